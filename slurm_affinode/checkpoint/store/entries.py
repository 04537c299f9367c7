"""Entries of a store: ``CLUSTER.JOBID`` directories owned by root, with the entries of the job's images.

    SEQ          a complete image
    SEQ.tmp      an image that is being written, or a partial copy
    SEQ.N.bad    an image that was set aside
    SEQ.N.gone   an image that is being removed

An entry is read only with a manifest that was signed for it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import manifest
from slurm_affinode.checkpoint.image.writer import MANIFEST, SIGNATURE, TMP, locked
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, NoRoom
from slurm_affinode.model.suspension import Manifest

JOB = re.compile(r"(?P<cluster>[A-Za-z0-9_-]{1,64})\.(?P<job>[1-9]\d{0,9})")
BAD = ".bad"
GONE = ".gone"
_SEQ = re.compile(r"([0-9]{4,9})(\..*)?", re.DOTALL)
_MANIFEST_LIMIT = 64 << 20
_Stamp = list[tuple[int, int, int, int]]


def number(entry: str) -> int | None:
    """Return the sequence number of an entry's image: at least four digits, more after 10,000 suspensions."""
    match = _SEQ.fullmatch(entry)
    return None if match is None else int(match[1])


class Entries:
    """The entries of one store."""

    def __init__(self, path: Path, key: bytes, *, owner: int, create: bool) -> None:
        """``key``: for signatures. ``owner``: required owner of all entries. Raises ``CheckpointError``."""
        self.path = path
        self._key = key
        self.owner = owner
        self.top = root_directory.open_top(path, owner=owner, create=create)
        facts = os.fstat(self.top)
        self.place = facts.st_dev, facts.st_ino
        """Identity of the directory, whatever its path."""
        self._sizes: dict[tuple[str, int], tuple[_Stamp, int, int]] = {}

    def close(self) -> None:
        """Close the directory."""
        if self.top >= 0:
            os.close(self.top)
            self.top = -1

    def mounted(self) -> None:
        """Raise ``NoRoom`` if the path is no longer the opened directory (unmounted, replaced) or is read-only."""
        try:
            now, then, whole = self.path.lstat(), os.fstat(self.top), os.fstatvfs(self.top)
        except OSError as error:
            raise NoRoom(f"{self.path}: no longer exists: {error.strerror}") from None
        if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
            raise NoRoom(f"{self.path}: is not the file system with which the agent was started")
        if whole.f_flag & os.ST_RDONLY:
            raise NoRoom(f"{self.path}: is read-only")

    # --- jobs

    def jobs(self) -> list[str]:
        """Return the names of the jobs' directories."""
        return [name for name in root_directory.names(self.top) if JOB.fullmatch(name)]

    @contextmanager
    def job(self, name: str) -> Iterator[int | None]:
        """Open a job's directory; ``None`` if there is none. Raises ``ImageDamaged`` if another user owns it."""
        if not JOB.fullmatch(name):
            raise ImageDamaged(f"{name!r} is not the name of a job in a store")
        try:
            fd = root_directory.open_directory(self.top, name, owner=self.owner)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def make_job(self, name: str) -> int:
        """Open a job's directory, creating it if needed; the caller closes it. Raises ``NoRoom``."""
        try:
            root_directory.make_directory(self.top, name)
            return root_directory.open_directory(self.top, name, owner=self.owner)
        except OSError as error:
            raise NoRoom(f"{self.path}: nothing can be written: {error.strerror}") from None

    # --- images

    @staticmethod
    def complete(job_fd: int) -> list[int]:
        """Return the sequence numbers of a job's complete images, oldest first."""
        return sorted(
            int(name) for name in root_directory.names(job_fd) if number(name) is not None and name.isdecimal()
        )

    @staticmethod
    def next(job_fd: int) -> int:
        """Return the number after the highest one in the directory, complete or not."""
        return max((seq + 1 for name in root_directory.names(job_fd) if (seq := number(name)) is not None), default=1)

    def image(self, job_fd: int, name: str, seq: int) -> Image:
        """Return a complete image. Raises ``ImageDamaged``, also if it does not exist."""
        manifest_, signer = self._signed(job_fd, name, f"{seq:04d}")
        return Image(manifest_, str(self.path), former=signer is None)

    def manifest(self, job_fd: int, name: str, entry: str) -> Manifest:
        """Return the manifest in an entry of job ``name``. Raises ``ImageDamaged`` unless signed for this entry."""
        return self._signed(job_fd, name, entry)[0]

    def _signed(self, job_fd: int, name: str, entry: str) -> tuple[Manifest, str | None]:
        """Return the manifest and the node that signed it."""
        seq = number(entry)
        if seq is None:
            raise ImageDamaged(f"{name}/{entry}: is not the name of an image")
        label = f"{name}/{seq:04d}"
        try:
            with root_directory.directory(job_fd, entry, owner=self.owner) as fd:
                data = root_directory.read(fd, MANIFEST, owner=self.owner, limit=_MANIFEST_LIMIT)
                signature = root_directory.read(fd, SIGNATURE, owner=self.owner, limit=4096)
            decoded = manifest.decode(data, signature, self._key)
        except FileNotFoundError:
            raise ImageDamaged(f"{label}: does not exist") from None
        except ImageDamaged as error:
            raise type(error)(f"{label}: {error}") from None
        if (decoded.key.name, decoded.seq) != (name, seq):
            raise ImageDamaged(f"{label}: is the image {decoded.key.name}/{decoded.seq:04d}, put elsewhere")
        return decoded, manifest.signer(signature)

    def images(self) -> Iterator[Image | ImageDamaged]:
        """Yield all complete images, and an error for each that is damaged or cannot be read."""
        try:
            jobs = self.jobs()
        except OSError as error:
            yield ImageDamaged(f"{self.path}: cannot be read: {error.strerror}")
            return
        for name in jobs:
            try:
                with self.job(name) as job_fd:
                    if job_fd is not None:
                        yield from self._job_entries(job_fd, name)
            except ImageDamaged as error:
                yield error
            except OSError as error:
                yield ImageDamaged(f"{name}: cannot be read: {error.strerror}")

    def _job_entries(self, job_fd: int, name: str) -> Iterator[Image | ImageDamaged]:
        for seq in self.complete(job_fd):
            try:
                yield self.image(job_fd, name, seq)
            except ImageDamaged as error:
                yield error

    def sizes(self) -> list[tuple[int, int]]:
        """Return user and bytes of every valid image. A manifest is read again only if it has changed.

        Raises ``OSError`` if the directory cannot be read.
        """
        known_sizes = self._sizes
        stamps: dict[tuple[str, int], tuple[_Stamp, int, int]] = {}
        for name in self.jobs():
            with suppress(ImageDamaged, OSError), self.job(name) as job_fd:
                if job_fd is None:
                    continue
                for seq in self.complete(job_fd):
                    with suppress(ImageDamaged, OSError):
                        stamp = _stamp(job_fd, f"{seq:04d}")
                        entry_size = known_sizes.get((name, seq))
                        if entry_size is None or entry_size[0] != stamp:
                            facts = self.manifest(job_fd, name, f"{seq:04d}")
                            entry_size = stamp, facts.uid, facts.size
                        stamps[name, seq] = entry_size
        self._sizes = stamps
        return [(uid, size) for _, uid, size in stamps.values()]

    def begun(self, *, growing: bool = False) -> Iterator[tuple[Manifest, int]]:
        """Yield partial copies and the bytes present. ``growing``: including those being written."""
        for name, job_fd, entry in self._ending(TMP):
            if growing or not locked(job_fd, entry):
                with suppress(ImageDamaged, OSError, ValueError):
                    facts = self.manifest(job_fd, name, entry)
                    with root_directory.directory(job_fd, entry, owner=self.owner) as fd:
                        held_bytes = root_directory.size_of(fd)
                    yield facts, held_bytes

    def aside(self) -> Iterator[str]:
        """Return the entries that were set aside: ``CLUSTER.JOBID/SEQ.N.bad``."""
        return (f"{name}/{entry}" for name, _, entry in self._ending(BAD))

    def _ending(self, suffix: str) -> Iterator[tuple[str, int, str]]:
        """Yield readable entries with this suffix: name and directory of the job, name of the entry."""
        names: list[str] = []
        with suppress(OSError):
            names = self.jobs()
        for name in names:
            with suppress(ImageDamaged, OSError), self.job(name) as job_fd:
                if job_fd is not None:
                    for entry in root_directory.names(job_fd):
                        if entry.endswith(suffix):
                            yield name, job_fd, entry

    # --- removing

    def remove(self, name: str, *entries: str) -> None:
        """Remove entries of a job; they disappear at once. Missing entries are ignored.

        Raises ``CheckpointError`` if one is being written.
        """
        with self.job(name) as job_fd:
            if job_fd is None:
                return
            for entry in entries:
                if entry.endswith(TMP) and locked(job_fd, entry):
                    raise CheckpointError(f"{name}/{entry}: is being written")
                self.drop(job_fd, entry)
        self.tidy(name)

    def tidy(self, name: str) -> None:
        """Remove a job's directory if it is empty."""
        with suppress(OSError):
            os.rmdir(name, dir_fd=self.top)

    @staticmethod
    def set_aside(job_fd: int, entry: str) -> None:
        """Rename an entry so that it is kept but no longer used."""
        with suppress(FileNotFoundError):
            _rename(job_fd, entry, f"{entry}.{time.monotonic_ns()}{BAD}")

    @staticmethod
    def drop(job_fd: int, entry: str) -> None:
        """Remove an entry, whatever its type."""
        gone = f"{entry}.{time.monotonic_ns()}{GONE}"
        try:
            _rename(job_fd, entry, gone)
        except FileNotFoundError:
            return
        try:
            shutil.rmtree(gone, dir_fd=job_fd)
        except NotADirectoryError:
            os.unlink(gone, dir_fd=job_fd)
        except OSError:  # a link, which rmtree does not follow, or another process is removing it
            with suppress(OSError):
                os.unlink(gone, dir_fd=job_fd)

    @staticmethod
    def uncomplete(job_fd: int, entry: str) -> None:
        """Turn a complete image into a partial one."""
        with suppress(FileNotFoundError):
            _rename(job_fd, entry, entry + TMP)


def _stamp(job_fd: int, entry: str) -> _Stamp:
    """Return a value that changes if one of the two files is replaced or written to. Raises ``OSError``."""
    each = [os.stat(f"{entry}/{name}", dir_fd=job_fd, follow_symlinks=False) for name in (MANIFEST, SIGNATURE)]
    return [(facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns) for facts in each]


def _rename(job_fd: int, entry: str, to: str) -> None:
    os.rename(entry, to, src_dir_fd=job_fd, dst_dir_fd=job_fd)
    os.fsync(job_fd)
