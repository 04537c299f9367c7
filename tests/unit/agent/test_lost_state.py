"""A slurmctld that has lost its state: it answers, and knows no job that sleeps."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from agent_sequences import check, go_on_at_c2, ledger, recovered
from agent_site import STEPS, Crash, World, make_job
from agent_world import KEEP_UNKNOWN_S, Agent

from slurm_affinode.agent.parts import Settings
from slurm_affinode.agent.waker import JobWaker
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.slurm.faults import UnknownJobError

HOUR_S = 3600.0


@pytest.fixture
def asleep(tmp_path):
    """A job that sleeps, and the agent of another node, which looks after the shared store."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1", STEPS)
    first = Agent(world, "c1")
    first.suspend()
    first.settle()
    return world, keeper(world, "c2")


def keeper(world, node):
    """An agent that wakes and sweeps."""
    agent = Agent(world, node, Settings(wake_backoff_s=100, wake_every_s=1))
    agent.waker = JobWaker(agent.parts, agent.waker._lease, tidy=agent.keeper.sweep, over=agent.keeper.over)
    return agent


def lose_state(agent):
    """slurmctld was started with an empty StateSaveLocation."""

    def unknown(job):
        raise UnknownJobError(f"job {job}: Invalid job id specified")

    agent.parts.slurm.jobs = tuple
    agent.parts.slurm.job = unknown


def pass_time(world, agent, seconds, step=600.0):
    """The agent looks and sweeps all the while."""
    end = world.clock + seconds
    while world.clock < end:
        world.clock += step
        agent.waker.tick()


def test_image_outlives_slurmctld_that_lost_its_state(asleep):
    """An empty answer is no word on the job: its image, its note and its claim stay, and it resumes."""
    world, agent = asleep
    lose_state(agent)
    pass_time(world, agent, 2 * HOUR_S)
    assert agent.images(shared=True) == [1]
    assert len(agent.parts.notes.all()) == 1
    assert "Slurm does not know this job" in agent.keeper.suspended()[0].failure
    del agent.parts.slurm.jobs, agent.parts.slurm.job
    pass_time(world, agent, 700)
    assert agent.images(shared=True) == [1]
    go_on_at_c2(world)


def test_image_outlives_new_job_with_its_id(asleep):
    """slurmctld counts from 1 again: another job of that number says nothing about the one that sleeps."""
    world, agent = asleep
    for state in ("RUNNING", "COMPLETED"):
        other = make_job(world, state=state, restarts=0, uid=4711, held=False)
        agent.parts.slurm.jobs = lambda other=other: (other,)
        agent.parts.slurm.job = lambda job, other=other: other
        pass_time(world, agent, 2 * HOUR_S)
    assert agent.images(shared=True) == [1]
    assert len(agent.parts.notes.all()) == 1


def test_image_of_cancelled_job_goes_at_once(asleep):
    """Slurm says so explicitly."""
    world, agent = asleep
    world.state = "CANCELLED"
    pass_time(world, agent, 700)
    assert agent.images(shared=True) == []
    assert agent.parts.notes.all() == []


def test_image_of_unknown_job_goes_after_its_time(asleep):
    """It has ended unnoticed, most likely: image and note go, and the ledger is told."""
    world, agent = asleep
    lose_state(agent)
    pass_time(world, agent, KEEP_UNKNOWN_S - 2 * HOUR_S, step=HOUR_S)
    assert agent.images(shared=True) == [1]
    pass_time(world, agent, 4 * HOUR_S, step=HOUR_S)
    assert agent.images(shared=True) == []
    assert agent.parts.notes.all() == []
    assert ledger(world).ended_ms is not None


def test_agent_that_restarts_and_others_know_since_when(asleep):
    """The time does not begin anew, and no other agent has another."""
    world, agent = asleep
    lose_state(agent)
    pass_time(world, agent, KEEP_UNKNOWN_S / 2, step=HOUR_S)
    other = keeper(world, "c3")
    lose_state(other)
    world.clock += KEEP_UNKNOWN_S / 2
    pass_time(world, other, 2 * HOUR_S, step=HOUR_S)
    assert other.images(shared=True) == []


def test_job_that_comes_back_has_all_the_time_again(asleep):
    """Slurm knew it in between."""
    world, agent = asleep
    agent.parts.slurm.release = lambda job: None
    for _ in range(3):
        lose_state(agent)
        pass_time(world, agent, 0.7 * KEEP_UNKNOWN_S, step=HOUR_S)
        del agent.parts.slurm.jobs, agent.parts.slurm.job
        pass_time(world, agent, HOUR_S)
    assert agent.images(shared=True) == [1]


def more_images(agent, count):
    """Images of further jobs in the shared store."""
    store = agent.parts.shared
    facts = store.get("alpha.7", 1).manifest
    for number in range(100, 100 + count):
        key = JobKey("alpha", number, 5)
        with store.begin(key, uid=os.getuid(), estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
        os.utime(store.path / key.name / "0001", (0, 0))  # else it is too young to go


def test_sweep_that_would_remove_most_images_stops(asleep, caplog):
    """It says so once, and goes on when an administrator has confirmed that the jobs are over."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 3 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert len(agent.images(shared=True)) == 7
    assert "7 of 7 images" in agent.keeper.sweep_stopped()
    assert "images prune --unknown --yes" in agent.keeper.sweep_stopped()
    assert len([one for one in caplog.records if "the sweep of images is stopped" in one.message]) == 1
    agent.parts.absences.confirm({"alpha.7", *(f"alpha.{number}" for number in range(100, 106))})
    assert agent.keeper.sweep_stopped() is None
    pass_time(world, agent, HOUR_S)
    assert agent.images(shared=True) == []


def test_further_images_do_not_let_a_stopped_sweep_go_on(asleep):
    """The unknown ones are fewer than half by then, and still wait for an administrator."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    store = agent.parts.shared
    facts = store.get("alpha.7", 1).manifest
    jobs = []
    for number in range(200, 220):
        job = make_job(world, job_id=number, state="PENDING", restarts=1, held=True)
        key = JobKey("alpha", number, round(job.submit.timestamp()))
        with store.begin(key, uid=os.getuid(), estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
        jobs.append(job)
    agent.parts.slurm.jobs = lambda: tuple(jobs)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert len(agent.images(shared=True)) == 27
    assert agent.keeper.sweep_stopped() is not None


def test_stopped_sweep_goes_on_when_slurm_knows_the_jobs_again(asleep):
    """Nobody has to confirm anything then."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert agent.keeper.sweep_stopped() is not None
    submit = datetime.fromtimestamp(5, UTC)
    others = [make_job(world, job_id=number, restarts=1, submit=submit, held=True) for number in range(100, 106)]
    agent.parts.slurm.jobs = lambda: (make_job(world), *others)
    agent.parts.slurm.release = lambda job: None
    pass_time(world, agent, HOUR_S)
    assert agent.keeper.sweep_stopped() is None
    assert len(agent.images(shared=True)) == 7


@pytest.mark.parametrize("phase", ["requeue", "kill"])
def test_suspension_under_way_outlives_slurmctld_that_lost_its_state(tmp_path, phase):
    """The agent died right before it asked for the requeue, or killed the tree: the complete image stays."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1", STEPS)
    world.crash_at = {"requeue": 4, "kill": 5}[phase]
    with pytest.raises(Crash, match=phase):
        Agent(world, "c1").suspend()
    agent = Agent(world, "c1")
    lose_state(agent)
    agent.keeper.recover()
    agent.keeper._stop.set()
    assert agent.images(shared=False) == [1]
    assert "kill" not in world.effect_log
    agent = recovered(world)
    check(world)
    go_on_at_c2(world)
