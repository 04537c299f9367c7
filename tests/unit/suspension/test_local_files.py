"""Node-local files of a job and the records of them, from its suspension to its end."""

from __future__ import annotations

import json

import pytest
from agent_site import Crash, Slurm, World, make_job
from agent_world import Agent
from job_owner import OWNER

from slurm_affinode.checkpoint.files import local_files
from slurm_affinode.checkpoint.files.created_files import FileIdentity
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.suspension.job.shepherd import Restored

from .agent_sequences import begun_at_c2, recovered


def recorded(agent: Agent) -> list[int]:
    """Record a file that was created by a restore; return the jobs with such records."""
    key = JobKey("alpha", 7, 1)
    agent.created.of(key, OWNER.uid).write({"psm": FileIdentity(1, "00")})
    return agent.created.jobs()


def test_created_files_are_recorded_until_the_job_leaves(world: World) -> None:
    """The next dump has the newer contents, and the files are removed with it."""
    agent = Agent(world, "c1")
    assert recorded(agent) == [7]
    agent.suspend()
    agent.settle()
    assert agent.created.jobs() == []


def test_created_files_are_recorded_until_the_job_ends(world: World) -> None:
    """The end of an attempt does not suffice, because the next one may be restored on this node."""
    agent = begun_at_c2(world)
    assert agent.restore() == Restored(2)
    recorded(agent)
    agent.keeper.handle_epilog(7, requeued=True)
    agent.keeper.handle_epilog(7, requeued=False)
    assert agent.created.jobs() == [7]
    world.state = "CANCELLED"
    agent.keeper.handle_epilog(7, requeued=False)
    assert agent.created.jobs() == []


@pytest.mark.parametrize("end", ["canceled", "unknown"])
def test_records_of_jobs_that_ended_elsewhere_are_removed(world: World, end: str) -> None:
    """No epilog of this node reports their end. Nothing is removed while Slurm does not respond."""
    agent = Agent(world, "c1")
    recorded(agent)
    path = agent.created.of(JobKey("alpha", 8, 1), 0).path
    if end == "unknown":
        path.write_text(json.dumps({}))
    for answers, left in ((False, [7, 8]), (True, [7])):
        world.answers = answers
        world.clock += 100
        agent.keeper.sweep(holds_lease=False)
        assert agent.created.jobs() == (left if end == "unknown" else [7])
    world.state = "CANCELLED" if end == "canceled" else world.state
    world.clock += 100
    agent.keeper.sweep(holds_lease=False)
    assert agent.created.jobs() == ([] if end == "canceled" else [7])


@pytest.mark.parametrize("node", ["c1", "c2"])
def test_files_of_an_attempt_that_slurm_has_replaced_are_removed(
    world: World, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node was lost before the requeue request. On the node of the new attempt, they may be in use again."""
    left: list[User] = []
    monkeypatch.setattr(local_files, "leave", lambda fd, owner: left.append(owner) or ["psm"])
    world.crash_at = 4  # the requeue request
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.restarts += 1
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    monkeypatch.setattr(Slurm, "job", lambda self, job_id: make_job(world, batch_host=node))
    agent = recovered(world)
    assert left == ([OWNER] if node == "c2" else [])
    assert agent.journal.open_journals() == []
