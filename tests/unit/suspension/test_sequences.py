"""Suspend and restore with the agent killed before each effect: a job is never lost and never duplicated."""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, datetime

import pytest
from agent_site import STEPS, Crash, make_job
from agent_world import Agent
from job_owner import OWNER

from slurm_affinode.model.suspension import JobKey, Phase, SuspendOption
from slurm_affinode.slurm.interface import ControllerDownError, UnknownJobError
from slurm_affinode.suspension.job.shepherd import Restored, Start
from slurm_affinode.suspension.records.record import SuspensionFacts

from .agent_sequences import check, ledger, recovered, resume_at_c2

SUSPEND_EFFECTS = ["lock", "checkpoint", "dump", "requeue", "kill"]
RESTORE_EFFECTS = ["criu restore", "restore", "unlock"]


def test_suspended_job_resumes_on_another_node(world):
    """The full cycle, with its ledger entry."""
    agent = Agent(world, "c1")
    done = agent.suspend()
    agent.settle()
    assert (done.phase, done.failure, done.gpus) == (Phase.QUEUED, None, 1)
    assert world.effect_log == SUSPEND_EFFECTS
    assert world.held
    check(world)
    assert agent.journal.open_journals() == []
    [sleeping] = Agent(world, "c2").keeper.suspended()
    assert (sleeping.where, sleeping.why, sleeping.node) == ("shared", "idle 15m", "c1")
    resume_at_c2(world)
    assert world.comment == ""
    entry = ledger(world)
    times = [entry.began_ms, entry.locked_ms, entry.parked_ms, entry.dumped_ms, entry.queued_ms, entry.restoring_ms]
    assert times == sorted(times)
    assert (entry.user, entry.gpus, entry.gpu_model, entry.restored_node) == ("alice", 1, "H100", "c2")
    assert Agent(world, "c2").keeper.suspended() == []


@pytest.mark.parametrize(("left_s", "minutes"), [(61, 2), (-5, 1)])
def test_suspended_job_has_the_time_that_was_left(world, left_s, minutes):
    """In whole minutes, and at least one."""
    agent = Agent(world, "c1")
    ends = datetime.fromtimestamp(agent.clock.now() + left_s, UTC)
    agent.slurm.job = lambda job: make_job(world, expected_end=ends)
    agent.suspend()
    agent.settle()
    assert world.effect_log == [*SUSPEND_EFFECTS, f"time limit {minutes}"]


def test_suspended_jobs_are_counted_by_signed_notes(world):
    """A note that no agent has signed does not count, and nor does any after the restore."""
    agent, other = Agent(world, "c1"), Agent(world, "c2")
    agent.suspend()
    agent.settle()
    assert agent.keeper.suspended_ids() == other.keeper.suspended_ids() == {7}
    (note,) = (world.root / "shared" / "asleep").glob("*.json")
    value = json.loads(note.read_text()) | {"job_id": 8}
    note.with_name(note.name.replace(".7.", ".8.")).write_text(json.dumps(value))
    assert other.keeper.suspended_ids() == {7}
    resume_at_c2(world)
    assert other.keeper.suspended_ids() == set()


def test_canceled_suspended_job_loses_its_images(world):
    """The epilog of its first attempt may report the end: the images are deleted, and the ledger records the end."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.state = "CANCELLED"
    agent.keeper.handle_epilog(7, requeued=True)
    assert agent.images(shared=True) == [1]
    agent.keeper.handle_epilog(7, requeued=False)
    assert agent.images(shared=True) == agent.keeper.suspended() == []
    entry = ledger(world)
    assert entry.ended_ms is not None
    assert entry.ended_ms >= entry.queued_ms


@pytest.mark.parametrize("at", range(1, len(SUSPEND_EFFECTS) + 1))
def test_agent_killed_during_suspension_keeps_one_copy(world, at):
    """The agent is killed before each effect; a new agent recovers, and the job resumes with its memory."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    recovered(world)
    check(world)
    resume_at_c2(world)


@pytest.mark.parametrize("second", range(1, 5))
@pytest.mark.parametrize("first", range(2, len(SUSPEND_EFFECTS) + 1))
def test_agent_killed_during_recovery_recovers(world, first, second):
    world.crash_at = first
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.effects, world.crash_at = 0, second
    try:
        recovered(world)
    except Crash:
        recovered(world)
    world.crash_at = None
    check(world)
    resume_at_c2(world)


@pytest.mark.parametrize("at", range(1, len(SUSPEND_EFFECTS) + 1))
def test_recovery_waits_for_slurm(world, at):
    """slurmctld is down when the agent restarts: nothing is killed before the state of the job is known."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.answers = False
    recovered(world)
    assert world.copies() == 1 or world.state == "PENDING"
    world.answers = True
    recovered(world)
    check(world)
    resume_at_c2(world)


def test_unresponsive_slurmctld_is_queried_once_for_many_journals(world, monkeypatch):
    """Its timeout is long, and shepherds wait while the agent starts; when it responds, every job is queried."""
    agent = Agent(world, "c1")
    for job_id in (11, 12, 13):
        agent.journal.of_job(JobKey("alpha", job_id, 1)).write(
            Phase.LOCKING,
            SuspensionFacts(
                restarts=0,
                uid=OWNER.uid,
                gid=OWNER.gid,
                option=SuspendOption(),
                began_epoch=1.0,
                init_pid=1,
                init_started=1,
            ),
        )
    queries = []

    def job(job_id):
        queries.append(job_id)
        if world.answers:
            raise UnknownJobError(f"show job {job_id}: Invalid job id specified")
        raise ControllerDownError("no answer")

    monkeypatch.setattr(agent.slurm, "job", job)
    world.answers = False
    agent.keeper.recover()
    agent.keeper._queue.close()
    assert queries == [11]
    waiting = list(agent.keeper._waiting.values())
    assert [record.key.job_id for record in waiting] == [11, 12, 13]
    queries.clear()
    world.answers = True
    agent.keeper._round(waiting)
    assert sorted(set(queries)) == [11, 12, 13]


@pytest.mark.parametrize("at", range(1, len(SUSPEND_EFFECTS) + 1))
def test_node_failure_during_suspension(world, at):
    """Slurm requeues the job: it resumes from its image if that was complete, else it starts from the beginning."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    if world.state == "RUNNING":
        world.state, world.restarts = "PENDING", world.restarts + 1
    recovered(world)
    complete = "requeue" in world.effect_log or at == SUSPEND_EFFECTS.index("requeue") + 1
    assert Agent(world, "c2").images(shared=True) == ([1] if complete else [])
    world.start_run("c2")
    agent = Agent(world, "c2")
    assert isinstance(agent.restore(), Restored if complete else Start)
    assert world.steps() == [STEPS if complete else 0]


def test_node_that_returns_before_slurm_notices_requeues_job(world):
    """The agent is killed before the requeue, with a complete image, and Slurm still regards the job as running."""
    world.crash_at = SUSPEND_EFFECTS.index("requeue") + 1
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    recovered(world)
    check(world)
    resume_at_c2(world)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_unreadable_image_is_not_treated_as_missing(world, monkeypatch, number):
    """Its node and thus its processes were lost; the disk or the agent has a temporary error."""
    world.crash_at = SUSPEND_EFFECTS.index("requeue") + 1
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    opened = os.open

    def fails(path, *arguments, **options):
        if path == "0001":
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        recovered(world)
    assert Agent(world, "c1").journal.open_journals() != []
    recovered(world)
    check(world)
    resume_at_c2(world)


@pytest.mark.parametrize("at", range(1, len(RESTORE_EFFECTS) + 1))
def test_agent_killed_during_restore_recovers(world, at):
    """The partial restore is killed, and the image is restored from the beginning."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    world.effects, world.crash_at = 0, at
    with pytest.raises(Crash):
        Agent(world, "c2").restore()
    again = recovered(world, "c2")
    assert again.restore() == Restored(2)
    check(world)
    assert again.journal.open_journals() == []


def test_three_consecutive_suspensions(world):
    """Each image is newer than the previous one, and the newest is restored."""
    node = "c1"
    for number in (1, 2, 3):
        agent = Agent(world, node)
        world.nodes[node].processes[1].steps = STEPS + number
        done = agent.suspend()
        agent.settle()
        assert (done.seq, done.failure) == (number, None)
        world.nodes[node].init = None
        node = "c2" if node == "c1" else "c1"
        world.start_run(node)
        assert Agent(world, node).restore() == Restored(2)
        assert world.steps() == [STEPS + number]
        assert Agent(world, node).keeper.identify(Agent(world, node).watched())[1] == number
