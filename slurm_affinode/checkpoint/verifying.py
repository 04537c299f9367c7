"""Whether the files of an image are those that its manifest lists."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from slurm_affinode.checkpoint import digest, packing, rootdir
from slurm_affinode.checkpoint.blockio import is_cached, past_cache
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged, Pages, Take
from slurm_affinode.checkpoint.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.model.suspension import FileFact, Manifest

_PAGES = re.compile(rf"{CRIU}/pages-[^/]+\.img")
"""Memory of the tree: bytes that CRIU puts in their places. It finds nothing in them but the symbols of a vDSO, whose
tables it reads within their bounds."""


def same_files(fd: int, criu_fd: int, facts: Manifest) -> None:
    """No file is missing, none is there in addition. Raises ``ImageDamaged``."""
    here = {name for name in rootdir.names(fd) if name not in (CRIU, MANIFEST, SIGNATURE)}
    here |= {f"{CRIU}/{name}" for name in rootdir.names(criu_fd)}
    listed = {_form(fact, here) for fact in facts.files}
    if missing := listed - here:
        raise ImageDamaged(f"{min(missing)}: is missing")
    if extra := here - listed:
        raise ImageDamaged(f"{min(extra)}: does not belong there")


def _form(fact: FileFact, here: set[str]) -> str:
    """The name that a file has: that of its compressed form where that alone is there."""
    packed = fact.path + packing.SUFFIX
    return packed if fact.size >= packing.LEAST and fact.path not in here and packed in here else fact.path


@contextmanager
def same_contents(
    fd: int, criu_fd: int, facts: Manifest, owner: int, progress: digest.Progress | None, *, known: bool = False
) -> Iterator[Pages]:
    """Each file is a regular one, its owner's alone, of the size and digest listed.

    Within the context this is so, but for the digests of the pages: threads make them until the context is left. Both
    it and they raise ``ImageDamaged``, and ``CheckpointError`` where this node cannot make such digests or the time is
    over. ``known``: the digests are right, and are not made.
    """
    kind = digest.NOTHING if known else digest.named(facts.digest)
    pages = [fact for fact in facts.files if _PAGES.fullmatch(fact.path)]
    others = [fact for fact in facts.files if not _PAGES.fullmatch(fact.path)]
    with digest.pool() as executor, ThreadPoolExecutor(1, thread_name_prefix="verify") as ahead:
        packed = {at: {name for name in rootdir.names(at) if name.endswith(packing.SUFFIX)} for at in (fd, criu_fd)}
        files = _Files(fd, criu_fd, packed, kind, owner, executor)
        for fact in pages:
            with files.opened(fact):
                pass
        if not known:
            files.verify(others, progress)
        try:
            yield _Pages(partial(ahead.submit, files.verify, pages, progress), known, facts.files, kind)
        finally:
            files.stop.set()


class _Pages:
    """Of an image."""

    def __init__(
        self, verify: Callable[[Take | None], Future[None]], known: bool, facts: Sequence[FileFact], kind: digest.Kind
    ) -> None:
        self._verify, self._known = verify, known
        self._facts, self._kind = {fact.path: fact for fact in facts}, kind
        self._under_way: Future[None] | None = None

    def begin(self, take: Take | None = None) -> None:
        """As ``Pages.begin``."""
        if self._under_way is None and (take is not None or not self._known):
            self._under_way = self._verify(take)

    def sound(self, timeout_s: float | None = None) -> None:
        """As ``Pages.sound``."""
        self.begin()
        if self._under_way is None:
            return
        if not wait([self._under_way], timeout_s).done:
            raise CheckpointError("could not be verified in time")
        self._under_way.result()

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """As ``Pages.check``."""
        fact = self._facts.get(path)
        if fact is None:
            raise ImageDamaged(f"{path}: does not belong there")

        def within() -> Iterator[memoryview]:
            """The blocks, up to the size of the file: another machine may make it grow for as long as it is read."""
            read = 0
            for block in blocks:
                read += len(block)
                if read > fact.size:
                    raise ImageDamaged(f"{path}: its contents have changed")
                yield block

        found = self._kind.of_blocks(within())
        if self._kind is not digest.NOTHING and found != fact.digest:
            raise ImageDamaged(f"{path}: its contents have changed")


class _Stopped(Exception):  # noqa: N818 - not a failure
    """Nobody waits for the digests any more."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Of one image, being verified."""

    fd: int
    criu_fd: int
    packed: Mapping[int, set[str]]
    """Names of compressed files in either directory."""
    kind: digest.Kind
    owner: int
    executor: ThreadPoolExecutor
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: blocks that no thread has begun are left."""

    def verify(self, facts: Sequence[FileFact], progress: digest.Progress | None, take: Take | None = None) -> None:
        """Raises ``ImageDamaged``, and ``EOFError`` and ``OSError`` of a file that cannot be read to its end."""
        readings = (self._reading(fact, take) for fact in facts)
        with closing(digest.of_files(self.kind, readings, progress)) as made:
            for fact, found in zip(facts, made, strict=True):
                if found != fact.digest and self.kind is not digest.NOTHING:
                    raise ImageDamaged(f"{fact.path}: its contents have changed")

    @contextmanager
    def opened(self, fact: FileFact) -> Iterator[tuple[int, bool]]:
        """A file, as it is or in its compressed form (true)."""
        at, name = (self.criu_fd, fact.path[len(CRIU) + 1 :]) if "/" in fact.path else (self.fd, fact.path)
        packed = fact.size >= packing.LEAST and name + packing.SUFFIX in self.packed[at]
        size = packing.packed_size(fact.size) if packed else fact.size
        with rootdir.file(at, name + packing.SUFFIX if packed else name, owner=self.owner, size=size) as opened:
            yield opened, packed

    @contextmanager
    def _reading(self, fact: FileFact, take: Take | None) -> Iterator[digest.Reading]:
        with self.opened(fact) as (opened, packed):
            # Each byte is read once, so the page cache would only cost time and memory; CRIU by itself reads it again.
            if take is not None and not packed and not is_cached(opened, fact.size):
                past_cache(opened)
            piece = None if take is None else partial(take, fact.path.rpartition("/")[2])
            numbers = range(digest.count(fact.size))
            yield digest.Reading(
                fact.size, [self.executor.submit(self._block, opened, packed, n, fact.size, piece) for n in numbers]
            )

    def _block(self, opened: int, packed: bool, number: int, size: int, piece: digest.Piece | None) -> bytes:
        if self.stop.is_set():
            raise _Stopped
        return (packing.block if packed else digest.block)(self.kind, opened, number, size, piece)


@dataclass(frozen=True, slots=True)
class NamedPages:
    """``Pages`` that say of which image they are."""

    pages: Pages
    label: str

    def begin(self, take: Take | None = None) -> None:
        """As ``Pages.begin``."""
        self.pages.begin(take)

    def sound(self, timeout_s: float | None = None) -> None:
        """As ``Pages.sound``."""
        with named(self.label):
            self.pages.sound(timeout_s)

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """As ``Pages.check``."""
        with named(self.label):
            self.pages.check(path, blocks)


@contextmanager
def named(label: str) -> Iterator[None]:
    """What is wrong with an image, said with its name."""
    try:
        yield
    except (FileNotFoundError, EOFError):
        raise ImageDamaged(f"{label}: is not complete") from None
    except OSError as error:
        raise ImageDamaged(f"{label}: cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise type(error)(f"{label}: {error}", hint=error.hint) from None
