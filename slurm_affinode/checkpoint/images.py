"""The image store: ``STORE/CLUSTER.JOBID/SEQ``, root's alone, every image complete under its name or not there.

An image holds a user's memory and is restored with root's rights, so nothing in the store is believed because it is
there: directories and files have to belong to root and be closed to others, without links, with exactly the files that
the manifest lists, and the manifest has to be signed with the key that root alone has.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from slurm_affinode.checkpoint import packing, rootdir, sweeping
from slurm_affinode.checkpoint.blockio import Limiter
from slurm_affinode.checkpoint.budget import Budget
from slurm_affinode.checkpoint.copying import How, Stopped, copy_files, shorten
from slurm_affinode.checkpoint.entries import JOB, Entries
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, NoRoom, Pages, Usage
from slurm_affinode.checkpoint.patiently import Patiently
from slurm_affinode.checkpoint.verifying import NamedPages, named, same_contents, same_files
from slurm_affinode.checkpoint.writer import CRIU, TMP, ImageWriter, Place, begin_directory, locked
from slurm_affinode.core.suspension import owns
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest
from slurm_affinode.patience import NoAnswerError, Patience

T = TypeVar("T")
_PATIENTLY, _OR_FULL = Patiently(), Patiently(full=True)
_PLAIN = How(Limiter(0))
_NONE: Mapping[str, int] = {}


class DirectoryStore:
    """Images in a directory on one file system. May be used by several threads, and by several nodes."""

    def __init__(
        self,
        path: Path,
        key: bytes,
        *,
        quota: int | None = None,
        user_quota: int | None = None,
        user_share: float | None = None,
        reserve: int = 0,
        owner: int | None = None,
        create: bool = True,
        clock: Callable[[], float] = time.time,
        patience: Patience | None = None,
    ) -> None:
        """``quota``, ``user_quota``: bytes of all images, and of one user's. ``reserve``: bytes to leave free.
        ``user_share``: of one user, as a share of ``quota``, else of what the file system has for images.

        ``owner``: the user that the store belongs to (this process's). ``patience``: with a file system that may not
        answer; all but reading and copying whole images then fails soon. Raises ``CheckpointError``.
        """
        self.path = path
        self.patience = patience
        self._key = key
        self._owner = os.geteuid() if owner is None else owner
        self._clock = clock
        self._entries = Entries(path, key, owner=self._owner, create=create)
        self.budget = Budget(path, quota=quota, user_quota=user_quota, user_share=user_share, reserve=reserve)
        self._mutex = threading.Lock()

    def same_as(self, other: DirectoryStore) -> bool:
        """Whether both are one directory, by whatever paths."""
        return self._entries.place == other._entries.place

    def close(self) -> None:
        """Let go of the directory."""
        self._entries.close()

    # --- room

    @_OR_FULL
    def check_room(self, uid: int, estimate: int, *, freeable: int = 0) -> None:
        """Whether an image of so many bytes would fit. Raises ``NoRoom`` with the numbers.

        ``freeable``: bytes of other images that would make room for it.
        """
        with self._mutex:
            self._check_room(uid, estimate, freeable)

    def _check_room(self, uid: int, size: int, freeable: int = 0) -> None:
        self._entries.mounted()
        self.budget.check(self.usage(), uid, size, freeable)

    @_PATIENTLY
    def jobs(self) -> list[str]:
        """Names (``CLUSTER.JOBID``) of the jobs of which something is here, also what cannot be read.

        Raises ``OSError``.
        """
        return self._entries.jobs()

    @_OR_FULL
    def room(self) -> int:
        """Bytes that an image may still have here; below 0: there are so many more than there may be."""
        with self._mutex:
            return self.budget.left(self.usage())

    @_OR_FULL
    def usage(self) -> Usage:
        """What is used, by whom. Images that are being written count for the store, not yet for their user.

        Raises ``NoRoom`` where the file system answers with an error.
        """
        try:
            used, free = rootdir.size_of(self._entries.top), os.fstatvfs(self._entries.top)
            sound = self._entries.sizes()
        except OSError as error:
            raise NoRoom(f"{self.path}: cannot be read: {error.strerror}") from None
        by_user: dict[int, int] = {}
        for uid, size in sound:
            by_user[uid] = by_user.get(uid, 0) + size
        return Usage(used, free.f_bavail * free.f_frsize, self.budget.quota, by_user, len(sound))

    # --- writing

    @Patiently(late=ImageWriter.abandon, full=True)
    def begin(self, key: JobKey, *, uid: int, estimate: int, at_least: int = 1) -> ImageWriter:
        """A new image. ``at_least``: lowest sequence number, where another store has older ones. Raises ``NoRoom``."""
        with self._mutex:
            self._check_room(uid, estimate)
            job_fd = self._entries.make_job(key.name)
            try:
                seq = max(at_least, self._entries.next(job_fd))
                fds = begin_directory(job_fd, seq, owner=self._owner, fresh=True)
            except OSError as error:
                os.close(job_fd)
                raise NoRoom(f"{self.path}: no image can be begun: {error.strerror}") from None
            except BaseException:
                os.close(job_fd)
                raise
            return self._writer(key.name, job_fd, seq, fds, (uid, estimate))

    @Patiently(late=ImageWriter.leave, full=True)
    def take_up(self, image: Image) -> ImageWriter:
        """A writer for a copy of an image, begun before or not. Raises ``NoRoom``, ``CheckpointError``."""
        facts, entry = image.manifest, image.entry
        with self._mutex:
            if self.budget.under_way((image.job, facts.seq)):  # not every file system has locks for directories
                raise CheckpointError(f"{image.job}/{entry}{TMP}: somebody else is writing this image")
            self._check_room(facts.uid, 0)
            job_fd = self._entries.make_job(image.job)
            try:
                half = 0
                with suppress(FileNotFoundError), rootdir.directory(job_fd, entry + TMP, owner=self._owner) as fd:
                    half = rootdir.size_of(fd)
                missing = max(0, facts.size - half)
                self._check_room(facts.uid, missing)
                if entry in rootdir.names(job_fd):  # damaged, or only not to be read now: it may be the better one
                    self._entries.set_aside(job_fd, entry)
                fds = begin_directory(job_fd, facts.seq, owner=self._owner, fresh=False)
            except BaseException:
                os.close(job_fd)
                raise
            return self._writer(image.job, job_fd, facts.seq, fds, (facts.uid, missing))

    def _writer(self, name: str, job_fd: int, seq: int, fds: tuple[int, int], promise: tuple[int, int]) -> ImageWriter:
        self.budget.promise((name, seq), *promise)
        done = partial(self.budget.settle, (name, seq))
        return ImageWriter(Place(job_fd, str(self.path), self._owner, self._key, done), seq, fds)

    # --- reading

    @_PATIENTLY
    def find(self, run: LiveRun) -> Image | None:
        """The newest image that may be put in place of this run. ``ImageDamaged`` where the newest one is not sound."""
        with self._entries.job(run.key.name) as job_fd:
            seqs = [] if job_fd is None else self._entries.complete(job_fd)
            if job_fd is None or not seqs:
                return None
            image = self._entries.image(job_fd, run.key.name, seqs[-1])
            return image if owns(image.manifest, run) else None

    @_PATIENTLY
    def get(self, name: str, seq: int) -> Image:
        """One image by its name. Raises ``ImageDamaged``, also where there is none."""
        with self._entries.job(name) as job_fd:
            if job_fd is None:
                raise ImageDamaged(f"{name}: there is no image in {self.path}")
            return self._entries.image(job_fd, name, seq)

    def has(self, image: Image) -> bool:
        """Whether something has the name of a complete image; also what is damaged, or cannot be looked at."""
        try:
            return self._has(image)
        except (CheckpointError, OSError):
            return True

    @_PATIENTLY
    def _has(self, image: Image) -> bool:
        with self._entries.job(image.job) as job_fd:
            return job_fd is not None and image.entry in rootdir.names(job_fd)

    def images(self) -> list[Image | ImageDamaged]:
        """All of them; an error for each that is not sound."""
        try:
            return self._listed(self._entries.images)
        except NoAnswerError as error:
            return [ImageDamaged(f"{self.path}: cannot be read: {error.strerror}")]

    def begun(self, *, growing: bool = False) -> list[tuple[Manifest, int]]:
        """Copies that are not complete, with the bytes that there are of them. ``growing``: also what grows now."""
        with suppress(NoAnswerError):
            return self._listed(partial(self._entries.begun, growing=growing))
        return []

    def aside(self) -> list[str]:
        """What was set aside: ``CLUSTER.JOBID/SEQ.N.bad``."""
        with suppress(NoAnswerError):
            return self._listed(self._entries.aside)
        return []

    @_PATIENTLY
    def _listed(self, found: Callable[[], Iterator[T]]) -> list[T]:
        return list(found())

    @Patiently(late=os.close)
    def open(self, image: Image) -> int:
        """A descriptor of the image's directory (the caller closes it). Raises ``ImageDamaged``."""
        with self._entries.job(image.job) as job_fd:
            try:
                if job_fd is not None:
                    return rootdir.open_directory(job_fd, image.entry, owner=self._owner)
            except FileNotFoundError:
                pass
        raise ImageDamaged(f"{image.job}/{image.entry}: is not there any more")

    @Patiently(late=os.close)
    def open_criu(self, image: Image) -> int:
        """A descriptor of the directory with CRIU's files (the caller closes it). Raises ``ImageDamaged``."""
        fd = self.open(image)
        try:
            return rootdir.open_directory(fd, CRIU, owner=self._owner)
        except FileNotFoundError:
            raise ImageDamaged(f"{image.job}: has no {CRIU}") from None
        finally:
            os.close(fd)

    @_PATIENTLY
    def packed(self, image: Image) -> bool:
        """Whether it is compressed: it cannot be restored from where it is."""
        fd = self.open_criu(image)
        try:
            return any(name.endswith(packing.SUFFIX) for name in rootdir.names(fd))
        finally:
            os.close(fd)

    def verify(self, image: Image, *, progress: Callable[[int], None] | None = None) -> None:
        """Read all of it: inventory, owners, modes, links, sizes, digests. Raises ``ImageDamaged``."""
        with self.verifying(image, progress=progress) as pages:
            pages.sound()

    @contextmanager
    def verifying(
        self, image: Image, *, progress: Callable[[int], None] | None = None, known: bool = False
    ) -> Iterator[Pages]:
        """The same, with the pages of its processes still to be read within the context: as ``same_contents``."""
        label = f"{image.job}/{image.entry}"
        with ExitStack() as stack:
            fd = self.open(image)
            stack.callback(os.close, fd)
            with named(label):
                criu_fd = stack.enter_context(rootdir.directory(fd, CRIU, owner=self._owner))
                same_files(fd, criu_fd, image.manifest)
                contents = same_contents(fd, criu_fd, image.manifest, self._owner, progress, known=known)
                pages = stack.enter_context(contents)
            yield NamedPages(pages, label)

    # --- copying

    def copy(self, image: Image, to: DirectoryStore, how: How = _PLAIN) -> Image:
        """Copy to another store, verified on the way; takes up where a broken copy ended.

        An image that is there already, complete, is left as it is. Raises ``NoRoom``, ``ImageDamaged`` where this one
        is not sound, ``CheckpointError`` where the copy was told to stop.
        """
        name, seq = image.job, image.manifest.seq
        with suppress(ImageDamaged):
            there = to.get(name, seq)
            if there.manifest == image.manifest:
                return there
        try:
            begun = to.take_up(image)
        except ImageDamaged as error:  # not this one is
            raise NoRoom(f"{to.path}: {name} cannot be copied: {error}") from None
        with begun as writer:
            fd = self.open(image)
            try:
                copy_files(image.manifest, fd, writer.fd, owner=self._owner, how=how)
                writer.publish()
            except Stopped:
                writer.leave()
                raise CheckpointError(f"{name}: the copy was stopped; it is taken up later") from None
            except OSError as error:
                writer.leave()
                raise NoRoom(f"{to.path}: {name} cannot be copied: {error.strerror}") from None
            except BaseException:
                writer.leave()
                raise
            finally:
                os.close(fd)
        return to.get(name, seq)

    # --- removing

    @_PATIENTLY
    def set_aside(self, image: Image) -> None:
        """Put a damaged image out of the way: nobody finds it, and it can be looked at while its job lives."""
        with self._entries.job(image.job) as job_fd:
            if job_fd is not None:
                self._entries.set_aside(job_fd, image.entry)

    @_PATIENTLY
    def cut(self, image: Image, keep: int) -> None:
        """Leave about ``keep`` bytes of a copy, as one that was begun; 0: nothing. What is elsewhere must be whole."""
        entry = image.entry
        if keep <= 0:
            self._entries.remove(image.job, entry, entry + TMP)
            return
        with self._entries.job(image.job) as job_fd:
            if job_fd is None or locked(job_fd, entry + TMP):
                return
            self._entries.uncomplete(job_fd, entry)
            with suppress(FileNotFoundError), rootdir.directory(job_fd, entry + TMP, owner=self._owner) as fd:
                shorten(image.manifest, fd, keep, owner=self._owner)

    @_PATIENTLY
    def remove(self, image: Image) -> None:
        """Remove it; from the first moment on nobody finds it. Removing it twice is no error."""
        self._entries.remove(image.job, image.entry)

    @_PATIENTLY
    def discard(self, key: JobKey, seq: int) -> None:
        """Remove what there is of one suspension's image, complete or not. ``CheckpointError`` while it grows."""
        self._entries.remove(key.name, f"{seq:04d}", f"{seq:04d}{TMP}")

    def busy(self, key: JobKey) -> bool:
        """Whether somebody may be writing an image of the job now: also a CRIU that has outlived its agent.

        The tree must not be let go on before that is over.
        """
        with suppress(NoAnswerError):
            return self._busy(key)
        return True

    @_PATIENTLY
    def _busy(self, key: JobKey) -> bool:
        with self._entries.job(key.name) as job_fd:
            return job_fd is not None and any(
                locked(job_fd, name) for name in rootdir.names(job_fd) if name.endswith(TMP)
            )

    @_PATIENTLY
    def sweep(
        self, live: Collection[LiveRun], *, cluster: str, newest: Mapping[str, int] = _NONE,
        kept: Collection[str] = (), young_s: float = 600, dry_run: bool = False,
        failed: Callable[[str], None] = lambda why: None,
        leaving: Callable[[Image], None] = lambda image: None,
    ) -> list[str]:  # fmt: skip
        """Remove the cluster's images whose job is not among ``live``, and broken writes; what was removed.

        ``live``: *all* running and pending jobs of the cluster, of an answer that Slurm really gave. ``newest``: see
        ``sweeping.newest``; images before these go, too. ``kept``: names of jobs of which Slurm says nothing: all their
        images stay. What is younger than ``young_s`` stays: its job may be newer
        than that answer. ``dry_run``: what would be removed. ``failed`` is told of each job of which something stays
        that should not, ``leaving`` of each sound image before it goes. Raises ``OSError`` where the store cannot be
        read.
        """
        runs, removed, now = sweeping.by_job(live), [], self._clock()
        for name in self._entries.jobs():
            match = JOB.fullmatch(name)
            if match is None or match["cluster"] != cluster:
                continue
            try:
                with suppress(ImageDamaged), self._entries.job(name) as job_fd:
                    if job_fd is not None:
                        load = partial(self._entries.manifest, job_fd, name)
                        found = sweeping.stale(
                            job_fd, load, runs.get(int(match["job"]), []), now=now, young_s=young_s,
                            newest_seq=newest.get(name, 0), kept=name in kept,
                        )  # fmt: skip
                        for entry in found:
                            if not dry_run:
                                with suppress(ImageDamaged, ValueError):
                                    leaving(self._entries.image(job_fd, name, int(entry)))
                                self._entries.drop(job_fd, entry)
                            removed.append(f"{name}/{entry}")
            except OSError as error:  # what is wrong with one is no reason to keep all the others
                failed(f"{self.path}/{name}: {error.strerror}")
            if not dry_run:
                self._entries.tidy(name)
        return removed
