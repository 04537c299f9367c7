"""The store of checkpoint images: ``STORE/CLUSTER.JOBID/SEQ``. An image under its final name is complete.

An image holds a user's memory and is restored as root, so the contents of the store are not trusted by themselves.
Directories and files must belong to root and be inaccessible to others, without links. An image must have exactly the
files that its manifest lists, and the manifest must be signed with root's key.

The store enforces its quota and the quota of each user, keeps free space, and reserves space for images being written.
A sweep removes the images of finished jobs, superseded images and interrupted writes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from slurm_affinode.base import text
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image import compression
from slurm_affinode.checkpoint.image.block_io import Limiter
from slurm_affinode.checkpoint.image.verifier import NamedPages, named, same_contents, same_files, small_file
from slurm_affinode.checkpoint.image.writer import CRIU, TMP, ImageWriter, Place, begin_directory, locked
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, NoRoom, Pages, Usage
from slurm_affinode.checkpoint.store.entries import BAD, GONE, JOB, Entries, number
from slurm_affinode.checkpoint.store.transfer import CopyMode, Stopped, copy_files, shorten
from slurm_affinode.core.suspension import of_this_run, owns
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest


class Budget:
    """Limits and reservations of one store. Not thread-safe: callers must serialize their calls."""

    def __init__(
        self, path: Path, *, quota: int | None, user_quota: int | None, user_share: float | None, reserve: int
    ) -> None:
        """``path``: for messages. The other arguments are those of ``DirectoryStore``."""
        self._path = path
        self.user_share = user_share
        self.quota, self.user_quota, self.reserve = quota, user_quota, reserve
        self._promised: dict[tuple[str, int], tuple[int, int]] = {}

    def promise(self, image: tuple[str, int], uid: int, size: int) -> None:
        """Reserve space for an image that is about to be written, which ``usage`` does not yet include."""
        self._promised[image] = uid, size

    def settle(self, image: tuple[str, int]) -> None:
        """Release the reservation of an image."""
        self._promised.pop(image, None)

    @property
    def promised(self) -> int:
        """Bytes reserved for images being written."""
        return self._sum()

    def under_way(self, image: tuple[str, int]) -> bool:
        """Return whether space is reserved for the image."""
        return image in self._promised

    def available_bytes(self, usage: Usage) -> int:
        """Return the bytes left for an image; negative if the limits are exceeded."""
        promised = self._sum()
        free = usage.free - self.reserve - promised
        return free if self.quota is None else min(free, self.quota - usage.used - promised)

    def check(self, usage: Usage, uid: int, size: int, freeable: int = 0) -> None:
        """Raise ``NoRoom`` with the numbers if a user's image of ``size`` bytes does not fit.

        ``freeable``: bytes of other images that can be removed to make room.
        """
        promised = self._sum()
        free = max(0, usage.free + freeable - self.reserve - promised)
        if size > free:
            raise NoRoom(f"{self._path}: {text.size(free)} free, {text.size(size)} needed")
        for what, held_bytes, quota in (
            ("the store has", usage.used - freeable + promised, self.quota),
            (f"user {uid} has", usage.by_user.get(uid, 0) + self._sum(uid), self._user_limit(usage)),
        ):
            if quota is not None and held_bytes + size > quota:
                raise NoRoom(
                    f"{self._path}: {what} {text.size(held_bytes)} of {text.size(quota)}, {text.size(size)} needed"
                )

    def _user_limit(self, usage: Usage) -> int | None:
        """Return the limit for one user in bytes; ``None``: no limit."""
        if self.user_share is None:
            return self.user_quota
        whole = usage.used + usage.free if self.quota is None else self.quota
        return int(self.user_share * whole)

    def _sum(self, uid: int | None = None) -> int:
        # A copy in one operation: ``promised`` is also read by threads that do not serialize their calls.
        return sum(size for user, size in list(self._promised.values()) if uid in (None, user))


S = TypeVar("S", bound="DirectoryStore")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Patiently:
    """Decorator that makes a method raise ``NoAnswerError`` if the file system does not respond."""

    late: Callable[[Any], object] = lambda result: None
    """Receives the result of a call that returns after it timed out."""
    full: bool = False
    """Raise ``NoRoom`` instead."""

    def __call__(self, method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        """Return the decorated method."""

        @wraps(method)
        def checked(store: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if store.calls is None:
                return method(store, *args, **kwargs)
            try:
                result: R = store.calls(lambda: method(store, *args, **kwargs), self.late)
            except NoAnswerError as error:
                if self.full:
                    raise NoRoom(f"{store.path}: {error.strerror}") from None
                raise
            return result

        return checked


Load = Callable[[str], Manifest]
"""Returns the manifest of an entry. Raises ``ImageDamaged``."""


def by_job(live: Collection[LiveRun]) -> dict[int, list[LiveRun]]:
    """Group attempts by job ID."""
    runs: dict[int, list[LiveRun]] = {}
    for run in live:
        runs.setdefault(run.key.job_id, []).append(run)
    return runs


def newest(images: Iterable[object], live: Collection[LiveRun]) -> dict[str, int]:
    """Return job name -> sequence number of the newest image that the current attempt may restore.

    Older images are never used. ``images``: images of the store shared by all nodes. An image of an attempt that has
    not been requeued does not count: its suspension may still be aborted, which leaves the job with the previous image.
    """
    runs, by_name = by_job(live), dict[str, int]()
    for image in images:
        if isinstance(image, Image):
            facts = image.manifest
            if any(owns(facts, run) for run in runs.get(facts.key.job_id, [])):
                by_name[facts.key.name] = max(facts.seq, by_name.get(facts.key.name, 0))
    return by_name


def stale(
    job_fd: int,
    load: Load,
    runs: Sequence[LiveRun],
    *,
    now: float,
    young_s: float,
    newest_seq: int,
    is_kept: bool = False,
) -> list[str]:
    """Return the entries of a job's directory that are no longer needed.

    ``is_kept``: return only entries that can never be used: interrupted dumps and interrupted removals.
    """
    entries_ = []
    for entry in root_directory.names(job_fd):
        try:
            age_s = now - os.stat(entry, dir_fd=job_fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:  # removed by the sweep of another node
            continue
        if entry.endswith(GONE) or (
            age_s >= young_s and not _needed(job_fd, entry, load, runs, newest_seq, is_kept=is_kept)
        ):
            entries_.append(entry)
    return entries_


def _needed(job_fd: int, entry: str, load: Load, runs: Sequence[LiveRun], newest_seq: int, *, is_kept: bool) -> bool:
    if is_kept and not entry.endswith(TMP):
        return True
    if entry.endswith(BAD):
        return bool(runs)
    if entry.endswith(TMP):
        if locked(job_fd, entry):
            return True
        if _older(entry, newest_seq) and not is_kept:
            return False
        # An interrupted copy has a manifest and can be continued; an interrupted dump has none.
        with suppress(ImageDamaged, ValueError):
            facts = load(entry)
            return is_kept or _belongs_to_any(facts, runs)
        return False
    if not entry.isdecimal() or _older(entry, newest_seq):
        return False
    try:
        facts = load(entry)
    except ImageDamaged:  # kept for analysis: the job may be held because of it
        return bool(runs)
    return _belongs_to_any(facts, runs)


def _older(entry: str, newest_seq: int) -> bool:
    seq = number(entry)
    return seq is not None and seq < newest_seq


def _belongs_to_any(facts: Manifest, runs: Sequence[LiveRun]) -> bool:
    return any(owns(facts, run) or of_this_run(facts, run) for run in runs)


T = TypeVar("T")
_PATIENTLY, _OR_FULL = Patiently(), Patiently(full=True)
_PLAIN = CopyMode(Limiter(0))
_NONE: Mapping[str, int] = {}


class DirectoryStore:
    """A store in a directory of one file system. May be used by several threads and nodes concurrently.

    Queries may be repeated. ``copy``, ``remove``, ``discard``, ``cut`` and ``set_aside`` are idempotent: an image that
    is already copied, or no longer there, is no error. A change that fails leaves the images that are there, and no
    image that is found but incomplete. Each method may raise ``CheckpointError`` for a store that cannot be used, and
    ``NoAnswerError`` (an ``OSError``), or ``NoRoom`` where it writes, if the file system does not respond.
    ``tests/conformance/image_store.py`` has the tests that every kind of store passes.
    """

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
        calls: FileSystemCalls | None = None,
    ) -> None:
        """``quota``, ``user_quota``: limits for all images and for the images of one user, in bytes.

        ``user_share``: limit for one user as a fraction of ``quota``, or of the used and free space if there is no
        quota. ``reserve``: bytes of the file system to leave free. ``owner``: UID that must own the store (default:
        that of this process). ``calls``: timeout for a file system that may not respond; applies to all operations
        except reading and copying whole images. Raises ``CheckpointError``.
        """
        self.path = path
        self.calls = calls
        self._key = key
        self._owner = os.geteuid() if owner is None else owner
        self._clock = clock
        self._entries = Entries(path, key, owner=self._owner, create=create)
        self.budget = Budget(path, quota=quota, user_quota=user_quota, user_share=user_share, reserve=reserve)
        self._mutex = threading.Lock()
        """Guards the budget: a check of free space and the reservation are one step."""

    def same_as(self, store: DirectoryStore) -> bool:
        """Return whether both stores are the same directory, even under different paths."""
        return self._entries.place == store._entries.place

    def close(self) -> None:
        """Close the directory."""
        self._entries.close()

    # --- space

    @_OR_FULL
    def check_room(self, uid: int, estimate: int, *, freeable: int = 0) -> None:
        """Raise ``NoRoom`` with the numbers if an image of ``estimate`` bytes does not fit.

        ``freeable``: bytes of other images that can be removed to make room.
        """
        with self._mutex:
            self._check_room(uid, estimate, freeable)

    def _check_room(self, uid: int, size: int, freeable: int = 0) -> None:
        self._entries.mounted()
        self.budget.check(self.usage(), uid, size, freeable)

    @_PATIENTLY
    def jobs(self) -> list[str]:
        """Return the names (``CLUSTER.JOBID``) of all jobs with entries, even unreadable ones. Raises ``OSError``."""
        return self._entries.jobs()

    @_OR_FULL
    def room(self) -> int:
        """Return the bytes left for an image; negative if the limits are exceeded."""
        with self._mutex:
            return self.budget.available_bytes(self.usage())

    @_OR_FULL
    def usage(self) -> Usage:
        """Return the usage of the store. Images being written count for the store, but not yet for their users.

        Raises ``NoRoom`` if the file system returns an error.
        """
        try:
            used, free = root_directory.size_of(self._entries.top), os.fstatvfs(self._entries.top)
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
        """Start a new image. ``at_least``: lowest sequence number, as another store may have older images.

        Raises ``NoRoom``.
        """
        with self._mutex:
            self._check_room(uid, estimate)
            job_fd = self._entries.make_job(key.name)
            try:
                seq = max(at_least, self._entries.next(job_fd))
                fds = begin_directory(job_fd, seq, owner=self._owner, fresh=True)
            except OSError as error:
                os.close(job_fd)
                raise NoRoom(f"{self.path}: no image can be created: {error.strerror}") from None
            except BaseException:
                os.close(job_fd)
                raise
            return self._writer(key.name, job_fd, seq, fds, (uid, estimate))

    @Patiently(late=ImageWriter.leave, full=True)
    def take_up(self, image: Image) -> ImageWriter:
        """Start or continue a copy of an image in this store. Raises ``NoRoom``, ``CheckpointError``."""
        facts, entry = image.manifest, image.entry
        with self._mutex:
            if self.budget.under_way((image.job, facts.seq)):  # some file systems cannot lock directories
                raise CheckpointError(f"{image.job}/{entry}{TMP}: another process is writing this image")
            self._check_room(facts.uid, 0)
            job_fd = self._entries.make_job(image.job)
            try:
                half = 0
                with (
                    suppress(FileNotFoundError),
                    root_directory.directory(job_fd, entry + TMP, owner=self._owner) as fd,
                ):
                    half = root_directory.size_of(fd)
                missing = max(0, facts.size - half)
                self._check_room(facts.uid, missing)
                if entry in root_directory.names(
                    job_fd
                ):  # damaged or temporarily unreadable: set it aside, as it may be better than the copy
                    self._entries.set_aside(job_fd, entry)
                fds = begin_directory(job_fd, facts.seq, owner=self._owner, fresh=False)
            except BaseException:
                os.close(job_fd)
                raise
            return self._writer(image.job, job_fd, facts.seq, fds, (facts.uid, missing))

    def _writer(self, name: str, job_fd: int, seq: int, fds: tuple[int, int], promise: tuple[int, int]) -> ImageWriter:
        self.budget.promise((name, seq), *promise)
        on_settled = partial(self.budget.settle, (name, seq))
        return ImageWriter(Place(job_fd, str(self.path), self._owner, self._key, on_settled), seq, fds)

    # --- reading

    @_PATIENTLY
    def find(self, run: LiveRun) -> Image | None:
        """Return the newest image if this attempt may restore it, otherwise ``None``.

        Raises ``ImageDamaged`` if the newest image is damaged.
        """
        with self._entries.job(run.key.name) as job_fd:
            seqs = [] if job_fd is None else self._entries.complete(job_fd)
            if job_fd is None or not seqs:
                return None
            image = self._entries.image(job_fd, run.key.name, seqs[-1])
            return image if owns(image.manifest, run) else None

    @_PATIENTLY
    def get(self, name: str, seq: int) -> Image:
        """Return an image by name. Raises ``ImageDamaged`` if it is damaged or does not exist."""
        with self._entries.job(name) as job_fd:
            if job_fd is None:
                raise ImageDamaged(f"{name}: there is no image in {self.path}")
            return self._entries.image(job_fd, name, seq)

    def has(self, image: Image) -> bool:
        """Return whether an image with this name exists. True also if it is damaged or cannot be read."""
        try:
            return self._has(image)
        except (CheckpointError, OSError):
            return True

    @_PATIENTLY
    def _has(self, image: Image) -> bool:
        with self._entries.job(image.job) as job_fd:
            return job_fd is not None and image.entry in root_directory.names(job_fd)

    def images(self) -> list[Image | ImageDamaged]:
        """Return all images, with an error in place of each image that is damaged."""
        try:
            return self._list(self._entries.images)
        except NoAnswerError as error:
            return [ImageDamaged(f"{self.path}: cannot be read: {error.strerror}")]

    def begun(self, *, growing: bool = False) -> list[tuple[Manifest, int]]:
        """Return the manifests and current sizes of incomplete copies. ``growing``: include those being written now."""
        with suppress(NoAnswerError):
            return self._list(partial(self._entries.begun, growing=growing))
        return []

    def aside(self) -> list[str]:
        """Return the damaged images that were set aside: ``CLUSTER.JOBID/SEQ.N.bad``."""
        with suppress(NoAnswerError):
            return self._list(self._entries.aside)
        return []

    @_PATIENTLY
    def _list(self, listing: Callable[[], Iterator[T]]) -> list[T]:
        return list(listing())

    @Patiently(late=os.close)
    def open(self, image: Image) -> int:
        """Return a descriptor of the image's directory, which the caller closes. Raises ``ImageDamaged``."""
        with self._entries.job(image.job) as job_fd:
            try:
                if job_fd is not None:
                    return root_directory.open_directory(job_fd, image.entry, owner=self._owner)
            except FileNotFoundError:
                pass
        raise ImageDamaged(f"{image.job}/{image.entry}: no longer exists")

    @Patiently(late=os.close)
    def open_criu(self, image: Image) -> int:
        """Return a descriptor of the directory with CRIU's files, which the caller closes. Raises ``ImageDamaged``."""
        fd = self.open(image)
        try:
            return root_directory.open_directory(fd, CRIU, owner=self._owner)
        except FileNotFoundError:
            raise ImageDamaged(f"{image.job}: has no {CRIU}") from None
        finally:
            os.close(fd)

    @_PATIENTLY
    def small_file(self, image: Image, name: str, limit: int, *, of_criu: bool = True) -> bytes:
        """Return a file of CRIU's directory, or of the image's own, verified.

        Raises ``ImageDamaged``, ``CheckpointError``.
        """
        fd = self.open_criu(image) if of_criu else self.open(image)
        try:
            return small_file(fd, name, image.manifest, self._owner, limit, of_criu=of_criu)
        finally:
            os.close(fd)

    @_PATIENTLY
    def packed(self, image: Image) -> bool:
        """Return whether the image is compressed and so cannot be restored directly from this store."""
        fd = self.open_criu(image)
        try:
            return any(name.endswith(compression.SUFFIX) for name in root_directory.names(fd))
        finally:
            os.close(fd)

    def verify(self, image: Image, *, progress: Callable[[int], None] | None = None) -> None:
        """Verify an image completely: list of files, owners, modes, links, sizes, digests. Raises ``ImageDamaged``."""
        with self.verifying(image, progress=progress) as pages:
            pages.sound()

    @contextmanager
    def verifying(
        self, image: Image, *, progress: Callable[[int], None] | None = None, is_known: bool = False
    ) -> Iterator[Pages]:
        """Verify an image except for its memory pages, which are verified within the context (``same_contents``)."""
        label = f"{image.job}/{image.entry}"
        with ExitStack() as stack:
            fd = self.open(image)
            stack.callback(os.close, fd)
            with named(label):
                criu_fd = stack.enter_context(root_directory.directory(fd, CRIU, owner=self._owner))
                same_files(fd, criu_fd, image.manifest)
                contents = same_contents(fd, criu_fd, image.manifest, self._owner, progress, is_known=is_known)
                pages = stack.enter_context(contents)
            yield NamedPages(pages, label)

    # --- copying

    def copy(self, image: Image, to: DirectoryStore, mode: CopyMode = _PLAIN) -> Image:
        """Copy an image to another store and verify it during the copy. Continues an interrupted copy.

        An identical complete copy is left unchanged. Raises ``NoRoom``, ``ImageDamaged`` if the source is damaged, and
        ``CheckpointError`` if the copy was stopped.
        """
        name, seq = image.job, image.manifest.seq
        with suppress(ImageDamaged):
            copied = to.get(name, seq)
            if copied.manifest == image.manifest:
                return copied
        try:
            begun = to.take_up(image)
        except ImageDamaged as error:  # the target is damaged, not the source
            raise NoRoom(f"{to.path}: {name} cannot be copied: {error}") from None
        with begun as writer:
            fd = self.open(image)
            try:
                copy_files(image.manifest, fd, writer.fd, owner=self._owner, mode=mode)
                writer.publish()
            except Stopped:
                writer.leave()
                raise CheckpointError(f"{name}: the copy was stopped and is resumed later") from None
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
        """Rename a damaged image, so that it is not found by readers but can be analyzed while its job exists."""
        with self._entries.job(image.job) as job_fd:
            if job_fd is not None:
                self._entries.set_aside(job_fd, image.entry)

    @_PATIENTLY
    def cut(self, image: Image, keep: int) -> None:
        """Shorten a copy to about ``keep`` bytes, as an incomplete copy; 0 removes it.

        Another store must have a complete copy.
        """
        entry = image.entry
        if keep <= 0:
            self._entries.remove(image.job, entry, entry + TMP)
            return
        with self._entries.job(image.job) as job_fd:
            if job_fd is None or locked(job_fd, entry + TMP):
                return
            self._entries.uncomplete(job_fd, entry)
            with suppress(FileNotFoundError), root_directory.directory(job_fd, entry + TMP, owner=self._owner) as fd:
                shorten(image.manifest, fd, keep, owner=self._owner)

    @_PATIENTLY
    def remove(self, image: Image) -> None:
        """Remove an image, which disappears for readers at once. Removing it twice is not an error."""
        self._entries.remove(image.job, image.entry)

    @_PATIENTLY
    def discard(self, key: JobKey, seq: int) -> None:
        """Remove the image of a suspension, complete or not. Raises ``CheckpointError`` while it is being written."""
        self._entries.remove(key.name, f"{seq:04d}", f"{seq:04d}{TMP}")

    def busy(self, key: JobKey) -> bool:
        """Return whether an image of the job may be being written, possibly by a CRIU that has outlived its agent.

        The process tree must not be resumed until that has finished.
        """
        with suppress(NoAnswerError):
            return self._busy(key)
        return True

    @_PATIENTLY
    def _busy(self, key: JobKey) -> bool:
        with self._entries.job(key.name) as job_fd:
            return job_fd is not None and any(
                locked(job_fd, name) for name in root_directory.names(job_fd) if name.endswith(TMP)
            )

    @_PATIENTLY
    def sweep(
        self, live: Collection[LiveRun], *, cluster: str, newest: Mapping[str, int] = _NONE,
        kept_names: Collection[str] = (), young_s: float = 600, dry_run: bool = False,
        failed: Callable[[str], None] = lambda why: None,
        leaving: Callable[[Image], None] = lambda image: None,
    ) -> list[str]:  # fmt: skip
        """Remove images of the cluster's finished jobs, and interrupted writes. Return the removed entries.

        ``live``: *all* running and pending jobs of the cluster, from a successful response of Slurm. ``newest``: from
        the function ``newest``; older images are removed too. ``kept_names``: names of jobs of unknown state; their
        images are not removed. Entries younger than ``young_s`` seconds are not removed either, as their jobs may be
        newer than the response. ``dry_run``: remove nothing. ``failed`` is called with the reason if entries of a job
        cannot be removed, ``leaving`` with each valid image before its removal. Raises ``OSError`` if the store
        cannot be read.
        """
        runs, removed, now = by_job(live), [], self._clock()
        for name in self._entries.jobs():
            match = JOB.fullmatch(name)
            if match is None or match["cluster"] != cluster:
                continue
            try:
                with suppress(ImageDamaged), self._entries.job(name) as job_fd:
                    if job_fd is not None:
                        load = partial(self._entries.manifest, job_fd, name)
                        outdated = stale(
                            job_fd, load, runs.get(int(match["job"]), []), now=now, young_s=young_s,
                            newest_seq=newest.get(name, 0), is_kept=name in kept_names,
                        )  # fmt: skip
                        for entry in outdated:
                            if not dry_run:
                                with suppress(ImageDamaged, ValueError):
                                    leaving(self._entries.image(job_fd, name, int(entry)))
                                self._entries.drop(job_fd, entry)
                            removed.append(f"{name}/{entry}")
            except OSError as error:  # an error for one job must not keep the images of all others
                failed(f"{self.path}/{name}: {error.strerror}")
            if not dry_run:
                self._entries.tidy(name)
        return removed
