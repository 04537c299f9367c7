"""Copies the files of an image from one directory to another, digesting what is written, and takes up begun copies.

The only way in which image data moves between tiers. A copy has the signed manifest from its beginning, so that what
was begun can be told from a broken dump, and its files are verified block by block as they pass.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from slurm_affinode.checkpoint import blockio, digest, packing, rootdir, writeback
from slurm_affinode.checkpoint.interface import ImageDamaged
from slurm_affinode.checkpoint.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.model.suspension import FileFact, Manifest

_SMALL = 64 << 20
_DIRECT_FROM = 1 << 20
_TOGETHER = 64
"""Small files that are written before the first of them is waited for: the disk then has them at once."""
_ZEROS = memoryview(bytes(1 << 20))

Progress = Callable[[int], None]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class How:
    """How data moves."""

    limiter: blockio.Limiter
    read_direct: bool = False
    """Read past the page cache: what is brought to host memory, or from a slow tier, is not read again there."""
    write_direct: bool = False
    """Write past the page cache, where the target's file system lets us."""
    level: int = 0
    """Of zstd, for the target; 0: it is not compressed."""
    progress: Progress | None = None
    stop: Callable[[], bool] = lambda: False
    """Looked at between blocks; the copy is then left as it is, to be taken up."""


def _packs(fact: FileFact, how: How) -> bool:
    return how.level > 0 and fact.size >= packing.LEAST


def _threads() -> int:
    """Blocks under way at once: a device wants some to be as fast as it can be, also while others are digested."""
    return max(4, digest.workers())


class Stopped(Exception):  # noqa: N818 - not a failure
    """A copy was asked to stop."""


class _Each(Protocol):
    """What a function makes of each of some things, in their order."""

    def __call__(self, do: Callable[[T], R], things: Iterable[T], /) -> list[R]:
        """Raises what the function raises."""
        ...


def _in_turn(do: Callable[[T], R], things: Iterable[T], /) -> list[R]:
    return [do(one) for one in things]


class _Crew:
    """The threads of one copy. Where one of them fails, the others stop."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._why: list[BaseException] = []
        self.over = threading.Event()

    def each(self, do: Callable[[T], R], things: Iterable[T], /) -> list[R]:
        """As ``_Each``, at the same time. Returns and raises when no thread is at it any more: the numbers of its files
        are then those of others.
        """

        def one(thing: T) -> R:
            try:
                return do(thing)
            except BaseException as error:
                self._why.append(error)
                self.over.set()
                raise

        under_way = [self._executor.submit(one, thing) for thing in things]
        try:
            wait(under_way, return_when=FIRST_EXCEPTION)
        except BaseException:
            self.over.set()
            raise
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)
        if self._why:
            raise self._why[0]
        return [future.result() for future in under_way]


@contextlib.contextmanager
def _of_source() -> Iterator[None]:
    """An error of the file system that is read from: not that of the target, which has others of the same class."""
    try:
        yield
    except OSError as error:
        raise ImageDamaged(f"cannot be read: {error.strerror}") from None


def copy_files(manifest: Manifest, source_fd: int, target_fd: int, *, owner: int, how: How) -> None:
    """Copy all that the manifest lists. All is durable then, but for the names.

    Raises ``ImageDamaged`` where the source is not what the manifest says, ``OSError`` of the target's file system,
    ``Stopped``.
    """
    kind = digest.named(manifest.digest)
    with (
        rootdir.directory(source_fd, CRIU, owner=owner) as criu_from,
        rootdir.directory(target_fd, CRIU, owner=owner) as criu_to,
        ThreadPoolExecutor(_threads(), thread_name_prefix="copy") as executor,
    ):
        wanted = {fact.path + (packing.SUFFIX if _packs(fact, how) else "") for fact in manifest.files} | {CRIU}
        for at, prefix in ((target_fd, ""), (criu_to, f"{CRIU}/")):
            for name in rootdir.names(at):
                if prefix + name not in wanted:
                    os.unlink(name, dir_fd=at)
        for name in (MANIFEST, SIGNATURE):
            with _of_source():
                data = rootdir.read(source_fd, name, owner=owner, limit=_SMALL)
            rootdir.write(target_fd, name, data)
        there = {False: set(rootdir.names(source_fd)), True: set(rootdir.names(criu_from))}
        crew, asked = _Crew(executor), how.stop
        how = replace(how, stop=lambda: crew.over.is_set() or asked())

        def copy_of(fact: FileFact) -> _Copy:
            inner = fact.path.startswith(f"{CRIU}/")
            name = fact.path[len(CRIU) + 1 :] if inner else fact.path
            ends = (criu_from, criu_to) if inner else (source_fd, target_fd)
            return _Copy(kind, fact, name, ends[0], ends[1], owner, how, name + packing.SUFFIX in there[inner])

        for some in _in_batches(manifest.files):
            _durably([copy_of(fact) for fact in some], crew)
        os.fsync(criu_to)
        os.fsync(target_fd)


def _in_batches(files: Iterable[FileFact]) -> Iterator[Sequence[FileFact]]:
    """Many small ones together; a large one, of which many blocks are under way, alone."""
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
    """Make these copies, the blocks of one or several files at the same time."""
    opened: list[int] = []
    try:
        if len(copies) == 1:
            copies[0].run(crew.each, opened)
        else:
            crew.each(lambda one: one.run(_in_turn, opened), copies)
        crew.each(os.fsync, opened)
    finally:
        for fd in opened:
            os.close(fd)


def shorten(manifest: Manifest, fd: int, keep: int, *, owner: int) -> None:
    """Leave about ``keep`` bytes of a copy: whole blocks from its beginning, in the order in which it is made."""
    with rootdir.directory(fd, CRIU, owner=owner) as criu_fd:
        for fact in manifest.files:
            inner = fact.path.startswith(f"{CRIU}/")
            at, name = (criu_fd, fact.path[len(CRIU) + 1 :]) if inner else (fd, fact.path)
            if fact.size <= keep:
                keep -= fact.size
                continue
            blocks, keep = keep // digest.BLOCK, 0
            if blocks == 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=at)
                continue
            target = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            try:
                if os.fstat(target).st_size > blocks * digest.BLOCK:
                    os.ftruncate(target, blocks * digest.BLOCK)
            finally:
                os.close(target)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One file, from one directory to another."""

    kind: digest.Kind
    fact: FileFact
    name: str
    source_at: int
    target_at: int
    owner: int
    how: How
    packed: bool
    """The source is."""

    def run(self, each: _Each, opened: list[int]) -> None:
        """Copy it by blocks. Its descriptor goes to ``opened``: whoever asks makes it durable, and closes it."""
        size, packs = self.fact.size, _packs(self.fact, self.how)
        name, length = (self.name + packing.SUFFIX, packing.packed_size(size)) if self.packed else (self.name, size)
        with rootdir.file(self.source_at, name, owner=self.owner, size=length) as source:
            target = self._open(self.name + packing.SUFFIX if packs else self.name)
            opened.append(target)
            whole = packing.packed_size(size) if packs else size
            begun = os.fstat(target).st_size
            blocks = packing.blocks_begun(begun) if packs else begun // digest.BLOCK
            # Blocks are written by several threads, so that the last ones before the end may have holes.
            kept = max(0, blocks - 2 * _threads()) if begun < whole else digest.count(size)
            if size >= _DIRECT_FROM and self.how.read_direct and not self.packed:
                blockio.past_cache(source)
            if self._copy(source, target, kept, each) != self.fact.digest:
                again = kept > 0 and self._copy(source, target, 0, each) == self.fact.digest
                if not again:
                    raise ImageDamaged(f"{self.fact.path}: its contents have changed")
            _resize(target, whole)

    def _open(self, name: str) -> int:
        try:
            with rootdir.file(self.target_at, name, owner=self.owner):
                pass
        except ImageDamaged:  # of a begun copy, and nothing that a store takes; or there is none
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.target_at)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, rootdir.FILE_MODE, dir_fd=self.target_at)
        with rootdir.closed_on_error(fd):
            os.fchmod(fd, rootdir.FILE_MODE)
        return fd

    def _copy(self, source: int, target: int, kept: int, each: _Each) -> str:
        """Blocks from ``kept`` on are copied, those before it read where they are; the digest of all."""
        size, packs = self.fact.size, _packs(self.fact, self.how)
        # What is left out because it is 0 has to be a hole.
        end = packing.packed_size(kept * digest.BLOCK) if packs and kept else kept * digest.BLOCK
        _resize(target, min(packing.packed_size(size) if packs else size, end))
        if size >= _DIRECT_FROM and not packs:
            # What is kept is read through the cache, by other threads, from the same descriptor.
            blockio.past_cache(target, on=self.how.write_direct and not kept)
        digest_of = packing.block if packs else digest.block

        def one(number: int) -> bytes:
            if self.how.stop():
                raise Stopped
            if number < kept:
                made = digest_of(self.kind, target, number, size)
            else:
                made = self._copy_block(source, target, number)
            if self.how.progress is not None:
                self.how.progress(min(size, (number + 1) * digest.BLOCK) - number * digest.BLOCK)
            return made

        try:
            return self.kind.total(each(one, range(digest.count(size))))
        except EOFError:
            raise ImageDamaged(f"{self.fact.path}: is shorter than it was") from None
        except ImageDamaged as error:
            raise ImageDamaged(f"{self.fact.path}: {error}") from None

    def _copy_block(self, source: int, target: int, number: int) -> bytes:
        """Copy what is not 0 of a block; the hash of all of it."""
        state, buffer = self.kind.new(), blockio.buffer()
        packs = _packs(self.fact, self.how)
        begin, end = number * digest.BLOCK, min(self.fact.size, (number + 1) * digest.BLOCK)
        done = begin
        with _of_source():
            # Slots of a packed file are of whole chunks.
            ranges = [(begin, end)] if self.packed or packs else list(blockio.data_ranges(source, begin, end))
        for start, stop in ranges:
            _add_zeros(state, start - done)
            for at in range(start, stop, blockio.CHUNK):
                length = min(blockio.CHUNK, stop - at)
                self.how.limiter.pass_(length, self.how.stop)
                if self.how.stop():
                    raise Stopped
                with _of_source():
                    if self.packed:
                        packing.read(source, number, at - begin, buffer.view[:length])
                    elif blockio.read_into(source, buffer, length, at) < length:
                        raise EOFError
                state.update(buffer.view[:length])
                if packs and not buffer.zero(0, length):
                    packing.write(target, number, at - begin, buffer.view[:length], self.how.level)
                elif not packs:
                    for first, last in blockio.runs(buffer, length):
                        blockio.write_from(target, buffer, first, last, at + first)
            done = stop
        _add_zeros(state, end - done)
        if not packs and not blockio.is_direct(target):
            writeback.start_writing(target, begin, end - begin)
        return state.digest()


def _resize(fd: int, size: int) -> None:
    """Cut or extend a file, where it has another size: a change of the file system, also where nothing changes."""
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)


def _add_zeros(state: digest.Hash, count: int) -> None:
    while count > 0:
        state.update(_ZEROS[: min(count, len(_ZEROS))])
        count -= len(_ZEROS)
