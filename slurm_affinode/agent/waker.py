"""Letting suspended jobs go back to work: by hand, at a time, or when GPUs are free and nobody waits for them.

Every node may do it; one at a time does, by a lease in the shared store that another one takes over when it is not
renewed. Two that overlap for a moment do no harm: releasing a job twice is as once. A job is released only when its
image is complete in the shared store, since Slurm may start it anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from slurm_affinode import jsonvalues
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.notes import NO_NOTE, Note, Plan, read_signed
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.surviving import surviving
from slurm_affinode.agent.sweep import is_of
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.nodekeys import SIGNER, Signer
from slurm_affinode.core.policy import WAITS_FOR_ROOM
from slurm_affinode.core.waketime import wake_time
from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import write_text
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import JobKey, LiveRun, Refusal
from slurm_affinode.patience import Patience
from slurm_affinode.slurm.faults import ControllerDownError, UnknownJobError

NOW = "now"
"""``Note.wake`` of a job that somebody has woken."""
_LEASE_FACTOR = 4.0
_LEASE = "waker lease"
"""Purpose of its signature."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who wakes jobs in this cluster."""

    path: Path | None
    """``None``: there is no shared store, and nobody else."""
    signer: Signer
    """Of this node."""
    patience: Patience = field(default_factory=lambda: Patience(None))
    """With the file system that it is on."""

    def held(self, now: float, lasts_s: float) -> bool:
        """Take or renew it; whether it is ours."""
        path, node = self.path, self.signer.node
        if path is None:
            return True
        try:
            # One without a signature, as of an older release, is nobody's: that release gives way to this one.
            found = self.patience(lambda: read_signed(self.signer, _LEASE, path))
            value = found.value if found.signed and found.value is not None else {}
            holder = value["node"]
            if (
                holder == value[SIGNER]
                and holder != node
                and now < jsonvalues.number(value["until"]) <= now + 10 * lasts_s
            ):
                return False
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nobody has it, or nobody who can be read
        text = self.signer.encode(_LEASE, path.name, {"node": node, "until": now + lasts_s})
        try:
            self.patience(lambda: write_text(path, text, mode=0o600))
        except OSError:
            return False
        return True


class JobWaker:
    """``Waker`` for the agent."""

    def __init__(
        self,
        parts: Parts,
        lease: Lease,
        *,
        tidy: Callable[[bool], None] = lambda holds_lease: None,
        over: Callable[[JobKey, int], None] = lambda key, began_ms: None,
    ) -> None:
        """``tidy`` is called with each tick (with whether the lease is ours), ``over`` for a job that will not wake."""
        self._parts = parts
        self._lease = lease
        self._tidy = tidy
        self._over = over
        self._next = 0.0
        self._plans: dict[int, Plan] | None = None
        self._lock = threading.Lock()

    # --- by hand

    def wake(self, key: JobKey, who: str, *, admin: bool = False) -> bool:
        """See ``interface.Waker``."""
        parts = self._parts
        note = parts.notes.read(key.cluster, key.job_id)
        try:
            job = parts.slurm.job(key.job_id)
        except UnknownJobError:
            if note is not None:
                text = f"Slurm does not know job {key.job_id}; its image is kept for a time: see slurm-affinode status"
                raise Refused(Refusal("unknown-job", text)) from None
            raise Refused(Refusal("ended", f"job {key.job_id} is over")) from None
        if note is not None and not is_of(note, job):
            note = None
        if job.ended:
            raise Refused(Refusal("ended", f"job {job.id} is over ({job.state.lower()})"))
        ending = job.state == "COMPLETING" and note is not None  # Slurm still ends the run that was dumped
        if not job.pending and not ending:
            raise Refused(Refusal("running", f"job {job.id} is not suspended: it is {job.state.lower()}"))
        if job.held_by_admin and not admin:
            text = f"job {job.id} is held by an administrator, and cannot be woken before one has released it"
            raise Refused(Refusal("held-by-admin", text))
        if note is None:
            raise Refused(Refusal("no-note", f"job {job.id} cannot be woken now: {NO_NOTE}"))
        parts.log.info("job %s: woken by %s", key.job_id, who)
        note = replace(note, wake=NOW, failure=None, released_epoch=None)
        parts.notes.write(note)
        # Where its image is not in the shared store yet, or the job not in the queue, the next ticks do it.
        return not ending and self._release(note, job)

    # --- by itself

    def tick(self) -> None:
        """See ``interface.Waker``."""
        parts = self._parts
        with self._lock:
            now = parts.now()
            if now < self._next <= now + parts.settings.wake_every_s:  # else the clock was set back
                return
            self._next = now + parts.settings.wake_every_s
        with surviving(parts.log, "waking failed, by a fault of the agent"):
            try:
                mine = self._lease.held(parts.now(), _LEASE_FACTOR * parts.settings.wake_every_s)
                if mine:
                    self._look()
                self._tidy(mine)
            except AffinodeError as error:
                parts.log.warning("waking: %s", error)

    def _look(self) -> None:
        parts = self._parts
        notes = [note for note in parts.notes.all() if note.cluster == parts.cluster]
        if not notes:
            return
        jobs = parts.slurm.jobs()
        by_id = {job.job_id: job for job in jobs}
        for note in notes:
            job = by_id.get(note.job_id)
            # Of one that is not listed nothing is known: the sweep decides when its image goes.
            if job is not None and job.ended and is_of(note, job):
                self._over(note.key, note.began_ms)
        self._tell_plans(notes, by_id)
        asleep = [
            (note, by_id[note.job_id])
            for note in sorted(notes, key=lambda note: note.since_epoch)
            if (job := by_id.get(note.job_id)) is not None
            and is_of(note, job)
            and job.pending
            and job.held
            and not job.held_by_admin
            and not self._came_back(note)
        ]
        for note, job in asleep:
            # One whose restore has failed waits until somebody asks for it anew: it would fail again and again.
            if note.wake not in ("auto", "hold") and note.failure is None:
                self._try_release(note, job)
        candidates = [(note, job) for note, job in asleep if note.wake == "auto" and self._may(note)]
        if candidates:
            self._auto(candidates, jobs, parts.slurm.nodes(), {note.job_id for note in notes})

    def _tell_plans(self, notes: Sequence[Note], by_id: Mapping[int, Job]) -> None:
        """So that their images can come before them."""
        plans = {}
        for note in notes:
            job = by_id.get(note.job_id)
            if job is not None and job.pending and not job.held and job.expected_start and job.nodes_expected:
                plans[job.job_id] = Plan(job.expected_start.timestamp(), job.nodes_expected)
        if plans != self._plans:
            self._parts.notes.write_plan(plans)
            self._plans = plans

    def _came_back(self, note: Note) -> bool:
        """It was released a moment ago, and is held again: where it was started nobody could restore it."""
        return self._parts.now() - (note.released_epoch or 0.0) < self._parts.settings.wake_backoff_s

    def _may(self, note: Note) -> bool:
        """It has slept long enough, and its last restore did not fail."""
        settings = self._parts.settings
        least_s = min(settings.wake_backoff_limit_s, settings.wake_backoff_s * 2.0 ** min(max(0, note.seq - 1), 60))
        return note.failure is None and self._parts.now() - note.since_epoch >= least_s

    def _auto(
        self, candidates: Sequence[tuple[Note, Job]], jobs: Sequence[Job], nodes: Sequence[Node], ours: set[int]
    ) -> None:
        free = Free(nodes)
        for job in jobs:  # those on their way take theirs first
            if job.job_id in ours and job.pending and not job.held:
                free.take(job)
        for note, job in candidates:
            if waited_for(job, jobs, ours) or not free.take(job):
                continue
            self._try_release(note, job)

    def _try_release(self, note: Note, listed: Job) -> None:
        """A job that Slurm does not release keeps no other one asleep."""
        try:
            job = self._parts.slurm.job(listed.job_id)
            if not job.held_by_admin:  # it is not ours to release
                self._release(note, job)
        except ControllerDownError:
            raise
        except AffinodeError as error:
            self._parts.log.warning("job %s: not released: %s", listed.job_id, error)

    def _release(self, note: Note, job: Job) -> bool:
        """Release the job if its image is where it may start; whether it was."""
        parts = self._parts
        if not job.held:
            return True
        if not self._everywhere(job):
            return False
        if note.wake not in ("auto", "hold", NOW):
            self._begin(note)
        parts.slurm.release(job.job_id)
        parts.log.info("job %s: released", job.job_id)
        now = parts.now()
        parts.notes.write(replace(note, released_epoch=now))
        parts.ledger.write(
            LedgerEntry(note.cluster, note.job_id, note.submit, note.began_ms, released_ms=round(now * 1000))
        )
        return True

    def _begin(self, note: Note) -> None:
        parts = self._parts
        try:
            when = datetime.fromtimestamp(wake_time(note.wake, note.since_epoch), UTC)
        except ValueError as error:  # the plugin takes no such option
            parts.log.warning("job %s: %s; it wakes now", note.job_id, error)
            return
        if when.timestamp() > parts.now():
            parts.slurm.set_begin(note.job_id, when)

    def _everywhere(self, job: Job) -> bool:
        store = self._parts.shared
        if store is None or job.submit is None:
            return False
        key = JobKey(self._parts.cluster, job.job_id, round(job.submit.timestamp()))
        note = self._parts.notes.read(key.cluster, key.job_id)
        try:
            image = store.find(LiveRun(key, job.uid or 0, job.restarts))
        except (CheckpointError, OSError) as error:
            if note is not None and note.given_up:
                return True
            self._parts.log.warning("job %s: not released: %s", job.job_id, error)
            return False
        if note is not None and image is not None and note.precedes(image.manifest):
            self._parts.log.warning("job %s: not released: its note is of an earlier suspension", job.job_id)
            return False
        if note is not None and note.given_up:
            return True
        return image is not None and (note is None or image.manifest.seq >= note.seq)


class Free:
    """Free GPUs by node, as they are given away."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._free = {
            node.name: (node, node.gpus.count - (node.gpus_used.count if node.gpus_used else 0))
            for node in nodes
            if node.gpus is not None and node.responding and not node.draining
        }

    def take(self, job: Job) -> bool:
        """Give a job its GPUs on the node where they leave least over; ``False``: there is no such node."""
        asked = job.gpus_requested
        count = 0 if asked is None else asked.count
        fitting = [
            (left, name)
            for name, (node, left) in self._free.items()
            if left >= count
            and set(job.partitions) & set(node.partitions)
            and (asked is None or asked.kind is None or node.gpus is None or asked.kind == node.gpus.kind)
        ]
        if not fitting:
            return False
        left, name = min(fitting)
        self._free[name] = (self._free[name][0], left - count)
        return True


def waited_for(job: Job, jobs: Sequence[Job], ours: set[int]) -> bool:
    """Whether another job waits for GPUs that this one would take: what is free is theirs first."""
    return any(
        other.pending
        and not other.held
        and other.job_id not in ours
        and other.gpus_requested is not None
        and (other.reason is None or other.reason in WAITS_FOR_ROOM)
        and bool(set(other.partitions) & set(job.partitions))
        for other in jobs
    )
