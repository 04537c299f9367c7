"""Common parts of suspension scenarios on the fake cluster."""

from __future__ import annotations

from agent_site import STEPS
from agent_world import Agent

from slurm_affinode.model.ledger import decode
from slurm_affinode.suspension.job.shepherd import Restored


def recovered(world, node="c1", limits=None):
    """Start a new agent on the node, and complete all the work of its start."""
    agent = Agent(world, node, limits=limits)
    agent.keeper.recover()
    agent.keeper._queue.close()
    agent.keeper._queue.join()
    for _ in range(3):
        agent.keeper._round(list(agent.keeper._waiting.values()))
    agent.settle()
    return agent


def check(world):
    """Check the invariants that hold after each recovery."""
    assert world.ran_stopped == 0
    assert world.copies() <= 1
    if world.state == "RUNNING":
        assert world.running()
        assert world.steps() == [STEPS]
        return
    assert (world.state, world.copies()) == ("PENDING", 0)
    agent = Agent(world, "c2")
    assert agent.images(shared=True) == [1]
    assert world.comment.startswith("suspended: idle 15m, 1 MiB, wake with: slurm-affinode wake 7")


def resume_at_c2(world):
    """Release the job and start it on the other node, where the agent restores its image."""
    if world.state == "PENDING":
        world.start_run("c2")
        world.nodes["c1"].init = None
        agent = Agent(world, "c2")
        assert agent.restore() == Restored(2)
    assert world.running()
    assert world.steps() == [STEPS]
    assert world.copies() == 1


def begun_at_c2(world, settings=None):
    """Return the agent on c2, where a job suspended on c1 has been started; nothing is left on c1."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    return Agent(world, "c2", settings)


def ledger(world):
    lines = [
        decode(line)
        for path in sorted((world.root / "shared" / "ledger").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    merged = lines[0]
    for line in lines[1:]:
        assert line.key == merged.key
        merged = merged.merged(line)
    return merged
