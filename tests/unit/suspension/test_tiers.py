"""Suspend and restore with three tiers: damaged copies and failing tiers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_site import STEPS, Process, World
from agent_world import FakeImager

from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import DumpNoRoom, Image, ImageDamaged, NoRoom, Stop
from slurm_affinode.model.suspension import Manifest, Phase
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.job.shepherd import Hold, Restored
from slurm_affinode.suspension.records.shared_state import NO_NOTE

from .agent_tiers import Tiered, again_at, asleep, read_only, read_only_store


@pytest.mark.parametrize("tier", ["memory", "disk", "shared"])
def test_flipped_bit_does_not_prevent_restore(world: World, tier: str) -> None:
    """The job is restored from an intact copy; the damaged copy is removed and reported."""
    asleep(world).damage(tier)
    agent = again_at(world, "c1")
    if tier == "disk":  # else the intact copy in memory is used
        store = agent.tiers.tiers[0].store
        store.remove(store.get("alpha.7", 1))
    reply = agent.restore()
    assert isinstance(reply, Restored)
    assert world.steps() == [STEPS]
    if tier != "shared":
        assert reply.trouble is not None
        assert f"copy in the tier {tier} is damaged" in reply.trouble
        assert tier not in agent.where()


def test_pages_found_damaged_during_restore(world: World) -> None:
    """CRIU has begun with one copy, in which nothing runs yet; it restarts with the next, in an empty namespace."""
    asleep(world).damage("memory")
    agent = again_at(world, "c1")
    tried: list[int] = []
    restore = agent.imager.restore

    def restores(*arguments: Any, pages: Any, **options: Any) -> int:
        tried.append(len(world.nodes["c1"].processes))
        world.nodes["c1"].processes = [Process(99, 2, cuda=None)]  # stopped
        try:
            pages.sound()
        except ImageDamaged:
            world.nodes["c1"].processes.append(Process(98, 3, cuda=None))  # missed by the kill
            raise
        return restore(*arguments, pages=pages, **options)

    agent.imager.restore = restores  # type: ignore[method-assign]
    assert isinstance(agent.restore(), Restored)
    assert tried == [0, 0]
    assert world.steps() == [STEPS]
    assert agent.where() == ["disk", "shared"]


def test_job_without_intact_copy_is_held(world: World) -> None:
    """None of its processes runs; the last copy is kept, and the reason names each copy."""
    first = asleep(world)
    for tier in ("memory", "disk", "shared"):
        first.damage(tier)
    agent = again_at(world, "c1")
    reply = agent.restore()
    assert isinstance(reply, Hold)
    assert all(f"{tier}: alpha.7/0001: criu/pages-1.img: its contents" in reply.reason for tier in ("memory", "disk"))
    assert world.nodes["c1"].processes == []
    assert agent.where() == ["shared"]


@pytest.mark.parametrize(("damaged", "last"), [(2, "restored on c1 after"), (3, "not restored: memory: alpha.7/0001")])
def test_success_is_reported_for_intact_copy_only(world: World, tmp_path: Path, damaged: int, last: str) -> None:
    """The success message appears in the job's output only after an intact copy was restored, and only once."""
    first = asleep(world)
    for tier in ("memory", "disk", "shared")[:damaged]:
        first.damage(tier)
    agent = again_at(world, "c1")
    with (tmp_path / "out").open("wb") as out:
        agent.restorer.restore(replace(agent.arrival(), fds=(out.fileno(),) * 3))
    output = (tmp_path / "out").read_text()
    assert output.count("\n") == (2 if damaged < 3 else 1)
    assert output.splitlines()[-1].startswith(f"slurm-affinode: {last}")


def test_files_read_by_criu_are_verified_first(world: World) -> None:
    """CRIU does not read that copy."""
    first, dump = Tiered(world, "c1"), FakeImager.dump

    def dumps(self: FakeImager, tree: Any, directory_fd: int, *, timeout_s: float, stop: Stop) -> None:
        Path(f"/proc/self/fd/{directory_fd}/inventory.img").write_bytes(b"inventory")
        dump(self, tree, directory_fd, timeout_s=timeout_s, stop=stop)

    first.imager.dump = partial(dumps, first.imager)  # type: ignore[method-assign]
    assert first.suspend().phase is Phase.QUEUED
    first.settle()
    first.damage("memory")  # its first file
    agent = again_at(world, "c1")
    assert isinstance(agent.restore(), Restored)
    assert world.effect_log.count("criu restore") == 1
    assert agent.where() == ["disk", "shared"]


def test_image_is_copied_to_memory_on_another_node(world: World) -> None:
    """The job is then restored from there."""
    asleep(world)
    agent = again_at(world, "c2")
    assert agent.restore() == Restored(2)
    assert agent.where() == ["memory", "shared"]


def test_damaged_shared_copy_is_replaced_from_another_node(world: World) -> None:
    """The other node holds the job with the reason; the first one copies again; then the job wakes there."""
    first = asleep(world)
    first.damage("shared")
    other = again_at(world, "c2")
    held = other.restore()
    assert isinstance(held, Hold)
    assert "contents have changed" in held.reason
    failure = other.asleep()
    assert failure is not None
    assert failure.count("contents have changed") == 1
    world.sleep(100)
    mender = first.prefetcher(0)
    mender.tick()
    mender._queue.join()
    assert first.where() == ["memory", "disk", "shared"]
    assert str(other.asleep()).endswith("its damaged shared image was repaired: it can be woken")
    assert first.shared is not None
    first.shared.verify(first.shared.get("alpha.7", 1))
    mender.tick()
    assert first.asleep() is not None
    world.state = "PENDING"
    assert isinstance(again_at(world, "c2").restore(), Restored)


def test_job_continues_if_no_tier_has_room(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Memory has room, but no durable tier has: the suspension is aborted and leaves nothing behind."""
    agent = Tiered(world, "c1")
    for tier in agent.tiers.tiers[1:]:
        tier.store.budget.reserve = 1 << 60
    begin = agent.tiers.check_room
    agent.tiers.check_room = lambda uid, estimate: None  # type: ignore[method-assign]
    done = agent.suspend()
    assert done.phase is Phase.RUNNING
    assert "free" in (done.failure or "")
    assert world.running()
    assert agent.where() == []
    agent.tiers.check_room = begin  # type: ignore[method-assign]
    assert [refusal.code for refusal in agent.suspender.refusals(agent.watched())] == ["no-room"]


def test_full_memory_tier_is_skipped(world: World) -> None:
    """The dump is written to the disk, and status gives the reason: this is not a failure."""
    agent = Tiered(world, "c1", memory=10)
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()
    assert agent.where() == ["disk", "shared"]
    assert agent.asleep() is None
    (item,) = agent.keeper.suspended()
    assert (item.passed or "").startswith(f"memory: {world.root}/c1/memory: 10 B free, ")


def test_read_only_disk_is_skipped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its durable copy is in the shared tier; status gives the reason."""
    agent = Tiered(world, "c1")
    monkeypatch.setattr(agent.local._entries, "mounted", read_only_store)
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()
    assert agent.where() == ["memory", "shared"]
    (item,) = agent.keeper.suspended()
    assert item.passed == "disk: shared: is read-only"


@pytest.mark.parametrize("when", ["while CRIU writes", "when it is committed"])
def test_memory_tier_full_during_dump_is_skipped(world: World, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The tree, still stopped, is dumped again, to the disk; ``status`` says so, and the job can be restored."""
    agent = Tiered(world, "c1")
    dump, dumped = agent.imager.dump, list[bool]()

    def fails_first(tree, directory_fd, *, timeout_s, stop):  # type: ignore[no-untyped-def]
        dumped.append(all(process.stopped for process in world.nodes["c1"].processes))
        if when == "while CRIU writes" and len(dumped) == 1:
            raise DumpNoRoom("the image store ran full during the dump")
        return dump(tree, directory_fd, timeout_s=timeout_s, stop=stop)

    agent.imager.dump = fails_first  # type: ignore[method-assign]
    commit = ImageWriter.commit

    def full_first(self: ImageWriter, facts: Manifest) -> Image:
        if when == "when it is committed" and len(dumped) == 1:
            raise NoRoom("the image cannot be made durable: No space left on device")
        return commit(self, facts)

    monkeypatch.setattr(ImageWriter, "commit", full_first)
    assert agent.suspend().phase is Phase.QUEUED
    agent.settle()
    assert dumped == [True, True]
    assert agent.where() == ["disk", "shared"]
    assert "did not fit where it was dumped to first" in (agent.asleep() or "")
    assert isinstance(again_at(world, "c1").restore(), Restored)
    assert world.steps() == [STEPS]
    assert world.running()


def test_job_continues_if_every_tier_is_full_during_dump(world: World) -> None:
    """Each tier is tried; the suspension is aborted and leaves nothing behind."""
    agent = Tiered(world, "c1")
    tried: list[int] = []

    def fails(tree, directory_fd, *, timeout_s, stop):  # type: ignore[no-untyped-def]
        tried.append(directory_fd)
        raise DumpNoRoom("the image store ran full during the dump")

    agent.imager.dump = fails  # type: ignore[method-assign]
    done = agent.suspend()
    assert done.phase is Phase.RUNNING
    assert "ran full during the dump" in (done.failure or "")
    assert len(tried) == 3
    assert world.running()
    assert agent.where() == []
    assert not any(list(store.path.glob("*/*")) for store in agent.tiers.stores)


def test_image_trouble_is_shown_in_status(world: World) -> None:
    """Problems with an image are shown while its job is suspended."""
    agent = asleep(world)
    agent.damage("memory")
    copies = list(agent.tiers._all_copies("alpha.7", 1))
    assert agent.tiers.sound(copies, lambda copy, pages: pages.sound() or copy.tier.name) == "disk"  # type: ignore[func-returns-value]
    assert "copy in the tier memory is damaged" in (agent.asleep() or "")


def test_job_without_note_is_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared store has become read-only meanwhile: status and an attempt to wake the job report it."""
    agent = Tiered(world, "c1")
    waker = agent.waker_with()
    with monkeypatch.context() as patch:
        patch.setattr("slurm_affinode.suspension.records.shared_state.write_text", read_only)
        patch.setattr(agent.tiers, "publish", read_only_store)
        patch.setattr(agent.outcomes, "_asleep", lambda record: not agent.outcomes._stop.set())
        assert agent.suspend().phase is Phase.QUEUED
        agent.settle()
        assert agent.asleep() == NO_NOTE
        (item,) = agent.keeper.suspended()
        assert (item.where, item.why, item.gpu_bytes > 0) == ("node", "idle 15m", True)
        with pytest.raises(Refused, match="cannot be woken now: its note is not beside the shared store"):
            waker.wake(item.key, "alice")
    after = Tiered(world, "c1")
    after.keeper.recover()
    after.settle()
    assert (after.where(), after.asleep()) == (["memory", "disk", "shared"], None)
