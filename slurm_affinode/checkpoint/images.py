"""The image store: ``STORE/CLUSTER.JOBID/SEQ``, root's alone, every image complete under its name or not there.

An image holds a user's memory and is restored with root's rights, so nothing in the store is believed because it is
there: directories and files have to belong to root and be closed to others, without links, with exactly the files that
the manifest lists, and the manifest has to be signed with the key that root alone has.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from slurm_affinode.checkpoint import manifest, packing, rootdir, sweeping
from slurm_affinode.checkpoint.blockio import Limiter
from slurm_affinode.checkpoint.copying import How, Stopped, copy_files, shorten
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, NoRoom, Usage
from slurm_affinode.checkpoint.verifying import same_contents, same_files
from slurm_affinode.checkpoint.writer import CRIU, MANIFEST, SIGNATURE, TMP, ImageWriter, Place, begin_directory, locked
from slurm_affinode.core.suspension import owns
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest
from slurm_affinode.sizes import size as gib

_JOB = re.compile(r"(?P<cluster>[A-Za-z0-9_-]{1,64})\.(?P<job>[1-9]\d{0,9})")
_SEQ = re.compile(r"\d{4}")
_PLAIN = How(Limiter(0))
_MANIFEST_LIMIT = 64 << 20


class DirectoryStore:
    """Images in a directory on one file system. May be used by several threads, and by several nodes."""

    def __init__(
        self,
        path: Path,
        key: bytes,
        *,
        quota: int | None = None,
        user_quota: int | None = None,
        reserve: int = 0,
        owner: int | None = None,
        create: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``quota``, ``user_quota``: bytes of all images, and of one user's. ``reserve``: bytes to leave free.

        ``owner``: the user that the store belongs to (this process's). Raises ``CheckpointError``.
        """
        self.path = path
        self._key = key
        self._quota, self._user_quota, self._reserve = quota, user_quota, reserve
        self._owner = os.geteuid() if owner is None else owner
        self._clock = clock
        self._top = rootdir.open_top(path, owner=self._owner, create=create)
        self._pending: dict[tuple[str, int], tuple[int, int]] = {}
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Let go of the directory."""
        if self._top >= 0:
            os.close(self._top)
            self._top = -1

    # --- writing

    def begin(self, key: JobKey, *, uid: int, estimate: int, at_least: int = 1) -> ImageWriter:
        """A new image. ``at_least``: lowest sequence number, where another store has older ones. Raises ``NoRoom``."""
        with self._mutex:
            self._make_room_for(uid, estimate)
            job_fd = self._job_directory(key.name)
            try:
                taken = [int(name[:4]) for name in rootdir.names(job_fd) if _SEQ.match(name)]
                seq = max([at_least, *(number + 1 for number in taken)])
                fds = begin_directory(job_fd, seq, owner=self._owner, fresh=True)
            except OSError as error:
                os.close(job_fd)
                raise NoRoom(f"{self.path}: no image can be begun: {error.strerror}") from None
            except BaseException:
                os.close(job_fd)
                raise
            return self._writer(key.name, job_fd, seq, fds, (uid, estimate))

    def _job_directory(self, name: str) -> int:
        try:
            rootdir.make_directory(self._top, name)
            return rootdir.open_directory(self._top, name, owner=self._owner)
        except OSError as error:
            raise NoRoom(f"{self.path}: nothing can be written: {error.strerror}") from None

    def _writer(self, name: str, job_fd: int, seq: int, fds: tuple[int, int], pending: tuple[int, int]) -> ImageWriter:
        self._pending[name, seq] = pending

        def done() -> None:
            self._pending.pop((name, seq), None)

        return ImageWriter(Place(job_fd, str(self.path), self._owner, self._key, done), seq, fds)

    def check_room(self, uid: int, estimate: int) -> None:
        """Whether an image of so many bytes would fit. Raises ``NoRoom`` with the numbers."""
        with self._mutex:
            self._make_room_for(uid, estimate)

    def mounted(self) -> None:
        """Raises ``NoRoom`` where the path is not the directory any more that was opened: unmounted, or replaced."""
        try:
            now, then = self.path.lstat(), os.fstat(self._top)
        except OSError as error:
            raise NoRoom(f"{self.path}: is not there any more: {error.strerror}") from None
        if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
            raise NoRoom(f"{self.path}: is not the file system any more that the agent was started with")
        if os.fstatvfs(self._top).f_flag & os.ST_RDONLY:
            raise NoRoom(f"{self.path}: is read-only")

    def room(self) -> int:
        """Bytes that an image may still have here."""
        with self._mutex:
            usage = self.usage()
            promised = sum(size for _, size in self._pending.values())
        left = usage.free - self._reserve - promised
        return max(0, left if self._quota is None else min(left, self._quota - usage.used - promised))

    def _make_room_for(self, uid: int, estimate: int) -> None:
        self.mounted()
        usage = self.usage()
        promised = sum(size for _, size in self._pending.values())
        mine = usage.by_user.get(uid, 0) + sum(size for user, size in self._pending.values() if user == uid)
        free = max(0, usage.free - self._reserve - promised)
        if estimate > free:
            raise NoRoom(f"{self.path}: {gib(free)} free, {gib(estimate)} needed")
        for what, held, quota in (
            ("the store has", usage.used + promised, self._quota),
            (f"user {uid} has", mine, self._user_quota),
        ):
            if quota is not None and held + estimate > quota:
                raise NoRoom(f"{self.path}: {what} {gib(held)} of {gib(quota)}, {gib(estimate)} needed")

    # --- reading

    def find(self, run: LiveRun) -> Image | None:
        """The newest image that may be put in place of this run. ``ImageDamaged`` where the newest one is not sound."""
        with self._job(run.key.name) as job_fd:
            if job_fd is None:
                return None
            seqs = _complete(job_fd)
            if not seqs:
                return None
            image = self._image(job_fd, run.key.name, seqs[-1])
            return image if owns(image.manifest, run) else None

    def get(self, name: str, seq: int) -> Image:
        """One image by its name. Raises ``ImageDamaged``, also where there is none."""
        with self._job(name) as job_fd:
            if job_fd is None:
                raise ImageDamaged(f"{name}: there is no image in {self.path}")
            return self._image(job_fd, name, seq)

    def images(self) -> list[Image | ImageDamaged]:
        """All of them; an error for each that is not sound."""
        found: list[Image | ImageDamaged] = []
        for name in self._jobs():
            try:
                with self._job(name) as job_fd:
                    if job_fd is not None:
                        found += self._of_job(job_fd, name)
            except ImageDamaged as error:
                found.append(error)
        return found

    def _of_job(self, job_fd: int, name: str) -> Iterator[Image | ImageDamaged]:
        for seq in _complete(job_fd):
            try:
                yield self._image(job_fd, name, seq)
            except ImageDamaged as error:
                yield error

    def _jobs(self) -> list[str]:
        return [name for name in rootdir.names(self._top) if _JOB.fullmatch(name)]

    @contextmanager
    def _job(self, name: str) -> Iterator[int | None]:
        if not _JOB.fullmatch(name):
            raise ImageDamaged(f"{name!r} is not the name of a job in a store")
        try:
            fd = rootdir.open_directory(self._top, name, owner=self._owner)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def _image(self, job_fd: int, name: str, seq: int) -> Image:
        return Image(self._manifest(job_fd, name, seq, f"{seq:04d}"), str(self.path))

    def _manifest(self, job_fd: int, name: str, seq: int, entry: str) -> Manifest:
        label = f"{name}/{seq:04d}"
        try:
            with rootdir.directory(job_fd, entry, owner=self._owner) as fd:
                data = rootdir.read(fd, MANIFEST, owner=self._owner, limit=_MANIFEST_LIMIT)
                signature = rootdir.read(fd, SIGNATURE, owner=self._owner, limit=4096)
            found = manifest.decode(data, signature, self._key)
        except FileNotFoundError:
            raise ImageDamaged(f"{label}: is not there") from None
        except ImageDamaged as error:
            raise ImageDamaged(f"{label}: {error}") from None
        if (found.key.name, found.seq) != (name, seq):
            raise ImageDamaged(f"{label}: is the image {found.key.name}/{found.seq:04d}, put elsewhere")
        return found

    def open(self, image: Image) -> int:
        """A descriptor of the image's directory (the caller closes it). Raises ``ImageDamaged``."""
        name, seq = image.manifest.key.name, f"{image.manifest.seq:04d}"
        with self._job(name) as job_fd:
            try:
                if job_fd is not None:
                    return rootdir.open_directory(job_fd, seq, owner=self._owner)
            except FileNotFoundError:
                pass
        raise ImageDamaged(f"{name}/{seq}: is not there any more")

    def open_criu(self, image: Image) -> int:
        """A descriptor of the directory with CRIU's files (the caller closes it). Raises ``ImageDamaged``."""
        fd = self.open(image)
        try:
            return rootdir.open_directory(fd, CRIU, owner=self._owner)
        except FileNotFoundError:
            raise ImageDamaged(f"{image.manifest.key.name}: has no {CRIU}") from None
        finally:
            os.close(fd)

    def packed(self, image: Image) -> bool:
        """Whether it is compressed: it cannot be restored from where it is."""
        fd = self.open_criu(image)
        try:
            return any(name.endswith(packing.SUFFIX) for name in rootdir.names(fd))
        finally:
            os.close(fd)

    def verify(self, image: Image, *, progress: Callable[[int], None] | None = None) -> None:
        """Read all of it: inventory, owners, modes, links, sizes, digests. Raises ``ImageDamaged``."""
        label = f"{image.manifest.key.name}/{image.manifest.seq:04d}"
        fd = self.open(image)
        try:
            with rootdir.directory(fd, CRIU, owner=self._owner) as criu_fd:
                same_files(fd, criu_fd, image.manifest)
                same_contents(fd, criu_fd, image.manifest, self._owner, progress)
        except (FileNotFoundError, EOFError):
            raise ImageDamaged(f"{label}: is not complete") from None
        except OSError as error:
            raise ImageDamaged(f"{label}: cannot be read: {error.strerror}") from None
        except ImageDamaged as error:
            raise ImageDamaged(f"{label}: {error}") from None
        finally:
            os.close(fd)

    # --- copying

    def copy(self, image: Image, to: DirectoryStore, how: How = _PLAIN) -> Image:
        """Copy to another store, verified on the way; takes up where a broken copy ended.

        An image that is there already, complete, is left as it is. Raises ``NoRoom``, ``ImageDamaged`` where this one
        is not sound, ``CheckpointError`` where the copy was told to stop.
        """
        key, seq = image.manifest.key, image.manifest.seq
        with suppress(ImageDamaged):
            there = to.get(key.name, seq)
            if there.manifest == image.manifest:
                return there
        with to.take_up(image) as writer:
            fd = self.open(image)
            try:
                copy_files(image.manifest, fd, writer.fd, owner=self._owner, how=how)
                writer.publish()
            except Stopped:
                writer.leave()
                raise CheckpointError(f"{key.name}: the copy was stopped; it is taken up later") from None
            except OSError as error:
                writer.leave()
                raise NoRoom(f"{to.path}: {key.name} cannot be copied: {error.strerror}") from None
            except BaseException:
                writer.leave()
                raise
            finally:
                os.close(fd)
        return to.get(key.name, seq)

    def take_up(self, image: Image) -> ImageWriter:
        """A writer for a copy of an image, begun before or not."""
        key, seq, size = image.manifest.key, image.manifest.seq, image.manifest.size
        with self._mutex:
            self._make_room_for(image.manifest.uid, 0)
            job_fd = self._job_directory(key.name)
            try:
                half = 0
                with suppress(FileNotFoundError), rootdir.directory(job_fd, f"{seq:04d}{TMP}", owner=self._owner) as fd:
                    half = rootdir.size_of(fd)
                self._make_room_for(image.manifest.uid, max(0, size - half))
                if f"{seq:04d}" in rootdir.names(job_fd):  # damaged, or the copy would not have been asked for
                    self._drop(job_fd, f"{seq:04d}")
                fds = begin_directory(job_fd, seq, owner=self._owner, fresh=False)
            except BaseException:
                os.close(job_fd)
                raise
            return self._writer(key.name, job_fd, seq, fds, (image.manifest.uid, max(0, size - half)))

    # --- removing

    def set_aside(self, image: Image) -> None:
        """Put a damaged image out of the way: nobody finds it, and it can be looked at while its job lives."""
        name, entry = image.manifest.key.name, f"{image.manifest.seq:04d}"
        with self._job(name) as job_fd:
            if job_fd is not None:
                with suppress(FileNotFoundError):
                    os.rename(
                        entry, f"{entry}.{time.monotonic_ns()}{sweeping.BAD}", src_dir_fd=job_fd, dst_dir_fd=job_fd
                    )
                    os.fsync(job_fd)

    def aside(self) -> list[str]:
        """What was set aside: ``CLUSTER.JOBID/SEQ.N.bad``."""
        found = []
        for name in self._jobs():
            with suppress(ImageDamaged), self._job(name) as job_fd:
                if job_fd is not None:
                    found += [f"{name}/{entry}" for entry in rootdir.names(job_fd) if entry.endswith(sweeping.BAD)]
        return found

    def cut(self, image: Image, keep: int) -> None:
        """Leave about ``keep`` bytes of a copy, as one that was begun; 0: nothing. What is elsewhere must be whole."""
        name, entry = image.manifest.key.name, f"{image.manifest.seq:04d}"
        if keep <= 0:
            self._remove(name, [entry, entry + TMP])
            return
        with self._job(name) as job_fd:
            if job_fd is None or locked(job_fd, entry + TMP):
                return
            with suppress(FileNotFoundError):
                os.rename(entry, entry + TMP, src_dir_fd=job_fd, dst_dir_fd=job_fd)
                os.fsync(job_fd)
            with suppress(FileNotFoundError), rootdir.directory(job_fd, entry + TMP, owner=self._owner) as fd:
                shorten(image.manifest, fd, keep, owner=self._owner)

    def begun(self) -> list[tuple[Manifest, int]]:
        """Copies that are not complete, with the bytes that there are of them; not those that grow right now."""
        found = []
        for name in self._jobs():
            with suppress(ImageDamaged, OSError), self._job(name) as job_fd:
                entries = [] if job_fd is None else rootdir.names(job_fd)
                for entry in entries:
                    if job_fd is not None and entry.endswith(TMP) and not locked(job_fd, entry):
                        with suppress(ImageDamaged, OSError):
                            facts = self._manifest(job_fd, name, int(entry[:4]), entry)
                            with rootdir.directory(job_fd, entry, owner=self._owner) as fd:
                                found.append((facts, rootdir.size_of(fd)))
        return found

    def remove(self, image: Image) -> None:
        """Remove it; from the first moment on nobody finds it. Removing it twice is no error."""
        self._remove(image.manifest.key.name, [f"{image.manifest.seq:04d}"])

    def discard(self, key: JobKey, seq: int) -> None:
        """Remove what there is of one suspension's image, complete or not. ``CheckpointError`` while it grows."""
        self._remove(key.name, [f"{seq:04d}", f"{seq:04d}{TMP}"])

    def _remove(self, name: str, entries: list[str]) -> None:
        with self._job(name) as job_fd:
            if job_fd is None:
                return
            for entry in entries:
                if entry.endswith(TMP) and locked(job_fd, entry):
                    raise CheckpointError(f"{name}/{entry}: is being written")
                self._drop(job_fd, entry)
        with suppress(OSError):  # it holds others
            os.rmdir(name, dir_fd=self._top)

    @staticmethod
    def _drop(job_fd: int, entry: str) -> None:
        gone = f"{entry}.{time.monotonic_ns()}{sweeping.GONE}"
        try:
            os.rename(entry, gone, src_dir_fd=job_fd, dst_dir_fd=job_fd)
        except FileNotFoundError:
            return
        os.fsync(job_fd)
        try:
            shutil.rmtree(gone, dir_fd=job_fd)
        except NotADirectoryError:
            os.unlink(gone, dir_fd=job_fd)
        except OSError:  # a link, which rmtree does not follow; or another process removes it too
            with suppress(OSError):
                os.unlink(gone, dir_fd=job_fd)

    def busy(self, key: JobKey) -> bool:
        """Whether somebody writes an image of the job now: also a CRIU that has outlived its agent.

        The tree must not be let go on before that is over.
        """
        with self._job(key.name) as job_fd:
            return job_fd is not None and any(
                locked(job_fd, name) for name in rootdir.names(job_fd) if name.endswith(TMP)
            )

    def sweep(
        self, live: Collection[LiveRun], *, cluster: str, young_s: float = 600, dry_run: bool = False
    ) -> list[str]:
        """Remove the cluster's images whose job is not among ``live``, and broken writes; what was removed.

        ``live``: *all* running and pending jobs of the cluster, of an answer that Slurm really gave. What is younger
        than ``young_s`` stays: its job may be newer than that answer. ``dry_run``: what would be removed.
        """
        runs, removed, now = sweeping.by_job(live), [], self._clock()
        for name in self._jobs():
            match = _JOB.fullmatch(name)
            if match is None or match["cluster"] != cluster:
                continue
            with suppress(ImageDamaged), self._job(name) as job_fd:
                if job_fd is not None:
                    load = partial(self._manifest, job_fd, name)
                    found = sweeping.stale(job_fd, load, runs.get(int(match["job"]), []), now=now, young_s=young_s)
                    removed += [f"{name}/{entry}" for entry in found]
                    for entry in [] if dry_run else found:
                        self._drop(job_fd, entry)
            if not dry_run:
                with suppress(OSError):
                    os.rmdir(name, dir_fd=self._top)
        return removed

    def usage(self) -> Usage:
        """What is used, by whom. Images that are being written count for the store, not yet for their user."""
        used = rootdir.size_of(self._top)
        by_user: dict[int, int] = {}
        sound = [image for image in self.images() if isinstance(image, Image)]
        for image in sound:
            by_user[image.manifest.uid] = by_user.get(image.manifest.uid, 0) + image.manifest.size
        free = os.fstatvfs(self._top)
        return Usage(used, free.f_bavail * free.f_frsize, self._quota, by_user, len(sound))


def _complete(job_fd: int) -> list[int]:
    return [int(name) for name in rootdir.names(job_fd) if _SEQ.fullmatch(name)]
