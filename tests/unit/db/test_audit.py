"""Audit records, warnings, claims and keeps, on every database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from slurm_affinode.db.audit import Who, ZombieLog, bounded
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import AuditEntry, Keep

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOLD = timedelta(minutes=10)
KEY = "alpha/squatter/job:7:1000"


@pytest.fixture
def log(repository: Repository) -> Iterator[ZombieLog]:
    return ZombieLog(repository.engine)


def entry(**values: object) -> AuditEntry:
    base = AuditEntry(NOW, "r1", "root@login", "cancel", "done", "idle for 2h", cluster="alpha", finding=KEY, job_id=7,
                      job="5_2", user="alice", evidence={"gpus": [0, 1.5]})  # fmt: skip
    return replace(base, **values)  # type: ignore[arg-type]


def test_records_are_returned_complete_and_in_order(log: ZombieLog) -> None:
    """Hostile texts are included: NUL, lone surrogates, and texts that are too long."""
    log.record([entry(), entry(verb="warn-user", reason="a\0b\ud800 '; DROP TABLE jobs --", user="b\u00f6b")])
    log.record([entry(verb="look", finding="x" * 900)])
    first, second, third = log.history()
    assert (first.number, first.evidence, first.time) == (1, {"gpus": [0, 1.5]}, NOW)
    assert "DROP TABLE" in second.reason
    assert second.user == "b\u00f6b"
    assert third.finding == bounded("x" * 900)
    assert len(third.finding or "") == 512


def test_records_are_found_by_job_user_verb_and_time(log: ZombieLog) -> None:
    """An array is found by its job ID, and each task by its name or raw ID; 5 does not match 55."""
    log.record([entry(), entry(job="55", job_id=55, user="bob"), entry(job="5", job_id=5, time=NOW + HOLD)])
    assert [item.job for item in log.history(job="5")] == ["5_2", "5"]
    assert [item.job for item in log.history(job="5_2")] == ["5_2"]
    assert [item.job for item in log.history(job="7")] == ["5_2"]
    assert [item.job for item in log.history(user="bob")] == ["55"]
    assert [item.job for item in log.history(since=NOW + HOLD)] == ["5"]
    assert [item.job for item in log.history(until=NOW)] == []
    assert [item.job for item in log.history(limit=1)] == ["5"]
    assert log.history(verb="keep") == []
    log.record([entry(job="6+1", job_id=8)])
    assert [item.job for item in log.history(job="6")] == ["6+1"]
    for odd in ("9" * 40, "\u00b2", "5%", ""):
        assert log.history(job=odd) == []


def test_claim_is_held_by_one_run(log: ZombieLog) -> None:
    """It ends when it is released, when its settled time has passed, or when its holder has timed out."""
    assert log.claim("cancel|a", "r1", NOW, HOLD)
    assert not log.claim("cancel|a", "r2", NOW, HOLD)
    log.release("cancel|a", "r2")
    assert not log.claim("cancel|a", "r2", NOW, HOLD)
    assert log.claim("cancel|a", "r2", NOW + HOLD, HOLD)
    log.release("cancel|a", "r2")
    assert log.claim("cancel|a", "r3", NOW, HOLD)
    log.settle("cancel|a", "r3", NOW, None)
    assert not log.claim("cancel|a", "r4", NOW + timedelta(days=3650), HOLD)
    assert log.claim("drain|b", "r1", NOW, HOLD)
    log.settle("drain|b", "r1", NOW, NOW + timedelta(hours=1))
    assert not log.claim("drain|b", "r2", NOW + HOLD, HOLD)
    assert log.claim("drain|b", "r2", NOW + timedelta(hours=1), HOLD)


def test_concurrent_claims_are_granted_once(log: ZombieLog) -> None:
    got: list[str] = []
    threads = [
        threading.Thread(target=lambda run=f"r{n}": log.claim("cancel|x", run, NOW, HOLD) and got.append(run))  # type: ignore[misc]
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_warning_sent_meanwhile_is_not_sent_again(log: ZombieLog) -> None:
    """The second run decided before the first had sent the warning."""
    assert log.claim_warning(KEY, 1, "r1", now=NOW, hold=HOLD, last_seen=None)
    assert not log.claim_warning(KEY, 1, "r2", now=NOW, hold=HOLD, last_seen=None)
    log.warned(KEY, 1, NOW, "alice@example.org", "r1")
    assert not log.claim_warning(KEY, 1, "r2", now=NOW, hold=HOLD, last_seen=None)
    assert log.claim_warning(KEY, 2, "r2", now=NOW, hold=HOLD, last_seen=None)


def test_new_first_warning_resets_the_later_ones(log: ZombieLog) -> None:
    """A job that used its GPUs in between gets all warnings again."""
    for number in (1, 2):
        log.claim_warning(KEY, number, "r1", now=NOW, hold=HOLD, last_seen=None)
        log.warned(KEY, number, NOW, "alice", "r1")
    seen = log.ledger(NOW).warnings[KEY]
    assert [item.number for item in seen] == [1, 2]
    later = NOW + timedelta(hours=9)
    assert log.claim_warning(KEY, 1, "r2", now=later, hold=HOLD, last_seen=seen[0].time)
    log.warned(KEY, 1, later, "alice", "r2")
    assert [(warning.number, warning.time) for warning in log.ledger(later).warnings[KEY]] == [(1, later)]


def test_notices_without_stages_are_separate_from_warnings(log: ZombieLog) -> None:
    """Their number is 0."""
    log.claim_warning(KEY, 0, "r1", now=NOW, hold=HOLD, last_seen=None)
    log.warned(KEY, 0, NOW, "alice", "r1")
    ledger = log.ledger(NOW)
    assert ledger.mailed == {KEY: NOW}
    assert ledger.warnings == {}
    assert log.ledger(NOW + timedelta(days=91)).mailed == {}


def test_owner_postpones_once_per_attempt(log: ZombieLog) -> None:
    """A second request returns the first one; a requeued job may be postponed again."""
    keep = Keep("alpha", 7, NOW - HOLD, "alice", "a long reason", NOW, NOW + timedelta(hours=2))
    assert log.keep(keep) is None
    assert log.keep(replace(keep, why="another")) == keep
    assert log.ledger(NOW).keeps == {("alpha", 7): keep}
    assert log.ledger(keep.until).keeps == {}
    again = replace(keep, submit=NOW, until=NOW + timedelta(hours=3))
    assert log.keep(again) is None
    assert log.ledger(NOW).keeps[("alpha", 7)] == again


def test_finding_seen_again_keeps_its_first_time(log: ZombieLog) -> None:
    """That ends if it was not seen for a day."""
    log.see([KEY], NOW)
    log.see([KEY, "b"], NOW + timedelta(hours=20))
    log.see([KEY], NOW + timedelta(hours=40))
    assert log.ledger(NOW).first_seen == {KEY: NOW, "b": NOW + timedelta(hours=20)}
    log.see([KEY], NOW + timedelta(hours=64))
    assert log.ledger(NOW).first_seen[KEY] == NOW + timedelta(hours=64)
    assert log.ledger(NOW).mailed == {}


def test_finding_missing_from_a_complete_scan_is_forgotten(log: ZombieLog) -> None:
    """If it is found again, it counts as new; findings of other kinds stay."""
    keys = ["a_/orphan-memory/node:n1:G", "ab/orphan-memory/node:n1:G", "a_/orphan-process/process:n1:7:7"]
    log.see(keys, NOW)
    log.warned(keys[0], 0, NOW, "ops", "r1")
    later = NOW + timedelta(minutes=15)
    log.see([], later, all_of=["a_/orphan-memory/"])
    assert log.ledger(later).first_seen == dict.fromkeys(keys[1:], NOW)
    assert log.ledger(later).mailed == {keys[0]: NOW}
    log.see(keys[:1], later, all_of=["a_/orphan-memory/"])
    log.see(keys[:1], later + timedelta(minutes=15), all_of=["a_/orphan-memory/"])
    assert log.ledger(later).first_seen[keys[0]] == later


def test_pruning_of_old_records_is_recorded(log: ZombieLog) -> None:
    """The record has actor, number and reason; younger records stay, and pruning nothing is not recorded."""
    who, later = Who("r9", "root@login"), NOW + timedelta(days=3)
    log.record([entry(), entry(time=NOW + timedelta(days=2))])
    log.warned("old", 1, NOW, "alice", "r1")
    assert log.prune(NOW, who, later, "nightly.keep_audit") == 0
    assert log.prune(NOW + timedelta(days=1), who, later, "nightly.keep_audit") == 1
    kept, pruning = log.history()
    assert kept.time == NOW + timedelta(days=2)
    assert (pruning.verb, pruning.result, pruning.actor, pruning.time) == ("prune", "done", "root@login", later)
    assert pruning.reason == "1 record from before 2026-11-21 12:00 UTC deleted: nightly.keep_audit"
    assert log.ledger(later).warnings == {}
    log.record([entry(time=later)])
    assert [item.number for item in log.history()] == [2, 3, 4]


def test_settled_claims_are_pruned_with_their_records(log: ZombieLog) -> None:
    """Claims held now, or settled later, stay. The pruning of claims is not recorded."""
    for name in ("old", "young", "held"):
        assert log.claim(name, "r1", NOW, HOLD)
    log.settle("old", "r1", NOW, None)
    log.settle("young", "r1", NOW + timedelta(days=2), None)
    who, later = Who("r9", "root@login"), NOW + timedelta(days=3)
    assert log.prune(NOW, who, later, "nightly.keep_audit") == 0
    assert (log.settled("old"), log.settled("young"), log.claim("held", "r2", NOW, HOLD)) == (True, True, False)
    assert log.prune(NOW + timedelta(days=1), who, later, "nightly.keep_audit") == 0
    assert (log.settled("old"), log.settled("young"), log.claim("held", "r2", NOW, HOLD)) == (False, True, True)
    assert log.history() == []
