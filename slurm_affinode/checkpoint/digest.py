"""Digests of large files, faster than disks: blocks in parallel, and while a file is still being written.

The digest of a file is a hash over the hashes of each of its blocks of 64 MiB, the last one shorter, one empty block
for an empty file. Blocks let all cores help, let a file be digested from its beginning while it grows, and let a copy
that was cut off be taken up again. The hash is BLAKE3 (``blake3-64m``), or SHA-256 (``sha256-64m``) where the package
``blake3`` is not there; the manifest names it, and either is verified.

BLAKE3, since the node's cores are its jobs': a core digests 4.4 GiB/s with it, 1.7 GiB/s with SHA-256, and 0.5 GiB/s
with SHA-256 where the processor has no instructions for it (AMD EPYC; Intel before Ice Lake has none).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from slurm_affinode.checkpoint.blockio import CHUNK, buffer, is_direct, read_into
from slurm_affinode.checkpoint.interface import CheckpointError

BLOCK = 64 << 20
_READ = 1 << 20
"""Read at once where the page cache is between, so that what was read is still near the processor; else ``CHUNK``."""
_POLL_S = 0.02
_FILES_AHEAD = 32

Progress = Callable[[int], None]
Piece = Callable[[int, memoryview], None]
"""Gets where a piece of a file begins, and the piece, for the call: whole pages, but at the end of the file."""


class Hash(Protocol):
    """As of ``hashlib``."""

    def update(self, data: memoryview, /) -> object:
        """Take in some bytes; lets other threads run meanwhile."""
        ...

    def digest(self) -> bytes:
        """The hash of what was taken in."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to digest files."""

    name: str
    """In manifests."""
    new: Callable[[], Hash]

    def total(self, blocks: Iterable[bytes]) -> str:
        """The digest of a file out of those of its blocks, hexadecimal."""
        state = self.new()
        for one in blocks:
            state.update(memoryview(one))
        return state.digest().hex()

    def of_blocks(self, blocks: Iterable[memoryview]) -> str:
        """The digest of a file out of its blocks."""

        def hashed(block: memoryview) -> bytes:
            state = self.new()
            state.update(block)
            return state.digest()

        made = [hashed(block) for block in blocks]
        return self.total(made or [hashed(memoryview(b""))])


class _Nothing:
    """In place of a hash, where nobody asks."""

    def update(self, data: memoryview, /) -> None:
        """Leave it."""

    def digest(self) -> bytes:
        """The same of everything."""
        return b""


NOTHING = Kind("", _Nothing)
"""For files that are only read."""
SHA256 = Kind("sha256-64m", hashlib.sha256)
_BLAKE3 = "blake3-64m"


@cache
def blake3() -> Kind | None:
    """BLAKE3; ``None``: the package is not there."""
    try:
        return Kind(_BLAKE3, importlib.import_module("blake3").blake3)
    except ImportError:
        return None


def preferred() -> Kind:
    """The kind for new images: BLAKE3 where its package is, else SHA-256."""
    return blake3() or SHA256


def named(name: str) -> Kind:
    """Of an image. Raises ``CheckpointError`` where it cannot be made here."""
    found = {SHA256.name: SHA256, _BLAKE3: blake3()}.get(name)
    if found is None and name == _BLAKE3:
        raise CheckpointError("its digests are BLAKE3", hint="install the Python package blake3 on this node")
    if found is None:
        raise CheckpointError(f"its digests are {name}, this release knows {_BLAKE3} and {SHA256.name}")
    return found


def workers() -> int:
    """Threads for digests: enough for the disk, without taking the node from its jobs."""
    return min(8, max(2, (os.cpu_count() or 2) // 2))


@contextmanager
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that digest blocks."""
    executor = ThreadPoolExecutor(workers(), thread_name_prefix="digest")
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def block(kind: Kind, fd: int, number: int, size: int, take: Piece | None = None) -> bytes:
    """Hash of a block of an open file of ``size`` bytes; ``take`` gets every piece of it.

    Raises ``EOFError`` where the file is shorter.
    """
    state, piece = kind.new(), buffer()
    begin, end = number * BLOCK, min(size, (number + 1) * BLOCK)
    length = CHUNK if is_direct(fd) else _READ
    for at in range(begin, end, length):
        view = piece.view[: min(length, end - at)]
        if read_into(fd, piece, len(view), at) < len(view):
            raise EOFError
        state.update(view)
        if take is not None:
            take(at, view)
    return state.digest()


def count(size: int) -> int:
    """Number of blocks of a file."""
    return max(1, -(-size // BLOCK))


@dataclass(frozen=True, slots=True)
class Reading:
    """A file whose blocks are being digested."""

    size: int
    blocks: Sequence[Future[bytes]]

    def lengths(self) -> Iterator[int]:
        """Bytes of each block, the last of which may be shorter than ``BLOCK``."""
        return (min(self.size, (number + 1) * BLOCK) - number * BLOCK for number in range(len(self.blocks)))


def begin(kind: Kind, fd: int, size: int, executor: ThreadPoolExecutor) -> Reading:
    """Digest the blocks of an open file, each in the next thread that is free."""
    return Reading(size, [executor.submit(block, kind, fd, number, size) for number in range(count(size))])


def of_files(
    kind: Kind, files: Iterable[AbstractContextManager[Reading]], progress: Progress | None = None
) -> Generator[str, None, None]:
    """Digests of files, in their order; the blocks of many files are under way at once.

    ``files``: each opens a file and begins to digest it, and is left when that is done. Raises what opening raises,
    and ``EOFError`` where a file is shorter than it should be.
    """
    under_way: deque[tuple[ExitStack, Reading]] = deque()

    def finish() -> str:
        reading = under_way[0][1]
        made = []
        for future, length in zip(reading.blocks, reading.lengths(), strict=True):
            made.append(future.result())
            if progress is not None:
                progress(length)
        under_way.popleft()[0].close()
        return kind.total(made)

    try:
        for file in files:
            stack = ExitStack()
            under_way.append((stack, stack.enter_context(file)))
            if len(under_way) > _FILES_AHEAD:
                yield finish()
        while under_way:
            yield finish()
    finally:
        for stack, reading in under_way:
            for future in reading.blocks:
                future.cancel()
            wait(reading.blocks)  # they read from a descriptor that is about to be closed
            stack.close()


class Follower:
    """Digests files of a directory while another process appends to them; the end is then short.

    For files that grow at their end and are not written twice, as CRIU's page files are. ``finish`` digests what was
    not seen growing.
    """

    def __init__(self, directory_fd: int, kind: Kind, *, prefix: str = "pages-") -> None:
        """Begin."""
        # A position of its own: others list the directory at the same time.
        self._directory_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory_fd)
        self._kind = kind
        self._prefix = prefix
        self._fds: dict[str, int] = {}
        self._blocks: dict[str, list[Future[bytes]]] = {}
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(workers(), thread_name_prefix="digest")
        self._thread = threading.Thread(target=self._watch, name="digest-follower", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        for entry in os.scandir(self._directory_fd):
            if entry.name.startswith(self._prefix) and entry.name not in self._fds:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fds[entry.name] = os.open(entry.name, flags, dir_fd=self._directory_fd)
                self._blocks[entry.name] = []
        for name, fd in self._fds.items():
            size, made = os.fstat(fd).st_size, self._blocks[name]
            while (len(made) + 1) * BLOCK <= size:
                made.append(self._executor.submit(block, self._kind, fd, len(made), size))

    def finish(self, name: str, fd: int, size: int) -> Reading:
        """What is done of a file that does not grow any more, and the rest of it."""
        self._stop.set()
        self._thread.join()
        made = self._blocks.get(name, [])
        rest = (self._executor.submit(block, self._kind, fd, number, size) for number in range(len(made), count(size)))
        return Reading(size, [*made, *rest])

    def stop(self) -> None:
        """End the threads."""
        self._stop.set()
        self._thread.join()
        self._executor.shutdown(wait=True, cancel_futures=True)
        for fd in (*self._fds.values(), self._directory_fd):
            os.close(fd)
        self._fds.clear()
