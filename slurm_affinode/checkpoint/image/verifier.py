"""Verify the files of a checkpoint image against its manifest."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from slurm_affinode.base.threads import pool
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import compression, digest
from slurm_affinode.checkpoint.image.block_io import is_cached, past_cache
from slurm_affinode.checkpoint.image.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged, Pages, Take
from slurm_affinode.model.suspension import FileFact, Manifest

_PAGES = re.compile(rf"{CRIU}/pages-[^/]+\.img")
"""Memory of the process tree, which CRIU copies without interpreting it, except for the symbol tables of a vDSO, which
it reads with bounds checks."""


def same_files(fd: int, criu_fd: int, facts: Manifest) -> None:
    """Check that no file is missing and that there is no extra file. Raises ``ImageDamaged``."""
    present = {name for name in root_directory.names(fd) if name not in (CRIU, MANIFEST, SIGNATURE)}
    present |= {f"{CRIU}/{name}" for name in root_directory.names(criu_fd)}
    listed_files = {_form(fact, present) for fact in facts.files}
    if missing := listed_files - present:
        raise ImageDamaged(f"{min(missing)}: is missing")
    if extra := present - listed_files:
        raise ImageDamaged(f"{min(extra)}: does not belong there")


def _form(fact: FileFact, present: set[str]) -> str:
    """Return the name of a file in the store: the compressed file if only that exists."""
    packed = fact.path + compression.SUFFIX
    return packed if fact.size >= compression.LEAST and fact.path not in present and packed in present else fact.path


@contextmanager
def same_contents(
    fd: int, criu_fd: int, facts: Manifest, owner: int, progress: digest.Progress | None, *, is_known: bool = False
) -> Iterator[Pages]:
    """Check that each file is a regular file, private to its owner, with the size and digest in the manifest.

    All of this is checked on entry, except for the digests of the pages, which threads verify until the context is
    left. Both the context and the pages raise ``ImageDamaged``, or ``CheckpointError`` if this node does not support
    the digest or on timeout. ``is_known``: the digests are known to be correct and are not computed.
    """
    kind = digest.NO_DIGEST if is_known else digest.named(facts.digest)
    pages = [fact for fact in facts.files if _PAGES.fullmatch(fact.path)]
    other_facts = [fact for fact in facts.files if not _PAGES.fullmatch(fact.path)]
    with digest.pool() as executor, pool("verify", 1) as ahead:
        packed = {
            directory_fd: {name for name in root_directory.names(directory_fd) if name.endswith(compression.SUFFIX)}
            for directory_fd in (fd, criu_fd)
        }
        files = _Files(fd, criu_fd, packed, kind, owner, executor)
        for fact in pages:
            with files.opened(fact):
                pass
        if not is_known:
            files.verify(other_facts, progress)
        try:
            yield _Pages(partial(ahead.submit, files.verify, pages, progress), is_known, facts.files, kind)
        finally:
            files.stop.set()


def small_file(
    directory_fd: int, name: str, facts: Manifest, owner: int, limit: int, *, of_criu: bool = True
) -> bytes:  # fmt: skip
    """Return a file of CRIU's directory, or of the image's own, with the contents that the manifest lists.

    Raises ``ImageDamaged``, and ``CheckpointError`` if this node does not support the digest.
    """
    path = f"{CRIU}/{name}" if of_criu else name
    expected = {fact.path: fact.digest for fact in facts.files}
    if path not in expected:
        raise ImageDamaged(f"{path}: does not belong there")
    data = memoryview(root_directory.read(directory_fd, name, owner=owner, limit=limit))
    blocks = (data[offset : offset + digest.BLOCK] for offset in range(0, len(data), digest.BLOCK))
    if digest.named(facts.digest).of_blocks(blocks) != expected[path]:
        raise ImageDamaged(f"{path}: its contents have changed")
    return bytes(data)


class _Pages:
    """Implementation of ``Pages``."""

    def __init__(
        self,
        verify: Callable[[Take | None], Future[None]],
        is_known: bool,
        facts: Sequence[FileFact],
        kind: digest.DigestAlgorithm,
    ) -> None:
        self._verify, self._is_known = verify, is_known
        self._facts, self._kind = {fact.path: fact for fact in facts}, kind
        self._under_way: Future[None] | None = None

    def begin(self, take: Take | None = None) -> None:
        """See ``Pages.begin``."""
        if self._under_way is None and (take is not None or not self._is_known):
            self._under_way = self._verify(take)

    def sound(self, timeout_s: float | None = None) -> None:
        """See ``Pages.sound``."""
        self.begin()
        if self._under_way is None:
            return
        if not wait([self._under_way], timeout_s).done:
            raise CheckpointError("could not be verified in time")
        self._under_way.result()

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """See ``Pages.check``."""
        fact = self._facts.get(path)
        if fact is None:
            raise ImageDamaged(f"{path}: does not belong there")

        def within() -> Iterator[memoryview]:
            """Limit the blocks to the size of the file, which another machine could extend without end."""
            read = 0
            for block in blocks:
                read += len(block)
                if read > fact.size:
                    raise ImageDamaged(f"{path}: its contents have changed")
                yield block

        actual = self._kind.of_blocks(within())
        if self._kind is not digest.NO_DIGEST and actual != fact.digest:
            raise ImageDamaged(f"{path}: its contents have changed")


class _Stopped(Exception):  # noqa: N818 - not a failure
    """The digests are no longer needed."""


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one image during verification."""

    fd: int
    criu_fd: int
    packed: Mapping[int, set[str]]
    """Directory descriptor -> names of the compressed files in it."""
    kind: digest.DigestAlgorithm
    owner: int
    executor: Executor
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to skip the blocks that no thread has started."""

    def verify(self, facts: Sequence[FileFact], progress: digest.Progress | None, take: Take | None = None) -> None:
        """Verify digests. Raises ``ImageDamaged``, and ``EOFError`` or ``OSError`` if a file cannot be read in full."""
        readings = (self._reading(fact, take) for fact in facts)
        with closing(digest.of_files(self.kind, readings, progress)) as digests:
            for fact, actual in zip(facts, digests, strict=True):
                if actual != fact.digest and self.kind is not digest.NO_DIGEST:
                    raise ImageDamaged(f"{fact.path}: its contents have changed")

    @contextmanager
    def opened(self, fact: FileFact) -> Iterator[tuple[int, bool]]:
        """Open a file. Yield the descriptor and whether the file is compressed."""
        directory_fd, name = (self.criu_fd, fact.path[len(CRIU) + 1 :]) if "/" in fact.path else (self.fd, fact.path)
        packed = fact.size >= compression.LEAST and name + compression.SUFFIX in self.packed[directory_fd]
        size = compression.packed_size(fact.size) if packed else fact.size
        with root_directory.file(
            directory_fd, name + compression.SUFFIX if packed else name, owner=self.owner, size=size
        ) as opened:
            yield opened, packed

    @contextmanager
    def _reading(self, fact: FileFact, take: Take | None) -> Iterator[digest.FileDigest]:
        with self.opened(fact) as (opened, packed):
            # Each byte is read only once, so bypass the page cache. Without ``take``, CRIU reads the file again.
            if take is not None and not packed and not is_cached(opened, fact.size):
                past_cache(opened)
            piece = None if take is None else partial(take, fact.path.rpartition("/")[2])
            numbers = range(digest.count(fact.size))
            yield digest.FileDigest(
                fact.size, [self.executor.submit(self._block, opened, packed, n, fact.size, piece) for n in numbers]
            )

    def _block(self, opened: int, packed: bool, number: int, size: int, piece: digest.Piece | None) -> bytes:
        if self.stop.is_set():
            raise _Stopped
        return (compression.block if packed else digest.block)(self.kind, opened, number, size, piece)


@dataclass(frozen=True, slots=True)
class NamedPages:
    """``Pages`` with the name of the image added to errors."""

    pages: Pages
    label: str

    def begin(self, take: Take | None = None) -> None:
        """See ``Pages.begin``."""
        self.pages.begin(take)

    def sound(self, timeout_s: float | None = None) -> None:
        """See ``Pages.sound``."""
        with named(self.label):
            self.pages.sound(timeout_s)

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """See ``Pages.check``."""
        with named(self.label):
            self.pages.check(path, blocks)


@contextmanager
def named(label: str) -> Iterator[None]:
    """Convert errors within the context to checkpoint errors that name the image."""
    try:
        yield
    except (FileNotFoundError, EOFError):
        raise ImageDamaged(f"{label}: is not complete") from None
    except OSError as error:
        raise ImageDamaged(f"{label}: cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise type(error)(f"{label}: {error}", hint=error.hint) from None
