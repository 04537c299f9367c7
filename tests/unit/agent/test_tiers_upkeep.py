"""Images that come before their jobs, stay while they are restored, and go when nobody needs them."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from agent_site import World, make_job
from agent_tiers import Tiered, again_at, asleep, read_only

from slurm_affinode.agent import sweep
from slurm_affinode.agent.absences import Absence
from slurm_affinode.agent.notes import Plan
from slurm_affinode.agent.prefetch import Prefetcher, load_demand
from slurm_affinode.agent.shepherds import Restored
from slurm_affinode.agent.waker import JobWaker
from slurm_affinode.checkpoint.interface import Image, ImageDamaged
from slurm_affinode.checkpoint.tier import Copy
from slurm_affinode.model.suspension import LiveRun, Phase


def test_an_image_comes_before_its_job(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """When Slurm expects to start a released job on this node within the time, and on no other node."""
    asleep(world)
    agent = Tiered(world, "c2")
    prefetcher = Prefetcher(agent.parts, 600, world.root / "demand.json")
    waker = JobWaker(agent.parts, agent.waker._lease)

    def plan(in_s: float, nodes: tuple[str, ...], *, held: bool = False) -> list[str]:
        start = datetime.fromtimestamp(world.now() + in_s, UTC)
        job = replace(make_job(world), state="PENDING", nodes_expected=nodes, expected_start=start, held=held)
        waker._tell_plans(agent.parts.notes.all(), {7: job})
        prefetcher.tick()
        prefetcher.settle()
        return agent.where()

    assert agent.parts.notes.plan() == {}
    assert plan(60, ("c2",), held=True) == ["shared"]
    assert plan(6000, ("c2",)) == ["shared"]
    assert plan(60, ("c1",)) == ["shared"]
    assert plan(60, ()) == ["shared"]
    assert plan(60, ("c2",)) == ["memory", "shared"]
    with caplog.at_level(logging.WARNING):
        assert plan(60, ("c2",)) == ["memory", "shared"]
    assert not caplog.records
    assert load_demand(world.root / "demand.json").state()["events"] > 0
    (world.root / "demand.json").write_text("{}")
    assert load_demand(world.root / "demand.json").state()["marks"] == {}


def test_a_read_only_tier_keeps_nothing_else_from_being_tidied(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The job is over: its images go where they can, its note too, and the sweep goes on with the next tier."""
    agent = asleep(world)
    agent.parts.tiers.tiers[0].store._entries.drop = read_only  # type: ignore[method-assign]
    world.state = "CANCELLED"
    (note,) = agent.parts.notes.all()
    agent.keeper.over(note.key, note.began_ms)
    assert agent.where() == ["memory"]
    assert agent.parts.notes.all() == []
    assert "Read-only file system" in caplog.text

    broken = agent.parts.tiers.tiers[1].store
    broken.begin(note.key, uid=1, estimate=1).leave()
    for store in agent.parts.tiers.stores:
        for path in store.path.glob("alpha.7/*"):
            os.utime(path, (0, 0))
    world.sleep(10_000)
    agent.keeper.sweep(True)
    assert agent.where() == ["memory"]
    assert not (broken.path / "alpha.7").exists()


def test_the_image_that_is_restored_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory runs short between its verification and its restore: it does not leave while it is in use."""
    asleep(world)
    agent = again_at(world, "c2")
    pairs = agent.restorer._gpu_pairs

    def short(*arguments: Any) -> Any:
        object.__setattr__(agent.parts.tiers.tiers[0], "left", lambda: -1)
        agent.parts.tiers.relieve()
        return pairs(*arguments)

    monkeypatch.setattr(agent.restorer, "_gpu_pairs", short)
    assert agent.restore() == Restored(2)
    agent.parts.tiers.relieve()
    assert agent.where() == ["shared"]


def test_an_image_that_cannot_be_brought_does_not_hold_up_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two jobs that start soon the first one's is too large, or damaged; what is damaged is read once."""
    asleep(world)
    agent = Tiered(world, "c2")
    parts, tiers = agent.parts, agent.parts.tiers
    (first,) = parts.notes.all()
    second = replace(first, job_id=8)
    plans = {7: Plan(world.now() + 30, ("c2",)), 8: Plan(world.now() + 60, ("c2",))}
    (copy, *_), _ = tiers.copies(LiveRun(first.key, first.uid, first.restarts + 1))

    def copies(run: LiveRun) -> tuple[list[Copy], None]:
        facts = replace(copy.image.manifest, key=run.key)
        return [replace(copy, image=replace(copy.image, manifest=facts))], None

    asked: list[str] = []
    first_is: list[Copy | Exception | None] = [None, None, ImageDamaged("its contents have changed"), copy]

    def pull(copy: Copy, **_: object) -> Copy | None:
        asked.append(copy.image.job)
        found = first_is.pop(0) if copy.image.job == "alpha.7" else copy
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(parts.notes, "all", lambda: [second, first])
    monkeypatch.setattr(parts.notes, "plan", lambda: plans)
    monkeypatch.setattr(tiers, "copies", copies)
    monkeypatch.setattr(tiers, "pull", pull)
    prefetcher = Prefetcher(parts, 600, None)
    for _ in range(4):
        prefetcher.tick()
        prefetcher.settle()
    assert asked == ["alpha.7", "alpha.8", "alpha.7", "alpha.8", "alpha.7", "alpha.8", "alpha.8"]
    assert "its copy in the tier shared is damaged: its contents have changed" in caplog.text


def test_an_image_on_its_way_to_the_shared_tier_is_not_copied_twice(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes longer than a minute: it is not missing there."""
    first = asleep(world)
    shared = first.parts.shared
    assert shared is not None
    image = shared.get("alpha.7", 1)
    shared.remove(image)
    writer = shared.take_up(image)
    world.sleep(100)
    mender = Prefetcher(first.parts, 0, None)
    mender.tick()
    mender.settle()
    assert not caplog.records
    writer.leave()
    mender.tick()
    mender.settle()
    assert first.where() == ["memory", "disk", "shared"]


def test_an_older_image_goes_when_the_newer_one_is_everywhere(world: World) -> None:
    """Suspended on c1 and again on c2: what c1 still has of the first time goes, too."""
    first = asleep(world)
    second = again_at(world, "c2")
    assert second.restore() == Restored(2)
    assert second.suspend().phase is Phase.QUEUED
    second.settle()
    for path in world.root.glob("*/*/alpha.7/*"):
        os.utime(path, (0, 0))

    def held(agent: Tiered) -> dict[str, list[int]]:
        return {
            tier.name: [one.manifest.seq for one in tier.store.images() if isinstance(one, Image)]
            for tier in agent.parts.tiers.tiers
        }

    world.sleep(10_000)
    assert held(first) == {"memory": [1], "disk": [1], "shared": [1, 2]}
    first.keeper.sweep(False)
    second.keeper.sweep(True)
    assert held(first) == {"memory": [], "disk": [], "shared": [2]}
    assert held(second) == {"memory": [2], "disk": [2], "shared": [2]}


@pytest.mark.parametrize(("took_s", "left"), [(0.0, []), (100.0, ["memory", "disk", "shared"])])
def test_a_sweep_that_took_long_leaves_what_came_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, took_s: float, left: list[str]
) -> None:
    """Slurm was asked, then the stores were read for longer than a job needs to be submitted and suspended."""
    agent = asleep(world)
    minute_ago = time.time() - 60
    for path in world.root.glob("*/*/alpha.7/*"):
        os.utime(path, (minute_ago, minute_ago))
    clock = [time.monotonic()]

    def takes_long(*_: object) -> dict[str, Absence]:
        clock[0] += took_s
        return {}

    monkeypatch.setattr(agent.parts.absences, "update", takes_long)
    monkeypatch.setattr(sweep.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(agent.parts.slurm, "jobs", lambda: (make_job(world, state="CANCELLED"),))
    agent.keeper.sweep(holds_lease=True)
    assert agent.where() == left


def test_what_is_known_of_the_demand_ends_with_the_job(world: World) -> None:
    """Also where it has ended on another node."""
    agent = asleep(world)
    agent.parts.tiers.demand.requested("alpha.5", world.now())
    world.sleep(10_000)
    agent.keeper.sweep(True)
    assert set(agent.parts.tiers.demand.state()["marks"]) == {"alpha.7"}
