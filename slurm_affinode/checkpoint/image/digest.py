"""Digests of large files, computed faster than disks deliver: in parallel, and while a file is still being written.

The digest of a file is a hash of the hashes of its 64 MiB blocks (the last one may be shorter; an empty file has one
empty block). With blocks, several cores can share the work, a file can be digested while it grows, and an interrupted
copy can be continued. The hash is BLAKE3 (``blake3-64m``), or SHA-256 (``sha256-64m``) if the package ``blake3`` is not
installed. The manifest names the hash; both are verified.

BLAKE3 is preferred because it leaves more CPU time to jobs: one core digests 4.4 GiB/s with BLAKE3, 1.7 GiB/s with
SHA-256, and 0.5 GiB/s with SHA-256 on processors without SHA instructions (rates for AMD EPYC; Intel processors before
Ice Lake lack these instructions).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

from slurm_affinode.base import threads
from slurm_affinode.checkpoint.image.block_io import CHUNK, buffer, is_direct, is_hole, read_into
from slurm_affinode.checkpoint.interface import CheckpointError

BLOCK = 64 << 20
_READ = 1 << 20
"""Read size with the page cache, small enough for the data to stay in the CPU cache; direct I/O uses ``CHUNK``."""
_ZEROS = memoryview(bytes(_READ))
_POLL_S = 0.02
_FILES_AHEAD = 32

Progress = Callable[[int], None]
Piece = Callable[[int, memoryview], None]
"""Receives the offset and contents of a piece of a file: whole pages, except at the end of the file. The memory is
valid only during the call."""


class Hash(Protocol):
    """A hash object as in ``hashlib``."""

    def update(self, data: memoryview, /) -> object:
        """Hash more data. Releases the GIL."""
        ...

    def digest(self) -> bytes:
        """Return the hash of all data so far."""
        ...


@dataclass(frozen=True, slots=True)
class DigestAlgorithm:
    """A digest algorithm."""

    name: str
    """Name in manifests."""
    new: Callable[[], Hash]

    def total(self, blocks: Iterable[bytes]) -> str:
        """Return the digest of a file in hexadecimal, from the hashes of its blocks."""
        state = self.new()
        for block in blocks:
            state.update(memoryview(block))
        return state.digest().hex()

    def of_blocks(self, blocks: Iterable[memoryview]) -> str:
        """Return the digest of a file in hexadecimal, from its blocks."""

        def hashed(block: memoryview) -> bytes:
            state = self.new()
            state.update(block)
            return state.digest()

        hashes = [hashed(block) for block in blocks]
        return self.total(hashes or [hashed(memoryview(b""))])


class _NoDigest:
    """A hash object that computes nothing."""

    def update(self, data: memoryview, /) -> None:
        """Ignore the data."""

    def digest(self) -> bytes:
        """Return a constant."""
        return b""


NO_DIGEST = DigestAlgorithm("", _NoDigest)
"""For files that are read but need no digest."""
SHA256 = DigestAlgorithm("sha256-64m", hashlib.sha256)
_BLAKE3 = "blake3-64m"


@cache
def blake3() -> DigestAlgorithm | None:
    """Return BLAKE3, or ``None`` if the package is not installed."""
    try:
        return DigestAlgorithm(_BLAKE3, importlib.import_module("blake3").blake3)
    except ImportError:
        return None


def preferred() -> DigestAlgorithm:
    """Return the algorithm for new images: BLAKE3 if its package is installed, otherwise SHA-256."""
    return blake3() or SHA256


def named(name: str) -> DigestAlgorithm:
    """Return the algorithm that a manifest names. Raises ``CheckpointError`` if it is not available here."""
    algorithm = {SHA256.name: SHA256, _BLAKE3: blake3()}.get(name)
    if algorithm is None and name == _BLAKE3:
        raise CheckpointError("its digests are BLAKE3", hint="install the Python package blake3 on this node")
    if algorithm is None:
        raise CheckpointError(f"its digests are {name}, this release knows {_BLAKE3} and {SHA256.name}")
    return algorithm


def workers() -> int:
    """Return the number of digest threads: enough to keep up with the disk, but few enough to leave cores to jobs."""
    return min(8, max(2, (os.cpu_count() or 2) // 2))


def pool() -> AbstractContextManager[Executor]:
    """Return threads for digesting blocks, see ``threads.pool``."""
    return threads.pool("digest", workers())


def block(kind: DigestAlgorithm, fd: int, number: int, size: int, take: Piece | None = None) -> bytes:
    """Return the hash of a block of an open file of ``size`` bytes; ``take`` receives each piece of the block.

    A hole is not read: users have sparse files of any size. Raises ``EOFError`` if the file is shorter than ``size``.
    """
    state, piece = kind.new(), buffer()
    begin, end = number * BLOCK, min(size, (number + 1) * BLOCK)
    length = CHUNK if is_direct(fd) else _READ
    if begin < end and is_hole(fd, begin, end):
        if take is not None:
            piece.view[:length] = bytes(length)
            for offset in range(begin, end, length):
                take(offset, piece.view[: min(length, end - offset)])
        return of_zeros(kind, end - begin)
    for offset in range(begin, end, length):
        view = piece.view[: min(length, end - offset)]
        if read_into(fd, piece, len(view), offset) < len(view):
            raise EOFError
        state.update(view)
        if take is not None:
            take(offset, view)
    return state.digest()


def add_zeros(state: Hash, length: int) -> None:
    """Hash ``length`` zeros."""
    while length > 0:
        state.update(_ZEROS[: min(length, len(_ZEROS))])
        length -= len(_ZEROS)


@lru_cache(maxsize=8)
def of_zeros(kind: DigestAlgorithm, length: int) -> bytes:
    """Return the hash of a block of ``length`` zeros."""
    state = kind.new()
    add_zeros(state, length)
    return state.digest()


def count(size: int) -> int:
    """Return the number of blocks of a file."""
    return max(1, -(-size // BLOCK))


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file being digested, block by block."""

    size: int
    blocks: Sequence[Future[bytes]]

    def lengths(self) -> Iterator[int]:
        """Return the length of each block in bytes. The last one may be shorter than ``BLOCK``."""
        return (min(self.size, (number + 1) * BLOCK) - number * BLOCK for number in range(len(self.blocks)))


def begin(kind: DigestAlgorithm, fd: int, size: int, executor: Executor) -> FileDigest:
    """Start digesting the blocks of an open file in a thread pool."""
    return FileDigest(size, [executor.submit(block, kind, fd, number, size) for number in range(count(size))])


def of_files(
    kind: DigestAlgorithm, files: Iterable[AbstractContextManager[FileDigest]], progress: Progress | None = None
) -> Generator[str, None, None]:
    """Yield the digests of files in order. Blocks of several files are digested at a time.

    ``files``: contexts that open a file and start digesting it; each is exited when its file is done. Raises
    ``EOFError`` if a file is shorter than expected, and the errors of the contexts.
    """
    under_way: deque[tuple[ExitStack, FileDigest]] = deque()

    def finish() -> str:
        reading = under_way[0][1]
        digests = []
        for future, length in zip(reading.blocks, reading.lengths(), strict=True):
            digests.append(future.result())
            if progress is not None:
                progress(length)
        under_way.popleft()[0].close()
        return kind.total(digests)

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
            wait(reading.blocks)  # threads may still read from the descriptor that is closed next
            stack.close()


class Follower:
    """Digests the files of a directory while another process appends to them, so that little is left to do at the end.

    Suitable only for files that are written sequentially, once, such as CRIU's page files. ``finish`` digests the rest.
    """

    def __init__(self, directory_fd: int, kind: DigestAlgorithm, *, prefix: str = "pages-") -> None:
        """Start the threads. ``prefix``: names of the files to digest begin with it."""
        # Open the directory anew: the read position must not be shared with other threads that list it.
        self._directory_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory_fd)
        self._kind = kind
        self._prefix = prefix
        self._fds: dict[str, int] = {}
        self._blocks: dict[str, list[Future[bytes]]] = {}
        self._stack = ExitStack()
        self._executor = self._stack.enter_context(pool())
        self._poller = threads.Repeated("digest-follower", _POLL_S, self._follow)
        self._poller.start()

    def _follow(self) -> None:
        for entry in os.scandir(self._directory_fd):
            if entry.name.startswith(self._prefix) and entry.name not in self._fds:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fds[entry.name] = os.open(entry.name, flags, dir_fd=self._directory_fd)
                self._blocks[entry.name] = []
        for name, fd in self._fds.items():
            size, digests = os.fstat(fd).st_size, self._blocks[name]
            while (len(digests) + 1) * BLOCK <= size:
                digests.append(self._executor.submit(block, self._kind, fd, len(digests), size))

    def finish(self, name: str, fd: int, size: int) -> FileDigest:
        """Digest the rest of a file that no longer grows. Return all of its blocks."""
        self._poller.join()
        digests = self._blocks.get(name, [])
        rest = (
            self._executor.submit(block, self._kind, fd, number, size) for number in range(len(digests), count(size))
        )
        return FileDigest(size, [*digests, *rest])

    def stop(self) -> None:
        """Stop the threads."""
        self._poller.join()
        self._stack.close()
        for fd in (*self._fds.values(), self._directory_fd):
            os.close(fd)
        self._fds.clear()
