"""Signals to a job suspended in place, sent by Slurm or others: they thaw it, and none is lost."""

from __future__ import annotations

import contextlib
import signal

import pytest
from inplace_site import GIB, Later, Node, asleep, awake, failing

from slurm_affinode.checkpoint.interface import CudaError
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.interface import Refused


def test_signal_thaws_job_with_or_without_room(world, node):
    """Its handlers run at once; its memory returns when there is room. A signal just before the freeze counts."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.scheduler.signalled(7, 15)
    assert node.stopped() == [False, False]
    assert node.phase() is Phase.WAKING
    node.round()
    assert node.view()["waits"]
    node.cards.others = 0
    node.round()
    assert awake(world)
    node.freezer.during = lambda: node.scheduler.signalled(7, 15)
    node.sleep()
    node.round()
    assert awake(world)


def test_unreported_continue_is_detected(world, node):
    """Running processes would wait for their GPU without being noticed."""
    node.sleep()
    node.thawed()
    node.round()
    assert awake(world)


@pytest.mark.parametrize("agent", ["same", "next"])
def test_continue_of_process_stopped_by_job_is_detected(world, node, agent):
    """It continues, and is not stopped again."""
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


def test_process_continued_during_failed_restore_is_not_stopped(world, node, monkeypatch):
    """A child that was stopped when the job was suspended, and that its parent has continued since."""
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


def test_signal_does_not_wait_for_other_wakes(world, node):
    """Its processes are continued at once, even if its own wake has not begun."""
    workers = node.scheduler._wakes = Later()
    node.sleep()
    node.connection()
    node.round()
    assert (len(workers.calls), asleep(world)) == (1, True)
    node.scheduler.signalled(7, 15)
    assert node.stopped() == [False, False]
    workers.work()
    assert awake(world)


def test_job_that_handles_signal_is_not_frozen_again(world, node):
    """Its handlers run even if its memory cannot be restored."""
    node.sleep()
    with failing(node):
        node.scheduler.signalled(7, 15)
        node.round()
        assert "the driver failed" in node.view()["failure"]
        assert node.stopped() == [False, False]
    node.round()
    assert awake(world)


def test_unreported_signal_wakes_job(world, node):
    """It was sent by others than Slurm, or without an agent; signals to processes stopped earlier are ignored."""
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
    assert node.scheduler.view(7) is None


def test_blocked_signal_wakes_job_once(world, node):
    """A signal that stays blocked does not disturb the next suspension, while a new one does."""
    script, child = node.processes
    node.sleep()
    node.freezer.waiting = {child.pid: 15}
    node.round()
    assert awake(world)
    node.sleep()
    after = Node(world)
    after.freezer.waiting = {child.pid: 15}
    after.recover()
    for item in (node, after):
        item.round()
        assert asleep(world)
    after.freezer.waiting = {child.pid: 15, script.pid: 10}
    after.round()
    assert after.scheduler.view(7) is None


def test_signal_wakes_queued_job(world, node):
    """There is no room for the job, and an earlier request has queued it."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    assert asleep(world)
    node.freezer.waiting = {node.processes[1].pid: 10}
    node.round()
    assert node.stopped() == [False, False]


def test_job_suspended_by_slurm_is_not_woken(world, node):
    """Its signals do not wake it; a request waits, and its place counts from when Slurm resumes the job."""
    node.sleep()
    node.scheduler.signalled(7, signal.SIGTSTP)
    node.freezer.by_slurm = True
    assert node.view()["suspended_by_slurm"]
    node.connection()
    node.round()
    world.clock += 700
    node.round()
    assert (asleep(world), node.view()["overdue"]) == (True, False)
    assert node.view()["waits"] == "Slurm has suspended it; an operator resumes it with: scontrol resume 7"
    node.freezer.by_slurm = False
    node.cards.others = 79 * GIB
    node.round()
    assert (node.view()["waits"], node.view()["overdue"]) == (
        "it needs 48 GiB on GPU 0, and 960 MiB is left there: other processes hold the rest",
        False,
    )
    node.cards.others = 0
    node.round()
    assert awake(world)


def test_job_about_to_be_suspended_by_slurm_is_not_woken(world, node):
    """It would be stopped with its memory on the GPU; a stop that does not come delays the wake only briefly."""
    node.sleep()
    node.scheduler.signalled(7, signal.SIGTSTP)
    node.connection()
    node.round()
    assert (asleep(world), node.view()["waits"]) == (
        True,
        "Slurm is about to suspend it; an operator resumes it with: scontrol resume 7",
    )
    world.clock += 2.5
    node.freezer.by_slurm = True
    node.round()
    assert node.view()["waits"].startswith("Slurm has suspended it")
    node.freezer.by_slurm = False
    world.clock += 0.5
    node.round()
    assert awake(world)


def test_suspension_by_slurm_clears_overdue(world, node):
    """Its time and its mark restart."""
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
def test_signal_after_announced_stop_wakes_job(world, node, number):
    """The job is resumed or canceled before it was stopped: the wake does not wait for the stop."""
    node.sleep()
    node.scheduler.signalled(7, signal.SIGTSTP)
    node.connection()
    node.round()
    node.scheduler.signalled(7, number)
    node.round()
    assert awake(world)


def test_job_suspended_by_slurm_is_refused(world, node):
    """It could not be locked; nothing is announced as making room."""
    node.freezer.by_slurm = True
    with pytest.raises(Refused, match="Slurm has suspended it"):
        node.sleep()


def test_signal_just_before_suspension_wakes_job(world, node):
    """Its handlers may still run; requests that old were answered by then."""
    node.scheduler.signalled(7, 15)
    world.clock += 3
    node.sleep()
    node.round()
    assert awake(world)


def test_signal_during_failed_restore_is_not_lost(world, node):
    """It arrives right before the job is frozen again."""
    node.sleep()
    node.connection()
    sleeper = node.scheduler._sleepers[7]
    turns: list[str] = []

    class Turn(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            turns.append("")
            sleeper.thawing.signalled = len(turns) > 1

    sleeper.thawing.lock = Turn()
    with failing(node):
        node.round()
    assert node.stopped() == [True, False]
    node.scheduler.signalled(7, signal.SIGTERM)
    assert node.stopped() == [False, False]
