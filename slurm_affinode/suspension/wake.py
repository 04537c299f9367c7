"""Release of suspended jobs: on request, at a given time, or when GPUs are free and no other job waits for them.

Every node can do it; one at a time does, by a lease in the shared store that another node takes over when it is not
renewed. A short overlap is harmless, since releasing a job is idempotent. A job is released only when its image is
complete in the shared store, since Slurm may start it on any node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from slurm_affinode.base import json_values
from slurm_affinode.base.counters import NO_COUNTERS, Counters
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import write_text
from slurm_affinode.base.text import one_line
from slurm_affinode.base.threads import surviving
from slurm_affinode.base.timeouts import FileSystemCalls
from slurm_affinode.checkpoint.image.signatures import SIGNER, Signer
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.core.policy import WAITS_FOR_ROOM
from slurm_affinode.core.wake_time import backoff_s, wake_time
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import JobKey, LiveRun, Mode, Refusal, RefusalCode
from slurm_affinode.slurm.interface import ControllerDownError, SlurmClient, UnknownJobError
from slurm_affinode.suspension import messages, metrics, notify
from slurm_affinode.suspension.context import LOG, Location, Records, SuspendSettings
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.records.shared_state import NO_NOTE, NOW, Note, StartPlan, read_signed
from slurm_affinode.suspension.records.sweep import is_of

_LEASE_FACTOR = 4.0
_LEASE = "waker lease"
"""Purpose of its signature."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of the node that wakes jobs in this cluster."""

    path: Path | None
    """``None``: there is no shared store, and no other node."""
    signer: Signer
    """The signer of this node."""
    calls: FileSystemCalls = field(default_factory=lambda: FileSystemCalls(None))
    """For calls to the file system of the lease."""

    @classmethod
    def of(cls, root: Path | None, cluster: str, signer: Signer) -> Lease:
        """Return the lease of a cluster. ``root``: the directory beside the shared store, which clusters may share."""
        return cls(None if root is None else root / f"waker.{cluster}.json", signer, FileSystemCalls(root))

    def held(self, now: float, lasts_s: float) -> bool:
        """Acquire or renew the lease; return whether this node holds it."""
        path, node = self.path, self.signer.node
        if path is None:
            return True
        try:
            # An unsigned lease, as of an older release, does not count: that release gives way to this one.
            content = self.calls(lambda: read_signed(self.signer, _LEASE, path))
            value = content.value if content.signed and content.value is not None else {}
            holder = value["node"]
            if (
                holder == value[SIGNER]
                and holder != node
                and now < json_values.number(value["until"]) <= now + 10 * lasts_s
            ):
                return False
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no lease, or an unreadable one
        text = self.signer.encode(_LEASE, path.name, {"node": node, "until": now + lasts_s})
        try:
            self.calls(lambda: write_text(path, text, mode=0o600))
        except OSError:
            return False
        return True


class JobWaker:
    """``Waker`` for the agent."""

    def __init__(
        self,
        *,
        location: Location,
        slurm: SlurmClient,
        records: Records,
        shared: DirectoryStore | None,
        settings: SuspendSettings,
        lease: Lease,
        tidy: Callable[[bool], None] = lambda holds_lease: None,
        over: Callable[[JobKey, int], None] = lambda key, began_ms: None,
        counters: Counters = NO_COUNTERS,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``shared``: the store that every node sees.

        ``tidy`` is called with each tick (whether this node holds the lease), ``over`` for a job that has ended.
        """
        self._cluster = location.cluster
        self._slurm = slurm
        self._ledger, self._notes = records.ledger, records.notes
        self._shared = shared
        self._settings = settings
        self._now = now
        self._lease = lease
        self._tidy = tidy
        self._record_end = over
        self._counters = counters
        self._next = 0.0
        self._plans: dict[int, StartPlan] | None = None

    # --- on request

    def wake(self, key: JobKey, who: str, *, admin: bool = False, from_start: bool = False) -> bool:
        """See ``interface.Waker``."""
        note = self._notes.read(key.cluster, key.job_id)
        try:
            job = self._slurm.job(key.job_id)
        except UnknownJobError:
            if note is not None:
                text = f"Slurm does not know job {key.job_id}; its image is kept for a time: see slurm-affinode status"
                raise Refused(Refusal(RefusalCode.UNKNOWN_JOB, text)) from None
            raise Refused(Refusal(RefusalCode.ENDED, f"job {key.job_id} is over")) from None
        if note is not None and not is_of(note, job):
            note = None
        if job.has_ended:
            raise Refused(Refusal(RefusalCode.ENDED, f"job {job.id} is over ({job.state.lower()})"))
        ending = job.state == "COMPLETING" and note is not None  # Slurm is still ending the dumped attempt
        if not job.pending and not ending:
            raise Refused(Refusal(RefusalCode.RUNNING, f"job {job.id} is not suspended: it is {job.state.lower()}"))
        if job.held_by_admin and not admin:
            text = f"job {job.id} is held by an administrator, and cannot be woken before one has released it"
            raise Refused(Refusal(RefusalCode.HELD_BY_ADMIN, text))
        if note is None:
            raise Refused(Refusal(RefusalCode.NO_NOTE, f"job {job.id} cannot be woken now: {NO_NOTE}"))
        LOG.info("job %s: woken by %s%s", key.job_id, who, ", from its beginning" if from_start else "")
        note = replace(
            note, wake=NOW, failure=None, failures=0, failed_epoch=None, retry_epoch=None, released_epoch=None,
            releases=0, given_up=note.given_up or from_start,
        )  # fmt: skip
        self._notes.write(note)
        # If its image is not in the shared store yet, or the job not in the queue, a later tick releases it.
        return not ending and self._release(note, job)

    # --- automatic

    def tick(self) -> None:
        """See ``interface.Waker``."""
        now = self._now()
        if now < self._next <= now + self._settings.wake_every_s:  # otherwise the clock was set back
            return
        self._next = now + self._settings.wake_every_s
        with surviving(LOG, "waking failed, by a fault of the agent"):
            try:
                holds_lease = self._lease.held(self._now(), _LEASE_FACTOR * self._settings.wake_every_s)
                if holds_lease:
                    self._wake_due()
                self._tidy(holds_lease)
            except AffinodeError as error:
                LOG.warning("cannot wake jobs: %s", error)

    def _wake_due(self) -> None:
        notes = [note for note in self._notes.all() if note.cluster == self._cluster]
        if not notes:
            return
        jobs = self._slurm.jobs()
        by_id = {job.job_id: job for job in jobs}
        for note in notes:
            job = by_id.get(note.job_id)
            # A job that is not listed is unknown: the sweep decides when its image is removed.
            if job is not None and job.has_ended and is_of(note, job):
                self._record_end(note.key, note.began_ms)
        self._report_plans(notes, by_id)
        nodes: Sequence[Node] | None = None
        if any(note.tied for note in notes):
            nodes = self._slurm.nodes()
            notes = [self._checked(note, by_id.get(note.job_id), nodes) for note in notes]
        asleep = [
            (note, by_id[note.job_id])
            for note in sorted(notes, key=lambda note: note.since_epoch)
            if (job := by_id.get(note.job_id)) is not None
            and is_of(note, job)
            and job.pending
            and job.is_held
            and not job.held_by_admin
            and not self._came_back(note)
        ]
        for note, job in asleep:
            if note.wake not in ("auto", "hold") and self._due(note):
                self._try_release(note, job)
        candidates = [(note, job) for note, job in asleep if note.wake == "auto" and self._may(note)]
        if candidates:
            self._auto(candidates, jobs, nodes or self._slurm.nodes(), {note.job_id for note in notes})

    def _checked(self, note: Note, job: Job | None, nodes: Sequence[Node]) -> Note:
        """Return the note of a tied job with the state of its node, which is also written for the owner to see."""
        if not note.tied or job is None or not job.pending or not is_of(note, job):
            return note
        state = why_unavailable(note.node, nodes) if job.nodes_required == (note.node,) else None
        text = None if state is None else messages.without_node(note.node, state, job.id)
        if text != note.unavailable:
            note = replace(note, unavailable=text)
            self._notes.write(note)
            comment = messages.suspended(note.why, note.gpu_bytes, job.id, tied_to=note.node)
            notify.comment(self._slurm, note.job_id, comment if text is None else f"{messages.SUSPENDED}{text}")
        return note

    def _report_plans(self, notes: Sequence[Note], by_id: Mapping[int, Job]) -> None:
        """Publish the expected starts, so that images can be prefetched."""
        plans = {}
        for note in notes:
            job = by_id.get(note.job_id)
            if job is not None and job.pending and not job.is_held and job.expected_start and job.nodes_expected:
                plans[job.job_id] = StartPlan(job.expected_start.timestamp(), job.nodes_expected)
        if plans != self._plans:
            self._notes.write_plan(self._cluster, plans)
            self._plans = plans

    def _came_back(self, note: Note) -> bool:
        """Return whether it was released recently, and is held again because it could not be restored there."""
        since_s = self._now() - (note.released_epoch or 0.0)
        return since_s < self._settings.release_pause_s(note.releases)

    def _due(self, note: Note) -> bool:
        """Return whether its last restore did not fail, or may be retried now.

        A restore that is not retried would fail again and again.
        """
        if note.failure is None:
            return True
        limit_s = self._settings.retry_backoff_limit_s
        # A time that is further away was written by a node with a wrong clock.
        return note.retry_epoch is not None and not 0 < note.retry_epoch - self._now() <= limit_s

    def _may(self, note: Note) -> bool:
        """Return whether it has slept long enough, and no failed restore forbids its release now."""
        settings = self._settings
        least_s = backoff_s(settings.wake_backoff_s, settings.wake_backoff_limit_s, note.seq)
        return self._due(note) and self._now() - note.since_epoch >= least_s

    def _auto(
        self, candidates: Sequence[tuple[Note, Job]], jobs: Sequence[Job], nodes: Sequence[Node], own_jobs: set[int]
    ) -> None:
        free = Free(nodes)
        for job in jobs:  # released jobs take their GPUs first
            if job.job_id in own_jobs and job.pending and not job.is_held:
                free.take(job)
        for note, job in candidates:
            if waited_for(job, jobs, own_jobs) or not free.take(job):
                continue
            self._try_release(note, job)

    def _try_release(self, note: Note, queued_job: Job) -> None:
        """Release a job; if Slurm refuses, other jobs are released nevertheless."""
        try:
            job = self._slurm.job(queued_job.job_id)
            if not job.held_by_admin:  # only an administrator may release it
                self._release(note, job)
        except ControllerDownError:
            raise
        except AffinodeError as error:
            LOG.warning("job %s: cannot be released: %s", queued_job.job_id, error)

    def _release(self, note: Note, job: Job) -> bool:
        """Release the job if its image is available wherever it may start; return whether it is released."""
        if not job.is_held:
            return True
        if not self._everywhere(job):
            return False
        if note.tied and note.given_up:  # it needs none of its files
            if job.nodes_required == (note.node,):
                notify.require(self._slurm, job, tuple(filter(None, (note.required or "").split(","))))
            note = replace(note, tied=None, unavailable=None)
        elif note.tied and note.required is None:  # Slurm did not respond when it was suspended
            note = replace(note, required=",".join(job.nodes_required))
            notify.require(self._slurm, job, (note.node,))
        if note.wake not in ("auto", "hold", NOW):
            self._begin(note)
        now = self._now()
        # First: if it cannot be recorded, a job whose restore fails at once would be released again with every tick.
        self._notes.write(replace(note, released_epoch=now, releases=note.releases + 1))
        try:
            self._slurm.release(job.job_id)
        except AffinodeError:
            with suppress(AffinodeError):
                self._notes.write(note)
            raise
        LOG.info("job %s: released", job.job_id)
        self._counters.add(metrics.WAKES, mode=Mode.REQUEUE.value)
        self._ledger.write(replace(LedgerEntry.of(note.key, note.began_ms), released_ms=round(now * 1000)))
        return True

    def _begin(self, note: Note) -> None:
        try:
            when = datetime.fromtimestamp(wake_time(note.wake, note.since_epoch), UTC)
        except ValueError as error:  # the plugin accepts no such option
            LOG.warning("job %s: %s; it wakes now", note.job_id, error)
            return
        if when.timestamp() > self._now():
            self._slurm.set_begin(note.job_id, when)

    def _everywhere(self, job: Job) -> bool:
        store = self._shared
        run = LiveRun.of(self._cluster, job)
        if store is None or run is None:
            return False
        note = self._notes.read(run.key.cluster, run.key.job_id)
        try:
            image = store.find(run)
        except (CheckpointError, OSError) as error:
            if note is not None and note.given_up:
                return True
            LOG.warning("job %s: cannot be released: %s", job.job_id, error)
            return False
        if note is not None and image is not None and note.precedes(image.manifest):
            LOG.warning("job %s: cannot be released: its note is from an earlier suspension", job.job_id)
            return False
        if note is not None and note.given_up:
            return True
        return image is not None and (note is None or image.manifest.seq >= note.seq)


class Free:
    """Free GPUs by node, less those assigned so far."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._free = {
            node.name: (node, node.gpus.count - (node.gpus_used.count if node.gpus_used else 0))
            for node in nodes
            if node.gpus is not None and node.responding and not node.draining
        }

    def take(self, job: Job) -> bool:
        """Assign a job GPUs on the node where the fewest are left over; ``False`` if it fits on no node."""
        requested = job.gpus_requested
        count = 0 if requested is None else requested.count
        fitting = [
            (free, name)
            for name, (node, free) in self._free.items()
            if free >= count
            and (not job.nodes_required or name in job.nodes_required)
            and name not in job.nodes_excluded
            and set(job.partitions) & set(node.partitions)
            and (requested is None or requested.kind is None or node.gpus is None or requested.kind == node.gpus.kind)
        ]
        if not fitting:
            return False
        free, name = min(fitting)
        self._free[name] = (self._free[name][0], free - count)
        return True


def why_unavailable(name: str, nodes: Sequence[Node]) -> str | None:
    """Return why a node starts no jobs, such as ``is down (power failure)``; ``None`` if it does."""
    node = next((node for node in nodes if node.name == name), None)
    if node is None:
        return "Slurm does not know"
    why = f" ({one_line(node.reason, 100)})" if node.reason else ""
    if not node.responding:
        return f"is down{why}"
    return f"is drained{why}" if node.draining else None


def waited_for(job: Job, jobs: Sequence[Job], own_jobs: set[int]) -> bool:
    """Return whether another job waits for GPUs that this one would take: that job has precedence."""
    return any(
        pending_job.pending
        and not pending_job.is_held
        and pending_job.job_id not in own_jobs
        and pending_job.gpus_requested is not None
        and (pending_job.reason is None or pending_job.reason in WAITS_FOR_ROOM)
        and bool(set(pending_job.partitions) & set(job.partitions))
        for pending_job in jobs
    )
