"""Writeback of image files while another process appends to them."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image.block_io import Writeback, start_writing

MIB = 1 << 20
WAIT_S = 30.0


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    """A descriptor of an empty directory."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_appended_data_is_written_back_once(directory: int, tmp_path: Path) -> None:
    """Data is written in pieces of at least 4 MiB, each from the end of the last; small files are left to the end."""
    seen: queue.Queue[tuple[int, int]] = queue.Queue()

    def start(fd: int, at: int, length: int) -> None:
        start_writing(fd, at, length)
        seen.put((at, length))

    (tmp_path / "inventory.img").write_bytes(b"small")
    writeback = Writeback(directory, every_s=0.001, start=start)
    with (tmp_path / "pages-1.img").open("wb", buffering=0) as file:
        file.write(bytes(9 * MIB))
        begun = 0
        while begun < 8 * MIB:
            at, length = seen.get(timeout=WAIT_S)
            assert at == begun
            begun += length
        file.write(bytes(7 * MIB))
        while begun < 16 * MIB:
            at, length = seen.get(timeout=WAIT_S)
            assert at == begun
            begun += length
    writeback.close()
    assert begun == 16 * MIB
    assert seen.empty()


def test_vanished_and_special_files_are_skipped(directory: int, tmp_path: Path) -> None:
    """Links are not followed, a FIFO does not block, and removed files and directories are not errors."""
    seen: queue.Queue[str] = queue.Queue()

    def start(fd: int, at: int, length: int) -> None:
        seen.put(str(Path(f"/proc/self/fd/{fd}").readlink()))

    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.write_bytes(bytes(8 * MIB))
    (tmp_path / "a-link").symlink_to(elsewhere)
    os.mkfifo(tmp_path / "b-fifo")
    (tmp_path / "c-directory").mkdir()
    gone = tmp_path / "d-gone"
    gone.write_bytes(bytes(8 * MIB))
    writeback = Writeback(directory, every_s=0.001, start=start)
    assert seen.get(timeout=WAIT_S) == str(gone)
    gone.unlink()
    last = tmp_path / "e-last"
    last.write_bytes(bytes(8 * MIB))
    while (value := seen.get(timeout=WAIT_S)) != str(last):
        assert value.startswith(str(gone))
    for path in tmp_path.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    tmp_path.rmdir()
    writeback.close()


def test_writeback_leaves_no_descriptors_open(directory: int, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - descriptors of this process
    (tmp_path / "pages-1.img").write_bytes(bytes(8 * MIB))
    seen: queue.Queue[int] = queue.Queue()
    writeback = Writeback(directory, every_s=0.001, start=lambda fd, at, length: seen.put(length))
    assert seen.get(timeout=WAIT_S) == 8 * MIB
    writeback.stop()
    writeback.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
