"""A shared tier whose file system does not answer any more: a FUSE that stalls, as a hard NFS mount does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from agent_site import World, make_job
from agent_tiers import Tiered, again_at, asleep
from stalling import Stalling
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.orchestration import _report
from slurm_affinode.agent.shepherds import Hold, Restored
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.tier import Tier
from slurm_affinode.checkpoint.tiers import Tiers
from slurm_affinode.model.suspension import Phase
from slurm_affinode.patience import Patience

from agent_world import KEY  # isort: skip


@pytest.fixture
def shared(world: World, stalling: Callable[..., Stalling], monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalling]:
    """The file system of the shared store."""
    monkeypatch.setattr(Patience.__init__, "__kwdefaults__", {"look_s": 0.2})
    made, answers_ = stalling(world.root / "shared"), Patience._answers
    # On a busy machine it may be slower than that, and is not silent.
    monkeypatch.setattr(Patience, "_answers", lambda self: not made.stalled or answers_(self))
    yield made
    made.go_on()


class OnIt(Tiered):
    """An agent that knows that the shared store may not answer."""

    def __init__(self, world: World, node: str) -> None:
        super().__init__(world, node)
        before = self.parts.tiers
        path = world.root / "shared" / "images"
        store = DirectoryStore(path, KEY, patience=Patience(path.parent))
        tiers = Tiers(
            [*before.node, Tier("shared", store, shared=True)], now=world.now,
            report=lambda key, text: _report(self.parts, key, text),
        )  # fmt: skip
        object.__setattr__(self.parts, "tiers", tiers)


def test_what_needs_no_shared_store_goes_on(world: World, shared: Stalling) -> None:
    """Nothing waits, host memory is given back, a job is not suspended and says why. Then all is as before."""
    agent = OnIt(world, "c1")
    shared.stall()
    began = time.monotonic()
    with pytest.raises(Refused, match=r"shared/images: its file system does not answer"):
        agent.suspend()
    assert [one.code for one in agent.suspender.refusals(agent.watched(slurm=make_job(world)))] == ["no-room"]
    agent.parts.tiers.relieve()
    agent.keeper.sweep(holds_lease=True)
    agent.waker.tick()
    assert agent.keeper.suspended() == []
    assert "does not answer" in (agent.keeper.silent() or "")
    assert "does not answer" in (agent.keeper.room() or "")
    assert time.monotonic() - began < DEADLINE_S
    shared.go_on()
    answers(agent)
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()
    assert agent.where() == ["memory", "disk", "shared"]


def test_a_suspension_under_way_comes_to_its_end(world: World, shared: Stalling) -> None:
    """The image is on the node, the job in the queue; its note and its copy follow."""
    agent = OnIt(world, "c1")
    done = agent.suspend(shared.stall)
    assert done.phase is Phase.QUEUED
    assert agent.where() == ["memory", "disk"]
    shared.go_on()
    answers(agent)
    wait_until("its copy is there", lambda: agent.keeper.suspended()[0].where == "shared")
    assert agent.where() == ["memory", "disk", "shared"]


def test_a_restore_waits_for_the_file_server(world: World, shared: Stalling, caplog: pytest.LogCaptureFixture) -> None:
    """For some time, since another node may have a newer image."""
    caplog.set_level(logging.INFO)
    asleep(world)
    again_at(world, "c2")
    agent = OnIt(world, "c2")
    shared.stall()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            shared.go_on()
            answers(agent)

    object.__setattr__(agent.parts, "sleep", sleep)
    assert isinstance(agent.restore(), Restored)
    assert len(waited) >= 3
    said = [line.removeprefix(f"{shared.path}: ") for line in caplog.messages if line.startswith(f"{shared.path}: ")]
    assert sorted(said) == [
        *["answers again"] * 2,  # the images, the notes
        *["its file system does not answer; what needs it fails until it does"] * 2,
    ]


def test_a_restore_is_held_where_the_file_server_stays_away(world: World, shared: Stalling) -> None:
    """Its image stays."""
    asleep(world)
    again_at(world, "c2")
    agent = OnIt(world, "c2")
    object.__setattr__(agent.parts, "settings", replace(agent.parts.settings, restore_s=3))
    shared.stall()
    reply = agent.restore()
    assert isinstance(reply, Hold)
    assert "does not answer" in reply.reason
    shared.go_on()
    answers(agent)
    assert agent.where() == ["shared"]


def answers(agent: Tiered) -> None:
    """Wait until what was left behind has come back."""
    parts = agent.parts
    patient = [parts.notes._ask, parts.ledger._ask, *(s.patience for s in parts.tiers.stores if s.patience)]
    wait_until("all has come back", lambda: not any(one.silent for one in patient))
