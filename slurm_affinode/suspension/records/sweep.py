"""The sweep of the image stores: remove the images of ended jobs, keep those of jobs unknown to Slurm for a while.

Slurm reporting a job as ended suffices; its absence does not (see ``core.retention``). A job list that lacks a job
which Slurm knows by its ID is not used.

The time since which Slurm does not know a job is shared by all agents: beside the shared store, owned by root and
signed, ``unknown/CLUSTER.JOBID.json`` is created when an agent first finds that Slurm responds without knowing the job,
and removed when Slurm knows it again. ``sweep-stopped.CLUSTER.json`` exists while a sweep waits for an administrator.
Times are the file server's, read from a file just written there, because clocks of nodes differ and agents restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.files import write_text
from slurm_affinode.base.timeouts import FileSystemCalls
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged
from slurm_affinode.checkpoint.store import image_store
from slurm_affinode.checkpoint.store.entries import JOB
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.core.retention import Fate, fate, too_many
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import LiveRun
from slurm_affinode.slurm.interface import SlurmClient, UnknownJobError
from slurm_affinode.suspension.records.shared_state import Note, Notes, opened, read_signed

_PURPOSE, _STOPPED = "unknown job", "stopped sweep"
_FORGOTTEN_S = 30 * 86400.0
"""The record of a job without images is removed this long after its images could have been."""
_MOST_JOBS = 1000
"""Listed in the record of a stopped sweep."""
_MOST_BYTES = 1 << 20
_STOPPED_BEFORE = "sweep-stopped.json"
"""Written by agents of 0.9.0: the jobs in it say of which cluster it is."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A job that Slurm does not know."""

    since: float
    """When that was first seen: seconds since the epoch, by the clock of the file server."""
    age_s: float
    confirmed: bool
    """An administrator has confirmed that its images may be removed."""
    due: bool
    """Its images may be removed."""


@dataclass(frozen=True, slots=True)
class StoppedSweep:
    """A sweep that would have removed most images of a store."""

    since: float
    node: str
    store: str
    going: int
    present: int
    jobs: tuple[str, ...]
    """``CLUSTER.JOBID`` of the jobs with images that would have been removed."""

    def __str__(self) -> str:
        """Return a description in one line."""
        return (
            f"the sweep of images is stopped: Slurm does not know the jobs of {self.going} of {self.present} images in "
            f"{self.store}; nothing is removed until it does, or an administrator confirms that these jobs have ended"
        )


STOPPED_HINT = (
    "has slurmctld lost its state? Restore it. To remove these images: slurm-affinode images prune --unknown --yes"
)


def server_time(directory: Path, node: str) -> float:
    """Return the time by the clock of the file system of a directory. Raises ``OSError``."""
    path = directory / f".clock.{node}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"now\n")
        os.fsync(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


class Absences:
    """The jobs of one cluster that Slurm does not know. Can be used by several threads and nodes."""

    def __init__(
        self, root: Path, signer: Signer, cluster: str | None, *, keep_s: float,
        clock: Callable[[Path, str], float] = server_time,
    ) -> None:  # fmt: skip
        """``root``: the directory beside the shared store. ``keep_s``: how long images of unknown jobs are kept.

        ``cluster``: ``None`` to read the records of all clusters; nothing can be recorded then.
        """
        self._root = root
        self._directory = root / "unknown"
        self._cluster = cluster
        self._stop = root / f"sweep-stopped.{cluster}.json"
        self._signer = signer
        self._keep_s = keep_s
        self._clock = clock
        self._ask = FileSystemCalls(root)

    def update(self, known_names: Collection[str], unknown: Collection[str]) -> dict[str, Absence]:
        """Record which jobs (``CLUSTER.JOBID``) Slurm knows, and return an ``Absence`` for each unknown one.

        Raises ``AffinodeError`` if that cannot be recorded: nothing may be removed then.
        """
        try:
            return self._ask(lambda: self._update(frozenset(known_names), unknown))
        except OSError as error:
            raise AffinodeError(f"{self._directory}: {error.strerror or error}") from error

    def _update(self, known_names: Collection[str], unknown: Collection[str]) -> dict[str, Absence]:
        stored = self._read()
        if not stored and not unknown:
            return {}
        updated = {}
        with opened(self._directory, create=True) as directory:
            now = self._clock(directory, self._signer.node)
            for name, (since, _) in stored.items():
                lost = name not in unknown and now - since > self._keep_s + _FORGOTTEN_S
                if name in known_names or lost:
                    (directory / _file(name)).unlink(missing_ok=True)
            for name in unknown:
                since, confirmed = stored.get(name, (now, False))
                since = min(since, now)  # the clock of the file server was set back
                if (since, confirmed) != stored.get(name):
                    self._write(directory, name, since, confirmed=confirmed)
                updated[name] = self._absence(since, now, confirmed=confirmed)
        return updated

    def confirm(self, unknown: Collection[str]) -> None:
        """Record that an administrator permits the removal of these jobs' images. Raises ``AffinodeError``."""

        def put() -> None:
            stored = self._read()
            with opened(self._directory, create=True) as directory:
                now = self._clock(directory, self._signer.node)
                for name in unknown:
                    self._write(directory, name, stored.get(name, (now, False))[0], confirmed=True)
            self._remove_stop()

        try:
            self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{self._directory}: {error.strerror or error}") from error

    def all(self) -> dict[str, Absence]:
        """Return the recorded jobs; empty if they cannot be read."""

        def read() -> dict[str, Absence]:
            stored = self._read()
            if not stored:
                return {}
            with opened(self._directory) as directory:
                now = self._clock(directory, self._signer.node)
            return {name: self._absence(since, now, confirmed=yes) for name, (since, yes) in stored.items()}

        with contextlib.suppress(OSError):
            return self._ask(read)
        return {}

    def _absence(self, since: float, now: float, *, confirmed: bool) -> Absence:
        age_s = max(0.0, now - since)
        return Absence(since, age_s, confirmed, due=confirmed or age_s >= self._keep_s)

    def _write(self, directory: Path, name: str, since: float, *, confirmed: bool) -> None:
        value = {"since": since, "confirmed": confirmed}
        text = self._signer.encode(_PURPOSE, _file(name), value)
        write_text(directory / _file(name), text, mode=0o600)

    def _read(self) -> dict[str, tuple[float, bool]]:
        """Return name -> since when, and whether it is confirmed. Unsigned records are ignored, and written anew."""
        recorded = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                if not JOB.fullmatch(path.stem) or path.suffix != ".json" or not self._is_of(path.stem):
                    continue
                signed = read_signed(self._signer, _PURPOSE, path)
                if signed.value is None or not signed.signed:
                    continue
                since = signed.value.get("since")
                if isinstance(since, int | float) and 0 <= since < 1 << 40:
                    recorded[path.stem] = float(since), signed.value.get("confirmed") is True
        return recorded

    # --- a sweep that has stopped

    def stopped(self) -> StoppedSweep | None:
        """Return the sweep that waits for an administrator, of several the one that waits for longest.

        Raises ``AffinodeError`` if a record cannot be read.
        """
        try:
            sweeps = self._ask(lambda: [stopped for _, stopped in self._stops()])
        except OSError as error:
            raise AffinodeError(f"{self._stop}: {error.strerror or error}") from error
        return min(sweeps, key=lambda stopped: stopped.since, default=None)

    def _stops(self) -> list[tuple[Path, StoppedSweep]]:
        paths = [self._stop] if self._cluster is not None else sorted(self._root.glob("sweep-stopped.*.json"))
        stops = []
        for path in (*paths, self._root / _STOPPED_BEFORE):
            content = read_signed(self._signer, _STOPPED, path, most=_MOST_BYTES)
            stopped = None if content.value is None or not content.signed else _stopped_of(content.value)
            if stopped is not None and (path.name != _STOPPED_BEFORE or any(map(self._is_of, stopped.jobs))):
                stops.append((path, stopped))
        return stops

    def _is_of(self, job: str) -> bool:
        """Return whether ``CLUSTER.JOBID`` is a job of the cluster."""
        return self._cluster is None or job.rpartition(".")[0] == self._cluster

    def _remove_stop(self) -> None:
        for path, _ in self._stops():
            path.unlink(missing_ok=True)
        self._stop.unlink(missing_ok=True)

    def stop(self, store: str, going: int, present: int, jobs: Collection[str]) -> StoppedSweep:
        """Record that a sweep has stopped. Raises ``AffinodeError``."""
        named = sorted(jobs)[:_MOST_JOBS]

        def put() -> float:
            now = self._clock(self._stop.parent, self._signer.node)
            value = {
                "since": now, "node": self._signer.node, "store": store, "going": going, "present": present,
                "jobs": named,
            }  # fmt: skip
            write_text(self._stop, self._signer.encode(_STOPPED, self._stop.name, value), mode=0o600)
            return now

        try:
            since = self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{self._stop}: {error.strerror or error}") from error
        return StoppedSweep(since, self._signer.node, store, going, present, tuple(named))

    def resume(self) -> None:
        """Remove the record of a stopped sweep: its reason is gone. Raises ``AffinodeError``."""
        try:
            self._ask(self._remove_stop)
        except OSError as error:
            raise AffinodeError(f"{self._stop}: {error.strerror or error}") from error


def _file(name: str) -> str:
    """Return the name of the file of an unknown job."""
    return f"{name}.json"


def _stopped_of(value: Mapping[str, Any]) -> StoppedSweep | None:
    try:
        return StoppedSweep(
            json_values.number(value["since"]), json_values.typed(str, value["node"]),
            json_values.typed(str, value["store"]), json_values.whole(value["going"]),
            json_values.whole(value["present"]),
            tuple(json_values.typed(str, name) for name in json_values.typed(list, value["jobs"])),
        )  # fmt: skip
    except (KeyError, ValueError):
        return None


LOG = logging.getLogger("slurm_affinode.agent")
MOST_QUERIED = 50
"""Maximum number of jobs missing from the list that one sweep looks up by ID; images of the others stay until the
next."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep."""

    live: Collection[str]
    """Jobs (``CLUSTER.JOBID``) that run or are pending."""
    unknown: Mapping[str, Absence]
    """Jobs with an image or a note that Slurm does not know."""
    removable_jobs: Collection[str]
    """The unknown jobs with images that may be removed; those on this node were."""
    removed: Sequence[tuple[DirectoryStore, str]] = ()
    """``CLUSTER.JOBID/ENTRY``; with ``dry_run``, the entries that would be removed."""
    stopped: StoppedSweep | None = None


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The jobs that Slurm lists, by ID."""

    live: dict[int, list[LiveRun]]
    ended_runs: dict[int, list[LiveRun]]

    def fate(self, image: Image) -> Fate:
        job_id = image.manifest.key.job_id
        return fate(image.manifest, self.live.get(job_id, ()), self.ended_runs.get(job_id, ()))


@dataclass(slots=True)
class ImageSweep:
    """A sweep of the stores of one node. ``stores``: all of them; ``shared``: the one that every node sees."""

    slurm: SlurmClient
    cluster: str
    stores: Sequence[DirectoryStore]
    shared: DirectoryStore | None
    notes: Notes
    absences: Absences
    failed: Callable[[DirectoryStore, str], None] = lambda store, why: LOG.warning("sweep: %s", why)
    """Called for each entry that could not be removed or read."""
    _images: dict[int, list[Image | ImageDamaged]] = field(default_factory=dict)
    """By index of the store in ``stores``."""

    def run(self, *, young_s: float, dry_run: bool = False) -> Swept:
        """Remove unneeded files older than ``young_s``. Raises ``AffinodeError``, but never after a removal."""
        began = time.monotonic()
        jobs = self._jobs()
        notes = [note for note in self.notes.all() if note.cluster == self.cluster]
        self._images = {index: store.images() for index, store in enumerate(self.stores)}
        unknown = self._unknown(jobs, notes)
        unasked = self._ask_for(jobs, unknown)
        unknown = self._unknown(jobs, notes)  # without those that Slurm reports as ended
        live = {run.key.name for runs in jobs.live.values() for run in runs}
        known_keys = live | {run.key.name for runs in jobs.ended_runs.values() for run in runs}
        absent = self.absences.update(known_keys - unknown, unknown)
        stopped = self._stop(absent)
        if stopped is not None:
            return Swept(live, absent, (), stopped=stopped)
        ended = {name for name, value in absent.items() if value.due and name not in unasked}
        newest = self._newest(jobs, notes)
        removed: list[tuple[DirectoryStore, str]] = []
        for store in self.stores:
            try:
                removed += [
                    (store, name)
                    for name in store.sweep(
                        [run for runs in jobs.live.values() for run in runs], cluster=self.cluster, newest=newest,
                        kept_names=unknown - ended, young_s=young_s + time.monotonic() - began, dry_run=dry_run,
                        failed=partial(self.failed, store), leaving=partial(deleted_files.gone, store),
                    )
                ]  # fmt: skip
            except (CheckpointError, OSError) as error:
                why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
                self.failed(store, f"{store.path}: {why}")
        return Swept(live, absent, ended, removed)

    # --- jobs in Slurm

    def _jobs(self) -> _Jobs:
        live: dict[int, list[LiveRun]] = {}
        ended: dict[int, list[LiveRun]] = {}
        for job in self.slurm.jobs():
            run = LiveRun.of(self.cluster, job)
            if run is not None:
                (ended if job.has_ended else live).setdefault(job.job_id, []).append(run)
        return _Jobs(live, ended)

    def _ask_for(self, jobs: _Jobs, unknown: Collection[str]) -> Collection[str]:
        """Look up the jobs that the list lacks by ID; return those beyond the limit (``MOST_QUERIED``).

        Those that Slurm reports as ended are added to ``jobs``. Raises ``UnreachableError`` if Slurm knows one that has
        not ended: its list is incomplete then.
        """
        absences = self.absences.all()
        numbers = {name: int(name.rpartition(".")[2]) for name in unknown}
        lacking = sorted(name for name, number in numbers.items() if not _is_listed(jobs, number))
        doubtful = [name for name in lacking if name not in absences or absences[name].due]
        for name in doubtful[:MOST_QUERIED]:
            try:
                job = self.slurm.job(numbers[name])
            except UnknownJobError:
                continue
            if not job.has_ended:
                raise UnreachableError(
                    f"Slurm's list of jobs lacks {numbers[name]}, which Slurm finds by its ID; nothing is removed",
                    hint="try again",
                )
            run = LiveRun.of(self.cluster, job)
            if run is not None:
                jobs.ended_runs[numbers[name]] = [run]
        return frozenset(doubtful[MOST_QUERIED:])

    # --- stored images

    def _unknown(self, jobs: _Jobs, notes: Collection[Note]) -> set[str]:
        """Return the names of jobs with data in a store, or a note, that Slurm does not know."""
        unknown = {
            image.job
            for images in self._images.values()
            for image in images
            if isinstance(image, Image) and image.manifest.key.cluster == self.cluster
            and jobs.fate(image) is Fate.UNKNOWN
        }  # fmt: skip
        unknown |= {note.key.name for note in notes if not _knows(jobs, note)}
        for store in self.stores:  # entries without a readable manifest, or with only that of a copy
            unknown |= {name for name, number in _directories(store, self.cluster) if not _is_listed(jobs, number)}
            for facts, _ in store.begun(growing=True):
                if facts.key.cluster == self.cluster and jobs.fate(Image(facts, "")) is Fate.UNKNOWN:
                    unknown.add(facts.key.name)
        return unknown

    def _newest(self, jobs: _Jobs, notes: Collection[Note]) -> dict[str, int]:
        """Return the newest image of each job; see ``image_store.newest``.

        For a job with given-up or discarded images, the number after theirs, so that all of them are outdated.
        """
        live = [run for runs in jobs.live.values() for run in runs]
        shared = [] if self.shared is None else self._images[list(self.stores).index(self.shared)]
        newest = image_store.newest(shared, live)
        for note in notes:
            later = (
                image.job == note.key.name and note.precedes(image.manifest)
                for images in self._images.values() for image in images if isinstance(image, Image)
            )  # fmt: skip
            if note.given_up and not any(later):
                newest[note.key.name] = note.seq + 1
        for restore in self.notes.discarded():
            images = [
                image.manifest for images in self._images.values() for image in images
                if isinstance(image, Image) and image.job == restore.name
            ]  # fmt: skip
            if all(map(restore.discards, images)):
                newest[restore.name] = restore.seq + 1
        return newest

    # --- stopping

    def _stop(self, absent: Mapping[str, Absence]) -> StoppedSweep | None:
        """Return the sweep that waits for an administrator, this one or an earlier one; ``None`` if none does.

        All due jobs count, not only those that this sweep has looked up: later sweeps would remove the others.
        """
        before = self.absences.stopped()
        waiting = {name for name, value in absent.items() if not value.confirmed}
        if before is not None and waiting.intersection(before.jobs):
            return before
        going = {name for name in waiting if absent[name].due}
        for index, store in enumerate(self.stores):
            images = [image for image in self._images[index] if _cluster_of(image) in (None, self.cluster)]
            names = [image.job for image in images if isinstance(image, Image) and image.job in going]
            if too_many(len(names), len(images)):
                stopped = self.absences.stop(str(store.path), len(names), len(images), going)
                LOG.error("%s", stopped)
                return stopped
        if before is not None:
            self.absences.resume()
            LOG.info("the sweep of images continues: Slurm knows the jobs again, or an administrator has confirmed")
        return None


def is_of(note: Note, job: Job) -> bool:
    """Return whether a job that Slurm lists is the job of a note, and not another one with its ID."""
    submit = 0 if job.submit is None else round(job.submit.timestamp())
    return job.uid == note.uid and job.restarts >= note.restarts and submit >= note.submit


def _knows(jobs: _Jobs, note: Note) -> bool:
    runs = (*jobs.live.get(note.job_id, ()), *jobs.ended_runs.get(note.job_id, ()))
    return any(
        run.uid == note.uid and run.restarts >= note.restarts and run.key.submit_epoch >= note.submit for run in runs
    )


def _is_listed(jobs: _Jobs, number: int) -> bool:
    return number in jobs.live or number in jobs.ended_runs


def _cluster_of(image: Image | ImageDamaged) -> str | None:
    """Return the cluster of an image; ``None``: unknown, because it is damaged."""
    return image.manifest.key.cluster if isinstance(image, Image) else None


def _directories(store: DirectoryStore, cluster: str) -> Iterator[tuple[str, int]]:
    try:
        names = store.jobs()
    except (CheckpointError, OSError) as error:
        raise AffinodeError(f"{store.path}: {error}") from error
    for name in names:
        of, _, number = name.rpartition(".")
        if of == cluster:
            yield name, int(number)
