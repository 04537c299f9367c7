"""Ledgers of suspensions, from ingest to report."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.analysis.suspensions import given_back, outcome, totals
from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.checkpoint.user_files import User, as_user
from slurm_affinode.cli.ingest_suspensions import ingest_suspensions
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.ledger import LedgerEntry, encode
from slurm_affinode.pipeline import ledgers

BEGIN = datetime(2026, 11, 2, tzinfo=UTC)
MS = round(BEGIN.timestamp() * 1000)
HOUR = 3_600_000


def entry(job, began_h, **facts):
    return LedgerEntry("alpha", job, 5, MS + round(began_h * HOUR), gpus=facts.pop("gpus", 1), **facts)


def query(hours=24, **filters):
    return WasteQuery(BEGIN, BEGIN + timedelta(hours=hours), **filters)


def write(path, *entries, end="\n"):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(encode(item) for item in entries) + end)


def test_released_gpu_hours_end_at_the_next_start():
    slept = entry(1, 1, gpus=2, queued_ms=MS + 2 * HOUR, restoring_ms=MS + 5 * HOUR, restored_ms=MS + 5 * HOUR + 1500)
    frame = given_back([slept], query(), now=BEGIN + timedelta(hours=30))
    row = frame.row(0, named=True)
    assert (row["gpu_hours_given_back"], row["asleep_s"], row["restore_s"], row["outcome"]) == (
        6,
        10800,
        1.5,
        "restored",
    )
    assert totals(frame)["gpu_hours_given_back"] == 6


def test_released_gpu_hours_are_clipped_to_the_interval():
    asleep = entry(1, -3, queued_ms=MS - 2 * HOUR)
    for now, expected in ((12, 12), (48, 24)):
        frame = given_back([asleep], query(), now=BEGIN + timedelta(hours=now))
        assert frame["gpu_hours_given_back"].to_list() == [expected]
        assert frame["outcome"].to_list() == ["asleep"]


def test_failed_suspension_releases_no_gpu_hours():
    frame = given_back([entry(1, 1, failure="it computes again")], query(), now=BEGIN + timedelta(hours=9))
    total = totals(frame)
    assert (total["suspensions"], total["suspensions_failed"], total["gpu_hours_given_back"]) == (0, 1, 0)


def test_in_place_suspensions_are_counted_separately():
    """They keep their GPUs and release GPU memory, from the move to host memory to the start of the restore."""
    slept = entry(
        1, 1, mode="inplace", gpu_bytes=48 << 30, parked_ms=MS + 2 * HOUR, released_ms=MS + 4 * HOUR,
        restoring_ms=MS + 4 * HOUR + 500, restored_ms=MS + 4 * HOUR + 2500, node="c1", restored_node="c1",
        shares_gpus=1,
    )  # fmt: skip
    asleep = entry(2, 1, mode="inplace", gpu_bytes=1 << 30, parked_ms=MS + 20 * HOUR, shares_gpus=1)
    ran_on = entry(3, 1, mode="inplace", gpu_bytes=1 << 30, parked_ms=MS + 2 * HOUR, failure="it did not stop")
    frame = given_back([slept, asleep, ran_on], query(), now=BEGIN + timedelta(hours=22))
    rows = {row["job_id"]: row for row in frame.iter_rows(named=True)}
    assert [rows[job]["outcome"] for job in (1, 2, 3)] == ["restored", "asleep", "failed"]
    assert (rows[1]["wake_s"], rows[1]["restore_s"], rows[1]["gpu_hours_given_back"]) == (2.5, 2, None)
    total = totals(frame)
    assert (total["in_place_sleeps"], total["in_place_jobs"], total["wake_s"]) == (2, 2, 2.5)
    assert total["gpu_mem_gib_hours"] == pytest.approx(48 * (2 + 0.5 / 3600) + 2)
    assert (total["suspensions"], total["suspensions_failed"], total["gpu_hours_given_back"]) == (0, 1, 0)


def test_memory_of_whole_gpus_is_not_free_for_other_jobs(tmp_path):
    """A whole GPU stays allocated to the sleeper: it counts as 0, and unknown stays unknown, also in the database."""
    slept = [
        entry(job, 1, mode="inplace", gpu_bytes=8 << 30, parked_ms=MS, restoring_ms=MS + HOUR, restored_ms=MS + HOUR,
              shares_gpus=shares)
        for job, shares in ((1, 1), (2, 0), (3, None))
    ]  # fmt: skip
    with Repository.open(f"sqlite:///{tmp_path}/db") as store:
        write(tmp_path / "c1.jsonl", *slept)
        ledgers.ingest_ledgers(store, tmp_path / "c1.jsonl")
        stored = store.suspensions(query().since, query().until)
    frame = given_back(stored, query(), now=BEGIN + timedelta(hours=9))
    hours = dict(zip(frame["job_id"], frame["gpu_mem_gib_hours"], strict=True))
    assert hours == {1: 8, 2: 0, 3: None}
    assert totals(frame)["gpu_mem_gib_hours"] == 8
    assert totals(frame.filter(frame["job_id"] == 3))["gpu_mem_gib_hours"] is None


def test_filter_by_user():
    entries = [entry(1, 1, user="alice"), entry(2, 1, user="bob")]
    assert given_back(entries, query(users=("bob",)), now=BEGIN)["job_id"].to_list() == [2]


def test_directory_is_ingested_once_without_incomplete_lines(tmp_path):
    """Two nodes, one of which is writing a line."""
    write(tmp_path / "ledger" / "c1.jsonl", entry(1, 1), entry(2, 1))
    write(tmp_path / "ledger" / "c2.jsonl", entry(1, 1, restored_node="c2"), entry(3, 1), end="")
    with Repository.open(f"sqlite:///{tmp_path}/db") as store:
        first = ledgers.ingest_ledgers(store, tmp_path / "ledger")
        assert [(item.entries, item.counts.new, item.counts.updated) for item in first] == [(2, 2, 0), (1, 0, 1)]
        again = ledgers.ingest_ledgers(store, tmp_path / "ledger")
        assert sum(item.counts.new + item.counts.updated for item in again) == 0
        assert len(store.ingests(kind="suspensions")) == 2


def test_command_reports_ingested_entries_and_bad_lines(tmp_path):
    write(tmp_path / "ledger" / "c1.jsonl", entry(1, 1), end="\nnoise\n")
    arguments = ["--state", str(tmp_path), str(tmp_path / "ledger"), "--json"]
    done = CliRunner().invoke(ingest_suspensions, arguments, catch_exceptions=False)
    [source] = json.loads(done.stdout)
    assert (source["entries"], source["new"], source["problems"][0]["line"]) == (1, 1, 2)
    assert "c1.jsonl:2: not JSON" in done.stderr


def test_command_prints_a_row_for_each_ledger(tmp_path):
    """In a dry run, what would be new is not known."""
    write(tmp_path / "ledger" / "c1.jsonl", entry(1, 1), end="\nnoise\n")
    arguments = ["--state", str(tmp_path), str(tmp_path / "ledger")]
    dry = CliRunner().invoke(ingest_suspensions, [*arguments, "--dry-run"], catch_exceptions=False)
    assert dry.stdout.splitlines()[-1] == "dry run: nothing was stored"
    assert dry.stdout.splitlines()[-2].split()[-5:] == ["1", "-", "-", "-", "1"]
    done = CliRunner().invoke(ingest_suspensions, arguments, catch_exceptions=False)
    assert done.stdout.splitlines()[-1].split()[-5:] == ["1", "1", "0", "0", "1"]
    assert "c1.jsonl:2: not JSON" in done.stderr


def test_missing_directory_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        ledgers.ingest_ledgers(None, tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not read it")
@pytest.mark.parametrize(("closed", "left"), [("shared", []), ("shared/ledger", []), ("shared/ledger/c1.jsonl", [2])])
def test_unreadable_ledgers_are_skipped_and_reported(tmp_path, closed, left):
    """They are in a directory of root beside the images; the rest of the report is still available."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 2001, 2001)
    write(tmp_path / "shared" / "ledger" / "c1.jsonl", entry(1, 1))
    write(tmp_path / "shared" / "ledger" / "c2.jsonl", entry(2, 1))
    (tmp_path / closed).chmod(0o700)
    for path in (tmp_path, *(parent for parent in tmp_path.parents if "pytest-of-" in str(parent))):
        path.chmod(0o755)
    config = configuration.parse(f'[suspend]\nshared_store = "{tmp_path}/shared/images"\n', where="test")
    messages = []

    with Repository.open(f"sqlite:///{tmp_path}/state/db") as store:
        for path in (tmp_path / "state").iterdir():
            os.chown(path, 2001, 2001)
        as_user(User(2001, 2001), lambda: ledgers.configured(config, store, unread=messages.append))
        assert [suspension.job_id for suspension in store.suspensions(BEGIN, BEGIN + timedelta(days=1))] == left
    assert len(messages) == 1
    assert "cannot be read: Permission denied" in messages[0]


def test_missing_argument_is_an_error(tmp_path):
    with pytest.raises(AffinodeError, match="no ledger is named"):
        CliRunner().invoke(ingest_suspensions, ["--state", str(tmp_path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "failed"),
        ({"queued_ms": 5}, "asleep"),
        ({"queued_ms": 5, "restore_failure": "bad size"}, "asleep"),
        ({"queued_ms": 5, "restoring_ms": 6}, "restoring"),
        ({"queued_ms": 5, "restoring_ms": 6, "restore_failure": "bad size"}, "afresh"),
        ({"queued_ms": 5, "restoring_ms": 6, "restored_ms": 7}, "restored"),
        ({"queued_ms": 5, "ended_ms": 6}, "ended"),
    ],
)
def test_outcome_of_suspension(facts, expected):
    assert outcome(entry(1, 1, **facts)) == expected
