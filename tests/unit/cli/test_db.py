"""``db upgrade`` and ``db status``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from slurm_affinode.cli.db import db
from slurm_affinode.errors import NoStoreError


def invoke(*arguments):
    return CliRunner().invoke(db, [str(argument) for argument in arguments], catch_exceptions=False)


def test_upgrade_makes_the_store_once(tmp_path):
    state = tmp_path / "50% why?"
    first = invoke("upgrade", "--state", state)
    assert first.exit_code == 0
    assert first.output.startswith("applied 0001_initial\n")
    second = invoke("upgrade", "--state", state, "--json")
    said = json.loads(second.output)
    assert (said["applied"], said["version"]) == ([], 3)
    assert (state / "affinode.sqlite").exists()


def test_status_of_a_store_that_is_not_there_makes_none(tmp_path):
    with pytest.raises(NoStoreError, match="there is no store"):
        invoke("status", "--state", tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_status_of_an_empty_file_says_what_is_pending(tmp_path):
    (tmp_path / "affinode.sqlite").touch()
    done = invoke("status", "--state", tmp_path)
    assert done.exit_code == 1
    assert "0001_initial" in done.output


def test_status_counts(store_url):
    invoke("upgrade", "--db", store_url)
    done = invoke("status", "--db", store_url, "--json")
    assert done.exit_code == 0
    said = json.loads(done.output)
    assert (said["version"], said["pending"], said["jobs"], said["first"]) == (3, [], 0, None)
    assert said["size_bytes"] > 0
    assert "job runs" in invoke("status", "--db", store_url).output
