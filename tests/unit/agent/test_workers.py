"""Suspensions and restores in worker threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from agent_world import FakeLink
from background import Stalled
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.workers import Work
from slurm_affinode.base.threads import Workers
from slurm_affinode.model.suspension import Notice, Refusal, RefusalCode, SuspendOption
from slurm_affinode.suspension.interface import Arrival, Refused, SampleAgain
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.job.shepherd import Hello, Reply, Restored
from slurm_affinode.suspension.records.record import SuspensionRecord

ALICE, BOB = 2001, 2002


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    made = Stalled()
    yield made
    made.go.set()


class Suspender:
    """Refuses the job, and counts how often the refusals are computed."""

    def __init__(self) -> None:
        self.computed = 0

    def refusals(self, job: WatchedJob) -> list[Refusal]:
        self.computed += 1
        return [Refusal(RefusalCode.SRUN_STEPS, "it runs srun steps")]

    def suspend(self, job: WatchedJob, why: str, *, sample_again: SampleAgain, busy: bool = False) -> SuspensionRecord:
        raise Refused(self.refusals(job)[0])


@pytest.mark.parametrize("notice", [None, Notice("USR1", 0), Notice("USR1", 60)])
def test_refusals_are_computed_once(notice: Notice | None) -> None:
    """The suspender computes them; before a signal, they are computed first, and the job gets none if it is refused."""
    suspender, link = Suspender(), FakeLink()
    work = Work(SimpleNamespace(suspender=suspender), Workers(), 1)  # type: ignore[arg-type]
    job = WatchedJob(7, ALICE, ALICE, 0, SuspendOption(signal=notice), 1, 1, 2, link, 0.0)
    assert work.suspend(job, "idle 15m", lambda: None)
    outcome = wait_until("it is refused", lambda: work.outcome(7))
    assert (outcome.succeeded, outcome.code, outcome.text) == (False, "srun-steps", "it runs srun steps")
    assert (suspender.computed, link.sent) == (1, [])


def test_users_suspend_in_turn() -> None:
    """By default, one job at a time is suspended: bob's does not wait for all those of alice, which may take long."""
    began: list[int] = []
    go = threading.Event()

    def suspend(job: WatchedJob, why: str, *, sample_again: SampleAgain, busy: bool = False) -> SuspensionRecord:
        began.append(job.job_id)
        go.wait(DEADLINE_S)
        raise Refused(Refusal(RefusalCode.BUSY, "it is busy"))

    work = Work(SimpleNamespace(suspender=SimpleNamespace(suspend=suspend)), Workers(), 1)  # type: ignore[arg-type]
    for job_id, uid in ((1, ALICE), (2, ALICE), (3, ALICE), (4, BOB)):
        job = WatchedJob(job_id, uid, uid, 0, SuspendOption(), 1, 1, 2, FakeLink(), 0.0)
        assert work.suspend(job, "idle 15m", lambda: None)
    wait_until("the first one begins", lambda: began)
    go.set()
    wait_until("all are refused", lambda: all(work.outcome(job_id) for job_id in range(1, 5)))
    assert began == [1, 2, 4, 3]


def test_restore_does_not_wait_for_stalled_restores_of_another_user(stalled: Stalled) -> None:
    """Eight jobs of alice stall, for example on a FIFO; bob's job is restored at once."""

    def restore(arrival: Arrival) -> Reply:
        if arrival.uid == ALICE:
            stalled.call(str(arrival.job_id))()
        return Restored(2)

    work = Work(SimpleNamespace(restorer=SimpleNamespace(restore=restore)), Workers(), 1)  # type: ignore[arg-type]
    replied: list[int] = []

    def come(job_id: int, uid: int) -> None:
        hello = Hello(job_id, 1, True, 0, SuspendOption())
        arrival = Arrival(hello, job_id, uid, uid, 1, 1, FakeLink(), ())
        assert work.restore(arrival, lambda arrival, reply: replied.append(arrival.job_id))

    for job_id in range(1, 9):
        come(job_id, ALICE)
    wait_until("alice's stall", lambda: len(stalled.began) >= 4)
    come(9, BOB)
    wait_until("bob's is restored", lambda: replied == [9])
    stalled.go.set()
    wait_until("all are restored", lambda: sorted(replied) == list(range(1, 10)))
