"""Upkeep of images: fetched before their jobs start, kept while in use, and removed when obsolete."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from agent_site import World, make_job

from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged
from slurm_affinode.checkpoint.store.retention import Copy
from slurm_affinode.model.suspension import LiveRun, Phase
from slurm_affinode.suspension.job.shepherd import Restored
from slurm_affinode.suspension.records import shared_state, sweep
from slurm_affinode.suspension.records.shared_state import StartPlan
from slurm_affinode.suspension.records.sweep import Absence

from .agent_tiers import Tiered, again_at, asleep, read_only


def test_image_is_fetched_before_job_starts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It is fetched if Slurm expects to start a released job on this node, and on no other, within the time."""
    asleep(world)
    agent = Tiered(world, "c2")
    prefetcher = agent.prefetcher(600)
    waker = agent.waker_with()

    def plan(in_s: float, nodes: tuple[str, ...], *, held: bool = False) -> list[str]:
        start = datetime.fromtimestamp(world.now() + in_s, UTC)
        job = replace(make_job(world), state="PENDING", nodes_expected=nodes, expected_start=start, is_held=held)
        waker._report_plans(agent.notes.all(), {7: job})
        prefetcher.tick()
        prefetcher._queue.join()
        return agent.where()

    assert agent.notes.plan("alpha") == {}
    assert plan(60, ("c2",), held=True) == ["shared"]
    assert plan(6000, ("c2",)) == ["shared"]
    assert plan(60, ("c1",)) == ["shared"]
    assert plan(60, ()) == ["shared"]
    assert plan(60, ("c2",)) == ["memory", "shared"]
    with caplog.at_level(logging.WARNING):
        assert plan(60, ("c2",)) == ["memory", "shared"]
    assert not caplog.records


def test_read_only_tier_does_not_stop_sweep(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The job has ended: its images and its note are removed where possible, and the sweep continues."""
    agent = asleep(world)
    agent.tiers.tiers[0].store._entries.drop = read_only  # type: ignore[method-assign]
    world.state = "CANCELLED"
    (note,) = agent.notes.all()
    agent.keeper.record_end(note.key, note.began_ms)
    assert agent.where() == ["memory"]
    assert agent.notes.all() == []
    assert "Read-only file system" in caplog.text

    broken = agent.tiers.tiers[1].store
    broken.begin(note.key, uid=1, estimate=1).leave()
    for store in agent.tiers.stores:
        for path in store.path.glob("alpha.7/*"):
            os.utime(path, (0, 0))
    world.sleep(10_000)
    agent.keeper.sweep(True)
    assert agent.where() == ["memory"]
    assert not (broken.path / "alpha.7").exists()


def test_image_being_restored_is_not_evicted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory runs short between verification and restore: an image in use is not evicted."""
    asleep(world)
    agent = again_at(world, "c2")
    pairs = agent.restorer._gpu_pairs

    def short(*arguments: Any) -> Any:
        object.__setattr__(agent.tiers.tiers[0], "available_bytes", lambda: -1)
        agent.tiers.relieve()
        return pairs(*arguments)

    monkeypatch.setattr(agent.restorer, "_gpu_pairs", short)
    assert agent.restore() == Restored(2)
    agent.tiers.relieve()
    assert agent.where() == ["shared"]


def test_unfetchable_image_does_not_block_next(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of two jobs that start soon has a too large or damaged image; a damaged one is read only once."""
    asleep(world)
    agent = Tiered(world, "c2")
    notes, tiers = agent.notes, agent.tiers
    (first,) = notes.all()
    second = replace(first, job_id=8)
    plans = {7: StartPlan(world.now() + 30, ("c2",)), 8: StartPlan(world.now() + 60, ("c2",))}
    (copy, *_), _ = tiers.copies(LiveRun(first.key, first.uid, first.restarts + 1))

    def copies(run: LiveRun) -> tuple[list[Copy], None]:
        facts = replace(copy.image.manifest, key=run.key)
        return [replace(copy, image=replace(copy.image, manifest=facts))], None

    fetched: list[str] = []
    first_is: list[Copy | Exception | None] = [None, None, ImageDamaged("its contents have changed"), copy]

    def pull(copy: Copy, **_: object) -> Copy | None:
        fetched.append(copy.image.job)
        result = first_is.pop(0) if copy.image.job == "alpha.7" else copy
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(notes, "read", lambda cluster, job_id: {7: first, 8: second}[job_id])
    monkeypatch.setattr(notes, "plan", lambda cluster: plans)
    monkeypatch.setattr(tiers, "copies", copies)
    monkeypatch.setattr(tiers, "pull", pull)
    prefetcher = agent.prefetcher(600)
    for _ in range(4):
        prefetcher.tick()
        prefetcher._queue.join()
    assert fetched == ["alpha.7", "alpha.8", "alpha.7", "alpha.8", "alpha.7", "alpha.8", "alpha.8"]
    assert "its copy in the tier shared is damaged: its contents have changed" in caplog.text


def test_notes_of_other_nodes_are_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node prefetches: its requests to the shared file system do not grow with the number of sleeping jobs."""
    first = asleep(world)
    (note,) = first.notes.all()
    for number in range(100, 120):
        first.notes.write(replace(note, job_id=number))
    read: list[tuple[str, Path]] = []
    original = shared_state.read_signed

    def counted(signer: Any, purpose: str, path: Path, **more: Any) -> Any:
        read.append((signer.node, path))
        return original(signer, purpose, path, **more)

    monkeypatch.setattr(shared_state, "read_signed", counted)
    for agent in (first, Tiered(world, "c2"), Tiered(world, "c3")):
        agent.prefetcher(600).tick()
    assert [(node, path.name) for node, path in read if "asleep" in path.parts] == [("c1", "alpha.7.json")]


def test_image_being_copied_to_shared_tier_is_not_copied_twice(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The copy takes longer than a minute: the image is not regarded as missing there."""
    first = asleep(world)
    shared = first.shared
    assert shared is not None
    image = shared.get("alpha.7", 1)
    shared.remove(image)
    writer = shared.take_up(image)
    world.sleep(100)
    mender = first.prefetcher(0)
    mender.tick()
    mender._queue.join()
    assert not caplog.records
    writer.leave()
    mender.tick()
    mender._queue.join()
    assert first.where() == ["memory", "disk", "shared"]


def test_pauses_between_failed_copies_grow(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The image is larger than the shared tier: neither file system nor log gets a request every few seconds."""
    first = asleep(world)
    shared = first.shared
    assert shared is not None
    shared.remove(shared.get("alpha.7", 1))
    mender, repair = first.prefetcher(0), first.tiers.repair
    broken = True

    def repaired(name: str, seq: int) -> None:
        if broken:
            raise CheckpointError("40 GiB needed")
        repair(name, seq)

    monkeypatch.setattr(first.tiers, "repair", repaired)
    for _ in range(1000):
        world.sleep(2)
        mender.tick()
        mender._queue.join()
    assert 2 <= len(caplog.records) <= 6
    broken = False
    world.sleep(3600)
    mender.tick()
    mender._queue.join()
    assert first.where() == ["memory", "disk", "shared"]


def test_older_image_is_removed_when_newer_one_is_complete(world: World) -> None:
    """The job is suspended on c1 and again on c2: the copy of the first suspension on c1 is removed, too."""
    first = asleep(world)
    second = again_at(world, "c2")
    assert second.restore() == Restored(2)
    assert second.suspend().phase is Phase.QUEUED
    second.settle()
    for path in world.root.glob("*/*/alpha.7/*"):
        os.utime(path, (0, 0))

    def held(agent: Tiered) -> dict[str, list[int]]:
        return {
            tier.name: [image.manifest.seq for image in tier.store.images() if isinstance(image, Image)]
            for tier in agent.tiers.tiers
        }

    world.sleep(10_000)
    assert held(first) == {"memory": [1], "disk": [1], "shared": [1, 2]}
    first.keeper.sweep(False)
    second.keeper.sweep(True)
    assert held(first) == {"memory": [], "disk": [], "shared": [2]}
    assert held(second) == {"memory": [2], "disk": [2], "shared": [2]}


@pytest.mark.parametrize(("took_s", "left"), [(0.0, []), (100.0, ["memory", "disk", "shared"])])
def test_long_sweep_keeps_images_created_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, took_s: float, left: list[str]
) -> None:
    """Slurm was queried before the stores were read, which took long enough for a job to be submitted and suspended."""
    agent = asleep(world)
    minute_ago = time.time() - 60
    for path in world.root.glob("*/*/alpha.7/*"):
        os.utime(path, (minute_ago, minute_ago))
    clock = [time.monotonic()]

    def takes_long(*_: object) -> dict[str, Absence]:
        clock[0] += took_s
        return {}

    monkeypatch.setattr(agent.absences, "update", takes_long)
    monkeypatch.setattr(sweep.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(agent.slurm, "jobs", lambda: (make_job(world, state="CANCELLED"),))
    agent.keeper.sweep(holds_lease=True)
    assert agent.where() == left


def test_restored_jobs_are_forgotten_when_they_end(world: World) -> None:
    """The job may have ended on another node."""
    agent = asleep(world)
    for name in ("alpha.5", "alpha.7"):
        agent.tiers.retention.restored(name, 1)
    world.sleep(10_000)
    agent.keeper.sweep(True)
    assert agent.tiers.retention._restored == {"alpha.7": 1}
