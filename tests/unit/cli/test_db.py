"""``db upgrade`` and ``db status``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from slurm_affinode.base.errors import NoStoreError
from slurm_affinode.cli.db import db
from slurm_affinode.db.migrations import migrations

LATEST = len(migrations("sqlite"))
"""Number of the last migration."""


def invoke(*arguments):
    return CliRunner().invoke(db, [str(argument) for argument in arguments], catch_exceptions=False)


def test_db_upgrade_is_idempotent(tmp_path):
    state = tmp_path / "50% why?"
    first = invoke("upgrade", "--state", state)
    assert first.exit_code == 0
    assert first.output.startswith("applied 0001_initial\n")
    second = invoke("upgrade", "--state", state, "--json")
    record = json.loads(second.output)
    assert (record["applied"], record["version"]) == ([], LATEST)
    assert (state / "affinode.sqlite").exists()


def test_db_status_does_not_create_the_database(tmp_path):
    with pytest.raises(NoStoreError, match="there is no database"):
        invoke("status", "--state", tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_db_status_lists_pending_migrations(tmp_path):
    (tmp_path / "affinode.sqlite").touch()
    done = invoke("status", "--state", tmp_path)
    assert done.exit_code == 1
    assert "0001_initial" in done.output


def test_db_status_reports_counts(store_url):
    invoke("upgrade", "--db", store_url)
    done = invoke("status", "--db", store_url, "--json")
    assert done.exit_code == 0
    record = json.loads(done.output)
    assert (record["version"], record["pending"], record["jobs"], record["first"]) == (LATEST, [], 0, None)
    assert record["size_bytes"] > 0
    assert "job runs" in invoke("status", "--db", store_url).output
