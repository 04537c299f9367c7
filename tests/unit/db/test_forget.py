"""Pseudonyms of users who are forgotten, on every database."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
from sqlalchemy import select

from slurm_affinode.db import tables
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.db.forget import PREFIX
from slurm_affinode.db.records import IngestProblem, IngestRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import AuditEntry, Keep
from slurm_affinode.model.ledger import LedgerEntry

Frame = Callable[..., pl.DataFrame]
T0 = datetime(2026, 11, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NOW = T0 + DAY
BEGAN_MS = int(T0.timestamp()) * 1000
TEXTS = {"job_name": "alices-model", "comment": "for alice", "work_dir": "/home/alice", "submit_line": "sbatch -A x"}


def fill(repository: Repository, jobs: Frame, steps: Frame) -> None:
    """Store a job of alice, which she canceled, and one of bob, which root canceled."""
    repository.upsert(
        jobs({"job_id": 1, "user": "alice", "uid": 5001, "cancelled_by": "5001", "start": T0, **TEXTS},
             {"job_id": 2, "user": "bob", "uid": 5002, "cancelled_by": "0", "start": T0, "job_name": "alice2"},
             {"job_id": 3, "user": "alicia", "uid": 5003, "cancelled_by": "5001", "start": T0}),
        steps({"job_id": 1, "step_name": "alice.sh", "submit_line": "srun alice.sh"},
              {"job_id": 2, "step_name": "b", "submit_line": "srun b"}),
    )  # fmt: skip
    entry = LedgerEntry("c1", 1, int(T0.timestamp()), BEGAN_MS, user="alice", uid=5001, why="requested by alice")
    repository.upsert_suspensions([entry, replace(entry, job_id=2, user="bob", uid=5002, why="idle")])
    log = ZombieLog(repository.engine)
    audit = AuditEntry(T0, "r", "root@login", "cancel", "done", "mail to alice", cluster="c1", job_id=1, job="1",
                       user="alice", finding="c1/low/user:alice", evidence={"user": "alice"})  # fmt: skip
    log.record([audit, replace(audit, user="bob", actor="alice@login", reason="as alice wishes", finding="x",
                               evidence=None)])  # fmt: skip
    log.keep(Keep("c1", 1, T0, "alice", "alice's thesis", T0, NOW))
    problem = IngestProblem("user 'alice' has no account", 3)
    source = "/home/alice/sacct.txt"
    repository.record_ingest(IngestRecord("sacct", source, T0, T0, bad=1, problems=(problem,), notes=("of alice",)))


def all_texts(repository: Repository) -> str:
    """Return every value of every table."""
    with repository.engine.connect() as connection:
        rows = [connection.execute(select(table)).all() for table in tables.metadata.sorted_tables]
    return "\n".join(repr(row) for result in rows for row in result)


def mentions(repository: Repository) -> list[str]:
    return re.findall(r"(?<![\w.-])alice(?![\w-])|\b5001\b", all_texts(repository))


def test_user_is_replaced_in_every_table(repository: Repository, jobs: Frame, steps: Frame) -> None:
    """Neither name nor UID is left anywhere; other users, also with similar names, are unchanged."""
    fill(repository, jobs, steps)
    assert mentions(repository)
    pseudonym, rows = repository.forget("alice", NOW, apply=True)
    assert pseudonym.startswith(PREFIX)
    assert mentions(repository) == []
    assert rows.keys() == {"jobs", "steps", "suspensions", "zombie_audit", "zombie_keeps", "ingests", "ingest_problems"}
    result = {row["job_id"]: row for row in repository.jobs(T0 - DAY, NOW).to_dicts()}
    assert result[1]["user"] == result[1]["cancelled_by"] == result[3]["cancelled_by"] == pseudonym
    assert (result[1]["uid"], result[1]["job_name"], result[1]["work_dir"]) == (None, None, None)
    assert (result[2]["user"], result[2]["uid"], result[2]["job_name"]) == ("bob", 5002, "alice2")
    assert result[3]["user"] == "alicia"
    assert [suspension.user for suspension in repository.suspensions(T0, NOW)] == [pseudonym, "bob"]


def test_dry_run_changes_nothing(repository: Repository, jobs: Frame, steps: Frame) -> None:
    fill(repository, jobs, steps)
    before = all_texts(repository)
    _, rows = repository.forget("alice", NOW, apply=False)
    assert rows["jobs"] == 2
    assert all_texts(repository) == before


def test_forgetting_twice_is_a_no_op(repository: Repository, jobs: Frame, steps: Frame) -> None:
    """The pseudonym stays the same."""
    fill(repository, jobs, steps)
    pseudonym, _ = repository.forget("alice", NOW, apply=True)
    assert repository.forget("alice", NOW, apply=True) == (pseudonym, {})


def test_records_that_are_ingested_again_stay_forgotten(repository: Repository, jobs: Frame, steps: Frame) -> None:
    """Also a record that completes a run, and the steps and ledger entries of the time before."""
    fill(repository, jobs, steps)
    pseudonym, _ = repository.forget("alice", NOW, apply=True)
    again = {"job_id": 1, "user": "alice", "uid": 5001, "start": T0, "end": T0 + DAY, "state": "COMPLETED", **TEXTS}
    repository.upsert(jobs(again), steps({"job_id": 1, "step_name": "alice.sh", "submit_line": "srun alice.sh"}))
    entry = LedgerEntry(
        "c1", 1, int(T0.timestamp()), BEGAN_MS, user="alice", uid=5001, why="requested by alice", gpus=1
    )
    repository.upsert_suspensions([entry, replace(entry, job_id=9)])
    assert mentions(repository) == []
    [row] = [row for row in repository.jobs(T0 - DAY, NOW + DAY).to_dicts() if row["job_id"] == 1]
    assert (row["user"], row["state"], row["job_name"]) == (pseudonym, "COMPLETED", None)


def test_later_jobs_of_the_name_are_kept(repository: Repository, jobs: Frame, steps: Frame) -> None:
    """The name may be given to another person."""
    fill(repository, jobs, steps)
    repository.forget("alice", NOW, apply=True)
    repository.upsert(jobs({"job_id": 8, "submit": NOW + DAY, "start": NOW + DAY, "user": "alice", "uid": 6001}))
    [row] = [row for row in repository.jobs(NOW, NOW + 2 * DAY).to_dicts() if row["job_id"] == 8]
    assert (row["user"], row["uid"], row["job_name"]) == ("alice", 6001, "train")


def test_name_with_wildcards_matches_itself_only(repository: Repository, jobs: Frame) -> None:
    repository.upsert(jobs({"user": "a_b", "uid": 1}, {"job_id": 2, "user": "axb", "uid": 2}))
    assert repository.forget("a%b", NOW, apply=True)[1] == {}
    assert repository.forget("a_b", NOW, apply=True)[1] == {"jobs": 1}
