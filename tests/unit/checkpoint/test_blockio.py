"""Blocks in and out of files: rates, zeros, holes, and file systems that know no direct I/O."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import blockio

MIB = 1 << 20


def test_a_limiter_lets_pass_what_the_rate_allows() -> None:
    """All threads together; without a rate at once."""
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    limiter = blockio.Limiter(10 * MIB, clock=lambda: now[0], sleep=sleep)
    for _ in range(8):
        limiter.pass_(8 * MIB)
    assert now[0] == pytest.approx((64 - 8) / 10, rel=0.01)
    blockio.Limiter(0, sleep=sleep).pass_(1 << 40)
    assert now[0] < 6


def test_nobody_waits_longer_than_he_has_to() -> None:
    """At a byte per second a block takes months: who is told that it is over goes on at once."""
    slept: list[float] = []
    limiter = blockio.Limiter(1, clock=lambda: 0.0, sleep=slept.append)
    limiter.pass_(8 * MIB)
    limiter.pass_(8 * MIB, lambda: len(slept) == 3)
    assert len(slept) == 3
    assert sum(slept) < 1


def test_zeros_are_found_by_pieces() -> None:
    """Also a short last piece; nothing is 0 but zeros."""
    block = blockio.Buffer()
    block.view[: 2 * MIB] = bytes(2 * MIB)
    assert list(blockio.runs(block, 2 * MIB)) == []
    block.view[MIB + 1] = 1
    block.view[2 * MIB - 1] = 1
    assert list(blockio.runs(block, 2 * MIB)) == [(MIB, MIB + 256 * 1024), (2 * MIB - 256 * 1024, 2 * MIB)]
    assert list(blockio.runs(block, MIB + 10)) == [(MIB, MIB + 10)]
    assert block.zero(0, 0)


def test_holes_are_told(tmp_path: Path) -> None:
    """Data, a hole, data, a hole to the end."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * 8192)
        file.seek(4 * MIB)
        file.write(b"y" * 8192)
        file.truncate(8 * MIB)
    fd = os.open(path, os.O_RDONLY)
    try:
        ranges = list(blockio.data_ranges(fd, 0, 8 * MIB))
        assert sum(stop - start for start, stop in ranges) < MIB
        assert [start for start, _ in ranges] == [0, 4 * MIB]
        assert list(blockio.data_ranges(fd, 5 * MIB, 8 * MIB)) == []
        assert list(blockio.data_ranges(fd, MIB, 2 * MIB)) == []
    finally:
        os.close(fd)


def test_where_holes_are_not_told_all_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "lseek", refuse)
    assert list(blockio.data_ranges(0, 5, 9)) == [(5, 9)]


@pytest.mark.parametrize("size", [MIB, MIB + 1, 5000, 4096])
def test_direct_and_as_usual_are_the_same(tmp_path: Path, size: int) -> None:
    """What is written past the page cache is cut to its size; what is read ends where the file ends."""
    data = os.urandom(size)
    block = blockio.Buffer()
    block.view[:size] = data
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        blockio.past_cache(fd)
        blockio.write_from(fd, block, 0, size, 0)
        os.ftruncate(fd, size)
        assert (tmp_path / "file").read_bytes() == data
        block.view[:size] = bytes(size)
        assert blockio.read_into(fd, block, size, 0) == size
        assert block.view[:size] == data
        assert blockio.read_into(fd, block, 2 * MIB, 0) == size
    finally:
        os.close(fd)


def test_a_file_system_without_direct_io_is_read_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so at the first block, or when it is asked for."""
    (tmp_path / "file").write_bytes(b"contents")
    fd = os.open(tmp_path / "file", os.O_RDWR)
    preadv, pwrite = os.preadv, os.pwrite

    def refuse(call):  # type: ignore[no-untyped-def]
        def answer(fd: int, *rest: object) -> int:
            if blockio.is_direct(fd):
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(fd, *rest)

        return answer

    monkeypatch.setattr(os, "preadv", refuse(preadv))
    monkeypatch.setattr(os, "pwrite", refuse(pwrite))
    try:
        block = blockio.Buffer()
        blockio.past_cache(fd)
        assert blockio.read_into(fd, block, 8, 0) == 8
        blockio.past_cache(fd)
        block.view[:3] = b"CON"
        blockio.write_from(fd, block, 0, 3, 0)
        os.ftruncate(fd, 8)
        assert (tmp_path / "file").read_bytes()[:3] == b"CON"
    finally:
        os.close(fd)
    pipe, other = os.pipe()
    assert blockio.past_cache(pipe) in (True, False)
    os.close(pipe)
    os.close(other)


def test_what_is_in_the_page_cache_is_told_from_what_is_not(tmp_path: Path) -> None:
    """A file that was just written is; one that was written back and forgotten is not, nor is a part of it enough."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file:
        fd = file.fileno()
        if not blockio.is_cached(fd, 4 * MIB):
            pytest.skip("the file system does not tell")
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else what is looked at is read ahead
        os.posix_fadvise(fd, 2 * MIB, 0, os.POSIX_FADV_DONTNEED)
        if blockio.is_cached(fd, 4 * MIB):
            pytest.skip("the file system forgets nothing")
        assert blockio.is_cached(fd, 1 * MIB)
