"""What the stories of suspensions on the stand-in for a cluster have in common."""

from __future__ import annotations

from agent_site import STEPS
from agent_world import Agent

from slurm_affinode.agent.shepherds import Restored
from slurm_affinode.model.ledger import decode


def recovered(world, node="c1"):
    """A new agent on the node, with everything done that its start brings with it."""
    agent = Agent(world, node)
    agent.keeper.recover()
    for _ in range(3):
        agent.keeper._stop.set()
        with agent.keeper._lock:
            waiting = list(agent.keeper._waiting.values())
        agent.keeper._round(waiting)
    agent.aftermath.settle()
    return agent


def check(world):
    """What has to be true whenever an agent has had the time to put things in order."""
    assert world.ran_stopped == 0
    assert world.copies() <= 1
    if world.state == "RUNNING":
        assert world.running()
        assert world.steps() == [STEPS]
        return
    assert (world.state, world.copies()) == ("PENDING", 0)
    agent = Agent(world, "c2")
    assert agent.images(shared=True) == [1]
    assert world.comment.startswith("suspended: idle 15m, 1.0 MiB, wake with: slurm-affinode wake 7")


def go_on_at_c2(world):
    """The job is released and started at the other node, whose agent puts its image in place."""
    if world.state == "PENDING":
        world.start_run("c2")
        world.nodes["c1"].init = None
        agent = Agent(world, "c2")
        assert agent.restore() == Restored(2)
    assert world.running()
    assert world.steps() == [STEPS]
    assert world.copies() == 1


def begun_at_c2(world, settings=None):
    """The job was suspended at c1, which has forgotten it, and is started at c2: the agent there."""
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
