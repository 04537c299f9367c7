"""A job that sleeps is started where its image, its note, or both cannot be seen: what it has done is not lost."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from agent_site import STEPS, World
from agent_world import Agent

from slurm_affinode.agent.shepherds import Hold, Restored, Start
from slurm_affinode.model.suspension import Phase


@pytest.fixture
def world(world: World) -> World:
    """The job ran on c1 and sleeps."""
    asleep(Agent(world, "c1"))
    return world


def asleep(agent: Agent) -> None:
    """Its image is in the shared store."""
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()


def start(world: World, node: str) -> Agent:
    """Slurm starts it there."""
    world.start_run(node)
    for name, machine in world.nodes.items():
        if name != node:
            machine.init = None
    return Agent(world, node)


def twice_asleep(world: World) -> None:
    """Again, on c2: what c1 has on its disk is from before."""
    agent = start(world, "c2")
    assert agent.restore() == Restored(2)
    asleep(agent)


def test_an_older_image_is_not_taken_for_one_that_is_elsewhere(world: World) -> None:
    """The newest one is on c2 alone: on c1 the job waits for it."""
    twice_asleep(world)
    shared = Agent(world, "c1").parts.shared
    assert shared is not None
    shared.remove(shared.get("alpha.7", 2))
    shared.remove(shared.get("alpha.7", 1))
    assert start(world, "c1").restore() == Hold("its image is still on c2")


def test_an_older_image_is_not_taken_where_the_shared_store_cannot_be_read(world: World) -> None:
    """Neither is its note, which says that there is a newer one."""
    twice_asleep(world)
    agent = start(world, "c1")
    shared = agent.parts.shared
    assert shared is not None
    os.close(shared._entries.top)
    shared._entries.top = -1
    agent.parts.notes._root = world.root / "gone"
    held = agent.restore()
    assert isinstance(held, Hold)
    assert "cannot be read" in held.reason or "Bad file descriptor" in held.reason


def test_a_shared_store_that_was_not_mounted_when_the_agent_began(world: World) -> None:
    """An empty one is in its place: Slurm's comment says that the job sleeps, and it is held. It comes back later."""
    (world.root / "shared").rename(world.root / "elsewhere")
    held = start(world, "c2").restore()
    assert isinstance(held, Hold)
    assert "is it mounted?" in held.reason
    assert "is it mounted?" in world.comment
    again = start(world, "c2").restore()  # its comment is another one by now
    assert isinstance(again, Hold)
    for path in sorted((world.root / "shared").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (world.root / "shared").rmdir()
    (world.root / "elsewhere").rename(world.root / "shared")
    assert start(world, "c2").restore() == Restored(2)
    assert world.steps() == [STEPS]


def test_a_job_whose_images_were_given_up_starts_from_its_beginning(world: World) -> None:
    """``images prune 7 --yes`` on another node: it can be woken, and does not come back by what c1 still has."""
    first = Agent(world, "c1")
    (note,) = first.parts.notes.all()
    shared = first.parts.shared
    assert shared is not None
    shared.remove(shared.get("alpha.7", 1))
    first.parts.notes.write(replace(note, given_up=True))
    (asleep,) = first.keeper.suspended()
    assert asleep.failure == "its image was given up: it starts from its beginning"
    world.held = True
    first.waker.wake(note.key, "root")
    assert not world.held
    agent = start(world, "c1")
    assert agent.images(shared=False) == [1]
    assert agent.restore() == Start()
    assert agent.parts.notes.all() == []
    assert world.steps() == [0]
    assert world.comment == ""


def test_images_that_were_given_up_go_from_every_node(world: World) -> None:
    """With the next sweep, while the job still waits."""
    agent = Agent(world, "c1")
    (note,) = agent.parts.notes.all()
    agent.parts.notes.write(replace(note, given_up=True))
    for path in world.root.glob("*/images/alpha.7/*"):
        os.utime(path, (0, 0))
    agent.keeper.sweep(True)
    assert agent.images(shared=False) == agent.images(shared=True) == []
    assert agent.parts.notes.all() != []


def test_a_job_that_was_never_suspended_starts(world: World) -> None:
    """Also where its owner has put words into its comment."""
    (world.root / "shared").rename(world.root / "elsewhere")
    world.comment = "suspended animation"
    assert start(world, "c2").restore() == Start()
