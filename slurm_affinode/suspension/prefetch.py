"""Prefetching of images to the nodes where their jobs will start, and eviction of images when host memory is short.

The jobs about to start here are those in Slurm's own plan (expected start and planned nodes of a released job), which
one agent queries for all; see ``wake``. Images are read past the page cache, within ``pull_rate``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.threads import Workers
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged
from slurm_affinode.checkpoint.store.retention import Copy
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.core.wake_time import backoff_s
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.suspension.context import LOG, Location
from slurm_affinode.suspension.records.shared_state import Note, Notes, StartPlan

_MEND_S = 60.0
_MEND_MAX_S = 3600.0


class Prefetcher:
    """The prefetcher of the agent. Transfers one image at a time."""

    def __init__(
        self, *, location: Location, tiers: Tiers, notes: Notes, workers: Workers, ahead_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``ahead_s``: time before the expected start; 0: never."""
        self._node, self._cluster = location.node, location.cluster
        self._tiers = tiers
        self._notes = notes
        self._now = now
        self._ahead_s = ahead_s
        self._checked_failures: set[tuple[JobKey, str | None]] = set()
        self._bad: set[tuple[str, int]] = set()
        self._failures: dict[tuple[str, int], tuple[int, float]] = {}
        """Image -> number of failed copies to the shared tier, and when the next one is due."""
        self._queue = workers.queue("prefetch")
        self._under_way: Future[None] | None = None

    def tick(self) -> None:
        """Start the next transfer, if any, in the background. Must not raise."""
        try:
            self._tiers.relieve()  # first: it does not wait for the shared file system
            plans = self._plans()
            known_notes = self._read_notes(plans)
            self._tiers.retention.waiting({(note.key.name, note.seq) for note in known_notes})
            if self._under_way is not None and not self._under_way.done():
                return
            notes = [note for note in known_notes if not note.given_up]
            waiting = {(note.key.name, note.seq) for note in notes}
            self._failures = {image: failure for image, failure in self._failures.items() if image in waiting}
            work = [*self._to_repair(notes), *self._to_bring(notes, plans)]
            if work:
                self._under_way = self._queue.submit(self._run, work)
        except (AffinodeError, OSError) as error:
            LOG.warning("cannot prefetch images: %s", error)

    def _plans(self) -> dict[int, StartPlan]:
        """Return the plans of the jobs that start here soon."""
        plans = self._notes.plan(self._cluster) if self._ahead_s > 0 else {}
        return {
            job_id: plan
            for job_id, plan in plans.items()
            if self._node in plan.nodes and plan.start_epoch - self._now() <= self._ahead_s
        }

    def _read_notes(self, plans: Mapping[int, StartPlan]) -> list[Note]:
        """Return the notes of jobs with an image on this node, and of those that start here soon.

        Every node does so every few seconds: with all notes, the shared file system would serve nodes x sleeping jobs.
        """
        job_ids = set(plans)
        for tier in self._tiers.node:
            with suppress(CheckpointError, OSError):
                names = (name.rpartition(".") for name in tier.store.jobs())
                job_ids |= {int(number) for cluster, _, number in names if cluster == self._cluster}
        notes = (self._notes.read(self._cluster, job_id) for job_id in sorted(job_ids))
        return [note for note in notes if note is not None]

    def _run(self, work: Sequence[Callable[[], bool]]) -> None:
        """Do the first piece of work that has an effect; failures are logged and skipped."""
        for step in work:
            try:
                if step():
                    return
            except (AffinodeError, OSError) as error:
                LOG.warning("cannot prefetch images: %s", error)

    def _to_repair(self, notes: Sequence[Note]) -> Iterator[Callable[[], bool]]:
        """Yield the copies of this node's images to the shared tier that are due.

        An image is due if it is missing there for some time, or could not be restored from there. After a failure, the
        pauses grow: it may be larger than the store.
        """
        shared = self._tiers.shared
        if shared is None:
            return
        for note in notes:
            late = self._now() - note.since_epoch > _MEND_S
            if note.node != self._node or not late or self._tiers.on_node(note.key.name, note.seq) is None:
                continue
            if shared.store.busy(note.key):  # being copied
                continue
            if self._now() < self._failures.get((note.key.name, note.seq), (0, 0.0))[1]:
                continue
            doubt = note.failure is not None and (note.key, note.failure) not in self._checked_failures
            if doubt:
                self._checked_failures.add((note.key, note.failure))
            try:
                shared.store.get(note.key.name, note.seq)
            except CheckpointError:
                doubt = True
            if doubt:
                yield partial(self._repair, note)

    def _repair(self, note: Note) -> bool:
        image = note.key.name, note.seq
        try:
            self._tiers.repair(*image)
        except (AffinodeError, OSError):
            failures = self._failures.get(image, (0, 0.0))[0] + 1
            self._failures[image] = failures, self._now() + backoff_s(_MEND_S, _MEND_MAX_S, failures)
            raise
        self._failures.pop(image, None)
        return True

    def _to_bring(self, notes: Sequence[Note], plans: Mapping[int, StartPlan]) -> Iterator[Callable[[], bool]]:
        """Return the transfers for the jobs that start here next, according to Slurm."""
        soon: list[tuple[float, Copy]] = []
        for note in notes:
            plan = plans.get(note.job_id)
            if plan is None:
                continue
            # The next attempt, with the fields needed to find its image.
            copies, _ = self._tiers.copies(LiveRun(note.key, note.uid, note.restarts + 1))
            if copies and copies[0].tier is not self._tiers.tiers[0] and copies[0].id not in self._bad:
                soon.append((plan.start_epoch - self._now(), copies[0]))
        return (partial(self._bring, copy, max(left_s, 1.0)) for left_s, copy in sorted(soon, key=lambda item: item[0]))

    def _bring(self, copy: Copy, expected_s: float) -> bool:
        tiers = self._tiers
        try:
            return tiers.pull(copy, expected_s=expected_s) is not None
        except ImageDamaged as error:  # otherwise it would be read again and again
            self._bad.add(copy.id)
            tiers.report(copy.image.manifest.key, f"its copy in the tier {copy.tier.name} is damaged: {error}")
            return False
