"""Memory filled by the agent: real processes with the kernel's userfaultfd."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image.block_io import Buffer
from slurm_affinode.checkpoint.image.criu_images import PAGE
from slurm_affinode.checkpoint.image.memory_map import PageStretch, TreeMemory
from slurm_affinode.checkpoint.image.page_filler import CannotFill, Filler, beside
from slurm_affinode.checkpoint.interface import ImageDamaged

PAGES = 600
FILE = "pages-1.img"
PROGRAM = Path(__file__).with_name("faulting.py")


class Faulting:
    """A process that waits for its memory, and the expected contents."""

    def __init__(self, directory: Path, number: int = 7) -> None:
        self.directory, self.number = directory, number
        command = [sys.executable, str(PROGRAM), str(directory / "lazy-pages.socket"), str(number), str(PAGES)]
        self.program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self._line()
        if not line:
            assert self.program.stderr is not None
            pytest.skip(f"no userfaultfd here: {self.program.stderr.read().strip()}")
        self.address = int(line)
        # Other pages precede, separate and follow those to be filled, and some addresses have no page in the file.
        source = random.Random(number)  # noqa: S311
        self.file = source.randbytes((PAGES + 40) * PAGE)
        self.memory = bytearray(PAGES * PAGE)
        self.runs = []
        offset, page = 3 * PAGE, 2
        while page < PAGES - 60:
            count = source.randrange(1, 50)
            self.runs.append(PageStretch(offset, self.address + page * PAGE, count * PAGE))
            self.memory[page * PAGE : (page + count) * PAGE] = self.file[offset : offset + count * PAGE]
            offset += (count + source.randrange(0, 2)) * PAGE
            page += count + source.randrange(0, 3)
        (directory / FILE).write_bytes(self.file)

    @property
    def what(self) -> TreeMemory:
        """The memory to be filled."""
        return TreeMemory(self.number, FILE, tuple(self.runs))

    def hand_over(self) -> None:
        """Make the process send its userfaultfd, as CRIU does."""
        self.send("go")

    def send(self, word: str) -> None:
        """Send one line."""
        assert self.program.stdin is not None
        self.program.stdin.write(word + "\n")
        self.program.stdin.flush()

    def ask(self, word: str) -> str:
        """Send a line and return the reply."""
        self.send(word)
        return self._line()

    def is_filled(self) -> bool:
        """Return whether the memory has the expected contents."""
        return self.ask("all") == hashlib.sha256(self.memory).hexdigest()

    def _line(self) -> str:
        assert self.program.stdout is not None
        return self.program.stdout.readline().strip()

    def end(self) -> None:
        """Kill the process, even while it waits for memory."""
        self.program.kill()
        self.program.communicate()


def read(filler: Filler, data: bytes, size: int, begin: int = 0) -> None:
    """Pass a file to the filler from a page on, in pieces of ``size`` pages, by several threads."""

    def take(at: int) -> None:
        piece = Buffer(size * PAGE)
        view = piece.view[: min(size * PAGE, len(data) - at)]
        view[:] = data[at : at + len(view)]
        filler.take(FILE, at, view)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(begin * PAGE, len(data), size * PAGE)))


@pytest.fixture
def faulting(tmp_path: Path) -> Iterator[Callable[..., Faulting]]:
    """Return a function that starts a process."""
    with ExitStack() as stack:

        def start(number: int = 7) -> Faulting:
            made = Faulting(tmp_path, number)
            stack.callback(made.end)
            return made

        yield start


@pytest.fixture
def filler(tmp_path: Path) -> Iterator[Callable[[TreeMemory], Filler]]:
    """Return a function that makes a filler; its work directory has the image."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield lambda memory: Filler(fd, fd, [memory])
    os.close(fd)


@pytest.mark.parametrize("size", [1, 7, 256])
def test_pages_are_placed_at_their_addresses(
    faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler], size: int
) -> None:
    """The size of the pieces does not matter; addresses without a page in the file are zero."""
    process = faulting()
    with filler(process.what) as fills:
        process.hand_over()
        fills.begin(60)
        read(fills, process.file, size)
        fills.end()
        assert process.is_filled()


def test_page_that_is_accessed_early_is_filled_immediately(
    faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler]
) -> None:
    """It comes from the file, or is zero, and is not changed later."""
    process = faulting()
    with filler(process.what) as fills:
        process.hand_over()
        for page in (0, 2, 3, 90, 300, PAGES - 1):
            assert process.ask(str(page)) == str(process.memory[page * PAGE])
        fills.begin(60)
        read(fills, process.file, 16)
        fills.end()
        assert process.is_filled()


def test_page_that_differs_when_it_is_verified_is_detected(
    faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler]
) -> None:
    """An accessed page is read separately from the pages that are digested; a bad disk may return different data."""
    process = faulting()
    with filler(process.what) as fills:
        process.hand_over()
        assert process.ask("2") == str(process.memory[2 * PAGE])
        fills.begin(60)
        other = bytearray(process.file)
        other[process.runs[0].offset + 17] ^= 1  # in the page that was accessed
        read(fills, bytes(other), 16)
        with pytest.raises(ImageDamaged, match="while it is read"):
            fills.end()


def test_pages_wait_until_the_tree_is_complete(
    faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler]
) -> None:
    """The reader may be faster."""
    process = faulting()
    with filler(process.what) as fills:
        reading = threading.Thread(target=read, args=(fills, process.file, 64))
        reading.start()
        process.hand_over()
        fills.begin(60)
        reading.join()
        fills.end()
        assert process.is_filled()


def test_missing_page_is_reported(faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler]) -> None:
    """It would silently be zero."""
    process = faulting()
    with filler(process.what) as fills:
        process.hand_over()
        fills.begin(60)
        read(fills, process.file, 8, begin=4)
        with pytest.raises(CannotFill, match=f"{PAGE} bytes of process 7 were not read"):
            fills.end()


def test_ended_process_is_reported(faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler]) -> None:
    """Not to the threads that read."""
    process = faulting()
    with filler(process.what) as fills:
        process.hand_over()
        fills.begin(60)
        process.end()
        read(fills, process.file, 8)
        with pytest.raises(CannotFill, match="memory of process 7 cannot be filled"):
            fills.end()


def test_memory_that_is_not_handed_over_is_reported(
    faulting: Callable[..., Faulting], filler: Callable[[TreeMemory], Filler]
) -> None:
    """CRIU does not respond in time, ends, or sends the memory of another process."""
    first, other = faulting(), faulting(8)
    with filler(first.what) as fills, pytest.raises(CannotFill, match="not handed over the memory of process 7"):
        fills.begin(0.01)
    (first.directory / "lazy-pages.socket").unlink()
    with filler(first.what) as fills:
        other.hand_over()
        with pytest.raises(CannotFill, match="process 8"):
            fills.begin(60)


def test_readers_are_released_when_a_restore_fails(filler: Callable[[TreeMemory], Filler]) -> None:
    """CRIU failed before it made a process; the threads that read continue to the end."""
    with filler(TreeMemory(7, FILE, (PageStretch(0, PAGE, PAGE),))) as fills, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(fills.take, FILE, 0, Buffer(PAGE).view)
        with pytest.raises(CannotFill):
            fills.end()
        waits.result(60)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (["0-3,8-11", "4-7,12"], {0, 1, 2, 3, 8, 9, 10, 11}),
        (["0", "1-7"], {0, 1, 2, 3, 4, 5, 6, 7}),
        (["4-7", ""], set()),
        (["none"], set()),
        ([], set()),
    ],
)
def test_pages_are_placed_from_cpus_near_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: list[str], expected: set[int]
) -> None:
    """The kernel allocates memory on the NUMA node of the thread that touches it first."""
    for number, text in enumerate(lists):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3} if lists[:1] != ["0"] else {0, 1})
    assert beside(7, nodes=tmp_path) == expected


def test_filler_runs_on_the_given_cpus(tmp_path: Path) -> None:
    """If that is not permitted, its affinity is unchanged."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    (item, *_) = os.sched_getaffinity(0)
    seen = []

    def take(cpus: set[int]) -> None:
        with Filler(fd, fd, [], cpus) as fills:
            fills.begin(0)
            fills.take(FILE, 0, Buffer(PAGE).view)
            seen.append(os.sched_getaffinity(0))

    for cpus in ({item}, {100_000}):
        (tmp_path / "lazy-pages.socket").unlink(missing_ok=True)
        thread = threading.Thread(target=take, args=(cpus,))
        thread.start()
        thread.join()
    os.close(fd)
    assert seen == [{item}, os.sched_getaffinity(0)]
