"""Transitions of a sleeper: the request to wake it, and its processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.model.suspension import JobKey, Mode, Phase, SuspendOption
from slurm_affinode.suspension.inplace.queue import Deadline
from slurm_affinode.suspension.inplace.sleeper import ProcessState, Sleeper, Thawing, WakeState
from slurm_affinode.suspension.records.journal import Journal, JournalError
from slurm_affinode.suspension.records.record import SuspensionFacts

BEGUN = SuspensionFacts(
    job_id=7, restarts=0, uid=1000, gid=1000, option=SuspendOption(mode=Mode.INPLACE), began_epoch=90.0, init_pid=40,
    init_started=1,
)  # fmt: skip


def asleep(directory: Path) -> Sleeper:
    """Return a job that sleeps since 100 s after the epoch."""
    journal = Journal(directory, clock=lambda: 100.0).of_job(JobKey("alpha", 7, 1))
    journal.write(Phase.LOCKING, replace(BEGUN, cuda_pids=(41,), held_bytes={"GPU-0": 5}))
    for phase in (Phase.LOCKED, Phase.PARKED, Phase.FROZEN):
        journal.write(phase)
    return Sleeper.of(journal)


def test_job_held_back_by_slurm_joins_the_queue_anew(tmp_path: Path) -> None:
    """Its time in the queue begins when Slurm resumes it; what its journal records is the first request."""
    sleeper = asleep(tmp_path)
    assert (sleeper.wake_state, sleeper.requested_epoch, sleeper.frozen) == (WakeState.NONE, None, True)
    sleeper.request("a request", 3, 200.0)
    sleeper.place.deadline = Deadline.HANDLED
    sleeper.hold_back("Slurm has suspended it")
    assert (sleeper.wake_state, sleeper.place.waits) == (WakeState.HELD_BACK, "Slurm has suspended it")
    sleeper.requeue(300.0)
    assert (sleeper.wake_state, sleeper.requested_epoch, sleeper.place.turn) == (WakeState.QUEUED, 300.0, 3)
    assert sleeper.view(300.0, is_held=False, raised=0)["overdue"] is False


def test_failed_wake_returns_to_the_queue_with_a_delay(tmp_path: Path) -> None:
    """The place in the queue stays; each delay is longer."""
    sleeper = asleep(tmp_path)
    sleeper.request("a request", 1, 200.0)
    sleeper.begin_wake()
    assert (sleeper.waking, sleeper.frozen) == (True, False)
    assert [sleeper.failures.add("no GPU", 210.0) for _ in range(3)] == [1.0, 2.0, 4.0]
    sleeper.end_wake()
    assert (sleeper.wake_state, sleeper.requested_epoch) == (WakeState.QUEUED, 200.0)
    assert (sleeper.failures.pauses(213.0), sleeper.failures.pauses(214.0)) == (True, False)
    sleeper.failures.add("no GPU", 215.0)
    sleeper.failures.retry_now()
    assert not sleeper.failures.pauses(216.0)


def test_recorded_request_keeps_its_time_under_the_next_agent(tmp_path: Path) -> None:
    """The next agent requests the wake again; the journal has the time of the first one."""
    sleeper = asleep(tmp_path)
    sleeper.request("a request", 1, 200.0)
    assert not sleeper.recorded
    sleeper.record_request()
    after = Sleeper.of(Journal(tmp_path).of_job(JobKey("alpha", 7, 1)))
    after.request("another one", 9, 500.0)
    assert (after.requested_epoch, after.recorded, sleeper.recorded) == (200.0, True, True)


def test_processes_that_may_have_stopped_again_are_thawed_again() -> None:
    """A failed freeze may have stopped those that led; if all ran, they are continued anyway, and still count so."""
    thawing = Thawing()
    thawing.lead((41,), 10.0, complete=False)
    assert thawing.processes is ProcessState.LEADING
    thawing.forget_lead()
    assert (thawing.processes, thawing.leading) == (ProcessState.STOPPED, ())
    thawing.lead((41,), 11.0, complete=True)
    thawing.forget_lead()
    assert (thawing.processes, thawing.leading) == (ProcessState.RUNNING, ())
    thawing.stop()
    assert thawing.processes is ProcessState.STOPPED


def test_journal_of_another_kind_is_refused(tmp_path: Path) -> None:
    """It does not record what a process holds on GPUs."""
    journal = Journal(tmp_path).of_job(JobKey("alpha", 7, 1))
    journal.write(Phase.LOCKING, BEGUN)
    with pytest.raises(JournalError, match="is not the journal of a suspension in place"):
        Sleeper.of(journal)
