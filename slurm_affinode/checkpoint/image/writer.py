"""Writer for checkpoint images: written as ``SEQ.tmp``, locked, and renamed to ``SEQ`` when durable."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import digest, manifest
from slurm_affinode.checkpoint.image.block_io import Writeback
from slurm_affinode.checkpoint.interface import CheckpointError, Image, NoRoom
from slurm_affinode.model.suspension import FileFact, Manifest

CRIU = "criu"
MANIFEST = "manifest.json"
SIGNATURE = "manifest.hmac"
TMP = ".tmp"
_COPY = 4 << 20
_READ_S = 30.0
_PROGRESS_S = 1.0
"""Time to wait for the lock, which ``locked`` takes for a moment in other processes."""
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Place:
    """Destination of a writer."""

    job_fd: int
    """Descriptor of the job's directory in the store; the writer closes it."""
    store: str
    owner: int
    key: bytes
    on_close: Callable[[], None]
    """Called when the writer is closed, whether the image is complete or not."""


def begin_directory(job_fd: int, seq: int, *, owner: int, fresh: bool) -> tuple[int, int]:
    """Create or open ``SEQ.tmp`` and ``SEQ.tmp/criu``, lock the latter, and return both descriptors.

    ``fresh``: ``SEQ.tmp`` must not exist. The lock shows that the image is being written. It is held until the last
    process with the descriptor has ended, which may be a CRIU that has outlived its agent. Some file systems (NFS)
    cannot lock directories.
    """
    name = f"{seq:04d}{TMP}"
    if fresh:
        os.mkdir(name, root_directory.DIR_MODE, dir_fd=job_fd)
    else:
        root_directory.make_directory(job_fd, name)
    fd = root_directory.open_directory(job_fd, name, owner=owner)
    try:
        root_directory.make_directory(fd, CRIU)
        criu_fd = root_directory.open_directory(fd, CRIU, owner=owner)
    except BaseException:
        os.close(fd)
        if fresh:
            with suppress(OSError):
                os.rmdir(name, dir_fd=job_fd)
        raise
    deadline = time.monotonic() + _PROGRESS_S
    while not lock(criu_fd):
        if time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            continue
        os.close(criu_fd)
        os.close(fd)
        raise CheckpointError(f"{name}: another process is writing this image")
    return fd, criu_fd


def lock(fd: int) -> bool:
    """Lock a directory. Return ``False`` if it is locked elsewhere; ``True`` also if it cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def locked(job_fd: int, name: str) -> bool:
    """Return whether the image ``name`` is being written."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=job_fd)
    except OSError:
        return False
    try:
        criu_fd = os.open(CRIU, flags, dir_fd=fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    try:
        return not lock(criu_fd)
    finally:
        os.close(criu_fd)


class ImageWriter:
    """A checkpoint image being written, invisible to readers. Leaving the context without ``commit`` deletes it."""

    def __init__(self, place: Place, seq: int, fds: tuple[int, int]) -> None:
        """``fds``: the descriptors from ``begin_directory``."""
        self.seq = seq
        self._place = place
        self._fd, self.criu_fd = fds
        self._kind = digest.preferred()
        self._follower: digest.Follower | None = None
        self._writeback: Writeback | None = None
        self._open = True

    @property
    def fd(self) -> int:
        """Descriptor of the image's directory."""
        return self._fd

    def save(self, name: str, source_fd: int, size: int) -> int:
        """Copy the first ``size`` bytes of an open file to ``name`` and return the number of bytes copied.

        Raises ``NoRoom``, or ``NoAnswerError`` if reading times out.
        """
        read = FileSystemCalls(None, probe_s=_READ_S)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        offset, free = 0, os.fstatvfs(self._fd)
        if size > free.f_bavail * free.f_frsize:  # even if sparse: writing zeros could take hours before it fails
            raise NoRoom(f"{self._place.store}: {name} has {size} bytes, more than there is room for")
        try:
            fd = os.open(name, flags, root_directory.FILE_MODE, dir_fd=self._fd)
            try:
                while offset < size and (
                    chunk := read(partial(os.pread, source_fd, min(_COPY, size - offset), offset))
                ):
                    offset += _write_all(fd, chunk)
            finally:
                os.close(fd)
        except NoAnswerError:
            raise
        except OSError as error:
            raise NoRoom(f"{self._place.store}: {name} cannot be written: {error.strerror}") from None
        return offset

    def follow(self) -> None:
        """Start digesting CRIU's files and writing them to disk while they grow, which shortens ``commit``."""
        if self._follower is None:
            self._follower = digest.Follower(self.criu_fd, self._kind)
            self._writeback = Writeback(self.criu_fd)

    def commit(self, facts: Manifest) -> Image:
        """Complete the image: digests, signed manifest, sync to disk, rename. ``manifest.files`` is filled in."""
        try:
            files = self._files()
            complete = replace(facts, seq=self.seq, files=files, digest=self._kind.name, schema=manifest.SCHEMA)
            data = manifest.encode(complete)
            root_directory.write(self._fd, MANIFEST, data)
            root_directory.write(self._fd, SIGNATURE, manifest.sign(data, self._place.key, facts.node).encode() + b"\n")
            self._name_it()
        except OSError as error:
            raise NoRoom(f"{self._place.store}: the image cannot be made durable: {error.strerror}") from None
        self._close()
        return Image(complete, self._place.store)

    def _files(self) -> tuple[FileFact, ...]:
        """Digest all files and sync them to disk, both in parallel."""
        if self._writeback is not None:
            self._writeback.stop()
        top = [name for name in root_directory.names(self._fd) if name != CRIU]
        places = [(self._fd, name, name) for name in top]
        places += [(self.criu_fd, name, f"{CRIU}/{name}") for name in root_directory.names(self.criu_fd)]
        sizes = [self._close_to_others(directory_fd, name) for directory_fd, name, _ in places]
        with digest.pool() as syncing, digest.pool() as digesting:
            durable = [syncing.submit(self._sync, directory_fd, name) for directory_fd, name, _ in places]

            @contextmanager
            def reading(directory_fd: int, name: str, size: int) -> Iterator[digest.FileDigest]:
                with root_directory.file(directory_fd, name, owner=self._place.owner, size=size) as fd:
                    if self._follower is not None and directory_fd == self.criu_fd and size >= digest.BLOCK:
                        yield self._follower.finish(name, fd, size)
                    else:
                        yield digest.begin(self._kind, fd, size, digesting)

            opened = (
                reading(directory_fd, name, size) for (directory_fd, name, _), size in zip(places, sizes, strict=True)
            )
            with closing(digest.of_files(self._kind, opened)) as file_digests:
                file_facts = [
                    FileFact(path, size, digests)
                    for (_, _, path), size, digests in zip(places, sizes, file_digests, strict=True)
                ]
            for tier in durable:
                tier.result()
        return tuple(file_facts)

    @staticmethod
    def _close_to_others(directory_fd: int, name: str) -> int:
        """Make a file private to root and return its size."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            os.fchmod(fd, root_directory.FILE_MODE)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    @staticmethod
    def _sync(directory_fd: int, name: str) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _name_it(self) -> None:
        os.fsync(self.criu_fd)
        os.fsync(self._fd)
        name = f"{self.seq:04d}"
        os.rename(name + TMP, name, src_dir_fd=self._place.job_fd, dst_dir_fd=self._place.job_fd)
        os.fsync(self._place.job_fd)

    def publish(self) -> None:
        """Rename a complete copy to its final name."""
        try:
            self._name_it()
        except OSError as error:
            raise NoRoom(f"{self._place.store}: the image cannot be made durable: {error.strerror}") from None
        self._close()

    def leave(self) -> None:
        """Close the image but keep it, to be continued later."""
        self._close()

    def abandon(self) -> None:
        """Delete the unfinished image."""
        if self._open:
            with suppress(OSError):
                shutil.rmtree(f"{self.seq:04d}{TMP}", dir_fd=self._place.job_fd)
            self._close()

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._follower is not None:
            self._follower.stop()
        if self._writeback is not None:
            self._writeback.close()
        for fd in (self.criu_fd, self._fd, self._place.job_fd):
            os.close(fd)
        self._place.on_close()

    def __enter__(self) -> ImageWriter:
        """Return the writer."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Abandon the image unless it was committed."""
        self.abandon()


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)
