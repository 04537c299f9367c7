"""A restarted agent and the jobs suspended in place, those that are still there and those that were lost."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import replace

import pytest
from agent_site import Crash
from agent_world import FakeLink
from background import started_of
from inplace_site import GIB, OPEN, QUIET, Inline, Node, asleep, awake, entries

from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.inplace.gpu_sharing import Rules
from slurm_affinode.suspension.job.process_tree import LinuxProcesses


def test_next_agent_shows_job_as_asleep_when_shepherd_reconnects(world, node):
    """The registry of a new agent starts with every job running."""
    node.sleep()
    after = Node(world)
    after.recover()
    after.agent.registry.put(after.job())
    after.keeper.registered(after.job())
    assert (after.phase(), asleep(world)) == (Phase.FROZEN, True)
    assert after.view()["why"] == "idle 15m"


def test_shepherd_that_reconnects_at_the_end_of_a_wake(world, node, monkeypatch):
    """The job runs, and does not stay in the waking phase forever."""
    node.sleep()
    node.connection()
    write = node.agent.ledger.write

    def late(entry: LedgerEntry) -> None:
        node.keeper.registered(node.job())
        write(entry)

    monkeypatch.setattr(node.agent.ledger, "write", late)
    node.round()
    assert awake(world)
    assert node.phase() is Phase.RUNNING


def test_stale_comment_of_last_agent_is_removed(world, node):
    """The agent ended when the job had just woken: the comment does not stay forever. Comments on past events stay."""
    for comment, after in (
        ("asleep in place: idle 15m, 48 GiB in host memory // mine", "mine"),
        ("waits to wake: job 8 is ahead of it in the queue", ""),
        ("runs on: it is no longer idle // mine", "runs on: it is no longer idle // mine"),
        ("mine", "mine"),
    ):
        world.comment = comment
        next_one = Node(world)
        next_one.scheduler._comments._queue = Inline()
        next_one.keeper.registered(next_one.job())
        next_one.round()
        assert world.comment == after


def test_request_without_agent_wakes_job(world, node):
    """Requests read just before the freeze, which left nothing unread, count as well."""
    node.sleep()
    after = Node(world)
    after.sockets.now = {**QUIET, 12: replace(OPEN, received=80)}
    after.recover()
    after.round()
    assert awake(world)


def test_job_continued_by_slurm_without_agent_is_not_frozen_again(world, node):
    """It may be in the middle of its cleanup on cancellation. A job with an interrupted freeze stays suspended."""
    node.sleep()
    node.thawed()
    early = Node(world)
    early.recover()
    early.round()
    assert asleep(world)
    node.thawed()
    world.clock += 60
    after = Node(world)
    after.cards.others = 79 * GIB
    after.recover()
    after.round()
    assert node.stopped() == [False, False]
    assert after.view()["asked_why"] == "its processes were let go while there was no agent"
    after.cards.others = 0
    after.round()
    assert awake(world)


def test_process_continued_by_job_without_agent_is_not_stopped(world, node):
    """Its interrupted freeze is repeated by the next agent."""
    node.processes[0].stopped = True
    node.sleep()
    node.thawed()
    after = Node(world)
    after.recover()
    after.round()
    assert asleep(world)
    after.connection()
    after.round()
    assert awake(world)
    assert node.stopped() == [False, False]


def test_wake_command_survives_restart_of_agent(world, node):
    """The next agent could not detect the owner's request otherwise."""
    node.sleep()
    node.cards.others = 70 * GIB
    node.scheduler.wake(7, "alice")
    node.round()
    assert asleep(world)
    after = Node(world)
    after.recover()
    after.round()
    assert awake(world)


@pytest.mark.parametrize("at", range(1, 7))
def test_job_lost_with_its_node_is_reported(world, at):
    """Its comment reports the loss in any phase, even if Slurm does not respond at first; no state is left behind."""
    node = Node(world)
    world.crash_at = at
    with contextlib.suppress(Crash):
        node.sleep()
        node.connection()
        node.round()
    assert world.crash_at is None
    node.lose_job()
    world.answers = False
    after = Node(world)
    after.recover()
    assert len(after.agent.journal.open_journals()) == 1
    world.answers = True
    after.recover()
    assert after.agent.journal.open_journals() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    assert world.comment.startswith("lost: its processes on c1 ended while it was suspended (idle 15m)")


def test_job_canceled_without_agent_is_forgotten(world, node):
    """The comment stays empty."""
    node.sleep()
    node.lose_job()
    world.state = "CANCELLED"
    after = Node(world)
    after.recover()
    assert after.agent.journal.open_journals() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    assert world.comment == ""


def test_queue_survives_restart_of_agent(world, node):
    """The earliest request is still first, and its waiting time counts from then."""
    rules = Rules(start_free_pct=60, deadline_s=60)
    node = Node(world, rules)
    node.sleep()
    node.cards.others = 70 * GIB
    node.connection()
    node.round()
    requested_at = node.view()["asked"]
    world.clock += 50
    after = Node(world, rules)
    after.cards.others = 70 * GIB
    after.gpus_of = lambda job_id: [after.cards.uuid]
    job = after.job(job_id=8, root=0, link=FakeLink())
    after.agent.registry.put(job)
    assert not after.scheduler.admit(job)
    after.recover()
    after.round()
    assert (after.view()["asked"], after.view()["overdue"]) == (requested_at, False)
    assert after.view()["asked_why"] == "a connection waits on port 8000"
    assert after.view_of(8)["waits"] == "job 7 is ahead of it in the queue"
    world.clock += 10
    after.round()
    assert after.view()["overdue"]
    after.cards.others = 0
    after.round()
    assert awake(world)


def test_waking_job_keeps_its_turn(world, node):
    """The agent ended during its wake: later requests do not overtake it."""
    node.sleep()
    node.connection()
    world.crash_at = world.effects + 2
    with pytest.raises(Crash):
        node.round()
    requested_at = node.view()["asked"]
    world.clock += 50
    after = Node(world)
    after.cards.others = 79 * GIB
    after.recover()
    assert (after.view()["asked"], after.phase()) == (requested_at, Phase.WAKING)
    after.cards.others = 0
    after.round()
    assert awake(world)


def test_job_waiting_to_start_keeps_its_place(world, node, monkeypatch):
    """Its shepherd is older than the agent: its request went to the previous one."""
    node = Node(world, Rules(start_free_pct=60, deadline_s=60))
    node.sleep()
    node.cards.others = 70 * GIB
    since = world.clock - 30
    node.connection()
    node.round()
    after = Node(world, Rules(start_free_pct=60, deadline_s=60), unheard=lambda pids: {9: tuple(pids)})
    monkeypatch.setattr(after.agent.processes, "began", lambda started, now: since)
    after.cards.processes = lambda: {after.cards.uuid: {999: 70 * GIB}}  # of job 9, in place
    after.gpus_of = lambda job_id: [after.cards.uuid]
    after.recover()
    after.agent.registry.put(after.job(job_id=8, root=0, link=FakeLink()))
    assert not after.scheduler.admit(after.job(job_id=8, root=0, link=FakeLink()))
    after.round()
    assert after.view_of(8)["asked"] == since
    assert after.view()["waits"] == "job 8 is ahead of it in the queue"


def test_start_time_of_process_is_known() -> None:
    """The start time is exact to one clock tick."""
    child = subprocess.Popen(("sleep", "10"))
    try:
        now = time.time()
        assert now - 10 < LinuxProcesses().began(started_of(child.pid), now) <= now + 0.02
    finally:
        child.kill()
        child.wait()


def test_unresponsive_slurm_does_not_delay_wakes(world, node, monkeypatch):
    """Each query would time out, and requests would wait as long."""
    node.sleep()
    after = Node(world)
    monkeypatch.setattr(after.agent.slurm, "job", lambda job: pytest.fail("Slurm was queried"))
    after.recover()
    assert after.scheduler.holds(7) is Phase.FROZEN
    after.connection()
    after.round()
    assert awake(world)
