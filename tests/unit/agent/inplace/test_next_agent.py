"""What the next agent makes of jobs that sleep in place: of those that are there, and of those that are not."""

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

from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.tree import LinuxProcesses
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import Phase


def test_the_next_agent_shows_it_as_asleep_when_its_shepherd_is_back(world, node):
    """The registry of a new agent begins with every job running."""
    node.sleep()
    after = Node(world)
    after.recover()
    after.agent.parts.registry.put(after.job())
    after.keeper.registered(after.job())
    assert (after.phase(), asleep(world)) == (Phase.FROZEN, True)
    assert after.view()["why"] == "idle 15m"


def test_a_shepherd_that_comes_back_in_the_last_moment_of_a_wake(world, node, monkeypatch):
    """The job runs, and is not taken for one that wakes for ever."""
    node.sleep()
    node.connection()
    write = node.agent.parts.ledger.write

    def late(entry: LedgerEntry) -> None:
        node.keeper.registered(node.job())
        write(entry)

    monkeypatch.setattr(node.agent.parts.ledger, "write", late)
    node.round()
    assert awake(world)
    assert node.phase() is Phase.RUNNING


def test_a_comment_that_the_last_agent_could_not_take_away(world, node):
    """It ended when the job had just woken: the comment does not say for ever that it sleeps. One of the past stays."""
    for comment, after in (
        ("asleep in place: idle 15m, 48 GiB in host memory // mine", "mine"),
        ("waits to wake: job 8 asked before it", ""),
        ("runs on: it is not idle any more // mine", "runs on: it is not idle any more // mine"),
        ("mine", "mine"),
    ):
        world.comment = comment
        next_one = Node(world)
        next_one.director._comments.worker = Inline()
        next_one.keeper.registered(next_one.job())
        next_one.round()
        assert world.comment == after


def test_a_request_that_came_while_there_was_no_agent(world, node):
    """Also one that was read just before the freeze, and of which nothing waits any more."""
    node.sleep()
    after = Node(world)
    after.sockets.now = {**QUIET, 12: replace(OPEN, received=80)}
    after.recover()
    after.round()
    assert awake(world)


def test_one_that_slurm_let_go_while_there_was_no_agent_is_not_frozen_again(world, node):
    """It may be in the middle of what it does when it is cancelled. One whose freeze was cut short sleeps on."""
    node.sleep()
    node.let_go()
    early = Node(world)
    early.recover()
    early.round()
    assert asleep(world)
    node.let_go()
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


def test_what_its_job_let_go_on_while_there_was_no_agent_does_not_stay_stopped(world, node):
    """Its freeze was cut short, and is done again by the next one."""
    node.processes[0].stopped = True
    node.sleep()
    node.let_go()
    after = Node(world)
    after.recover()
    after.round()
    assert asleep(world)
    after.connection()
    after.round()
    assert awake(world)
    assert node.stopped() == [False, False]


def test_one_that_was_asked_for_by_hand_is_woken_by_the_next_agent(world, node):
    """It could not be seen otherwise that somebody wants it."""
    node.sleep()
    node.cards.others = 70 * GIB
    node.director.wake(7, "alice")
    node.round()
    assert asleep(world)
    after = Node(world)
    after.recover()
    after.round()
    assert awake(world)


@pytest.mark.parametrize("at", range(1, 7))
def test_one_that_was_lost_with_its_node(world, at):
    """In whatever phase: its comment says so, also where Slurm is silent at first, and nothing of it is left."""
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
    assert len(after.agent.parts.journal.open_records()) == 1
    world.answers = True
    after.recover()
    assert after.agent.parts.journal.open_records() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    assert world.comment.startswith("lost: its processes on c1 ended while it was suspended (idle 15m)")


def test_one_that_was_cancelled_while_there_was_no_agent(world, node):
    """There is nothing to be told."""
    node.sleep()
    node.lose_job()
    world.state = "CANCELLED"
    after = Node(world)
    after.recover()
    assert after.agent.parts.journal.open_records() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    assert world.comment == ""


def test_the_line_is_that_of_the_last_agent(world, node):
    """Who asked first is first, and has waited since then."""
    rules = Rules(start_free_pct=60, deadline_s=60)
    node = Node(world, rules)
    node.sleep()
    node.cards.others = 70 * GIB
    node.connection()
    node.round()
    asked = node.view()["asked"]
    world.clock += 50
    after = Node(world, rules)
    after.cards.others = 70 * GIB
    after.director.gpus_of = lambda job_id: [after.cards.uuid]
    job = after.job(job_id=8, root=0, link=FakeLink())
    after.agent.parts.registry.put(job)
    assert not after.director.admit(job)
    after.recover()
    after.round()
    assert (after.view()["asked"], after.view()["overdue"]) == (asked, False)
    assert after.view()["asked_why"] == "a connection waits on port 8000"
    assert after.view_of(8)["waits"] == "job 7 asked before it"
    world.clock += 10
    after.round()
    assert after.view()["overdue"]
    after.cards.others = 0
    after.round()
    assert awake(world)


def test_one_whose_turn_had_come_keeps_it(world, node):
    """The agent ended in the middle of its wake: nobody who asked later comes before it."""
    node.sleep()
    node.connection()
    world.crash_at = world.effects + 2
    with pytest.raises(Crash):
        node.round()
    asked = node.view()["asked"]
    world.clock += 50
    after = Node(world)
    after.cards.others = 79 * GIB
    after.recover()
    assert (after.view()["asked"], after.phase()) == (asked, Phase.WAKING)
    after.cards.others = 0
    after.round()
    assert awake(world)


def test_one_that_waits_to_start_keeps_its_place_too(world, node, monkeypatch):
    """Its shepherd is older than the agent: it has asked the one before."""
    node = Node(world, Rules(start_free_pct=60, deadline_s=60))
    node.sleep()
    node.cards.others = 70 * GIB
    since = world.clock - 30
    node.connection()
    node.round()
    after = Node(world, Rules(start_free_pct=60, deadline_s=60))
    monkeypatch.setattr(after.agent.parts.processes, "began", lambda started, now: since)
    after.cards.others = 70 * GIB
    after.director.gpus_of = lambda job_id: [after.cards.uuid]
    after.recover()
    after.agent.parts.registry.put(after.job(job_id=8, root=0, link=FakeLink()))
    assert not after.director.admit(after.job(job_id=8, root=0, link=FakeLink()))
    after.round()
    assert after.view_of(8)["asked"] == since
    assert after.view()["waits"] == "job 8 asked before it"


def test_when_a_process_began_is_known() -> None:
    """To the tick."""
    child = subprocess.Popen(("sleep", "10"))
    try:
        now = time.time()
        assert now - 10 < LinuxProcesses().began(started_of(child.pid), now) <= now + 0.02
    finally:
        child.kill()
        child.wait()


def test_slurm_that_is_silent_keeps_no_sleeper_waiting(world, node, monkeypatch):
    """It would take its time to be silent for each of them, and requests would wait so long."""
    node.sleep()
    after = Node(world)
    monkeypatch.setattr(after.agent.parts.slurm, "job", lambda job: pytest.fail("Slurm was asked"))
    after.recover()
    assert after.director.holds(7) is Phase.FROZEN
    after.connection()
    after.round()
    assert awake(world)
