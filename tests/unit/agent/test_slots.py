"""Slots that users share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from agent_world import FakeLink
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.interface import Arrival
from slurm_affinode.agent.shepherds import Hello, Reply, Restored
from slurm_affinode.agent.slots import Slots
from slurm_affinode.agent.work import Work
from slurm_affinode.model.suspension import SuspendOption

ALICE, BOB, CAROL, DAVE = 2001, 2002, 2003, 2004


class Stalled:
    """Calls that begin, and end when they are let go."""

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
    """Eight calls of one user stall; the call of another one begins at once."""
    slots = Slots(8, 4, 64, "test")
    for number in range(8):
        slots.submit(ALICE, stalled.call(f"alice {number}"))
    slots.submit(BOB, stalled.call("bob"))
    wait_until("bob's has begun", lambda: "bob" in stalled.began)
    assert len(stalled.began) == 5


def test_first_call_of_a_user_has_a_slot_when_all_are_taken(stalled: Stalled) -> None:
    """Two users have taken all that there are; a third one's first call begins, and his second one waits."""
    slots = Slots(4, 2, 6, "test")
    for uid in (ALICE, ALICE, BOB, BOB, CAROL, CAROL, DAVE):
        slots.submit(uid, stalled.call(str(uid)))
    wait_until("the first of each has begun", lambda: str(DAVE) in stalled.began)
    assert sorted(stalled.began) == [str(uid) for uid in (ALICE, ALICE, BOB, BOB, CAROL, DAVE)]
    slots.submit(2005, stalled.call("one too many"))
    assert "one too many" not in stalled.began


def test_free_slots_go_round(stalled: Stalled) -> None:
    """Who has more waiting gets no more of them."""
    order: list[str] = []
    slots = Slots(1, 1, 1, "test")
    slots.submit(DAVE, stalled.call("dave"))
    for name, uid in (("a1", ALICE), ("a2", ALICE), ("a3", ALICE), ("b1", BOB), ("c1", CAROL), ("b2", BOB)):
        slots.submit(uid, lambda name=name: order.append(name))  # type: ignore[misc]
    stalled.go.set()
    wait_until("all are done", lambda: len(order) == 6)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_fault_of_a_call_gives_its_slot_back(stalled: Stalled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    slots = Slots(1, 1, 1, "test")

    def fails() -> None:
        raise ValueError

    slots.submit(ALICE, fails)
    slots.submit(ALICE, stalled.call("next"))
    wait_until("the next one has begun", lambda: stalled.began == ["next"])


def test_nothing_begins_after_the_end(stalled: Stalled) -> None:
    """What waits is dropped."""
    slots = Slots(1, 1, 1, "test")
    slots.submit(ALICE, stalled.call("first"))
    slots.submit(ALICE, stalled.call("second"))
    slots.close()
    with pytest.raises(RuntimeError):
        slots.submit(BOB, stalled.call("third"))
    stalled.go.set()
    wait_until("the first is over", lambda: not slots._running)
    assert stalled.began == ["first"]


def test_restore_does_not_wait_for_stalled_ones_of_another_user(stalled: Stalled) -> None:
    """Eight jobs of alice stall, on a FIFO of hers for example; bob's is restored at once."""

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
