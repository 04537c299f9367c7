"""docs/operations.md: the runbook has a section for each alert, and its backups can be restored."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from servers import program_of
from sqlalchemy import URL, make_url

from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import JOBS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operations.md"
T0 = datetime(2026, 11, 1, tzinfo=UTC)


def section(title: str) -> str:
    """Return the text of a section of the page."""
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_alert_has_a_section_in_the_runbook() -> None:
    """Its annotation names the section, and no section is of an alert that is gone."""
    alerts = {}
    for path in (ROOT / "deploy" / "prometheus").glob("*.rules.yml"):
        for part in path.read_text(encoding="utf-8").split("- alert: ")[1:]:
            [runbook] = re.findall(r"^\s+runbook: (.*)$", part.partition("- record:")[0], re.MULTILINE)
            alerts[part.split()[0]] = runbook
    sections = re.findall(r"^### (\w+)$\n\n(.+)", section("Runbook"), re.MULTILINE)
    assert alerts.keys() == {name for name, _ in sections}
    assert alerts == {name: f"docs/operations.md#{name.lower()}" for name in alerts}


def blocks(kind: str) -> list[str]:
    """Return the commands of the backup and of the restoration for a kind of database."""
    result = re.findall(r"^```sh\n(.*?)^```", section("Backup and restore"), re.MULTILINE | re.DOTALL)
    return [block for block in result if block.startswith(f"# {kind}")]


def jobs(url: str) -> pl.DataFrame:
    with Repository.open(url) as store:
        return store.jobs(T0, datetime(2026, 12, 1, tzinfo=UTC))


def fill(url: str) -> None:
    row = dict.fromkeys(JOBS) | {"cluster": "c", "job_id": 1, "submit": T0, "start": T0, "user": "b\u00f6b", "gpus": 4}
    with Repository.open(url) as store:
        store.upsert(pl.DataFrame([row, row | {"job_id": 2}], schema=JOBS))


def shell(commands: Sequence[str], place: Path, **environment: str) -> None:
    script = "\n".join(commands).replace("/backup/", f"{place}/").replace("/var/lib/slurm-affinode/", f"{place}/state/")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env={**os.environ, "PATH": path, **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_backup_of_sqlite_is_restored_while_it_is_open(tmp_path: Path) -> None:
    """Also after changes that are in the write-ahead log only."""
    program_of("sqlite3")
    (tmp_path / "state").mkdir()
    url = f"sqlite:///{tmp_path}/state/affinode.sqlite"
    fill(url)
    backup, restore = blocks("SQLite")
    with Repository.open(url) as store:
        store.set("before", "1")
        shell([backup], tmp_path)
    before = jobs(url)
    with Repository.open(url) as store:
        store.delete_before(datetime(2030, 1, 1, tzinfo=UTC))
        store.forget("b\u00f6b", T0, apply=True)
    shell([restore, f"slurm-affinode db status --state {tmp_path}/state"], tmp_path)
    assert jobs(url).equals(before)
    with Repository.open(url) as store:
        assert store.get("before") == "1"


@pytest.mark.database
def test_backup_of_postgresql_is_restored(postgresql_server: URL, postgresql_url: str, tmp_path: Path) -> None:
    fill(postgresql_url)
    backup, restore = blocks("PostgreSQL")
    before = jobs(postgresql_url)
    shell([backup], tmp_path, DATABASE=_libpq(postgresql_url))
    other = make_url(postgresql_url).set(database=f"{make_url(postgresql_url).database}_restored")
    base = _libpq(postgresql_server.render_as_string(hide_password=False))
    try:
        shell([f"psql --quiet '{base}' -c 'CREATE DATABASE {other.database}'"], tmp_path)
        url = other.render_as_string(hide_password=False)
        shell([restore, f"slurm-affinode db status --db '{url}'"], tmp_path, DATABASE=_libpq(url))
        assert jobs(url).equals(before)
    finally:
        shell([f"psql --quiet '{base}' -c 'DROP DATABASE IF EXISTS {other.database}'"], tmp_path)


def _libpq(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


@pytest.mark.database
def test_backup_of_mariadb_is_restored(mariadb_url: str, tmp_path: Path) -> None:
    program_of("mariadb-dump")
    fill(mariadb_url)
    backup, restore = blocks("MariaDB")
    before = jobs(mariadb_url)
    made = make_url(mariadb_url)
    (tmp_path / "my.cnf").write_text(f"[client]\nuser = root\nsocket = {made.query['unix_socket']}\n")
    name, other = str(made.database), f"{made.database}_restored"
    commands = {
        old: f"{old} --defaults-file={tmp_path}/my.cnf" for old in ("mariadb-dump", "mariadb")
    }  # fmt: skip
    backup = backup.replace("mariadb-dump", commands["mariadb-dump"])
    restore = re.sub(r"^mariadb ", f"{commands['mariadb']} ", restore, flags=re.MULTILINE)
    shell([backup], tmp_path, DATABASE=name)
    try:
        shell([f"{commands['mariadb']} -e 'CREATE DATABASE {other} CHARACTER SET utf8mb4'"], tmp_path)
        shell([restore], tmp_path, DATABASE=other)
        assert jobs(made.set(database=other).render_as_string(hide_password=False)).equals(before)
    finally:
        shell([f"{commands['mariadb']} -e 'DROP DATABASE IF EXISTS {other}'"], tmp_path)
