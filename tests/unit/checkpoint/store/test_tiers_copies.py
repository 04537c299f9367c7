"""Tiers: copies of an image to other tiers, back to a node, and ahead of the job's start."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import block_io, digest
from slurm_affinode.checkpoint.image.block_io import Limiter
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import CheckpointError, DumpFailed, DumpNoRoom, Image, NoRoom
from slurm_affinode.checkpoint.store.retention import Copy

from ..conftest import JOB, LATER, MANIFEST, MIB, SMALL, Node, whole


def test_dump_is_written_to_memory_and_copied_to_durable_tiers(make_node: Callable[..., Node]) -> None:
    """First to the fastest tier, then to the disk, then to the shared tier."""
    node = make_node()
    image = node.dump(publish=False, settle=False)
    assert node.where(image) == ["memory"]
    assert node.tiers.settle(image).tier.name == "disk"
    assert node.tiers.settle(image).tier.name == "disk"
    assert node.where(image) == ["memory", "disk"]
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["memory", "disk", "shared"]
    copies, damage = node.tiers.copies(LATER)
    assert [copy.tier.name for copy in copies] == ["memory", "disk", "shared"]
    assert damage is None
    assert node.tiers.sound(copies, whole).tier.name == "memory"
    assert not node.reports


def test_dump_goes_to_disk_when_memory_is_full(make_node: Callable[..., Node]) -> None:
    """The only copy of an image stays where it is."""
    node = make_node(memory=6 * MIB)
    first = node.dump(1, publish=False, settle=False)
    second = node.dump(2)
    assert node.where(first) == ["memory"]
    assert node.where(second) == ["disk", "shared"]


def test_tier_that_runs_full_during_a_dump_is_skipped(make_node: Callable[..., Node]) -> None:
    """Nothing is left there, and it is reported; other errors are not retried in another tier."""
    node = make_node()
    tried: list[str] = []

    def fill(writer: ImageWriter) -> Image:
        tried.append(str(Path(f"/proc/self/fd/{writer.fd}").readlink()))
        Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").write_bytes(b"half")
        if len(tried) == 1:
            raise DumpNoRoom("the image store ran full during the dump")
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=4)
    assert [path.rsplit("/", 3)[1] for path in tried] == ["memory", "disk"]
    assert node.where(image) == ["disk"]
    assert list((node.memory.path / JOB.name).iterdir()) == []
    assert node.reports == [
        (123, "the tier memory ran full while its image was written: the image store ran full during the dump")
    ]

    def fail(writer: ImageWriter) -> Image:
        tried.append("once")
        raise DumpFailed("it holds something that cannot be dumped")

    with pytest.raises(DumpFailed, match="cannot be dumped"):
        node.tiers.write(JOB, fail, uid=1001, estimate=4)
    assert tried[2:] == ["once"]


def test_dump_names_each_tier_if_all_run_full(make_node: Callable[..., Node]) -> None:
    """No partial image is left."""
    node = make_node()

    def fill(writer: ImageWriter) -> Image:
        raise NoRoom(f"{len(node.reports)}: full")

    with pytest.raises(NoRoom, match="0: full"):
        node.tiers.write(JOB, fill, uid=1001, estimate=4)
    assert node.reports[-1] == (123, "no tier can store its image: 0: full; 1: full; 2: full")
    assert [list(store.path.glob("*/*")) for store in node.tiers.stores] == [[], [], []]


def test_other_node_brings_the_image_to_its_fast_tier(make_node: Callable[..., Node]) -> None:
    """It is read once from the shared tier, and verified meanwhile."""
    node = make_node()
    image = node.dump()
    other = make_node("c2")
    other.tiers.retention.tiers = (*other.tiers.tiers[:2], node.tiers.tiers[2])
    copies, _ = other.tiers.copies(LATER)
    assert [copy.tier.name for copy in copies] == ["shared"]
    result = other.tiers.sound(copies, whole)
    assert result.tier.name == "memory"
    assert result.image.manifest == image.manifest
    assert other.tiers.on_node(JOB.name, 1) == result


def test_copy_interrupted_by_the_end_of_the_agent_is_continued(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped copy is kept in part, and completed by the next agent."""
    node = make_node()
    image = node.dump(publish=False)
    stops = iter([False] * 40)
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: next(stops, True))
    with pytest.raises(Exception, match="resumed later"):
        node.tiers.publish(JOB.name, 1)
    ((facts, held),) = node.shared.begun()
    assert facts == image.manifest
    assert 0 < held < 4 * MIB
    assert node.shared.sweep([LATER], cluster="cluster", young_s=-1) == []
    monkeypatch.undo()
    monkeypatch.setattr(digest, "BLOCK", SMALL)
    assert node.tiers.publish(JOB.name, 1)
    node.shared.verify(image)


def test_copies_that_are_waited_for_continue_while_the_agent_ends(make_node: Callable[..., Node]) -> None:
    """A dump is copied to the disk, and the image of a restore is brought; copies ahead of a start are dropped."""
    node = make_node()
    node.tiers.stop()
    image = node.dump(publish=False)
    assert node.where(image) == ["memory", "disk"]
    copy = Copy(node.disk.copy(image, node.shared), node.tiers.tiers[2])
    for store in (node.memory, node.disk):
        store.remove(image)
    assert node.tiers.pull(copy, expected_s=60.0) is None
    assert node.where(image) == ["shared"]
    assert node.tiers.pull(copy, expected_s=0.0)


def test_zeros_take_no_room(make_node: Callable[..., Node], tmp_path: Path) -> None:
    """Blocks of zeros become holes, and holes are not read; contents and digests are the same."""
    node = make_node()

    def fill(writer: ImageWriter) -> Image:
        with Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").open("wb") as file:
            file.write(os.urandom(300_000))
            file.write(bytes(8 * MIB))
            file.seek(40 * MIB)
            file.write(b"end")
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=1)
    node.tiers.settle(image)
    copied = node.file(node.disk, image)
    assert copied.stat().st_size == 40 * MIB + 3
    assert copied.stat().st_blocks * 512 < MIB
    node.disk.verify(image)


def test_copies_keep_to_their_rates(make_node: Callable[..., Node]) -> None:
    """Copies to the shared tier and ahead of a start are limited; copies to the disk and for a restore are not."""
    node, passed = make_node(), dict.fromkeys(("shared", "ahead"), 0)

    class Counting(Limiter):
        """A limiter that counts and never waits."""

        def __init__(self, name: str) -> None:
            super().__init__(0)
            self.name = name

        def pass_(self, count: int, over: Callable[[], bool] = lambda: False) -> None:
            passed[self.name] += count

    node.tiers._to_shared, node.tiers._ahead = Counting("shared"), Counting("ahead")
    image = node.dump(publish=False)
    assert passed == {"shared": 0, "ahead": 0}
    node.tiers.publish(JOB.name, 1)
    assert passed == {"shared": image.manifest.size, "ahead": 0}
    for store in (node.memory, node.disk):
        store.remove(image)
    (copy,), _ = node.tiers.copies(LATER)
    assert node.tiers.pull(copy, expected_s=0.0)
    assert passed["ahead"] == 0
    node.memory.remove(image)
    assert node.tiers.pull(copy, expected_s=60.0)
    assert passed["ahead"] == image.manifest.size


@pytest.mark.parametrize("event", ["stop", "wanted"])
def test_low_rate_blocks_neither_stop_nor_restore(make_node: Callable[..., Node], event: str) -> None:
    """At a byte per second the agent ends immediately, and a job that starts earlier than expected is not delayed."""
    node = make_node()
    waiting = threading.Event()

    def sleep(seconds: float) -> None:
        waiting.set()
        time.sleep(min(seconds, 0.01))

    limiter = Limiter(1, sleep=sleep)
    limiter.pass_(8 * MIB)
    node.tiers._to_shared = node.tiers._ahead = limiter
    image = node.dump(publish=False)
    result: list[object] = []
    if event == "stop":
        stopped = partial(pytest.raises, CheckpointError, node.tiers.publish, JOB.name, 1)
        thread = threading.Thread(target=lambda: result.append(stopped()))
        thread.start()
        assert waiting.wait(60)
        node.tiers.stop()
    else:
        copy = Copy(node.disk.copy(image, node.shared), node.tiers.tiers[2])
        for store in (node.memory, node.disk):
            store.remove(image)
        thread = threading.Thread(target=lambda: result.append(node.tiers.pull(copy, expected_s=60.0)))
        thread.start()
        assert waiting.wait(60)
        brought = node.tiers.pull(copy, expected_s=0.0)
        assert brought is not None
        node.memory.verify(brought.image)
    thread.join(60)
    assert not thread.is_alive()
    assert result


def test_restore_waits_for_a_copy_that_is_under_way(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy ahead of the start continues at full speed instead of being read again, and no problem is reported."""
    node = make_node()
    image = node.dump()
    for store in (node.memory, node.disk):
        store.remove(image)
    (copy,), _ = node.tiers.copies(LATER)
    begun, proceed = threading.Event(), threading.Event()
    counts: list[int] = []

    class Slow(Limiter):
        """A limiter that waits for the test."""

        def pass_(self, count: int, over: Callable[[], bool] = lambda: False) -> None:
            counts.append(count)
            begun.set()
            assert proceed.wait(60)

    node.tiers._ahead = Slow(0)
    with ThreadPoolExecutor(2) as executor:
        ahead = executor.submit(node.tiers.pull, copy, expected_s=60.0)
        assert begun.wait(60)
        waits = executor.submit(node.tiers.sound, [copy], whole)
        while not node.tiers._pulls._under_way[copy.id].needed.is_set():
            assert not waits.done()
        proceed.set()
        result = waits.result(60)
        assert ahead.result(60) == result
    assert result.tier.name == "memory"
    assert len(counts) < image.manifest.size / SMALL
    assert node.reports == []


def test_copy_to_memory_bypasses_the_page_cache(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be in host memory twice. A copy out of memory uses the page cache, where the data still is."""
    node = make_node()
    read: list[str] = []
    switch = block_io.past_cache

    def past_cache(fd: int, *, on: bool = True) -> bool:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if on and path.parts[-3] == "0001":
            read.append(path.parts[-5])
        return switch(fd, on=on)

    monkeypatch.setattr(block_io, "past_cache", past_cache)
    image = node.dump()
    assert read == []
    for name in ("disk", "shared"):
        node.memory.remove(image)
        copy = next(item for item in node.tiers.copies(LATER)[0] if item.tier.name == name)
        assert node.tiers.pull(copy, expected_s=0.0)
    assert read == ["disk", "shared"]
    node.memory.verify(image)
