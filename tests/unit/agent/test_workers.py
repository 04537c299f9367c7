"""Worker slots shared by users."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from agent_world import FakeLink
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.workers import Slots, Work
from slurm_affinode.model.suspension import Notice, Refusal, SuspendOption
from slurm_affinode.suspension.interface import Arrival, LookAgain, Refused
from slurm_affinode.suspension.record import SuspensionRecord
from slurm_affinode.suspension.registry import WatchedJob
from slurm_affinode.suspension.shepherd import Hello, Reply, Restored

ALICE, BOB, CAROL, DAVE = 2001, 2002, 2003, 2004


class Stalled:
    """Calls that begin, and block until released."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go = threading.Event()

    def call(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.began.append(name)
            self.go.wait(DEADLINE_S)

        return run


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    made = Stalled()
    yield made
    made.go.set()


def test_another_user_does_not_wait_for_stalled_work(stalled: Stalled) -> None:
    """Eight calls of one user stall; the call of another user begins at once."""
    slots = Slots(8, 4, 64, "test")
    for number in range(8):
        slots.submit(ALICE, stalled.call(f"alice {number}"))
    slots.submit(BOB, stalled.call("bob"))
    wait_until("bob's has begun", lambda: "bob" in stalled.began)
    assert len(stalled.began) == 5


def test_first_call_of_user_gets_slot_when_all_are_taken(stalled: Stalled) -> None:
    """Two users have taken all slots; a third user's first call begins, and the second one waits."""
    slots = Slots(4, 2, 6, "test")
    for uid in (ALICE, ALICE, BOB, BOB, CAROL, CAROL, DAVE):
        slots.submit(uid, stalled.call(str(uid)))
    wait_until("the first of each has begun", lambda: str(DAVE) in stalled.began)
    assert sorted(stalled.began) == [str(uid) for uid in (ALICE, ALICE, BOB, BOB, CAROL, DAVE)]
    slots.submit(2005, stalled.call("one too many"))
    assert "one too many" not in stalled.began


def test_free_slots_are_assigned_round_robin(stalled: Stalled) -> None:
    """A user with more waiting calls does not get more slots."""
    order: list[str] = []
    slots = Slots(1, 1, 1, "test")
    slots.submit(DAVE, stalled.call("dave"))
    for name, uid in (("a1", ALICE), ("a2", ALICE), ("a3", ALICE), ("b1", BOB), ("c1", CAROL), ("b2", BOB)):
        slots.submit(uid, lambda name=name: order.append(name))  # type: ignore[misc]
    stalled.go.set()
    wait_until("all are done", lambda: len(order) == 6)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_failing_call_releases_its_slot(stalled: Stalled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    slots = Slots(1, 1, 1, "test")

    def fails() -> None:
        raise ValueError

    slots.submit(ALICE, fails)
    slots.submit(ALICE, stalled.call("next"))
    wait_until("the next one has begun", lambda: stalled.began == ["next"])


def test_no_call_begins_after_close(stalled: Stalled) -> None:
    """Waiting calls are dropped."""
    slots = Slots(1, 1, 1, "test")
    slots.submit(ALICE, stalled.call("first"))
    slots.submit(ALICE, stalled.call("second"))
    slots.close()
    with pytest.raises(RuntimeError):
        slots.submit(BOB, stalled.call("third"))
    stalled.go.set()
    wait_until("the first is over", lambda: not slots._running)
    assert stalled.began == ["first"]


class Suspender:
    """Refuses the job, and counts how often the refusals are computed."""

    def __init__(self) -> None:
        self.computed = 0

    def refusals(self, job: WatchedJob) -> list[Refusal]:
        self.computed += 1
        return [Refusal("srun-steps", "it runs srun steps")]

    def suspend(self, job: WatchedJob, why: str, *, look_again: LookAgain) -> SuspensionRecord:
        raise Refused(self.refusals(job)[0])


@pytest.mark.parametrize("notice", [None, Notice("USR1", 0), Notice("USR1", 60)])
def test_refusals_are_computed_once(notice: Notice | None) -> None:
    """The suspender computes them; before a signal, they are computed first, and the job gets none if it is refused."""
    suspender, link = Suspender(), FakeLink()
    work = Work(SimpleNamespace(suspender=suspender), 1)  # type: ignore[arg-type]
    job = WatchedJob(7, ALICE, ALICE, 0, SuspendOption(signal=notice), 1, 1, 2, link, 0.0)
    assert work.suspend(job, "idle 15m", lambda: None)
    outcome = wait_until("it is refused", lambda: work.outcome(7))
    assert (outcome.done, outcome.code, outcome.text) == (False, "srun-steps", "it runs srun steps")
    assert (suspender.computed, link.sent) == (1, [])


def test_restore_does_not_wait_for_stalled_restores_of_another_user(stalled: Stalled) -> None:
    """Eight jobs of alice stall, for example on a FIFO; bob's job is restored at once."""

    def restore(arrival: Arrival) -> Reply:
        if arrival.uid == ALICE:
            stalled.call(str(arrival.job_id))()
        return Restored(2)

    work = Work(SimpleNamespace(restorer=SimpleNamespace(restore=restore)), 1)  # type: ignore[arg-type]
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
