"""Signals to a job that sleeps in place, told by Slurm or not: they let it go, and none is lost."""

from __future__ import annotations

import contextlib
import signal

import pytest
from inplace_site import GIB, Later, Node, asleep, awake, failing

from slurm_affinode.agent.interface import Refused
from slurm_affinode.checkpoint.interface import CudaError
from slurm_affinode.model.suspension import Phase


def test_a_signal_lets_it_go_whether_there_is_room_or_not(world, node):
    """Its handlers run at once; its memory comes when there is room. One that came just before the freeze counts."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.director.signalled(7, 15)
    assert node.stopped() == [False, False]
    assert node.phase() is Phase.WAKING
    node.round()
    assert node.view()["waits"]
    node.cards.others = 0
    node.round()
    assert awake(world)
    node.freezer.during = lambda: node.director.signalled(7, 15)
    node.sleep()
    node.round()
    assert awake(world)


def test_a_continue_of_which_nobody_told_is_noticed(world, node):
    """What runs would wait for its GPU, and not be seen."""
    node.sleep()
    node.let_go()
    node.round()
    assert awake(world)


@pytest.mark.parametrize("agent", ["same", "next"])
def test_a_continue_of_what_its_job_had_stopped_is_noticed_too(world, node, agent):
    """It runs on, and is not stopped again."""
    script, _ = node.processes
    script.stopped = True
    node.sleep()
    script.stopped = False
    world.clock += 60
    if agent == "next":
        node = Node(world)
        node.recover()
    node.round()
    assert awake(world)


def test_what_its_job_let_go_on_while_a_restore_failed_does_not_stay_stopped(world, node, monkeypatch):
    """A child that was stopped when it fell asleep, and that its parent has continued since."""
    script, _ = node.processes
    script.stopped = True
    node.sleep()
    with monkeypatch.context() as patched:

        def fails(pid: int, **_: object) -> None:
            script.stopped = False
            raise CudaError("the driver failed")

        patched.setattr(node.agent.cuda, "restore", fails)
        node.connection()
        node.round()
        assert asleep(world)
    node.round()
    assert awake(world)
    assert node.stopped() == [False, False]


def test_a_signal_does_not_wait_for_those_that_are_being_woken(world, node):
    """Its processes are let go at once, also where its own wake is still to begin."""
    workers = node.director._workers = Later()
    node.sleep()
    node.connection()
    node.round()
    assert (len(workers.calls), asleep(world)) == (1, True)
    node.director.signalled(7, 15)
    assert node.stopped() == [False, False]
    workers.work()
    assert awake(world)


def test_one_that_takes_a_signal_is_not_frozen_again(world, node):
    """Where its memory cannot come back its handlers run all the same."""
    node.sleep()
    with failing(node):
        node.director.signalled(7, 15)
        node.round()
        assert "the driver failed" in node.view()["failure"]
        assert node.stopped() == [False, False]
    node.round()
    assert awake(world)


def test_a_signal_that_nobody_told_of_wakes_it(world, node):
    """Sent by somebody else than Slurm, or while there was no agent; what was stopped before is let be."""
    script, child = node.processes
    script.stopped = True
    node.sleep()
    node.freezer.waiting = {script.pid: 15}
    node.round()
    assert asleep(world)
    node.freezer.waiting = {child.pid: 15}
    node.cards.others = 79 * GIB
    node.round()
    assert node.stopped() == [True, False]
    assert node.view()["asked_why"] == f"SIGTERM waits for its process {child.pid}"
    node.cards.others, node.freezer.waiting = 0, {}
    node.round()
    assert node.director.view(7) is None


def test_a_signal_that_nobody_takes_wakes_it_once(world, node):
    """Blocked for ever: it was there before the next sleep, which it does not disturb; one that comes anew does."""
    script, child = node.processes
    node.sleep()
    node.freezer.waiting = {child.pid: 15}
    node.round()
    assert awake(world)
    node.sleep()
    after = Node(world)
    after.freezer.waiting = {child.pid: 15}
    after.recover()
    for one in (node, after):
        one.round()
        assert asleep(world)
    after.freezer.waiting = {child.pid: 15, script.pid: 10}
    after.round()
    assert after.director.view(7) is None


def test_a_signal_wakes_one_that_is_in_line_already(world, node):
    """There is no room for it, and somebody has asked for it before."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    assert asleep(world)
    node.freezer.waiting = {node.processes[1].pid: 10}
    node.round()
    assert node.stopped() == [False, False]


def test_one_that_slurm_suspends_sleeps_on_whoever_asks(world, node):
    """Its signals do not wake it, a request waits, and keeps its place from when Slurm lets it go on."""
    node.sleep()
    node.director.signalled(7, signal.SIGTSTP)
    node.freezer.by_slurm = True
    assert node.view()["suspended_by_slurm"]
    node.connection()
    node.round()
    world.clock += 700
    node.round()
    assert (asleep(world), node.view()["overdue"]) == (True, False)
    assert node.view()["waits"] == "Slurm has suspended it; it goes on with: scontrol resume 7"
    node.freezer.by_slurm = False
    node.cards.others = 79 * GIB
    node.round()
    assert (node.view()["waits"], node.view()["overdue"]) == (
        "it needs 48 GiB on GPU 0, and 960 MiB is left there: others hold the rest",
        False,
    )
    node.cards.others = 0
    node.round()
    assert awake(world)


def test_one_that_slurm_is_about_to_suspend_is_not_woken_before(world, node):
    """It would be stopped with its memory on the GPU; a stop that does not come holds nobody up for long."""
    node.sleep()
    node.director.signalled(7, signal.SIGTSTP)
    node.connection()
    node.round()
    assert (asleep(world), node.view()["waits"]) == (
        True,
        "Slurm is about to suspend it; it goes on with: scontrol resume 7",
    )
    world.clock += 2.5
    node.freezer.by_slurm = True
    node.round()
    assert node.view()["waits"].startswith("Slurm has suspended it")
    node.freezer.by_slurm = False
    world.clock += 0.5
    node.round()
    assert awake(world)


def test_one_that_was_overdue_before_slurm_suspended_it_is_so_no_more(world, node):
    """Its time begins anew, and so does what is said of it."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    world.clock += 700
    node.round()
    assert node.view()["overdue"]
    node.freezer.by_slurm = True
    node.round()
    node.freezer.by_slurm = False
    node.round()
    assert not node.view()["overdue"]
    world.clock += 700
    node.round()
    assert node.view()["overdue"]


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGTERM])
def test_what_slurm_says_after_a_stop_counts(world, node, number):
    """Resumed or cancelled before it was stopped: it does not wait for that."""
    node.sleep()
    node.director.signalled(7, signal.SIGTSTP)
    node.connection()
    node.round()
    node.director.signalled(7, number)
    node.round()
    assert awake(world)


def test_one_that_slurm_has_suspended_is_not_put_to_sleep(world, node):
    """It could not be locked; nobody is told that it makes room."""
    node.freezer.by_slurm = True
    with pytest.raises(Refused, match="Slurm has suspended it"):
        node.sleep()


def test_a_signal_just_before_it_falls_asleep_counts(world, node):
    """Its handlers may run still; somebody who asked as early was answered by then."""
    node.director.signalled(7, 15)
    world.clock += 3
    node.sleep()
    node.round()
    assert awake(world)


def test_a_signal_while_a_restore_fails_is_not_lost(world, node):
    """It comes when it is about to be frozen again."""
    node.sleep()
    node.connection()
    sleeper = node.director._sleepers[7]
    turns: list[str] = []

    class Turn(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            turns.append("")
            sleeper.signalled = len(turns) > 1

    sleeper.turning = Turn()
    with failing(node):
        node.round()
    assert node.stopped() == [True, False]
    node.director.signalled(7, signal.SIGTERM)
    assert node.stopped() == [False, False]
