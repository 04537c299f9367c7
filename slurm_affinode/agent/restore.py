"""Putting an image in place of a fresh start.

    whose is it -> claim -> verify -> GPUs -> output files -> CRIU -> CUDA restore -> unlock -> the script goes on

The pages of the processes, most of a large image, are verified in the step of CRIU, as they are put in place; the tree
is let go when their digests are right. Where a copy of the image is found damaged before that, what is there of
the tree is ended, and the next copy is tried from "GPUs" on.

A restore that fails leaves nothing of the tree and keeps the image; the site has chosen whether the job is then held or
starts afresh. What may be better later (Slurm silent, memory not free yet) is waited for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_affinode.agent import finding, mailing, telling, words
from slurm_affinode.agent.interface import Arrival
from slurm_affinode.agent.journal import JournalError, Record
from slurm_affinode.agent.notes import Note
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.requeue import patiently
from slurm_affinode.agent.shepherds import Hold, Reply, Restored, Start
from slurm_affinode.agent.streams import STREAMS, say
from slurm_affinode.agent.watch import by_index
from slurm_affinode.checkpoint import remaps
from slurm_affinode.checkpoint.asuser import user_of
from slurm_affinode.checkpoint.interface import CudaState, ImageDamaged, Pages, RestoreFailed
from slurm_affinode.checkpoint.private_image import verified_file
from slurm_affinode.checkpoint.room import shortage
from slurm_affinode.checkpoint.tier import Copy
from slurm_affinode.core.suspension import pair_gpus
from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import GpuFact, JobKey, LiveRun, Manifest, Phase, Refusal
from slurm_affinode.model.suspension_mail import MailKind, SuspensionMail

_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Placing:
    """A restore under way."""

    arrival: Arrival
    job: Job
    copies: Sequence[Copy]
    """Of its image, the fastest first."""
    record: Record
    began: float

    @property
    def manifest(self) -> Manifest:
        """What the image says of itself; all copies are alike."""
        return self.copies[0].image.manifest


class JobRestorer:
    """``Restorer`` for the agent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def restore(self, arrival: Arrival) -> Reply:
        """See ``interface.Restorer``."""
        parts = self._parts
        began = parts.now()
        job = patiently(parts, "ask Slurm for the job", lambda: parts.slurm.job(arrival.job_id))
        run = self._run(job, arrival)
        try:
            found = finding.find(parts, run, job)
        except ImageDamaged as error:
            return self._failed(arrival, job, None, str(error))
        if not found:
            return self._without_image(arrival, run, job)
        if arrival.foreign:
            names = ", ".join(arrival.foreign)
            return self._failed(arrival, job, None, f"Slurm has put it into namespaces of its own ({names})")
        record = parts.journal.record(found[0].image.manifest.key)
        placing = _Placing(arrival, job, found, record, began)
        who = f"{parts.node}/{arrival.init_pid}/{arrival.init_started}"
        other = finding.claim(parts, found[0].image, run, job, who)
        if other is not None:
            return self._failed(arrival, job, None, f"its image is being restored elsewhere ({other})")
        # Before anything else: Slurm takes no comment for a job that is over, and this one may be cancelled meanwhile.
        telling.comment(parts, arrival.job_id, words.restoring(parts.node))
        try:
            pid = self._place(placing)
        except (AffinodeError, OSError) as error:
            why = str(error) if isinstance(error, AffinodeError) else f"{type(error).__name__}: {error}"
            self._clean(arrival)
            return self._cut_short(placing, why) or self._failed(arrival, job, placing, why)
        for copy in placing.copies:
            remaps.gone(copy.tier.store, copy.image, arrival.init)
        note = parts.notes.read(run.key.cluster, run.key.job_id)
        self._told(placing)
        return Restored(pid, None if note is None else note.trouble)

    def _run(self, job: Job, arrival: Arrival) -> LiveRun:
        if job.submit is None:
            raise AffinodeError("Slurm does not say when the job was submitted")
        key = JobKey(self._parts.cluster, arrival.job_id, round(job.submit.timestamp()))
        return LiveRun(key, arrival.uid, job.restarts)

    def _without_image(self, arrival: Arrival, run: LiveRun, job: Job) -> Reply:
        """Something of the job's name is in a store, and it is not for this run."""
        note = self._parts.notes.read(run.key.cluster, run.key.job_id)
        if note is not None and note.given_up:
            self._parts.notes.remove(run.key.cluster, run.key.job_id)
        elif note is not None and finding.sleeps(note, run):
            # It sleeps, but its image is not here (yet): a fresh start would lose it.
            return self._hold(arrival, job, f"its image is still on {note.node}", note)
        elif words.sleeps(job.comment):
            store = "the image store" if self._parts.shared is None else self._parts.shared.path
            return self._hold(arrival, job, f"neither its image nor its note is in {store}: is it mounted?", None)
        if not (job.comment or "").startswith(words.LOST):  # that says why it starts anew
            telling.comment(self._parts, arrival.job_id, None)
        return Start()

    # --- the sequence

    def _place(self, placing: _Placing) -> int:
        parts, arrival, manifest = self._parts, placing.arrival, placing.manifest
        before = placing.record.facts
        again = placing.record.phase is Phase.RESTORING and (before["init_pid"], before["init_started"]) == (
            arrival.init_pid,
            arrival.init_started,
        )
        placing.record.write(
            Phase.RESTORING, job_id=arrival.job_id, uid=arrival.uid, gid=arrival.gid, seq=manifest.seq,
            restarts=manifest.restarts, run=placing.job.restarts, init_pid=arrival.init_pid,
            init_started=arrival.init_started, began=manifest.started_epoch, option=str(manifest.option),
        )  # fmt: skip
        # Verified, brought here, waiting for GPU memory, restored: it must not leave its tier meanwhile.
        with parts.tiers.pinned(placing.copies[0]):
            pid, pairs = parts.tiers.sound(
                placing.copies, lambda copy, pages: self._place_copy(placing, copy, pages, again=again)
            )
        self._cuda(arrival, manifest, pairs)
        return pid

    def _place_copy(
        self, placing: _Placing, copy: Copy, pages: Pages, *, again: bool
    ) -> tuple[int, dict[str, str] | None]:
        """The tree as it was without its GPU memory: PID of its root, and which GPU takes the place of which."""
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
            user = user_of(arrival.init_pid, arrival.uid, arrival.gid, started=arrival.init_started)
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
                shared=copy.tier.shared,
                ready=lambda: self._announce(placing, fds),
            )
        return pid, pairs

    def _clean(self, arrival: Arrival) -> None:
        """What an earlier attempt, cut short, has left in the namespace."""
        parts = self._parts
        if not parts.processes.end(
            arrival.init_pid, arrival.init_started, timeout_s=parts.settings.kill_s, reaped=True
        ):
            raise RestoreFailed("what an earlier restore has left behind cannot be ended")

    def _check(self, arrival: Arrival) -> None:
        """Raises ``RestoreFailed`` where its shepherd has ended: its number may be another process's by now."""
        if not self._parts.processes.alive(arrival.init_pid, arrival.init_started):
            raise RestoreFailed("its shepherd has ended")

    def _gpu_pairs(self, placing: _Placing, manifest: Manifest) -> dict[str, str] | None:
        if not manifest.cuda_pids:
            return None
        parts = self._parts
        devices = parts.gpus.devices()
        held = self._held(placing.job, devices)
        by_uuid = {device.uuid: device for device in devices if device.mig is None}
        new = [
            GpuFact(
                uuid,
                (by_uuid[uuid].model if uuid in by_uuid else None) or "unknown",
                round((by_uuid[uuid].memory_mib or 0) * 2**20) if uuid in by_uuid else 0,
                allocated=any(device.uuid == uuid for device in held),
            )
            for uuid in parts.cuda.devices()
        ]
        pairs = pair_gpus(manifest.gpus, new)
        if isinstance(pairs, Refusal):
            raise RestoreFailed(pairs.text)
        self._wait_for_memory(held, manifest.gpus, pairs)
        return pairs

    def _held(self, job: Job, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The GPUs of the new allocation on this node."""
        indices = self._parts.gpus_of(job)
        found = by_index(devices, indices) if indices else None
        if found is None:
            raise RestoreFailed("Slurm does not say which GPUs of this node the job has")
        return found

    def _wait_for_memory(self, held: Sequence[Device], old: Sequence[GpuFact], pairs: Mapping[str, str] | None) -> None:
        """A restore that runs out of GPU memory fails for good: there has to be room first, on each GPU."""
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

    def _cuda(self, arrival: Arrival, manifest: Manifest, pairs: dict[str, str] | None) -> None:
        parts = self._parts
        members = parts.processes.members(arrival.init_pid, arrival.init_started)
        by_number = {member.pid_ns: member.pid for member in members}
        missing = [number for number in manifest.cuda_pids if number not in by_number]
        if missing:
            raise RestoreFailed(f"process {missing[0]}, which has GPU memory to take back, is not there")
        pids = [by_number[number] for number in manifest.cuda_pids]
        for pid in pids:
            if parts.cuda.state(pid) is CudaState.CHECKPOINTED:
                parts.cuda.restore(pid, pairs=pairs)
        for pid in pids:
            if parts.cuda.state(pid) is CudaState.LOCKED:
                parts.cuda.unlock(pid)

    def _announce(self, placing: _Placing, fds: Mapping[int, int | None]) -> None:
        """Before the tree runs, so that it stands in front of what that writes next."""
        if not self._parts.settings.notices:
            return
        manifest = placing.manifest
        note = self._note(manifest)
        why = f": {note.why}" if note is not None and note.why else ""
        slept = words.span(placing.began - manifest.dumped_epoch)
        say(fds, f"suspended on {manifest.node}{why}\nrestored on {self._parts.node} after {slept}")

    def _note(self, manifest: Manifest) -> Note | None:
        note = self._parts.notes.read(manifest.key.cluster, manifest.key.job_id)
        return note if note is not None and note.seq == manifest.seq else None

    # --- how it went

    def _told(self, placing: _Placing) -> None:
        parts, manifest = self._parts, placing.manifest
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
        telling.comment(self._parts, placing.arrival.job_id, None)
        slept_s = max(0.0, placing.began - manifest.dumped_epoch)
        self._mail("restored", placing.job, manifest, slept_s=slept_s)
        try:
            placing.record.close()
        except JournalError as error:
            parts.log.warning("%s", error)

    def _cut_short(self, placing: _Placing, why: str) -> Reply | None:
        """Where Slurm has ended or requeued the run meanwhile nothing has failed; ``None``: it has not."""
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
            telling.comment(parts, job_id, words.suspended(note.why, note.gpu_bytes, job.id))
        with contextlib.suppress(JournalError):
            placing.record.close()
        return Hold(f"it is {job.state.lower()}")

    def _failed(self, arrival: Arrival, job: Job, placing: _Placing | None, why: str) -> Reply:
        """What the site chose. The image stays."""
        parts = self._parts
        parts.log.error("job %s: not restored: %s", arrival.job_id, why)
        note = parts.notes.read(parts.cluster, arrival.job_id)
        if parts.settings.notices:
            say(dict(zip(STREAMS, arrival.fds, strict=False)), f"not restored: {words.one(why)}")
        if placing is not None:
            entry = _entry(placing.manifest)
            if parts.settings.fresh:
                entry = replace(entry, restoring_ms=round(placing.began * 1000))
            parts.ledger.write(replace(entry, restore_failure=words.one(why)))
            with contextlib.suppress(JournalError):
                placing.record.close()
        self._mail("failed", job, None if placing is None else placing.manifest, why=why)
        if parts.settings.fresh:
            parts.notes.remove(parts.cluster, arrival.job_id)
            telling.comment(self._parts, arrival.job_id, words.held(f"{why}{words.AFRESH}"))
            return Start(restore_failed=True)
        if note is not None:
            with contextlib.suppress(AffinodeError):
                parts.notes.write(replace(note, failure=words.one(why)))
        return self._hold(arrival, job, why, note)

    def _mail(
        self,
        kind: MailKind,
        job: Job,
        manifest: Manifest | None,
        *,
        why: str | None = None,
        slept_s: float | None = None,
    ) -> None:
        """``manifest``: none where the image cannot be read."""
        if not job.user:
            return
        parts, key = self._parts, JobKey(self._parts.cluster, job.job_id, 0) if manifest is None else manifest.key
        began = 0.0 if manifest is None else manifest.started_epoch
        held = () if manifest is None else tuple(gpu for gpu in manifest.gpus if gpu.allocated)
        parts.mailer.tell(
            SuspensionMail(
                kind, key.cluster, key.job_id, job.user, parts.node, parts.now(),
                mailing.event(key, began, job.restarts), shown=job.id, job_name=job.name,
                partition=job.partitions[0] if job.partitions else None, why=why, gpus=len(held) or None,
                gpu_model=held[0].model if held else None, gpu_bytes=None if manifest is None else manifest.gpu_bytes,
                slept_s=slept_s, fresh=parts.settings.fresh,
            )
        )  # fmt: skip

    def _hold(self, arrival: Arrival, job: Job, why: str, note: Note | None) -> Reply:
        """Back to the queue, held: the image stays, and so does the job."""
        parts = self._parts
        text = words.one(why)
        telling.comment(
            self._parts, arrival.job_id, words.held(f"{text}; try again with: slurm-affinode wake {job.id}")
        )
        try:
            patiently(parts, "hold the job", lambda: parts.slurm.requeue(arrival.job_id, hold=True, running=True))
        except AffinodeError as error:
            # The plugin does it when the shepherd ends without having started anything.
            parts.log.warning("job %s: %s", arrival.job_id, error)
        if note is not None and note.released_epoch is not None:
            with contextlib.suppress(AffinodeError):
                parts.notes.write(replace(note, released_epoch=None, failure=text))
        return Hold(text)


def _entry(manifest: Manifest) -> LedgerEntry:
    key = manifest.key
    return LedgerEntry(key.cluster, key.job_id, key.submit_epoch, round(manifest.started_epoch * 1000))
