"""Block I/O: rate limits, zeros, holes, and file systems without direct I/O."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import block_io

MIB = 1 << 20


def test_limiter_keeps_the_rate() -> None:
    """The rate is for all threads together; without a rate nothing waits."""
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    limiter = block_io.Limiter(10 * MIB, clock=lambda: now[0], sleep=sleep)
    for _ in range(8):
        limiter.pass_(8 * MIB)
    assert now[0] == pytest.approx((64 - 8) / 10, rel=0.01)
    block_io.Limiter(0, sleep=sleep).pass_(1 << 40)
    assert now[0] < 6


def test_limiter_stops_waiting_when_canceled() -> None:
    """At a byte per second a block takes months."""
    slept: list[float] = []
    limiter = block_io.Limiter(1, clock=lambda: 0.0, sleep=slept.append)
    limiter.pass_(8 * MIB)
    limiter.pass_(8 * MIB, lambda: len(slept) == 3)
    assert len(slept) == 3
    assert sum(slept) < 1


def test_zeros_are_found_by_piece() -> None:
    """The last piece may be short; only zeros count."""
    block = block_io.Buffer()
    block.view[: 2 * MIB] = bytes(2 * MIB)
    assert list(block_io.runs(block, 2 * MIB)) == []
    block.view[MIB + 1] = 1
    block.view[2 * MIB - 1] = 1
    assert list(block_io.runs(block, 2 * MIB)) == [(MIB, MIB + 256 * 1024), (2 * MIB - 256 * 1024, 2 * MIB)]
    assert list(block_io.runs(block, MIB + 10)) == [(MIB, MIB + 10)]
    assert block.zero(0, 0)


def test_data_ranges_exclude_holes(tmp_path: Path) -> None:
    """The file has data, a hole, data, and a hole up to its end."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * 8192)
        file.seek(4 * MIB)
        file.write(b"y" * 8192)
        file.truncate(8 * MIB)
    fd = os.open(path, os.O_RDONLY)
    try:
        ranges = list(block_io.data_ranges(fd, 0, 8 * MIB))
        assert sum(stop - start for start, stop in ranges) < MIB
        assert [start for start, _ in ranges] == [0, 4 * MIB]
        assert list(block_io.data_ranges(fd, 5 * MIB, 8 * MIB)) == []
        assert list(block_io.data_ranges(fd, MIB, 2 * MIB)) == []
    finally:
        os.close(fd)


def test_file_is_one_data_range_where_holes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems do not report holes."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "lseek", refuse)
    assert list(block_io.data_ranges(0, 5, 9)) == [(5, 9)]


@pytest.mark.parametrize("size", [MIB, MIB + 1, 5000, 4096])
def test_direct_io_reads_and_writes_the_same_as_buffered_io(tmp_path: Path, size: int) -> None:
    """Data written with direct I/O is truncated to its size, and reads end at the end of the file."""
    data = os.urandom(size)
    block = block_io.Buffer()
    block.view[:size] = data
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        block_io.past_cache(fd)
        block_io.write_from(fd, block, 0, size, 0)
        os.ftruncate(fd, size)
        assert (tmp_path / "file").read_bytes() == data
        block.view[:size] = bytes(size)
        assert block_io.read_into(fd, block, size, 0) == size
        assert block.view[:size] == data
        assert block_io.read_into(fd, block, 2 * MIB, 0) == size
    finally:
        os.close(fd)


def test_file_system_without_direct_io_uses_buffered_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system refuses it with the first block, or when it is enabled."""
    (tmp_path / "file").write_bytes(b"contents")
    fd = os.open(tmp_path / "file", os.O_RDWR)
    preadv, pwrite = os.preadv, os.pwrite

    def refuse(call):  # type: ignore[no-untyped-def]
        def answer(fd: int, *rest: object) -> int:
            if block_io.is_direct(fd):
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(fd, *rest)

        return answer

    monkeypatch.setattr(os, "preadv", refuse(preadv))
    monkeypatch.setattr(os, "pwrite", refuse(pwrite))
    try:
        block = block_io.Buffer()
        block_io.past_cache(fd)
        assert block_io.read_into(fd, block, 8, 0) == 8
        block_io.past_cache(fd)
        block.view[:3] = b"CON"
        block_io.write_from(fd, block, 0, 3, 0)
        os.ftruncate(fd, 8)
        assert (tmp_path / "file").read_bytes()[:3] == b"CON"
    finally:
        os.close(fd)
    pipe, other = os.pipe()
    assert block_io.past_cache(pipe) in (True, False)
    os.close(pipe)
    os.close(other)


def test_file_is_cached_only_if_all_of_it_is_in_the_page_cache(tmp_path: Path) -> None:
    """A file that was just written is cached; one that was written back and dropped, even in part, is not."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file:
        fd = file.fileno()
        if not block_io.is_cached(fd, 4 * MIB):
            pytest.skip("the file system does not tell")
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # otherwise the probed pages are read ahead
        os.posix_fadvise(fd, 2 * MIB, 0, os.POSIX_FADV_DONTNEED)
        if block_io.is_cached(fd, 4 * MIB):
            pytest.skip("the file system forgets nothing")
        assert block_io.is_cached(fd, 1 * MIB)
