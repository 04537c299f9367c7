"""Several clusters that share a store: equal job IDs are different jobs, and no cluster acts for another one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from agent_site import STEPS, World
from agent_world import KEEP_UNKNOWN_S, Agent
from job_owner import OWNER

from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.records.shared_state import Notes, StartPlan
from slurm_affinode.suspension.records.sweep import Absences
from slurm_affinode.suspension.wake import Lease

from .test_lost_state import HOUR_S, keeper, lose_state, more_images, pass_time

KEY = bytes(range(64))


@pytest.fixture
def asleep(tmp_path: Path) -> tuple[World, Agent]:
    """Job 7 of cluster alpha is suspended; cluster beta has a sleeping job 7 and images of others in the same store."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1", STEPS)
    first = Agent(world, "c1", SuspendSettings())
    first.suspend()
    first.settle()
    (note,) = first.notes.all()
    first.notes.write(replace(note, cluster="beta"))
    store, facts = first.shared, first.shared.get("alpha.7", 1).manifest
    for number in (7, *range(300, 320)):
        key = JobKey("beta", number, 5)
        with store.begin(key, uid=OWNER.uid, estimate=0) as writer:
            writer.commit(replace(facts, key=key, seq=0, files=()))
        os.utime(store.path / key.name, (0, 0))
    return world, keeper(world, "c2")


def test_each_cluster_has_a_node_that_wakes(tmp_path: Path) -> None:
    """Else the jobs of all but one cluster would sleep until their owners wake them."""
    alpha, beta = (Lease.of(tmp_path, name, Signer(KEY, "c1")) for name in ("alpha", "beta"))
    other = Lease.of(tmp_path, "alpha", Signer(KEY, "c2"))
    assert alpha.held(100, 8)
    assert beta.held(100, 8)
    assert not other.held(101, 8)


def test_plans_of_clusters_are_separate(tmp_path: Path) -> None:
    notes = Notes(tmp_path, Signer(KEY, "c1"))
    plans = {"alpha": {7: StartPlan(100.0, ("c1",))}, "beta": {7: StartPlan(900.0, ("d1",))}}
    for cluster, plan in plans.items():
        notes.write_plan(cluster, plan)
    assert {cluster: notes.plan(cluster) for cluster in plans} == plans


def test_suspended_jobs_are_those_of_the_cluster(asleep: tuple[World, Agent]) -> None:
    _, agent = asleep
    assert len(agent.notes.all()) == 2
    assert [job.key.cluster for job in agent.keeper.suspended()] == ["alpha"]


def test_images_of_other_clusters_do_not_count_for_stopping_a_sweep(asleep: tuple[World, Agent]) -> None:
    """All of alpha's images would be removed, although they are few of those in the store."""
    world, agent = asleep
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert "7 of 7 images" in str(agent.keeper.sweep_stopped())
    assert len([name for name in agent.shared.jobs() if name.startswith("alpha.")]) == 7
    assert len([name for name in agent.shared.jobs() if name.startswith("beta.")]) == 21


def test_stopped_sweeps_of_clusters_are_separate(asleep: tuple[World, Agent]) -> None:
    """The sweep of one stops, and continues; that of the other waits for its own administrator."""
    world, agent = asleep
    jobs = {f"beta.{number}" for number in range(300, 320)}
    other = Absences(
        world.root / "shared", Signer(KEY, "d1"), "beta", keep_s=KEEP_UNKNOWN_S, clock=lambda directory, node: 1000.0
    )
    stopped = other.stop("/images", 20, 21, jobs)
    more_images(agent, 6)
    lose_state(agent)
    pass_time(world, agent, 2 * KEEP_UNKNOWN_S, step=HOUR_S)
    assert "7 of 7 images" in str(agent.keeper.sweep_stopped())
    assert other.stopped() == stopped
    agent.absences.confirm(agent.absences.all())
    assert agent.keeper.sweep_stopped() is None
    assert other.stopped() == stopped


def test_records_of_jobs_unknown_to_another_cluster_stay(tmp_path: Path) -> None:
    """A cluster knows nothing of them, for however long they are unknown."""
    clock = [1000.0]
    alpha, beta = (
        Absences(tmp_path, Signer(KEY, "c1"), cluster, keep_s=HOUR_S, clock=lambda directory, node: clock[0])
        for cluster in ("alpha", "beta")
    )
    beta.update((), ["beta.7"])
    clock[0] += 100 * 24 * HOUR_S
    alpha.update(["alpha.7"], ["alpha.8"])
    assert beta.all()["beta.7"].since == 1000.0


def test_stopped_sweep_of_an_older_agent_is_that_of_its_cluster(tmp_path: Path) -> None:
    """Its file has no cluster in its name."""
    alpha, beta = (Absences(tmp_path, Signer(KEY, "c1"), cluster, keep_s=HOUR_S) for cluster in ("alpha", "beta"))
    value = {"since": 5.0, "node": "c2", "store": "/images", "going": 9, "present": 9, "jobs": ["beta.7", "beta.8"]}
    old = tmp_path / "sweep-stopped.json"
    old.write_text(Signer(KEY, "c2").encode("stopped sweep", old.name, value))
    assert alpha.stopped() is None
    alpha.resume()
    assert str(beta.stopped()).startswith("the sweep of images is stopped: Slurm does not know the jobs of 9 of 9")
    beta.resume()
    assert beta.stopped() is None
    assert not old.exists()
