"""Which image a run takes while the shared tier does not answer: none that might be older than another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agent_site import STEPS, World, make_job
from agent_tiers import Tiered, again_at, asleep

from slurm_affinode.agent.shepherds import Hold, Restored
from slurm_affinode.model.suspension import Phase
from slurm_affinode.patience import NoAnswerError


def silent(agent: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shared does not answer, and is given up soon."""

    def no_answer(*_: Any, **__: Any) -> Any:
        raise NoAnswerError

    shared = agent.parts.tiers.stores[-1]
    for name in ("find", "get", "open", "open_criu"):
        monkeypatch.setattr(shared, name, no_answer)
    monkeypatch.setattr(agent.parts.notes, "_ask", no_answer)
    object.__setattr__(agent.parts, "settings", replace(agent.parts.settings, restore_s=3))


def test_the_image_of_the_last_run_is_on_the_node(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have a newer one, and Slurm says where this run is: nothing is waited for. Its note goes later."""
    asleep(world)
    agent = again_at(world, "c1")
    began = world.now()
    with monkeypatch.context() as patch:
        silent(agent, patch)
        assert isinstance(agent.restore(), Restored)
    assert world.steps() == [STEPS]
    assert world.now() - began < 3
    assert [one.seq for one in agent.keeper.suspended()] == [1]
    agent.parts.registry.put(agent.watched(phase=Phase.RESTORING))
    agent.keeper.sweep(holds_lease=False)
    assert [one.seq for one in agent.keeper.suspended()] == [1]
    agent.parts.registry.set_phase(7, Phase.RUNNING)
    world.clock += 100
    agent.keeper.sweep(holds_lease=False)
    assert agent.keeper.suspended() == []


@pytest.mark.parametrize("why", ["another run was between", "Slurm says that it is elsewhere", "it is not here"])
def test_where_a_newer_one_may_be_the_job_is_held(world: World, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """And its image stays."""
    asleep(world)
    agent = again_at(world, "c2" if why == "it is not here" else "c1")
    slurm = agent.parts.slurm
    if why == "another run was between":
        world.restarts += 1
    if why == "Slurm says that it is elsewhere":
        monkeypatch.setattr(slurm, "job", lambda job_id: make_job(world, batch_host="c3"))
    with monkeypatch.context() as patch:
        silent(agent, patch)
        reply = agent.restore()
    assert isinstance(reply, Hold)
    assert "does not answer" in reply.reason
    assert "shared" in agent.where()
