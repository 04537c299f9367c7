"""A sweep of the image stores: the images of jobs that are over go, those of jobs that Slurm does not know are kept.

Slurm's word on a job counts: one that it reports as ended has no use for its images. Its silence on a job does not: see
``core.removal`` and ``absences``. A list of jobs that lacks one which Slurm knows by its number is not used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from slurm_affinode.agent.absences import Absence, Absences, StoppedSweep
from slurm_affinode.agent.notes import Note, Notes
from slurm_affinode.checkpoint import remaps, sweeping
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged
from slurm_affinode.core.removal import Fate, fate, too_many
from slurm_affinode.errors import AffinodeError, UnreachableError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.slurm.faults import UnknownJobError
from slurm_affinode.slurm.interface import SlurmClient

LOG = logging.getLogger("slurm_affinode.agent")
ASKED = 50
"""So many jobs that the list lacks are looked up by number in one sweep; images of the others stay until the next."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep."""

    live: Collection[str]
    """Jobs (``CLUSTER.JOBID``) that run or wait."""
    unknown: Mapping[str, Absence]
    """Jobs with an image or a note that Slurm does not know."""
    gone: Collection[str]
    """Those of them whose images may go, and went as far as this node has them."""
    removed: Sequence[tuple[DirectoryStore, str]] = ()
    """``CLUSTER.JOBID/ENTRY``; with ``dry_run`` what would go."""
    stopped: StoppedSweep | None = None


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The jobs that Slurm lists, by number."""

    live: dict[int, list[LiveRun]]
    ended: dict[int, list[LiveRun]]

    def fate(self, image: Image) -> Fate:
        job_id = image.manifest.key.job_id
        return fate(image.manifest, self.live.get(job_id, ()), self.ended.get(job_id, ()))


@dataclass(slots=True)
class Sweep:
    """Of the stores of one node. ``stores``: all of them; ``shared``: the one that every node sees."""

    slurm: SlurmClient
    cluster: str
    stores: Sequence[DirectoryStore]
    shared: DirectoryStore | None
    notes: Notes
    absences: Absences
    failed: Callable[[DirectoryStore, str], None] = lambda store, why: LOG.warning("sweep: %s", why)
    """Told of what could not be removed, or read."""
    _images: dict[int, list[Image | ImageDamaged]] = field(default_factory=dict)
    """By the place of the store in ``stores``."""

    def run(self, *, young_s: float, dry_run: bool = False) -> Swept:
        """Remove unneeded files older than ``young_s``. Raises ``AffinodeError``, and has removed nothing then."""
        began = time.monotonic()
        jobs = self._jobs()
        notes = [note for note in self.notes.all() if note.cluster == self.cluster]
        self._images = {at: store.images() for at, store in enumerate(self.stores)}
        unknown = self._unknown(jobs, notes)
        unasked = self._ask_for(jobs, unknown)
        unknown = self._unknown(jobs, notes)  # without those that Slurm reports as ended when it is asked for them
        live = {run.key.name for runs in jobs.live.values() for run in runs}
        listed = live | {run.key.name for runs in jobs.ended.values() for run in runs}
        absent = self.absences.update(listed - unknown, unknown)
        gone = {name for name, one in absent.items() if one.due and name not in unasked}
        stopped = self._stop(absent, gone)
        if stopped is not None:
            return Swept(live, absent, (), stopped=stopped)
        newest = self._newest(jobs, notes)
        removed: list[tuple[DirectoryStore, str]] = []
        for store in self.stores:
            try:
                removed += [
                    (store, name)
                    for name in store.sweep(
                        [run for runs in jobs.live.values() for run in runs], cluster=self.cluster, newest=newest,
                        kept=unknown - gone, young_s=young_s + time.monotonic() - began, dry_run=dry_run,
                        failed=partial(self.failed, store), leaving=partial(remaps.gone, store),
                    )
                ]  # fmt: skip
            except (CheckpointError, OSError) as error:
                why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
                self.failed(store, f"{store.path}: {why}")
        return Swept(live, absent, gone, removed)

    # --- what Slurm says

    def _jobs(self) -> _Jobs:
        live: dict[int, list[LiveRun]] = {}
        ended: dict[int, list[LiveRun]] = {}
        for job in self.slurm.jobs():
            run = run_of(self.cluster, job)
            if run is not None:
                (ended if job.ended else live).setdefault(job.job_id, []).append(run)
        return _Jobs(live, ended)

    def _ask_for(self, jobs: _Jobs, unknown: Collection[str]) -> Collection[str]:
        """Look up the jobs that the list lacks by their number; return those that there was no time for.

        Those that Slurm reports as ended are added to ``jobs``. Raises ``UnreachableError`` where it knows one that has
        not ended: then its list is not complete.
        """
        known = self.absences.all()
        numbers = {name: int(name.rpartition(".")[2]) for name in unknown}
        lacking = sorted(name for name, number in numbers.items() if not _listed(jobs, number))
        doubtful = [name for name in lacking if name not in known or known[name].due]
        for name in doubtful[:ASKED]:
            try:
                job = self.slurm.job(numbers[name])
            except UnknownJobError:
                continue
            if not job.ended:
                raise UnreachableError(
                    f"Slurm's list of jobs lacks {numbers[name]}, which it knows by its id; nothing is removed",
                    hint="try again",
                )
            run = run_of(self.cluster, job)
            if run is not None:
                jobs.ended[numbers[name]] = [run]
        return frozenset(doubtful[ASKED:])

    # --- what is there

    def _unknown(self, jobs: _Jobs, notes: Collection[Note]) -> set[str]:
        """Names of the jobs with something in a store, or a note, of which Slurm says nothing."""
        found = {
            image.job
            for images in self._images.values()
            for image in images
            if isinstance(image, Image) and image.manifest.key.cluster == self.cluster
            and jobs.fate(image) is Fate.UNKNOWN
        }  # fmt: skip
        found |= {note.key.name for note in notes if not _knows(jobs, note)}
        for store in self.stores:  # what has no manifest that can be read, or only that of a copy
            found |= {name for name, number in _directories(store, self.cluster) if not _listed(jobs, number)}
            for facts, _ in store.begun(growing=True):
                if facts.key.cluster == self.cluster and jobs.fate(Image(facts, "")) is Fate.UNKNOWN:
                    found.add(facts.key.name)
        return found

    def _newest(self, jobs: _Jobs, notes: Collection[Note]) -> dict[str, int]:
        """See ``sweeping.newest``; of what was given up, everything that there was then."""
        live = [run for runs in jobs.live.values() for run in runs]
        shared = [] if self.shared is None else self._images[list(self.stores).index(self.shared)]
        found = sweeping.newest(shared, live)
        for note in notes:
            later = (
                image.job == note.key.name and note.precedes(image.manifest)
                for images in self._images.values() for image in images if isinstance(image, Image)
            )  # fmt: skip
            if note.given_up and not any(later):
                found[note.key.name] = note.seq + 1
        return found

    # --- stopping

    def _stop(self, absent: Mapping[str, Absence], gone: Collection[str]) -> StoppedSweep | None:
        """The sweep that has to wait for an administrator, this one or an earlier one; ``None``: none has."""
        before = self.absences.stopped()
        waiting = {name for name, one in absent.items() if not one.confirmed}
        if before is not None and waiting.intersection(before.jobs):
            return before
        going = {name for name in gone if name in waiting}
        for at, store in enumerate(self.stores):
            images = self._images[at]
            names = [image.job for image in images if isinstance(image, Image) and image.job in going]
            if too_many(len(names), len(images)):
                stopped = self.absences.stop(str(store.path), len(names), len(images), going)
                LOG.error("%s", stopped)
                return stopped
        if before is not None:
            self.absences.resume()
            LOG.info("the sweep of images continues: Slurm knows the jobs again, or an administrator has confirmed")
        return None


def run_of(cluster: str, job: Job) -> LiveRun | None:
    """A job of Slurm's list as a run; ``None``: it does not say when that was submitted."""
    if job.submit is None:
        return None
    return LiveRun(JobKey(cluster, job.job_id, round(job.submit.timestamp())), job.uid or 0, job.restarts)


def is_of(note: Note, job: Job) -> bool:
    """Whether a job that Slurm lists is the one that a note is of, and not another one with its number."""
    submit = 0 if job.submit is None else round(job.submit.timestamp())
    return job.uid == note.uid and job.restarts >= note.restarts and submit >= note.submit


def _knows(jobs: _Jobs, note: Note) -> bool:
    runs = (*jobs.live.get(note.job_id, ()), *jobs.ended.get(note.job_id, ()))
    return any(
        run.uid == note.uid and run.restarts >= note.restarts and run.key.submit_epoch >= note.submit for run in runs
    )


def _listed(jobs: _Jobs, number: int) -> bool:
    return number in jobs.live or number in jobs.ended


def _directories(store: DirectoryStore, cluster: str) -> Iterator[tuple[str, int]]:
    try:
        names = store.jobs()
    except (CheckpointError, OSError) as error:
        raise AffinodeError(f"{store.path}: {error}") from error
    for name in names:
        of, _, number = name.rpartition(".")
        if of == cluster:
            yield name, int(number)
