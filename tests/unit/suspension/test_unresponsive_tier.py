"""A shared tier on a file system that does not respond: a FUSE that stalls like a hard NFS mount."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from agent_site import World, make_job
from stalling import Stalling
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.composition import report_problem
from slurm_affinode.base.timeouts import FileSystemCalls
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.retention import Tier
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.job.shepherd import Hold, Restored

from .agent_tiers import Tiered, again_at, asleep

from agent_world import KEY  # isort: skip


@pytest.fixture
def shared(world: World, stalling: Callable[..., Stalling], monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalling]:
    """The file system of the shared store."""
    monkeypatch.setattr(FileSystemCalls.__init__, "__kwdefaults__", {"probe_s": 0.2})
    made, answers_ = stalling(world.root / "shared"), FileSystemCalls._answers
    # On a busy machine it may be slower than the timeout, but it does respond.
    monkeypatch.setattr(FileSystemCalls, "_answers", lambda self: not made.stalled or answers_(self))
    yield made
    made.resume()


class OnIt(Tiered):
    """An agent that expects the shared store to time out."""

    def __init__(self, world: World, node: str) -> None:
        super().__init__(world, node)
        before = self.tiers
        path = world.root / "shared" / "images"
        store = DirectoryStore(path, KEY, calls=FileSystemCalls(path.parent))
        tiers = Tiers(
            [*before.node, Tier("shared", store, shared=True)], now=world.now,
            report=lambda key, text: report_problem(self.notes, key, text),
        )  # fmt: skip
        self.build(tiers=tiers)


def test_local_work_continues_without_shared_store(world: World, shared: Stalling) -> None:
    """Nothing blocks, host memory is freed, and a suspension is refused with the reason. It works again afterwards."""
    agent = OnIt(world, "c1")
    shared.stall()
    began = time.monotonic()
    with pytest.raises(Refused, match=r"shared/images: its file system does not respond"):
        agent.suspend()
    assert [refusal.code for refusal in agent.suspender.refusals(agent.watched(slurm=make_job(world)))] == ["no-room"]
    agent.tiers.relieve()
    agent.keeper.sweep(holds_lease=True)
    agent.waker.tick()
    assert agent.keeper.suspended() == []
    assert agent.keeper.suspended_ids() is None
    assert "does not respond" in (agent.keeper.unresponsive() or "")
    assert "does not respond" in (agent.keeper.room() or "")
    assert time.monotonic() - began < DEADLINE_S
    shared.resume()
    answers(agent)
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()
    assert agent.where() == ["memory", "disk", "shared"]


def test_suspension_in_progress_completes(world: World, shared: Stalling) -> None:
    """The image is on the node, the job in the queue; its note and its shared copy follow."""
    agent = OnIt(world, "c1")
    done = agent.suspend(shared.stall)
    assert done.phase is Phase.QUEUED
    assert agent.where() == ["memory", "disk"]
    shared.resume()
    answers(agent)
    wait_until("its copy is there", lambda: agent.keeper.suspended()[0].where == "shared")
    assert agent.where() == ["memory", "disk", "shared"]


def test_restore_waits_for_file_server(world: World, shared: Stalling, caplog: pytest.LogCaptureFixture) -> None:
    """The wait is limited; another node may have a newer image."""
    caplog.set_level(logging.INFO)
    asleep(world)
    again_at(world, "c2")
    agent = OnIt(world, "c2")
    shared.stall()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            shared.resume()
            answers(agent)

    agent.build(clock=replace(agent.clock, sleep=sleep))
    assert isinstance(agent.restore(), Restored)
    assert len(waited) >= 3
    messages = [
        line.removeprefix(f"{shared.path}: ") for line in caplog.messages if line.startswith(f"{shared.path}: ")
    ]
    assert sorted(messages) == [
        *["its file system does not respond; operations on it fail until it responds"] * 2,
        *["responds again"] * 2,  # for the images and the notes
    ]


def test_job_is_held_if_file_server_does_not_return(world: World, shared: Stalling) -> None:
    """Its image is kept."""
    asleep(world)
    again_at(world, "c2")
    agent = OnIt(world, "c2")
    agent.build(settings=replace(agent.settings, restore_s=3))
    shared.stall()
    reply = agent.restore()
    assert isinstance(reply, Hold)
    assert "does not respond" in reply.reason
    shared.resume()
    answers(agent)
    assert agent.where() == ["shared"]


def answers(agent: Tiered) -> None:
    """Wait until all abandoned calls have returned."""
    calls = [agent.notes._ask, agent.ledger._ask, *(s.calls for s in agent.tiers.stores if s.calls)]
    wait_until("all has come back", lambda: not any(call.unresponsive for call in calls))
