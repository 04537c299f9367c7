"""A slurmctld that has lost its state: it responds, but knows no suspended job."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from agent_site import STEPS, Crash, World, make_job
from agent_world import KEEP_UNKNOWN_S, Agent
from job_owner import OWNER

from slurm_affinode.checkpoint.files.created_files import FileIdentity
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.slurm.interface import UnknownJobError
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.records.sweep import MOST_QUERIED

from .agent_sequences import check, ledger, recovered, resume_at_c2

HOUR_S = 3600.0


@pytest.fixture
def asleep(tmp_path):
    """A suspended job, and the agent of another node that maintains the shared store."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1", STEPS)
    first = Agent(world, "c1")
    first.suspend()
    first.settle()
    return world, keeper(world, "c2")


def keeper(world, node):
    """Return an agent that wakes jobs and sweeps."""
    agent = Agent(world, node, SuspendSettings(wake_backoff_s=100, wake_every_s=1))
    agent.waker = agent.waker_with(tidy=agent.keeper.sweep, over=agent.keeper.record_end)
    return agent


def lose_state(agent):
    """Make Slurm respond as if slurmctld had been started with an empty StateSaveLocation."""

    def unknown(job):
        raise UnknownJobError(f"job {job}: Invalid job id specified")

    agent.slurm.jobs = tuple
    agent.slurm.job = unknown


def pass_time(world, agent, seconds, step=600.0):
    """Advance the clock in steps, with a tick of the agent after each."""
    end = world.clock + seconds
    while world.clock < end:
        world.clock += step
        agent.waker.tick()


def test_image_outlives_slurmctld_that_lost_its_state(asleep):
    """An empty response is not evidence: image, note and claim of the job stay, and it resumes."""
    world, agent = asleep
    lose_state(agent)
    pass_time(world, agent, 2 * HOUR_S)
    assert agent.images(shared=True) == [1]
    assert len(agent.notes.all()) == 1
    assert "Slurm does not know this job" in agent.keeper.suspended()[0].failure
    del agent.slurm.jobs, agent.slurm.job
    pass_time(world, agent, 700)
    assert agent.images(shared=True) == [1]
    resume_at_c2(world)


def test_record_of_created_files_outlives_slurmctld_that_lost_its_state(asleep):
    """A later restore of the image replaces the files that a killed attempt has left behind."""
    world, agent = asleep
    for job_id in (7, 8):
        agent.created.of(JobKey("alpha", job_id, 5), OWNER.uid).write({"psm": FileIdentity(1, "00")})
    lose_state(agent)
    pass_time(world, agent, HOUR_S)
    assert agent.created.jobs() == [7]  # job 8 has no image


def test_image_outlives_new_job_with_its_id(asleep):
    """slurmctld counts from 1 again: another job with that ID does not affect the suspended one."""
    world, agent = asleep
    for state in ("RUNNING", "COMPLETED"):
        other = make_job(world, state=state, restarts=0, uid=4711, is_held=False)
        agent.slurm.jobs = lambda other=other: (other,)
        agent.slurm.job = lambda job, other=other: other
        pass_time(world, agent, 2 * HOUR_S)
    assert agent.images(shared=True) == [1]
    assert len(agent.notes.all()) == 1


def test_image_of_canceled_job_is_removed_at_once(asleep):
    """Slurm reports the cancellation explicitly."""
    world, agent = asleep
    world.state = "CANCELLED"
    pass_time(world, agent, 700)
    assert agent.images(shared=True) == []
    assert agent.notes.all() == []


def test_image_of_unknown_job_is_removed_after_retention(asleep):
    """Most likely it ended unnoticed: image and note are removed, and the ledger records the end."""
    world, agent = asleep
    lose_state(agent)
    pass_time(world, agent, KEEP_UNKNOWN_S - 2 * HOUR_S, step=HOUR_S)
    assert agent.images(shared=True) == [1]
    pass_time(world, agent, 4 * HOUR_S, step=HOUR_S)
    assert agent.images(shared=True) == []
    assert agent.notes.all() == []
    assert ledger(world).ended_ms is not None


def test_period_of_absence_survives_restart_and_is_shared(asleep):
    """The period does not restart, and is the same for all agents."""
    world, agent = asleep
    lose_state(agent)
    pass_time(world, agent, KEEP_UNKNOWN_S / 2, step=HOUR_S)
    other = keeper(world, "c3")
    lose_state(other)
    world.clock += KEEP_UNKNOWN_S / 2
    pass_time(world, other, 2 * HOUR_S, step=HOUR_S)
    assert other.images(shared=True) == []


def test_period_restarts_if_slurm_knows_job_again(asleep):
    """Slurm knew the job in between."""
    world, agent = asleep
    agent.slurm.release = lambda job: None
    for _ in range(3):
        lose_state(agent)
        pass_time(world, agent, 0.7 * KEEP_UNKNOWN_S, step=HOUR_S)
        del agent.slurm.jobs, agent.slurm.job
        pass_time(world, agent, HOUR_S)
    assert agent.images(shared=True) == [1]


def more_images(agent, count):
    """Add images of further jobs to the shared store."""
    store = agent.shared
    facts = store.get("alpha.7", 1).manifest
    for number in range(100, 100 + count):
        key = JobKey("alpha", number, 5)
        with store.begin(key, uid=OWNER.uid, estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
        os.utime(store.path / key.name / "0001", (0, 0))  # else it is too young to be removed


def test_sweep_that_would_remove_most_images_stops(asleep, caplog):
    """It reports this once, and continues when an administrator has confirmed that the jobs have ended."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 3 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert len(agent.images(shared=True)) == 7
    assert "7 of 7 images" in agent.keeper.sweep_stopped()
    assert "images prune --unknown --yes" in agent.keeper.sweep_stopped()
    assert len([record for record in caplog.records if "the sweep of images is stopped" in record.message]) == 1
    agent.absences.confirm({"alpha.7", *(f"alpha.{number}" for number in range(100, 106))})
    assert agent.keeper.sweep_stopped() is None
    pass_time(world, agent, HOUR_S)
    assert agent.images(shared=True) == []


def test_all_unknown_jobs_count_for_stopping_the_sweep(asleep):
    """One sweep looks up a limited number of jobs by ID: in a large store they are few, sweep after sweep."""
    world, agent = asleep
    more_images(agent, 2 * MOST_QUERIED + 10)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert len(agent.images(shared=True)) == 2 * MOST_QUERIED + 11
    assert "111 of 111 images" in agent.keeper.sweep_stopped()


def test_further_images_do_not_resume_stopped_sweep(asleep):
    """The unknown ones are then fewer than half, and still await confirmation by an administrator."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    store = agent.shared
    facts = store.get("alpha.7", 1).manifest
    jobs = []
    for number in range(200, 220):
        job = make_job(world, job_id=number, state="PENDING", restarts=1, is_held=True)
        key = JobKey("alpha", number, round(job.submit.timestamp()))
        with store.begin(key, uid=OWNER.uid, estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
        jobs.append(job)
    agent.slurm.jobs = lambda: tuple(jobs)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert len(agent.images(shared=True)) == 27
    assert agent.keeper.sweep_stopped() is not None


def test_stopped_sweep_resumes_when_slurm_knows_jobs_again(asleep):
    """No confirmation is needed then."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert agent.keeper.sweep_stopped() is not None
    submit = datetime.fromtimestamp(5, UTC)
    others = [make_job(world, job_id=number, restarts=1, submit=submit, is_held=True) for number in range(100, 106)]
    agent.slurm.jobs = lambda: (make_job(world), *others)
    agent.slurm.release = lambda job: None
    pass_time(world, agent, HOUR_S)
    assert agent.keeper.sweep_stopped() is None
    assert len(agent.images(shared=True)) == 7


@pytest.mark.parametrize("phase", ["requeue", "kill"])
def test_suspension_in_progress_outlives_lost_slurm_state(tmp_path, phase):
    """The agent died right before the requeue or the kill of the process tree: the complete image is kept."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1", STEPS)
    world.crash_at = {"requeue": 4, "kill": 5}[phase]
    with pytest.raises(Crash, match=phase):
        Agent(world, "c1").suspend()
    agent = Agent(world, "c1")
    lose_state(agent)
    agent.keeper.recover()
    agent.keeper._queue.close()
    assert agent.images(shared=False) == [1]
    assert "kill" not in world.effect_log
    agent = recovered(world)
    check(world)
    resume_at_c2(world)
