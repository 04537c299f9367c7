"""Copying of checkpoint images between directories, with digests of the written data and resumption of partial copies.

All image data moves between tiers this way. A copy has the signed manifest from its beginning, so that a partial copy
can be told from a broken dump, and its files are verified block by block as they are copied.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from slurm_affinode.base.threads import pool
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import block_io, compression, digest
from slurm_affinode.checkpoint.image.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.checkpoint.interface import ImageDamaged
from slurm_affinode.model.suspension import FileFact, Manifest

_SMALL = 64 << 20
_DIRECT_FROM = 1 << 20
_TOGETHER = 64
"""Number of small files written before the first is synced, so that the disk gets them together."""

Progress = Callable[[int], None]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CopyMode:
    """Settings of a copy."""

    limiter: block_io.Limiter
    read_direct: bool = False
    """Read past the page cache: data brought to host memory, or read from a slow tier, is not read there again."""
    write_direct: bool = False
    """Write past the page cache, if the target's file system supports it."""
    level: int = 0
    """zstd level for the target; 0: not compressed."""
    progress: Progress | None = None
    stop: Callable[[], bool] = lambda: False
    """Checked between blocks; the partial copy is kept and can be resumed."""


def _packs(fact: FileFact, mode: CopyMode) -> bool:
    return mode.level > 0 and fact.size >= compression.LEAST


def _threads() -> int:
    """Return the number of concurrent blocks: a device needs several for full speed, also while others are digested."""
    return max(4, digest.workers())


class Stopped(Exception):  # noqa: N818 - not a failure
    """A copy was stopped on request."""


class _Each(Protocol):
    """Applies a function to several things and returns the results in order."""

    def __call__(self, do: Callable[[T], R], things: Iterable[T], /) -> list[R]:
        """Raises the errors of the function."""
        ...


def _in_turn(do: Callable[[T], R], things: Iterable[T], /) -> list[R]:
    return [do(thing) for thing in things]


class _Crew:
    """The threads of one copy. If one of them fails, the others stop."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._why: list[BaseException] = []
        self.stop_event = threading.Event()

    def each(self, do: Callable[[T], R], things: Iterable[T], /) -> list[R]:
        """As ``_Each``, concurrently.

        Returns and raises only when no thread works on it, since its file descriptors are then reused.
        """

        def attempt(thing: T) -> R:
            try:
                return do(thing)
            except BaseException as error:
                self._why.append(error)
                self.stop_event.set()
                raise

        under_way = [self._executor.submit(attempt, thing) for thing in things]
        try:
            wait(under_way, return_when=FIRST_EXCEPTION)
        except BaseException:
            self.stop_event.set()
            raise
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)
        if self._why:
            raise self._why[0]
        return [future.result() for future in under_way]


@contextlib.contextmanager
def _source_errors() -> Iterator[None]:
    """Raise ``ImageDamaged`` for an error of the source's file system, to tell it from one of the target's."""
    try:
        yield
    except OSError as error:
        raise ImageDamaged(f"cannot be read: {error.strerror}") from None


def copy_files(manifest: Manifest, source_fd: int, target_fd: int, *, owner: int, mode: CopyMode) -> None:
    """Copy all files in the manifest, and sync everything but the names.

    Raises ``ImageDamaged`` if the source does not match the manifest, ``OSError`` of the target's file system, and
    ``Stopped``.
    """
    kind = digest.named(manifest.digest)
    with (
        root_directory.directory(source_fd, CRIU, owner=owner) as criu_from,
        root_directory.directory(target_fd, CRIU, owner=owner) as criu_to,
        pool("copy", _threads()) as executor,
    ):
        expected = {fact.path + (compression.SUFFIX if _packs(fact, mode) else "") for fact in manifest.files} | {CRIU}
        for directory_fd, prefix in ((target_fd, ""), (criu_to, f"{CRIU}/")):
            for name in root_directory.names(directory_fd):
                if prefix + name not in expected:
                    os.unlink(name, dir_fd=directory_fd)
        for name in (MANIFEST, SIGNATURE):
            with _source_errors():
                data = root_directory.read(source_fd, name, owner=owner, limit=_SMALL)
            root_directory.write(target_fd, name, data)
        source_names = {False: set(root_directory.names(source_fd)), True: set(root_directory.names(criu_from))}
        crew, stop = _Crew(executor), mode.stop
        mode = replace(mode, stop=lambda: crew.stop_event.is_set() or stop())

        def copy_of(fact: FileFact) -> _Copy:
            inner = fact.path.startswith(f"{CRIU}/")
            name = fact.path[len(CRIU) + 1 :] if inner else fact.path
            ends = (criu_from, criu_to) if inner else (source_fd, target_fd)
            return _Copy(
                kind, fact, name, ends[0], ends[1], owner, mode, name + compression.SUFFIX in source_names[inner]
            )

        for some in _in_batches(manifest.files):
            _durably([copy_of(fact) for fact in some], crew)
        os.fsync(criu_to)
        os.fsync(target_fd)


def _in_batches(files: Iterable[FileFact]) -> Iterator[Sequence[FileFact]]:
    """Yield batches of small files, and each large one alone: its blocks are copied concurrently."""
    small: list[FileFact] = []
    for fact in files:
        if fact.size >= _DIRECT_FROM:
            yield [fact]
            continue
        small.append(fact)
        if len(small) == _TOGETHER:
            yield small
            small = []
    if small:
        yield small


def _durably(copies: Sequence[_Copy], crew: _Crew) -> None:
    """Make these copies and sync them; blocks of one file or several files are copied concurrently."""
    opened: list[int] = []
    try:
        if len(copies) == 1:
            copies[0].run(crew.each, opened)
        else:
            crew.each(lambda worker: worker.run(_in_turn, opened), copies)
        crew.each(os.fsync, opened)
    finally:
        for fd in opened:
            os.close(fd)


def shorten(manifest: Manifest, fd: int, keep: int, *, owner: int) -> None:
    """Truncate a copy to about ``keep`` bytes: whole blocks from the start, in the order in which it is made."""
    with root_directory.directory(fd, CRIU, owner=owner) as criu_fd:
        for fact in manifest.files:
            inner = fact.path.startswith(f"{CRIU}/")
            directory_fd, name = (criu_fd, fact.path[len(CRIU) + 1 :]) if inner else (fd, fact.path)
            if fact.size <= keep:
                keep -= fact.size
                continue
            blocks, keep = keep // digest.BLOCK, 0
            if blocks == 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory_fd)
                continue
            target = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
            try:
                if os.fstat(target).st_size > blocks * digest.BLOCK:
                    os.ftruncate(target, blocks * digest.BLOCK)
            finally:
                os.close(target)


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copy of one file from one directory to another."""

    kind: digest.DigestAlgorithm
    fact: FileFact
    name: str
    source_at: int
    target_at: int
    owner: int
    mode: CopyMode
    packed: bool
    """Whether the source is compressed."""

    def run(self, each: _Each, opened: list[int]) -> None:
        """Copy the file by blocks. Its descriptor is added to ``opened``; the caller syncs and closes it."""
        size, packs = self.fact.size, _packs(self.fact, self.mode)
        name, length = (
            (self.name + compression.SUFFIX, compression.packed_size(size)) if self.packed else (self.name, size)
        )
        with root_directory.file(self.source_at, name, owner=self.owner, size=length) as source:
            target = self._open(self.name + compression.SUFFIX if packs else self.name)
            opened.append(target)
            whole = compression.packed_size(size) if packs else size
            begun = os.fstat(target).st_size
            blocks = compression.blocks_begun(begun) if packs else begun // digest.BLOCK
            # Blocks are written by several threads, so the last ones before the end may have holes.
            kept_blocks = max(0, blocks - 2 * _threads()) if begun < whole else digest.count(size)
            if size >= _DIRECT_FROM and self.mode.read_direct and not self.packed:
                block_io.past_cache(source)
            if self._copy(source, target, kept_blocks, each) != self.fact.digest:
                again = kept_blocks > 0 and self._copy(source, target, 0, each) == self.fact.digest
                if not again:
                    raise ImageDamaged(f"{self.fact.path}: its contents have changed")
            _resize(target, whole)

    def _open(self, name: str) -> int:
        try:
            with root_directory.file(self.target_at, name, owner=self.owner):
                pass
        except ImageDamaged:  # part of a partial copy that a store would not accept, or missing
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.target_at)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, root_directory.FILE_MODE, dir_fd=self.target_at)
        with root_directory.closed_on_error(fd):
            os.fchmod(fd, root_directory.FILE_MODE)
        return fd

    def _copy(self, source: int, target: int, kept_blocks: int, each: _Each) -> str:
        """Copy the blocks from ``kept_blocks`` on, read those before it in place, and return the digest of all."""
        size, packs = self.fact.size, _packs(self.fact, self.mode)
        # Ranges skipped because they are zero must be holes.
        end = (
            compression.packed_size(kept_blocks * digest.BLOCK) if packs and kept_blocks else kept_blocks * digest.BLOCK
        )
        _resize(target, min(compression.packed_size(size) if packs else size, end))
        if size >= _DIRECT_FROM and not packs:
            # Kept blocks are read through the cache, by other threads, from the same descriptor.
            block_io.past_cache(target, on=self.mode.write_direct and not kept_blocks)
        digest_of = compression.block if packs else digest.block

        def transfer_block(number: int) -> bytes:
            if self.mode.stop():
                raise Stopped
            if number < kept_blocks:
                block_digest = digest_of(self.kind, target, number, size)
            else:
                block_digest = self._copy_block(source, target, number)
            if self.mode.progress is not None:
                self.mode.progress(min(size, (number + 1) * digest.BLOCK) - number * digest.BLOCK)
            return block_digest

        try:
            return self.kind.total(each(transfer_block, range(digest.count(size))))
        except EOFError:
            raise ImageDamaged(f"{self.fact.path}: is shorter than it was") from None
        except ImageDamaged as error:
            raise ImageDamaged(f"{self.fact.path}: {error}") from None

    def _copy_block(self, source: int, target: int, number: int) -> bytes:
        """Copy the parts of a block that are not zero, and return the hash of the whole block."""
        state, buffer = self.kind.new(), block_io.buffer()
        packs = _packs(self.fact, self.mode)
        begin, end = number * digest.BLOCK, min(self.fact.size, (number + 1) * digest.BLOCK)
        position = begin
        with _source_errors():
            # A compressed file has slots of whole chunks.
            ranges = [(begin, end)] if self.packed or packs else list(block_io.data_ranges(source, begin, end))
        if not ranges:
            return digest.of_zeros(self.kind, end - begin)
        for start, stop in ranges:
            digest.add_zeros(state, start - position)
            for offset in range(start, stop, block_io.CHUNK):
                length = min(block_io.CHUNK, stop - offset)
                self.mode.limiter.pass_(length, self.mode.stop)
                if self.mode.stop():
                    raise Stopped
                with _source_errors():
                    if self.packed:
                        compression.read(source, number, offset - begin, buffer.view[:length])
                    elif block_io.read_into(source, buffer, length, offset) < length:
                        raise EOFError
                state.update(buffer.view[:length])
                if packs and not buffer.zero(0, length):
                    compression.write(target, number, offset - begin, buffer.view[:length], self.mode.level)
                elif not packs:
                    for first, last in block_io.runs(buffer, length):
                        block_io.write_from(target, buffer, first, last, offset + first)
            position = stop
        digest.add_zeros(state, end - position)
        if not packs and not block_io.is_direct(target):
            block_io.start_writing(target, begin, end - begin)
        return state.digest()


def _resize(fd: int, size: int) -> None:
    """Truncate or extend a file if its size differs; a call without effect would still modify the file system."""
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
