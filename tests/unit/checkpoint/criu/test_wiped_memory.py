"""Memory that is empty in a child process keeps this property."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from slurm_affinode.base.pidfd import Namespace, Process
from slurm_affinode.checkpoint.criu import sessions
from slurm_affinode.checkpoint.image.criu_images import BadImage, image_records, message

from .. import criu_files

PROGRAM = """
import ctypes, mmap, sys
pages = mmap.mmap(-1, 3 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages.madvise(18, mmap.PAGESIZE, mmap.PAGESIZE)  # MADV_WIPEONFORK: the page in the middle
print(ctypes.addressof(ctypes.c_char.from_buffer(pages)) + mmap.PAGESIZE, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def program() -> Iterator[tuple[Process, int]]:
    """A process, and the address of its page that is wiped in a child."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        address = int(made.stdout.readline())
        with Process(made.pid) as process:
            yield process, address
        made.communicate()


@pytest.fixture
def image(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def space(*processes: tuple[int, Process]) -> Namespace:
    return cast("Namespace", Mock(processes=lambda: iter(processes)))


def area(begin: int, *more: criu_files.Field) -> criu_files.Field:
    """Return a mapping of a page in the image of a process."""
    fields = ((1, begin), (2, begin + mmap.PAGESIZE), (5, 3), *more)
    return 14, criu_files.message(*fields)


def advice(image: int, pid: int) -> list[tuple[list[object], list[object]]]:
    """Return the beginning and the advice of each mapping in the image."""
    (memory,) = image_records(image, f"mm-{pid}.img")
    areas = [message(cast("bytes", area)) for area in memory[14]]
    return [(list(fields[1]), list(fields.get(9, []))) for fields in areas]


def test_wiped_page_is_recognized(program: tuple[Process, int]) -> None:
    process, address = program
    assert (address, address + mmap.PAGESIZE) in sessions.wiped(process)


@pytest.mark.parametrize(("before", "after"), [((), 1 << 18), (((9, 1 << 16),), 1 << 16 | 1 << 18)])
def test_property_is_added_to_the_advice_in_the_image(
    program: tuple[Process, int], image: int, tmp_path: Path, before: tuple[criu_files.Field, ...], after: int
) -> None:
    process, address = program
    others = sessions.wiped(process) - {(address, address + mmap.PAGESIZE)}
    known = [criu_files.message((1, begin), (2, end)) for begin, end in sorted(others)]
    fields = [area(4096, (9, 1 << 10)), area(address, *before), area(1 << 45), *((14, other) for other in known)]
    (tmp_path / "mm-7.img").write_bytes(criu_files.image(criu_files.message((1, 5), *fields, (15, 6))))
    sessions.keep_wiped(image, space((7, process)))
    assert advice(image, 7)[:3] == [([4096], [1 << 10]), ([address], [after]), ([1 << 45], [])]
    (memory,) = image_records(image, "mm-7.img")
    assert (memory[1], memory[15]) == ([5], [6])


def test_mapping_that_the_dump_lacks_is_an_error(program: tuple[Process, int], image: int, tmp_path: Path) -> None:
    (tmp_path / "mm-7.img").write_bytes(criu_files.image(criu_files.message((1, 5), area(4096))))
    with pytest.raises(BadImage, match=r"mm-7\.img: the mapping [0-9a-f]+-[0-9a-f]+ is missing"):
        sessions.keep_wiped(image, space((7, program[0])))


def test_files_of_processes_without_such_memory_are_not_read(image: int) -> None:
    process = Mock(lines=lambda name: [b"00400000-00401000 r--p", b"VmFlags: rd mr"])
    with contextlib.suppress(FileNotFoundError):
        sessions.keep_wiped(image, space((8, process)))
    assert os.listdir(image) == []
