"""Copies of images: many blocks and files in parallel, and the state after a failure."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import block_io
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import Image, ImageDamaged, NoRoom
from slurm_affinode.checkpoint.store import transfer

from ..conftest import JOB, MANIFEST, MIB, Node


@pytest.mark.parametrize("end", ["the target is full", "the source cannot be read"])
def test_files_are_closed_after_the_last_thread_has_ended(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Otherwise another file of the process could get the descriptor, and a late block."""
    node = make_node()
    image = node.dump(publish=False)
    under_way, still_open, calls = threading.Event(), list[bool](), itertools.count()
    write = block_io.write_from

    def late(fd: int, block: block_io.Buffer, begin: int, stop: int, at: int) -> None:
        number, before = next(calls), os.fstat(fd).st_ino
        if number == 0:
            assert under_way.wait(60)
            if end == "the target is full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise ImageDamaged("cannot be read")
        under_way.set()
        threading.Event().wait(0.2)
        try:
            still_open.append(os.fstat(fd).st_ino == before)
        except OSError:
            still_open.append(False)
        write(fd, block, begin, stop, at)

    expected = (
        (NoRoom, "No space left") if end == "the target is full" else (ImageDamaged, "pages-1.img: cannot be read")
    )
    with monkeypatch.context() as patch:
        patch.setattr(block_io, "write_from", late)
        with pytest.raises(expected[0], match=expected[1]):
            node.disk.copy(image, node.shared)
    assert still_open
    assert all(still_open)
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["memory", "disk", "shared"]


def test_small_files_are_renamed_after_all_are_durable(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written and synced together; after a damaged file, nothing is open or renamed."""
    node = make_node()
    count = 3 * transfer._TOGETHER + 5

    def fill(writer: ImageWriter) -> Image:
        for number in range(count):
            (Path(f"/proc/self/fd/{writer.criu_fd}") / f"{number}.img").write_bytes(bytes([number % 251]) * number)
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=MIB)
    synced, fsync = set[int](), os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        node.tiers.settle(image)
    files = list((node.disk.path / JOB.name / "0001" / "criu").iterdir())
    assert len(files) == count
    assert synced >= {file.stat().st_ino for file in files}
    node.disk.verify(image)

    source = node.memory.path / JOB.name / "0001" / "criu" / "130.img"
    source.write_bytes(b"x" * 130)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ImageDamaged, match=r"130\.img: its contents have changed"):
        node.memory.copy(image, node.shared)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert node.where(image) == ["memory", "disk"]
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["disk", "shared"]
