"""Restore a checkpoint image instead of starting the job afresh.

    find -> claim -> verify -> check GPUs -> output files -> CRIU -> CUDA restore -> unlock -> the script continues

The pages of the processes, most of a large image, are verified during the CRIU step as they are put in place, and the
tree is released when their digests match. If a copy of the image is found damaged before that, the partial tree is
killed and the next copy is tried from "check GPUs" on.

A failed restore leaves no process and keeps the image; the site decides whether the job is then held or starts afresh.
Temporary conditions (slurmctld does not respond, GPU memory not free yet) are waited for.

If the shared tier does not respond, another node may have a newer image, or have claimed the attempt. An image on this
node is used only if it belongs to the attempt right before the one that Slurm reports here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import span
from slurm_affinode.base.timeouts import NoAnswerError
from slurm_affinode.checkpoint import deleted_files
from slurm_affinode.checkpoint.interface import CudaState, Image, ImageDamaged, ImageUnanswered, Pages, RestoreFailed
from slurm_affinode.checkpoint.private_image import verified_file
from slurm_affinode.checkpoint.retention import Copy
from slurm_affinode.core.suspension import pair_gpus
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import GpuFact, JobKey, LiveRun, MailKind, Manifest, Phase, Refusal, SuspensionMail
from slurm_affinode.suspension import mail, messages, notify
from slurm_affinode.suspension.activity import by_index
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.interface import Arrival, cause
from slurm_affinode.suspension.journal import JobJournal, JournalError
from slurm_affinode.suspension.memory import HostMemory, shortage, visible_gpus
from slurm_affinode.suspension.record import SuspensionFacts
from slurm_affinode.suspension.requeue import retry
from slurm_affinode.suspension.shared_state import Note
from slurm_affinode.suspension.shepherd import Hold, Reply, Restored, Start
from slurm_affinode.suspension.streams import STREAMS, say

_PAUSE_S = 1.0


def _find(parts: Parts, run: LiveRun, job: Job) -> list[Copy]:
    """Return the copies of the newest image, the fastest first. Raises ``ImageDamaged`` if it is not intact.

    Waits for a file server that is unavailable for some time: that is no reason to hold the job.
    """
    deadline = parts.now() + parts.settings.restore_s
    while True:
        try:
            return _copies_of(parts, run, job)
        except ImageUnanswered:
            if parts.now() >= deadline:
                raise
        parts.sleep(_PAUSE_S)


def _copies_of(parts: Parts, run: LiveRun, job: Job) -> list[Copy]:
    copies, damage = parts.tiers.copies(run)
    newest = max((copy.image.manifest.seq for copy in copies), default=0)
    first = copies[0].image.manifest if copies else None
    note = parts.notes.read(run.key.cluster, run.key.job_id)
    if note is not None and first is not None and note.precedes(first):
        parts.log.warning("job %s: note ignored: it is from an earlier suspension than the image", first.key.job_id)
        note = None
    unneeded = isinstance(damage, ImageUnanswered) and first is not None and _last(parts, first, run, job)
    if damage is not None and not unneeded and (note is None or newest < note.seq):
        # A damaged copy does not matter if another store has that image; an older image is no substitute.
        raise damage
    if note is not None and _sleeps(note, run) and (newest < note.seq or note.given_up):
        return []  # an older image would lose the job's progress
    return [copy for copy in copies if copy.image.manifest == first]


def _last(parts: Parts, image: Manifest, run: LiveRun, job: Job) -> bool:
    """Return whether no other attempt can have run between the image, which is on this node, and this attempt."""
    return image.restarts + 1 == run.restarts and job.batch_host in (None, parts.node)


def _sleeps(note: Note, run: LiveRun) -> bool:
    """Return whether a note belongs to an earlier attempt."""
    return note.uid == run.uid and note.restarts < run.restarts


@dataclass(frozen=True, slots=True)
class _Placing:
    """A restore in progress."""

    arrival: Arrival
    job: Job
    copies: Sequence[Copy]
    """Copies of its image, the fastest first."""
    journal: JobJournal
    began: float

    @property
    def manifest(self) -> Manifest:
        """The manifest of the image, the same in all copies."""
        return self.copies[0].image.manifest


@dataclass(frozen=True, slots=True)
class _Placed:
    """A process tree that is restored, except for its GPU memory."""

    pid: int
    """Of its root, in its namespace."""
    gpus: dict[str, str] | None
    """UUID of each GPU that it had -> UUID of the one that it has now; ``None`` if it does not use CUDA."""


class JobRestorer:
    """``Restorer`` for the agent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._memory = HostMemory(parts)

    def restore(self, arrival: Arrival) -> Reply:
        """See ``interface.Restorer``."""
        parts = self._parts
        began = parts.now()
        job = retry(parts, "ask Slurm for the job", lambda: parts.slurm.job(arrival.job_id))
        run = LiveRun.of(parts.cluster, job, uid=arrival.uid)
        if run is None:
            raise AffinodeError("Slurm does not report when the job was submitted")
        try:
            copies = self._copies(arrival, run, job)
            if not copies:
                return self._without_image(arrival, run, job)
            image = copies[0].image
            placing = _Placing(arrival, job, copies, parts.journal.of_job(image.manifest.key), began)
            self._claim(arrival, run, job, image)
        except RestoreFailed as error:
            return self._failed(arrival, job, None, str(error))
        # Set first: Slurm accepts no comment for an ended job, and this one may be canceled meanwhile.
        notify.comment(parts, arrival.job_id, messages.restoring(parts.node))
        try:
            again = self._begin(placing)
            self._clean(arrival)  # first: the processes of an interrupted attempt use the memory of a raised limit
            self._make_room(placing)
            # The image must not leave its tier until it is restored.
            with parts.tiers.pinned(copies[0]):
                placed = parts.tiers.sound(copies, partial(self._place, placing, again=again))
            self._restore_cuda(placing, placed.gpus)
        except (AffinodeError, OSError) as error:
            self._clean(arrival)
            self._lower_limit(arrival)
            return self._cut_short(placing, cause(error)) or self._failed(arrival, job, placing, cause(error))
        return self._complete(placing, placed.pid)

    # --- before the restore

    def _copies(self, arrival: Arrival, run: LiveRun, job: Job) -> list[Copy]:
        """Return the copies of its image, the fastest first. Raises ``RestoreFailed`` if none can be restored."""
        try:
            copies = _find(self._parts, run, job)
        except ImageDamaged as error:
            raise RestoreFailed(str(error)) from None
        if copies and arrival.foreign:
            names = ", ".join(arrival.foreign)
            raise RestoreFailed(f"Slurm has put it into namespaces of its own ({names})")
        return copies

    def _claim(self, arrival: Arrival, run: LiveRun, job: Job, image: Image) -> None:
        """Claim the restore of the attempt. Raises ``RestoreFailed`` if another shepherd has claimed it.

        Raises ``AffinodeError`` if that cannot be determined.
        """
        parts = self._parts
        who = f"{parts.node}/{arrival.init_pid}/{arrival.init_started}"
        try:
            other = parts.notes.claim(run, who, former=image.former)
        except NoAnswerError as error:
            if not _last(parts, image.manifest, run, job):
                raise ImageUnanswered(f"its restore cannot be claimed: {error.strerror}") from None
            parts.log.warning("job %s: restored without a claim: %s", run.key.job_id, error.strerror)
            return
        if other is not None:
            raise RestoreFailed(f"its image is being restored elsewhere ({other})")

    def _without_image(self, arrival: Arrival, run: LiveRun, job: Job) -> Reply:
        """Return the reply for a job with data in a store, but no image for this attempt."""
        note = self._parts.notes.read(run.key.cluster, run.key.job_id)
        if note is not None and note.given_up:
            self._parts.notes.remove(run.key.cluster, run.key.job_id)
        elif note is not None and _sleeps(note, run):
            # It is suspended, but its image is not here (yet): a fresh start would lose it.
            return self._hold(arrival, job, f"its image is still on {note.node}", note)
        elif messages.sleeps(job.comment):
            store = "the image store" if self._parts.shared is None else self._parts.shared.path
            return self._hold(arrival, job, f"neither its image nor its note is in {store}: is it mounted?", None)
        if not (job.comment or "").startswith(messages.LOST):  # which states why it starts afresh
            notify.comment(self._parts, arrival.job_id, None)
        return Start()

    # --- the restore

    def _begin(self, placing: _Placing) -> bool:
        """Announce the restore; return whether an earlier one of this attempt was interrupted."""
        arrival, manifest = placing.arrival, placing.manifest
        facts = SuspensionFacts(
            job_id=arrival.job_id, uid=arrival.uid, gid=arrival.gid, seq=manifest.seq, restarts=manifest.restarts,
            run=placing.job.restarts, init_pid=arrival.init_pid, init_started=arrival.init_started,
            began_epoch=manifest.started_epoch, option=manifest.option,
        )  # fmt: skip
        again = placing.journal.phase is Phase.RESTORING and _init_of(placing.journal.record) == _init_of(facts)
        placing.journal.write(Phase.RESTORING, facts)
        return again

    def _place(self, placing: _Placing, copy: Copy, pages: Pages, *, again: bool) -> _Placed:
        """Restore the process tree from one copy, without its GPU memory."""
        parts, arrival, manifest = self._parts, placing.arrival, placing.manifest
        self._clean(arrival)
        self._check(arrival)
        pairs = self._gpu_pairs(placing, manifest)
        with contextlib.ExitStack() as stack:
            top = copy.tier.store.open(copy.image)
            stack.callback(os.close, top)
            criu = copy.tier.store.open_criu(copy.image)
            stack.callback(os.close, criu)
            fds = dict(zip(STREAMS, arrival.fds, strict=False))
            user = arrival.owner
            inherit = parts.streams.put_back(
                manifest.outputs,
                fds,
                lambda name: verified_file(top, name, name, pages, shared=copy.tier.shared),
                user,
                again=again,
                check=lambda: self._check(arrival),
            )
            pid = parts.imager.restore(
                arrival.init,
                criu,
                inherit,
                root_pid_ns=manifest.root_pid,
                timeout_s=parts.settings.restore_s,
                pages=pages,
                user=user,
                created=parts.created.of(manifest.key, arrival.uid),
                shared=copy.tier.shared,
                ready=lambda: self._announce(placing, fds),
            )
        return _Placed(pid, pairs)

    def _make_room(self, placing: _Placing) -> None:
        """Have the memory limit of the job permit its processes with the contents of their GPU memory."""
        arrival, files = placing.arrival, placing.manifest.files
        memory = sum(one.size for one in files if PurePath(one.path).match("criu/pages-*.img"))
        self._memory.make_room_for_image(arrival.job_id, arrival.init, memory, lambda: self._check(arrival))

    def _lower_limit(self, arrival: Arrival) -> None:
        if self._parts.limits is not None:
            self._parts.limits.lower(arrival.job_id)

    def _clean(self, arrival: Arrival) -> None:
        """Kill the processes that an interrupted attempt has left in the namespace."""
        parts = self._parts
        if not parts.processes.end(
            arrival.init_pid, arrival.init_started, timeout_s=parts.settings.kill_s, reaped=True
        ):
            raise RestoreFailed("the processes of an earlier restore cannot be killed")

    def _check(self, arrival: Arrival) -> None:
        """Raise ``RestoreFailed`` if the shepherd has ended: its PID may have been reused."""
        if not self._parts.processes.alive(arrival.init_pid, arrival.init_started):
            raise RestoreFailed("its shepherd has ended")

    def _gpu_pairs(self, placing: _Placing, manifest: Manifest) -> dict[str, str] | None:
        if not manifest.cuda_pids:
            return None
        parts = self._parts
        held = self._held(placing.job)
        pairs = pair_gpus(manifest.gpus, visible_gpus(parts, held))
        if isinstance(pairs, Refusal):
            raise RestoreFailed(pairs.text)
        self._wait_for_memory(held, manifest.gpus, pairs)
        return pairs

    def _held(self, job: Job) -> tuple[Device, ...]:
        """Return the GPUs of the new allocation on this node."""
        indices = self._parts.gpus_of(job)
        found = by_index(self._parts.gpus.devices(), indices) if indices else None
        if found is None:
            raise RestoreFailed("Slurm does not report which GPUs of this node the job has")
        return found

    def _wait_for_memory(self, held: Sequence[Device], old: Sequence[GpuFact], pairs: Mapping[str, str] | None) -> None:
        """Wait for free memory on each GPU: a restore that runs out of GPU memory fails permanently."""
        parts = self._parts
        needs = {gpu.uuid: gpu.held_bytes for gpu in old}
        deadline = parts.now() + parts.settings.free_s
        while True:
            try:
                why = shortage(needs, {device.uuid: parts.gpus.free_bytes(device) for device in held}, pairs)
            except GpuError as error:
                raise RestoreFailed(str(error)) from None
            if why is None:
                return
            if parts.now() >= deadline:
                raise RestoreFailed(f"its GPU memory does not fit: {why}")
            parts.sleep(_PAUSE_S)

    def _restore_cuda(self, placing: _Placing, pairs: Mapping[str, str] | None) -> None:
        parts, arrival, manifest = self._parts, placing.arrival, placing.manifest
        members = parts.processes.members(arrival.init_pid, arrival.init_started)
        by_number = {member.pid_ns: member.pid for member in members}
        missing = [number for number in manifest.cuda_pids if number not in by_number]
        if missing:
            raise RestoreFailed(f"process {missing[0]}, which has GPU memory to restore, does not exist")
        pids = [by_number[number] for number in manifest.cuda_pids]
        for pid in pids:
            if parts.cuda.state(pid) is CudaState.CHECKPOINTED:
                parts.cuda.restore(pid, pairs=pairs)
        for pid in pids:
            if parts.cuda.state(pid) is CudaState.LOCKED:
                parts.cuda.unlock(pid)

    def _announce(self, placing: _Placing, fds: Mapping[int, int | None]) -> None:
        """Write the notice before the tree runs, so that it precedes the next output of the tree."""
        arrival = placing.arrival
        try:
            self._parts.environments.write(arrival.job_id, arrival.uid, arrival.init)
        except OSError as error:
            self._parts.log.warning("job %s: its environment is not written: %s", arrival.job_id, error)
        if not self._parts.settings.notices:
            return
        manifest = placing.manifest
        note = self._note(manifest)
        why = f": {note.why}" if note is not None and note.why else ""
        slept = span(placing.began - manifest.dumped_epoch)
        say(fds, f"suspended on {manifest.node}{why}\nrestored on {self._parts.node} after {slept}")

    def _note(self, manifest: Manifest) -> Note | None:
        note = self._parts.notes.read(manifest.key.cluster, manifest.key.job_id)
        return note if note is not None and note.seq == manifest.seq else None

    # --- outcome

    def _complete(self, placing: _Placing, pid: int) -> Restored:
        parts, manifest = self._parts, placing.manifest
        self._lower_limit(placing.arrival)
        for copy in placing.copies:
            deleted_files.gone(copy.tier.store, copy.image, placing.arrival.init)
        note = parts.notes.read(manifest.key.cluster, manifest.key.job_id)
        parts.notes.remove(manifest.key.cluster, manifest.key.job_id)
        parts.tiers.demand.requested(manifest.key.name, parts.now())
        parts.ledger.write(
            replace(
                _entry(manifest),
                restoring_ms=round(placing.began * 1000),
                restored_ms=round(parts.now() * 1000),
                restored_node=parts.node,
            )
        )
        notify.comment(self._parts, placing.arrival.job_id, None)
        slept_s = max(0.0, placing.began - manifest.dumped_epoch)
        self._mail("restored", placing.job, manifest, slept_s=slept_s)
        try:
            placing.journal.close()
        except JournalError as error:
            parts.log.warning("%s", error)
        return Restored(pid, None if note is None else note.trouble)

    def _cut_short(self, placing: _Placing, why: str) -> Reply | None:
        """Return a reply if Slurm has ended or requeued the attempt meanwhile; ``None`` if the restore has failed."""
        parts, job_id = self._parts, placing.arrival.job_id
        try:
            job = parts.slurm.job(job_id)
        except AffinodeError:
            return None
        if job.allocated and job.state != "COMPLETING" and job.restarts == placing.job.restarts:
            return None
        parts.log.info("job %s: %s while it was being restored (%s)", job_id, job.state.lower(), why)
        note = self._note(placing.manifest)
        if note is not None and job.restarts > placing.job.restarts:
            notify.comment(parts, job_id, messages.suspended(note.why, note.gpu_bytes, job.id))
        with contextlib.suppress(JournalError):
            placing.journal.close()
        return Hold(f"it is {job.state.lower()}")

    def _failed(self, arrival: Arrival, job: Job, placing: _Placing | None, why: str) -> Reply:
        """Return the reply that the site has configured. The image is kept."""
        parts = self._parts
        parts.log.error("job %s: not restored: %s", arrival.job_id, why)
        note = parts.notes.read(parts.cluster, arrival.job_id)
        if parts.settings.notices:
            say(dict(zip(STREAMS, arrival.fds, strict=False)), f"not restored: {messages.reason(why)}")
        if placing is not None:
            entry = _entry(placing.manifest)
            if parts.settings.fresh:
                entry = replace(entry, restoring_ms=round(placing.began * 1000))
            parts.ledger.write(replace(entry, restore_failure=messages.reason(why)))
            with contextlib.suppress(JournalError):
                placing.journal.close()
        self._mail("failed", job, None if placing is None else placing.manifest, why=why)
        if parts.settings.fresh:
            parts.notes.remove(parts.cluster, arrival.job_id)
            notify.comment(self._parts, arrival.job_id, messages.held(f"{why}{messages.AFRESH}"))
            return Start(restore_failed=True)
        if note is None and placing is not None:
            note = self._new_note(placing)
        if note is not None:
            with contextlib.suppress(AffinodeError):
                parts.notes.write(replace(note, failure=messages.reason(why)))
        return self._hold(arrival, job, why, note)

    def _new_note(self, placing: _Placing) -> Note:
        """Return a note for a job whose image was restored before, which removed its note; the attempt was lost then.

        Without a note, it could not be woken.
        """
        manifest, job = placing.manifest, placing.job
        return Note(
            cluster=manifest.key.cluster, job_id=manifest.key.job_id, submit=manifest.key.submit_epoch,
            restarts=manifest.restarts, seq=manifest.seq, uid=manifest.uid, node=manifest.node,
            began_ms=round(manifest.started_epoch * 1000), since_epoch=self._parts.now(), why=messages.REQUEUED,
            gpus=sum(gpu.allocated for gpu in manifest.gpus), gpu_bytes=manifest.gpu_bytes, image_bytes=manifest.size,
            wake=manifest.option.wake, user=job.user, shown=None if job.id == str(job.job_id) else job.id,
        )  # fmt: skip

    def _mail(
        self,
        kind: MailKind,
        job: Job,
        manifest: Manifest | None,
        *,
        why: str | None = None,
        slept_s: float | None = None,
    ) -> None:
        """``manifest``: ``None`` if the image cannot be read."""
        if not job.user:
            return
        parts, key = self._parts, JobKey(self._parts.cluster, job.job_id, 0) if manifest is None else manifest.key
        began = 0.0 if manifest is None else manifest.started_epoch
        held = () if manifest is None else tuple(gpu for gpu in manifest.gpus if gpu.allocated)
        parts.mailer.tell(
            SuspensionMail(
                kind, key.cluster, key.job_id, job.user, parts.node, parts.now(),
                mail.event(key, began, job.restarts), shown=job.id, job_name=job.name,
                partition=job.partitions[0] if job.partitions else None, why=why, gpus=len(held) or None,
                gpu_model=held[0].model if held else None, gpu_bytes=None if manifest is None else manifest.gpu_bytes,
                slept_s=slept_s, fresh=parts.settings.fresh,
            )
        )  # fmt: skip

    def _hold(self, arrival: Arrival, job: Job, why: str, note: Note | None) -> Reply:
        """Requeue and hold the job; its image is kept."""
        parts = self._parts
        text = messages.reason(why)
        notify.comment(
            self._parts, arrival.job_id, messages.held(f"{text}; try again with: slurm-affinode wake {job.id}")
        )
        try:
            retry(parts, "hold the job", lambda: parts.slurm.requeue(arrival.job_id, hold=True, running=True))
        except AffinodeError as error:
            # The plugin requeues the job when the shepherd ends without having started anything.
            parts.log.warning("job %s: %s", arrival.job_id, error)
        if note is not None and note.released_epoch is not None:
            with contextlib.suppress(AffinodeError):
                parts.notes.write(replace(note, released_epoch=None, failure=text))
        return Hold(text)


def _entry(manifest: Manifest) -> LedgerEntry:
    return LedgerEntry.of(manifest.key, round(manifest.started_epoch * 1000))


def _init_of(facts: SuspensionFacts) -> tuple[int | None, int | None]:
    return facts.init_pid, facts.init_started
