"""Copies the files of an image from one directory to another, digesting what is written, and takes up broken copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slurm_affinode.checkpoint import digest, rootdir
from slurm_affinode.checkpoint.interface import ImageDamaged
from slurm_affinode.checkpoint.writer import CRIU, MANIFEST, SIGNATURE
from slurm_affinode.model.suspension import FileFact, Manifest

_CHUNK = 4 << 20
_SMALL = 64 << 20

Progress = Callable[[int], None]


def copy_files(
    manifest: Manifest, source_fd: int, target_fd: int, *, owner: int, progress: Progress | None = None
) -> None:
    """Copy all that the manifest lists, and the manifest itself last. All is durable then, but for the names.

    Raises ``ImageDamaged`` where the source is not what the manifest says, ``OSError`` of the target's file system.
    """
    kind = digest.named(manifest.digest)
    with (
        rootdir.directory(source_fd, CRIU, owner=owner) as criu_from,
        rootdir.directory(target_fd, CRIU, owner=owner) as criu_to,
        digest.pool() as executor,
    ):
        wanted = {fact.path for fact in manifest.files} | {MANIFEST, SIGNATURE, CRIU}
        for at, prefix in ((target_fd, ""), (criu_to, f"{CRIU}/")):
            for name in rootdir.names(at):
                if prefix + name not in wanted or name in (MANIFEST, SIGNATURE):
                    os.unlink(name, dir_fd=at)
        for fact in manifest.files:
            inner = fact.path.startswith(f"{CRIU}/")
            name = fact.path[len(CRIU) + 1 :] if inner else fact.path
            ends = (criu_from, criu_to) if inner else (source_fd, target_fd)
            _Copy(kind, fact, name, ends[0], ends[1], owner, progress).run(executor)
        for name in (MANIFEST, SIGNATURE):
            rootdir.write(target_fd, name, rootdir.read(source_fd, name, owner=owner, limit=_SMALL))
        os.fsync(criu_to)
        os.fsync(target_fd)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One file, from one directory to another."""

    kind: digest.Kind
    fact: FileFact
    name: str
    source_at: int
    target_at: int
    owner: int
    progress: Progress | None

    def run(self, executor: ThreadPoolExecutor) -> None:
        with rootdir.file(self.source_at, self.name, owner=self.owner, size=self.fact.size) as source:
            target = self._open()
            try:
                begun = os.fstat(target).st_size
                # Blocks are written by several threads, so that the last ones before the end may have holes.
                kept = max(0, begun // digest.BLOCK - 2 * digest.workers())
                if self._copy(source, target, kept, executor) != self.fact.digest:
                    again = kept > 0 and self._copy(source, target, 0, executor) == self.fact.digest
                    if not again:
                        raise ImageDamaged(f"{self.fact.path}: its contents have changed")
                os.ftruncate(target, self.fact.size)
                os.fsync(target)
            finally:
                os.close(target)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.name, flags, rootdir.FILE_MODE, dir_fd=self.target_at)
        os.fchmod(fd, rootdir.FILE_MODE)
        return fd

    def _copy(self, source: int, target: int, kept: int, executor: ThreadPoolExecutor) -> str:
        def one(number: int) -> bytes:
            if number < kept:
                made = digest.block(self.kind, target, number, self.fact.size)
            else:
                made = _copy_block(self.kind, source, target, number, self.fact.size)
            if self.progress is not None:
                self.progress(min(self.fact.size, (number + 1) * digest.BLOCK) - number * digest.BLOCK)
            return made

        try:
            return self.kind.total(executor.map(one, range(digest.count(self.fact.size))))
        except EOFError:
            raise ImageDamaged(f"{self.fact.path}: is shorter than it was") from None


def _copy_block(kind: digest.Kind, source: int, target: int, number: int, size: int) -> bytes:
    """Copy a block; the hash of what was written."""
    state = kind.new()
    at, end = number * digest.BLOCK, min(size, (number + 1) * digest.BLOCK)
    buffer = bytearray(min(_CHUNK, max(1, end - at)))
    view = memoryview(buffer)
    while at < end:
        got = os.preadv(source, [view[: min(len(buffer), end - at)]], at)
        if got == 0:
            raise EOFError
        state.update(view[:got])
        done = 0
        while done < got:
            done += os.pwrite(target, view[done:got], at + done)
        at += got
    digest.start_writing(target, number * digest.BLOCK, end - number * digest.BLOCK)
    return state.digest()
