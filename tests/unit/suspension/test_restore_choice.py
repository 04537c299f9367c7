"""Choice of the image while the shared tier does not respond: never one that may be outdated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agent_site import STEPS, World, make_job

from slurm_affinode.base.timeouts import NoAnswerError
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.job.shepherd import Hold, Restored

from .agent_tiers import Tiered, again_at, asleep


def disconnect(agent: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything shared unresponsive, with a short timeout."""

    def no_answer(*_: Any, **__: Any) -> Any:
        raise NoAnswerError

    shared = agent.tiers.stores[-1]
    for name in ("find", "get", "open", "open_criu"):
        monkeypatch.setattr(shared, name, no_answer)
    monkeypatch.setattr(agent.notes, "_ask", no_answer)
    agent.build(settings=replace(agent.settings, restore_s=3))


def test_local_image_of_previous_attempt_is_restored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No newer image can exist, and Slurm confirms the node of this attempt: no wait. The note is removed later."""
    asleep(world)
    agent = again_at(world, "c1")
    began = world.now()
    with monkeypatch.context() as patch:
        disconnect(agent, patch)
        assert isinstance(agent.restore(), Restored)
    assert world.steps() == [STEPS]
    assert world.now() - began < agent.settings.alive_s + 3
    assert [item.seq for item in agent.keeper.suspended()] == [1]
    agent.registry.put(agent.watched(phase=Phase.RESTORING))
    agent.keeper.sweep(holds_lease=False)
    assert [item.seq for item in agent.keeper.suspended()] == [1]
    agent.registry.set_phase(7, Phase.RUNNING)
    world.clock += 100
    agent.keeper.sweep(holds_lease=False)
    assert agent.keeper.suspended() == []


@pytest.mark.parametrize("why", ["another run was between", "Slurm says that it is elsewhere", "it is not here"])
def test_job_is_held_if_newer_image_may_exist(world: World, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Its image is kept."""
    asleep(world)
    agent = again_at(world, "c2" if why == "it is not here" else "c1")
    slurm = agent.slurm
    if why == "another run was between":
        world.restarts += 1
    if why == "Slurm says that it is elsewhere":
        monkeypatch.setattr(slurm, "job", lambda job_id: make_job(world, batch_host="c3"))
    with monkeypatch.context() as patch:
        disconnect(agent, patch)
        reply = agent.restore()
    assert isinstance(reply, Hold)
    assert "does not respond" in reply.reason
    assert "shared" in agent.where()
