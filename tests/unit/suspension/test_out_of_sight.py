"""Suspended jobs started where their image, their note, or both are not visible: no progress is lost."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from agent_site import STEPS, World
from agent_world import Agent

from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.job.shepherd import Hold, Restored, Start


@pytest.fixture
def world(world: World) -> World:
    """The job ran on c1 and is suspended."""
    asleep(Agent(world, "c1"))
    return world


def asleep(agent: Agent) -> None:
    """Suspend the job, with its image in the shared store."""
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()


def start(world: World, node: str) -> Agent:
    """Have Slurm start the job on this node."""
    world.start_run(node)
    for name, machine in world.nodes.items():
        if name != node:
            machine.init = None
    return Agent(world, node)


def twice_asleep(world: World) -> None:
    """Suspend the job again, on c2: the image on c1's disk is outdated."""
    agent = start(world, "c2")
    assert agent.restore() == Restored(2)
    asleep(agent)


def test_outdated_image_is_not_restored(world: World) -> None:
    """The newest image is on c2 alone: the job on c1 waits for it."""
    twice_asleep(world)
    shared = Agent(world, "c1").shared
    assert shared is not None
    shared.remove(shared.get("alpha.7", 2))
    shared.remove(shared.get("alpha.7", 1))
    assert start(world, "c1").restore() == Hold("its image is still on c2")


def test_outdated_image_is_not_restored_without_shared_store(world: World) -> None:
    """Its note, which names the newer image, cannot be read either."""
    twice_asleep(world)
    agent = start(world, "c1")
    shared = agent.shared
    assert shared is not None
    os.close(shared._entries.top)
    shared._entries.top = -1
    agent.notes._root = world.root / "gone"
    held = agent.restore()
    assert isinstance(held, Hold)
    assert "cannot be read" in held.reason or "Bad file descriptor" in held.reason


def test_job_is_held_if_shared_store_is_not_mounted(world: World) -> None:
    """An empty directory is in its place: Slurm's comment shows the suspension, and the job is held until the mount."""
    (world.root / "shared").rename(world.root / "elsewhere")
    held = start(world, "c2").restore()
    assert isinstance(held, Hold)
    assert "is it mounted?" in held.reason
    assert "is it mounted?" in world.comment
    again = start(world, "c2").restore()  # its comment has changed meanwhile
    assert isinstance(again, Hold)
    for path in sorted((world.root / "shared").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (world.root / "shared").rmdir()
    (world.root / "elsewhere").rename(world.root / "shared")
    assert start(world, "c2").restore() == Restored(2)
    assert world.steps() == [STEPS]


def test_job_with_abandoned_images_starts_afresh(world: World) -> None:
    """``images prune 7 --yes`` on another node: the job can be woken, and is not restored from the image left on c1."""
    first = Agent(world, "c1")
    (note,) = first.notes.all()
    shared = first.shared
    assert shared is not None
    shared.remove(shared.get("alpha.7", 1))
    first.notes.write(replace(note, given_up=True))
    (asleep,) = first.keeper.suspended()
    assert asleep.failure == "its image was abandoned: it starts from its beginning"
    world.held = True
    first.waker.wake(note.key, "root")
    assert not world.held
    agent = start(world, "c1")
    assert agent.images(shared=False) == [1]
    assert agent.restore() == Start()
    assert agent.notes.all() == []
    assert world.steps() == [0]
    assert world.comment == ""


def test_abandoned_images_are_removed_from_every_node(world: World) -> None:
    """The next sweep removes them while the job still waits."""
    agent = Agent(world, "c1")
    (note,) = agent.notes.all()
    agent.notes.write(replace(note, given_up=True))
    for path in world.root.glob("*/images/alpha.7/*"):
        os.utime(path, (0, 0))
    agent.keeper.sweep(True)
    assert agent.images(shared=False) == agent.images(shared=True) == []
    assert agent.notes.all() != []


def test_job_never_suspended_starts(world: World) -> None:
    """The owner's comment does not matter."""
    (world.root / "shared").rename(world.root / "elsewhere")
    world.comment = "suspended animation"
    assert start(world, "c2").restore() == Start()
