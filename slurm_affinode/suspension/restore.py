"""Restore a checkpoint image instead of starting the job afresh.

    find -> claim -> verify -> check GPUs -> output files -> CRIU -> CUDA restore -> unlock -> the script continues

The pages of the processes, most of a large image, are verified during the CRIU step as they are put in place, and the
tree is released when their digests match. If a copy of the image is found damaged before that, the partial tree is
killed and the next copy is tried from "check GPUs" on.

A failed restore leaves no process and keeps the image. If its cause may pass (``interface.may_pass``), the job returns
to the queue and the waker releases it again after a growing time; otherwise, and after the last retry, the site decides
whether it is held or starts afresh. Temporary conditions (slurmctld does not respond, GPU memory not free yet) are
waited for. A restore has succeeded once the batch script has run for some seconds, or has exited by itself, with any
exit status. It has failed if a signal ends the script before.

If the image was restored before, that attempt was lost: the job was preempted or requeued, or its node failed. It then
returns to the image, starts from its beginning or is held (``core.suspension.after_loss``), and its output says so.

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
from slurm_affinode.checkpoint.files import deleted_files, scratch_files, scratch_index
from slurm_affinode.checkpoint.files.scratch_files import ScratchRestored
from slurm_affinode.checkpoint.image.private_image import verified_file
from slurm_affinode.checkpoint.interface import (
    CheckpointError,
    CudaDriver,
    CudaState,
    Image,
    ImageDamaged,
    Imager,
    ImageUnanswered,
    Pages,
    RestoreFailed,
    RestoreInterrupted,
    may_pass,
)
from slurm_affinode.checkpoint.store.retention import Copy
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.core.suspension import AfterLossVerdict, after_loss, pair_gpus
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import (
    AfterLoss,
    GpuFact,
    JobKey,
    LiveRun,
    MailKind,
    Manifest,
    Phase,
    Refusal,
    SuspensionMail,
)
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import mail, messages, notify
from slurm_affinode.suspension.activity import by_index
from slurm_affinode.suspension.context import (
    LOG,
    Clock,
    GpuAllocations,
    Gpus,
    LocalFiles,
    Location,
    Records,
    Streams,
    SuspendSettings,
)
from slurm_affinode.suspension.interface import Arrival, cause
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Processes
from slurm_affinode.suspension.job.shepherd import Hold, Reply, Restored, Start, Wait
from slurm_affinode.suspension.job.streams import STREAMS, say
from slurm_affinode.suspension.mail import Mailer
from slurm_affinode.suspension.memory import HostMemory, shortage, visible_gpus
from slurm_affinode.suspension.records.journal import JobJournal, JournalError
from slurm_affinode.suspension.records.record import SuspensionFacts
from slurm_affinode.suspension.records.shared_state import NOW, LastRestore, Note
from slurm_affinode.suspension.requeue import retry

_PAUSE_S = 1.0
_CHECK_S = 0.5
"""Interval of checks whether a restored script runs."""
_REPORT_S = 2.0
"""Time for the report of a script that has ended; an older shepherd sends none."""
_SKEW_S = 60.0
"""A restore is not lost before it was complete, except by the difference of two clocks."""


def _sleeps(note: Note, run: LiveRun) -> bool:
    """Return whether a note belongs to an earlier attempt."""
    return note.uid == run.uid and note.restarts < run.restarts


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of an attempt that was restored from the same image."""

    restore: LastRestore
    verdict: AfterLossVerdict | None
    """``None``: its owner has decided for the image."""

    @property
    def text(self) -> str:
        """Return the loss in one line."""
        return messages.lost_after_restore(self.restore.node, self.restore.ran_s, fresh=self.restore.fresh)


@dataclass(frozen=True, slots=True)
class _Placing:
    """A restore in progress."""

    arrival: Arrival
    job: Job
    copies: Sequence[Copy]
    """Copies of its image, the fastest first."""
    journal: JobJournal
    began: float
    loss: _Loss | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the image, the same in all copies."""
        return self.copies[0].image.manifest


class JobRestorer:
    """``Restorer`` for the agent."""

    def __init__(
        self, *, location: Location, slurm: SlurmClient, processes: Processes, cuda: CudaDriver, gpus: Gpus,
        allocations: GpuAllocations, imager: Imager, streams: Streams, tiers: Tiers, files: LocalFiles,
        records: Records, memory: HostMemory, settings: SuspendSettings, limits: MemoryLimits | None,
        mailer: Mailer, clock: Clock,
    ) -> None:  # fmt: skip
        """``limits``: the memory limits of jobs; ``None``: they are not known."""
        self._node, self._cluster = location.node, location.cluster
        self._slurm = slurm
        self._processes = processes
        self._cuda = cuda
        self._gpus = gpus
        self._allocations = allocations
        self._imager = imager
        self._streams = streams
        self._tiers = tiers
        self._environments, self._created = files.environments, files.created
        self._scratch, self._scratch_records = files.scratch, files.scratch_records
        self._journal, self._ledger, self._notes = records.journal, records.ledger, records.notes
        self._memory = memory
        self._settings = settings
        self._limits = limits
        self._mailer = mailer
        self._clock = clock

    def restore(self, arrival: Arrival) -> Reply:
        """See ``interface.Restorer``."""
        began = self._clock.now()
        job = retry(
            "ask Slurm for the job", lambda: self._slurm.job(arrival.job_id), self._settings.slurm_s, self._clock
        )
        run = LiveRun.of(self._cluster, job, uid=arrival.uid)
        if run is None:
            raise AffinodeError("Slurm does not report when the job was submitted")
        try:
            copies = self._copies(arrival, run, job)
            if not copies:
                return self._without_image(arrival, run, job)
            image = copies[0].image
            placing = _Placing(arrival, job, copies, self._journal.of_job(image.manifest.key), began)
            self._claim(arrival, run, job, image)
            placing = replace(placing, loss=self._loss(arrival, run, image.manifest))
            again, runs_since_epoch = self._interrupted(placing)
            reply = self._reply_after_loss(placing) if runs_since_epoch is None else None
        except (RestoreFailed, JournalError) as error:
            return self._failed(arrival, job, None, error)
        if reply is not None:
            return reply
        arrival.link.send(Wait())  # from now on, the shepherd reports which processes have ended
        # Set first: Slurm accepts no comment for an ended job, and this one may be canceled meanwhile.
        notify.comment(self._slurm, arrival.job_id, messages.restoring(self._node))
        try:
            if runs_since_epoch is None:
                runs_since_epoch = self._restore_image(placing, again=again)
            else:
                LOG.info("job %s: its restore is resumed: an earlier agent has released its processes", job.job_id)
                self._restore_cuda(placing, resumed=True)
            self._lower_limit(arrival)
            self._see_alive(placing)
        except (AffinodeError, OSError) as error:
            self._clean(arrival)
            self._lower_limit(arrival)
            return self._cut_short(placing, cause(error)) or self._failed(arrival, job, placing, error)
        return self._complete(placing, runs_since_epoch)

    # --- before the restore

    def _copies(self, arrival: Arrival, run: LiveRun, job: Job) -> list[Copy]:
        """Return the copies of its image, the fastest first. Raises ``RestoreFailed`` if none can be restored."""
        try:
            copies = self._find(run, job)
        except ImageDamaged as error:
            kind = RestoreInterrupted if may_pass(error) else RestoreFailed
            raise kind(str(error)) from None
        if copies and arrival.foreign:
            names = ", ".join(arrival.foreign)
            raise RestoreFailed(f"Slurm has put it into namespaces of its own ({names})")
        return copies

    def _find(self, run: LiveRun, job: Job) -> list[Copy]:
        """Return the copies of the newest image, the fastest first. Raises ``ImageDamaged`` if it is not intact.

        Waits for a file server that is unavailable for some time: that is no reason to hold the job.
        """
        deadline = self._clock.now() + self._settings.restore_s
        while True:
            try:
                return self._copies_of(run, job)
            except ImageUnanswered:
                if self._clock.now() >= deadline:
                    raise
            self._clock.sleep(_PAUSE_S)

    def _copies_of(self, run: LiveRun, job: Job) -> list[Copy]:
        copies, damage = self._tiers.copies(run)
        newest = max((copy.image.manifest.seq for copy in copies), default=0)
        first = copies[0].image.manifest if copies else None
        note = self._notes.read(run.key.cluster, run.key.job_id)
        if note is not None and first is not None and note.precedes(first):
            LOG.warning("job %s: note ignored: it is from an earlier suspension than the image", first.key.job_id)
            note = None
        unneeded = isinstance(damage, ImageUnanswered) and first is not None and self._last(first, run, job)
        if damage is not None and not unneeded and (note is None or newest < note.seq):
            # A damaged copy does not matter if another store has that image; an older image is no substitute.
            raise damage
        if note is not None and _sleeps(note, run) and (newest < note.seq or note.given_up):
            return []  # an older image would lose the job's progress
        restored = self._notes.last_restore(run.key.cluster, run.key.job_id)
        if first is not None and restored is not None and restored.discards(first):
            return []
        return [copy for copy in copies if copy.image.manifest == first]

    def _last(self, image: Manifest, run: LiveRun, job: Job) -> bool:
        """Return whether no other attempt can have run between the image, which is on this node, and this attempt."""
        return image.restarts + 1 == run.restarts and job.batch_host in (None, self._node)

    def _claim(self, arrival: Arrival, run: LiveRun, job: Job, image: Image) -> None:
        """Claim the restore of the attempt. Raises ``RestoreFailed`` if another shepherd has claimed it.

        Raises ``AffinodeError`` if that cannot be determined.
        """
        who = f"{self._node}/{arrival.init_pid}/{arrival.init_started}"
        try:
            other_claim = self._notes.claim(run, who, former=image.former)
        except NoAnswerError as error:
            if not self._last(image.manifest, run, job):
                raise ImageUnanswered(f"its restore cannot be claimed: {error.strerror}") from None
            LOG.warning("job %s: restored without a claim: %s", run.key.job_id, error.strerror)
            return
        if other_claim is not None:
            raise RestoreInterrupted(f"its image is being restored elsewhere ({other_claim})")

    def _without_image(self, arrival: Arrival, run: LiveRun, job: Job) -> Reply:
        """Return the reply for a job with data in a store, but no image for this attempt."""
        note = self._notes.read(run.key.cluster, run.key.job_id)
        if note is not None and note.given_up:
            self._forget_image(note, job)
            self._comment(arrival, messages.GIVEN_UP)
        elif note is not None and _sleeps(note, run):
            # It is suspended, but its image is not here (yet): a fresh start would lose it.
            why = f"its image is still on {note.node}"
            return self._hold(arrival, job, why, self._noted(note, why, passes=True))
        elif messages.sleeps(job.comment):
            store = "the image store" if self._tiers.shared_store is None else self._tiers.shared_store.path
            return self._hold(arrival, job, f"neither its image nor its note is in {store}: is it mounted?", None)
        if not (job.comment or "").startswith(messages.LOST):  # which states why it starts afresh
            notify.comment(self._slurm, arrival.job_id, None)
        return Start()

    def _forget_image(self, note: Note, job: Job) -> None:
        """Remove the note of a job whose image was given up. Copies that other nodes have are not restored later."""
        with contextlib.suppress(AffinodeError):
            self._notes.write_restore(
                LastRestore(
                    cluster=note.cluster, job_id=note.job_id, submit=note.submit, image_restarts=note.restarts,
                    seq=note.seq, uid=note.uid, checkpoint_epoch=note.began_ms / 1000, run=job.restarts,
                    node=self._node, restored_epoch=self._clock.now(), discarded=True,
                )
            )  # fmt: skip
        self._notes.remove(note.cluster, note.job_id)

    def _comment(self, arrival: Arrival, text: str) -> None:
        """Write lines into the job's output, if the site has enabled them."""
        if self._settings.notices:
            say(dict(zip(STREAMS, arrival.fds, strict=False)), text)

    # --- a loss after a restore

    def _loss(self, arrival: Arrival, run: LiveRun, manifest: Manifest) -> _Loss | None:
        """Return the loss of an earlier attempt that was restored from this image; ``None`` if none is known."""
        restored = self._notes.last_restore(run.key.cluster, run.key.job_id)
        if restored is None or not restored.is_of(manifest) or restored.run >= run.restarts:
            return None
        # Slurm moves the submit time of a job when it requeues it. After another attempt, that was another requeue.
        requeued = float(run.key.submit_epoch)
        if (
            restored.lost_epoch is None
            and restored.run + 1 == run.restarts
            and (requeued >= restored.restored_epoch - _SKEW_S)
        ):
            restored = replace(restored, lost_epoch=requeued)
        settings = self._settings
        verdict = after_loss(
            arrival.hello.option.after_loss, settings.after_loss, restored.ran_s, settings.discard_image_after_s
        )
        return _Loss(restored, None if restored.held else verdict)

    def _reply_after_loss(self, placing: _Placing) -> Reply | None:
        """Return the reply for a job that is not restored again after a loss; ``None`` if it is.

        Raises ``RestoreFailed`` if the decision cannot be recorded.
        """
        loss = placing.loss
        if loss is None:
            return None
        action = AfterLoss.IMAGE if loss.verdict is None else loss.verdict.action
        held_restore = replace(loss.restore, held=loss.restore.held or action is AfterLoss.HOLD)
        try:
            if action is AfterLoss.START:
                started = replace(
                    held_restore, run=placing.job.restarts, node=self._node, restored_epoch=self._clock.now(),
                    lost_epoch=None, discarded=True, lost_s=loss.restore.ran_s,
                )  # fmt: skip
                self._notes.write_restore(started)
            else:
                self._notes.write_restore(held_restore)
        except AffinodeError as error:
            if action is AfterLoss.IMAGE:
                LOG.warning("job %s: %s", placing.arrival.job_id, error)
                return None
            raise RestoreInterrupted(f"what follows its loss cannot be recorded: {error}") from None
        if loss.verdict is None or action is AfterLoss.IMAGE:
            return None
        reply = self._start_over if action is AfterLoss.START else self._hold_for_choice
        return reply(placing, loss, loss.verdict.why)

    def _start_over(self, placing: _Placing, loss: _Loss, why: str) -> Reply:
        """Start the batch script from its beginning. Its image is recorded as discarded; the sweep removes it."""
        manifest, arrival = placing.manifest, placing.arrival
        LOG.info("job %s: starts from its beginning: %s: %s", arrival.job_id, loss.text, why)
        checkpoint = messages.format_time(manifest.dumped_epoch)
        self._comment(
            arrival,
            f"starts from its beginning, not from its checkpoint of {checkpoint}: {loss.text}, and {why}",
        )
        self._notes.remove(manifest.key.cluster, manifest.key.job_id)
        notify.comment(self._slurm, arrival.job_id, messages.started_over(loss.text, why))
        self._mail("failed", placing.job, manifest, why=f"{loss.text}; {why}", fresh=True, loss=loss)
        with contextlib.suppress(JournalError):
            placing.journal.close()
        return Start()

    def _hold_for_choice(self, placing: _Placing, loss: _Loss, because: str) -> Reply:
        """Hold the job until its owner decides."""
        job = placing.job
        why = f"{loss.text} ({because})"
        LOG.info("job %s: held: %s", placing.arrival.job_id, why)
        choice = (
            f"{why}; to restore it from its checkpoint of {messages.format_time(placing.manifest.dumped_epoch)}: "
            f"slurm-affinode wake {job.id}; to start from the beginning: slurm-affinode wake {job.id} --from-start"
        )
        self._comment(placing.arrival, f"held: {choice}")
        self._mail("failed", job, placing.manifest, why=why, fresh=False, loss=loss)
        # Without a failure, which would be retried.
        note = replace(self._new_note(placing), wake="hold", trouble=messages.reason(why))
        return self._hold(placing.arrival, job, why, note, comment=choice)

    # --- the restore

    def _interrupted(self, placing: _Placing) -> tuple[bool, float | None]:
        """Return whether an earlier restore of this attempt was interrupted, and since when its processes run.

        They run on: restoring them again would repeat what they have done since, and rewind their output.
        """
        arrival, journal = placing.arrival, placing.journal
        if journal.phase is not Phase.RESTORING:
            return False, None
        record = journal.record
        again = (record.init_pid, record.init_started) == (arrival.init_pid, arrival.init_started)
        return again, record.runs_since_epoch if again and record.runs_in_started == arrival.init_started else None

    def _restore_image(self, placing: _Placing, *, again: bool) -> float:
        """Restore the process tree and its GPU memory; return since when the tree runs (epoch)."""
        arrival, manifest = placing.arrival, placing.manifest
        facts = SuspensionFacts(
            job_id=arrival.job_id, uid=arrival.uid, gid=arrival.gid, seq=manifest.seq, restarts=manifest.restarts,
            run=placing.job.restarts, init_pid=arrival.init_pid, init_started=arrival.init_started,
            began_epoch=manifest.started_epoch, option=manifest.option,
        )  # fmt: skip
        placing.journal.write(Phase.RESTORING, facts)
        self._clean(arrival)  # first: the processes of an interrupted attempt use the memory of a raised limit
        self._make_room(placing)
        # The image must not leave its tier until it is restored.
        with self._tiers.pinned(placing.copies[0]):
            self._tiers.sound(placing.copies, partial(self._place, placing, again=again))
        # From now on, what the tree does must not be undone, even if this agent ends before the restore is complete.
        runs_since_epoch = self._clock.now()
        runs = SuspensionFacts(runs_since_epoch=runs_since_epoch, runs_in_started=arrival.init_started)
        placing.journal.write(Phase.RESTORING, runs)
        self._restore_cuda(placing)
        return runs_since_epoch

    def _place(self, placing: _Placing, copy: Copy, pages: Pages, *, again: bool) -> None:
        """Restore the process tree from one copy, without its GPU memory."""
        arrival, manifest = placing.arrival, placing.manifest
        self._clean(arrival)
        self._check(arrival)
        if manifest.cuda_pids:
            devices = self._allocated_devices(placing.job)
            self._wait_for_memory(devices, manifest.gpus, self._gpu_pairs(placing, devices))
        with contextlib.ExitStack() as stack:
            top = copy.tier.store.open(copy.image)
            stack.callback(os.close, top)
            criu = copy.tier.store.open_criu(copy.image)
            stack.callback(os.close, criu)
            fds = dict(zip(STREAMS, arrival.fds, strict=False))
            user = arrival.owner
            scratch = self._put_scratch(placing, copy, top, pages)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(self._scratch.remove, arrival.init, scratch.inodes, user)
            inherit = self._streams.restore_files(
                manifest.outputs,
                fds,
                lambda name: verified_file(top, name, name, pages, shared=copy.tier.shared),
                user,
                again=again,
                check=lambda: self._check(arrival),
            )
            self._imager.restore(
                arrival.init,
                criu,
                inherit,
                root_pid_ns=manifest.root_pid,
                timeout_s=self._settings.restore_s,
                pages=pages,
                user=user,
                created=self._created.of(manifest.key, arrival.uid),
                shared=copy.tier.shared,
                ready=lambda: self._announce(placing, fds, scratch),
            )
            undo.pop_all()

    def _put_scratch(self, placing: _Placing, copy: Copy, top: int, pages: Pages) -> ScratchRestored:
        """Restore closed node-local files from one copy, and record what the next suspension needs to know."""
        arrival, manifest = placing.arrival, placing.manifest
        names = {file.path for file in manifest.files}
        record, note = self._scratch_records.of(manifest.key, arrival.uid), self._note(manifest)
        if note is not None and (required := note.required) is not None:
            record.write(lambda facts: replace(facts, required=required))
        if scratch_index.INDEX not in names:
            return ScratchRestored()
        index = copy.tier.store.small_file(copy.image, scratch_index.INDEX, scratch_index.LIMIT, of_criu=False)
        with contextlib.ExitStack() as stack:
            data = None
            if scratch_index.DATA in names:
                data = verified_file(top, scratch_index.DATA, scratch_index.DATA, pages, shared=copy.tier.shared)
                stack.callback(os.close, data)
            return self._scratch.restore_files(
                arrival.init, index, data, arrival.owner, record, timeout_s=self._settings.restore_s
            )

    def _make_room(self, placing: _Placing) -> None:
        """Have the memory limit of the job permit its processes with the contents of their GPU memory."""
        arrival, files = placing.arrival, placing.manifest.files
        memory = sum(file.size for file in files if PurePath(file.path).match("criu/pages-*.img"))
        self._memory.make_room_for_image(arrival.job_id, arrival.init, memory, lambda: self._check(arrival))

    def _lower_limit(self, arrival: Arrival) -> None:
        if self._limits is not None:
            self._limits.lower(arrival.job_id)

    def _clean(self, arrival: Arrival) -> None:
        """Kill the processes that an interrupted attempt has left in the namespace."""
        if not self._processes.end(
            arrival.init_pid, arrival.init_started, timeout_s=self._settings.kill_s, reaped=True
        ):
            raise RestoreInterrupted("the processes of an earlier restore cannot be killed")

    def _check(self, arrival: Arrival) -> None:
        """Raise ``RestoreFailed`` if the shepherd has ended: its PID may have been reused."""
        if not self._processes.alive(arrival.init_pid, arrival.init_started):
            raise RestoreInterrupted("its shepherd has ended")

    def _gpu_pairs(self, placing: _Placing, devices: Sequence[Device]) -> dict[str, str] | None:
        """Return the UUID of each GPU that it had -> that of the one that it has now; ``None``: all are the same."""
        pairs = pair_gpus(placing.manifest.gpus, visible_gpus(self._cuda, self._gpus, devices))
        if isinstance(pairs, Refusal):
            raise RestoreInterrupted(pairs.text)  # Slurm may give it other GPUs the next time
        return pairs

    def _allocated_devices(self, job: Job) -> tuple[Device, ...]:
        """Return the GPUs of the new allocation on this node."""
        indices = self._allocations.of(job)
        devices = by_index(self._gpus.devices(), indices) if indices else None
        if devices is None:
            raise RestoreInterrupted("Slurm does not report which GPUs of this node the job has")
        return devices

    def _wait_for_memory(
        self, devices: Sequence[Device], old: Sequence[GpuFact], pairs: Mapping[str, str] | None
    ) -> None:
        """Wait for free memory on each GPU: a restore that runs out of GPU memory fails permanently."""
        needs = {gpu.uuid: gpu.held_bytes for gpu in old}
        deadline = self._clock.now() + self._settings.free_s
        while True:
            try:
                why = shortage(needs, {device.uuid: self._gpus.free_bytes(device) for device in devices}, pairs)
            except GpuError as error:
                raise RestoreInterrupted(str(error)) from None
            if why is None:
                return
            if self._clock.now() >= deadline:
                raise RestoreInterrupted(f"its GPU memory does not fit: {why}")
            self._clock.sleep(_PAUSE_S)

    def _restore_cuda(self, placing: _Placing, *, resumed: bool = False) -> None:
        """Restore the GPU memory of the processes that still lack it.

        ``resumed``: an earlier agent has begun, so that some may run, or have ended, since.
        """
        arrival, manifest = placing.arrival, placing.manifest
        if not manifest.cuda_pids:
            return
        members = self._processes.members(arrival.init_pid, arrival.init_started)
        by_number = {member.pid_ns: member.pid for member in members}
        missing = [number for number in manifest.cuda_pids if number not in by_number]
        if missing and not resumed:
            raise RestoreInterrupted(f"process {missing[0]}, which has GPU memory to restore, does not exist")
        pids = [by_number[number] for number in manifest.cuda_pids if number in by_number]
        if resumed:
            users = self._cuda.users(pids)
            pids = [pid for pid in pids if pid in users]
        waiting = [pid for pid in pids if self._cuda.state(pid) is CudaState.CHECKPOINTED]
        pairs = self._gpu_pairs(placing, self._allocated_devices(placing.job)) if waiting else None
        self._cuda.restore(*waiting, pairs=pairs)
        for pid in pids:
            if self._cuda.state(pid) is CudaState.LOCKED:
                self._cuda.unlock(pid)

    def _see_alive(self, placing: _Placing) -> None:
        """Wait until the batch script has run for some seconds, or has exited by itself, with any exit status.

        Raises ``RestoreFailed`` if a signal has ended it. An end that the shepherd does not report is the job's own.
        """
        arrival, root = placing.arrival, placing.manifest.root_pid
        began = self._clock.now()
        while (ran := self._clock.now() - began) < self._settings.alive_s:
            self._check(arrival)
            members = self._processes.members(arrival.init_pid, arrival.init_started)
            if all(member.pid_ns != root for member in members):
                break
            self._clock.sleep(_CHECK_S)
        else:
            return
        missing, status = self._clock.now(), None
        while status is None and self._clock.now() - missing < _REPORT_S:
            self._clock.sleep(_CHECK_S)
            self._check(arrival)
            status = arrival.link.status_of(root)
        if status is None:
            LOG.warning("job %s: its script has ended after its restore; how is unknown", arrival.job_id)
        elif os.WIFSIGNALED(status):
            signal_name = messages.signal_name(os.WTERMSIG(status))
            raise RestoreFailed(f"its script was ended by {signal_name} {span(ran)} after it was restored")

    def _announce(self, placing: _Placing, fds: Mapping[int, int | None], scratch: ScratchRestored) -> None:
        """Write the notice before the tree runs, so that it precedes the next output of the tree."""
        arrival = placing.arrival
        # The processes of an aborted restore, or of one by an earlier agent, had the same PIDs.
        arrival.link.forget_status(placing.manifest.root_pid)
        try:
            self._environments.write(arrival.job_id, arrival.uid, arrival.init)
        except OSError as error:
            LOG.warning("job %s: its environment is not written: %s", arrival.job_id, error)
        if not self._settings.notices:
            return
        manifest = placing.manifest
        note = self._note(manifest)
        why = f": {note.why}" if note is not None and note.why else ""
        slept = span(placing.began - manifest.dumped_epoch)
        lines = [f"suspended on {manifest.node}{why}", f"restored on {self._node} after {slept}"]
        if note is not None and note.local_files is not None:
            lines.insert(1, messages.reason(note.local_files))
        loss = placing.loss
        if loss is not None:
            ran_s = loss.restore.ran_s
            lost = "the work since then" if ran_s is None else f"{span(ran_s)} of work since then"
            point = (
                f"restored on {self._node} from its checkpoint of {messages.format_time(manifest.dumped_epoch)} again"
            )
            lines = [f"{point}; {lost} is lost: {loss.text}"]
        if scratch.tied and manifest.node != self._node:
            lines.append(messages.without_files(manifest.node))
        elif scratch.missing:
            lines.append(messages.files_missing(self._node, scratch.missing))
        if scratch.kept_paths:
            lines.append(messages.files_kept(self._node, scratch.kept_paths))
        say(fds, "\n".join(lines))

    def _note(self, manifest: Manifest) -> Note | None:
        note = self._notes.read(manifest.key.cluster, manifest.key.job_id)
        return note if note is not None and note.seq == manifest.seq else None

    # --- outcome

    def _complete(self, placing: _Placing, runs_since_epoch: float) -> Restored:
        """Record the restore; return the reply. ``runs_since_epoch``: when the process tree began to run."""
        manifest, loss = placing.manifest, placing.loss
        for copy in placing.copies:
            deleted_files.gone(copy.tier.store, copy.image, placing.arrival.init)
        note = self._notes.read(manifest.key.cluster, manifest.key.job_id)
        self._record(placing, runs_since_epoch)
        self._notes.remove(manifest.key.cluster, manifest.key.job_id)
        self._tiers.retention.restored(manifest.key.name, manifest.seq)
        self._ledger.write(
            replace(
                _entry(manifest),
                restoring_ms=round(placing.began * 1000),
                restored_ms=round(runs_since_epoch * 1000),
                restored_node=self._node,
            )
        )
        returned = None if loss is None else messages.returned(loss.text, manifest.dumped_epoch)
        notify.comment(self._slurm, placing.arrival.job_id, returned)
        slept_s = max(0.0, placing.began - manifest.dumped_epoch)
        self._mail("restored", placing.job, manifest, slept_s=None if loss is not None else slept_s, loss=loss)
        try:
            placing.journal.close()
        except JournalError as error:
            LOG.warning("%s", error)
        return Restored(manifest.root_pid, None if note is None else note.trouble)

    def _record(self, placing: _Placing, runs_since_epoch: float | None = None) -> None:
        """Record the attempt, for the case that it is lost. ``runs_since_epoch``: ``None`` if it starts afresh."""
        restore = LastRestore.of(
            placing.manifest, run=placing.job.restarts, node=self._node,
            at_epoch=self._clock.now() if runs_since_epoch is None else runs_since_epoch,
            fresh=runs_since_epoch is None, before=None if placing.loss is None else placing.loss.restore,
        )  # fmt: skip
        try:
            self._notes.write_restore(restore)
        except AffinodeError as error:
            LOG.warning("job %s: a loss of this attempt will not be noticed: %s", placing.arrival.job_id, error)

    def _cut_short(self, placing: _Placing, why: str) -> Reply | None:
        """Return a reply if Slurm has ended or requeued the attempt meanwhile; ``None`` if the restore has failed."""
        job_id = placing.arrival.job_id
        try:
            job = self._slurm.job(job_id)
        except AffinodeError:
            return None
        if job.allocated and job.state != "COMPLETING" and job.restarts == placing.job.restarts:
            return None
        LOG.info("job %s: %s while it was being restored (%s)", job_id, job.state.lower(), why)
        note = self._note(placing.manifest)
        if note is not None and job.restarts > placing.job.restarts:
            tied_to = note.node if note.tied else None
            notify.comment(self._slurm, job_id, messages.suspended(note.why, note.gpu_bytes, job.id, tied_to=tied_to))
        with contextlib.suppress(JournalError):
            placing.journal.close()
        return Hold(f"it is {job.state.lower()}")

    def _failed(self, arrival: Arrival, job: Job, placing: _Placing | None, error: Exception) -> Reply:
        """Return the reply: the job is to be retried, or what the site has configured. The image is kept."""
        why = cause(error)
        LOG.error("job %s: not restored: %s", arrival.job_id, why)
        note = self._notes.read(self._cluster, arrival.job_id)
        if note is None and placing is not None:
            note = self._new_note(placing)
        if note is not None:
            note = self._noted(note, why, passes=may_pass(error))
        retry_epoch = None if note is None else note.retry_epoch
        # Without its note, which is where its image is, the waker releases it again once both are there.
        absent = note is None and may_pass(error) and self._settings.restore_retries > 0
        fresh = self._settings.fresh and retry_epoch is None and not absent
        self._comment(arrival, messages.not_restored(why, job.id, fresh=fresh, retry_epoch=retry_epoch))
        if placing is not None:
            entry = _entry(placing.manifest)
            if fresh:
                entry = replace(entry, restoring_ms=round(placing.began * 1000))
            self._ledger.write(replace(entry, restore_failure=messages.reason(why)))
            with contextlib.suppress(JournalError):
                placing.journal.close()
        if retry_epoch is None:
            self._mail("failed", job, None if placing is None else placing.manifest, why=why, fresh=fresh)
        if fresh:
            if placing is not None:
                self._record(placing)
            self._notes.remove(self._cluster, arrival.job_id)
            notify.comment(self._slurm, arrival.job_id, messages.restore_failure(f"{why}{messages.AFRESH}"))
            return Start(restore_failed=True)
        return self._hold(arrival, job, why, note)

    def _noted(self, note: Note, why: str, *, passes: bool) -> Note:
        """Return the note with a further failed restore. ``passes``: it is retried, unless it has failed too often."""
        settings = self._settings
        count, now = note.failures + 1, self._clock.now()
        retry_epoch = None
        if passes and count <= settings.restore_retries:
            retry_epoch = now + settings.retry_pause_s(count)
        # It was released on request, also if with scontrol.
        wake = NOW if note.wake == "hold" and retry_epoch is not None else note.wake
        return replace(
            note, wake=wake, failure=messages.reason(why), failures=count, failed_epoch=now, retry_epoch=retry_epoch,
            released_epoch=None,
        )  # fmt: skip

    def _new_note(self, placing: _Placing) -> Note:
        """Return a note for a job whose image was restored before, which removed its note; the attempt was lost then.

        Without a note, it could not be woken.
        """
        manifest, job, tied = placing.manifest, placing.job, self._tied(placing)
        required = self._scratch_records.of(manifest.key, manifest.uid).read_or_default().required
        return Note(
            cluster=manifest.key.cluster, job_id=manifest.key.job_id, submit=manifest.key.submit_epoch,
            restarts=manifest.restarts, seq=manifest.seq, uid=manifest.uid, node=manifest.node,
            began_ms=round(manifest.started_epoch * 1000), since_epoch=self._clock.now(), why=messages.REQUEUED,
            gpus=sum(gpu.allocated for gpu in manifest.gpus), gpu_bytes=manifest.gpu_bytes, image_bytes=manifest.size,
            wake=manifest.option.wake, user=job.user, shown=None if job.id == str(job.job_id) else job.id,
            local_files=tied, tied=True if tied is not None else None, required=required if tied is not None else None,
        )  # fmt: skip

    def _tied(self, placing: _Placing) -> str | None:
        """Return why the job of an image is tied to its node; ``None`` if it is not, or that cannot be read."""
        with contextlib.suppress(CheckpointError, OSError):
            image, store = placing.copies[0].image, placing.copies[0].tier.store
            index = store.small_file(image, scratch_index.INDEX, scratch_index.LIMIT, of_criu=False)
            return scratch_files.tied(index, placing.arrival.uid)
        return None

    def _mail(
        self,
        kind: MailKind,
        job: Job,
        manifest: Manifest | None,
        *,
        why: str | None = None,
        slept_s: float | None = None,
        fresh: bool | None = None,
        loss: _Loss | None = None,
    ) -> None:
        """``manifest``: ``None`` if the image cannot be read. ``fresh``: ``None``: as the site has configured."""
        if not job.user:
            return
        key = JobKey(self._cluster, job.job_id, 0) if manifest is None else manifest.key
        began = 0.0 if manifest is None else manifest.started_epoch
        allocated_gpus = () if manifest is None else tuple(gpu for gpu in manifest.gpus if gpu.allocated)
        self._mailer.deliver(
            SuspensionMail(
                kind, key.cluster, key.job_id, job.user, self._node, self._clock.now(),
                mail.event(key, began, job.restarts), shown=job.id, job_name=job.name,
                partition=job.partitions[0] if job.partitions else None, why=why, gpus=len(allocated_gpus) or None,
                gpu_model=allocated_gpus[0].model if allocated_gpus else None,
                gpu_bytes=None if manifest is None else manifest.gpu_bytes,
                slept_s=slept_s, fresh=self._settings.fresh if fresh is None else fresh, lost=loss is not None,
                lost_s=None if loss is None else loss.restore.ran_s,
                checkpoint_epoch=None if loss is None or manifest is None else manifest.dumped_epoch,
            )
        )  # fmt: skip

    def _hold(self, arrival: Arrival, job: Job, why: str, note: Note | None, *, comment: str | None = None) -> Reply:
        """Requeue and hold the job, and write its note; its image is kept. ``comment``: replaces the usual one."""
        text = messages.reason(why)
        retry_epoch = None if note is None else note.retry_epoch
        agent_text = comment or f"{text}; {messages.next_try(job.id, retry_epoch)}"
        notify.comment(self._slurm, arrival.job_id, messages.restore_failure(agent_text))
        if note is not None:
            try:
                self._notes.write(note)
            except AffinodeError as error:
                LOG.warning("job %s: %s", arrival.job_id, error)
        try:
            retry(
                "hold the job",
                lambda: self._slurm.requeue(arrival.job_id, hold=True, running=True),
                self._settings.slurm_s,
                self._clock,
            )
        except AffinodeError as error:
            # The plugin requeues the job when the shepherd ends without having started anything.
            LOG.warning("job %s: %s", arrival.job_id, error)
        return Hold(text)


def _entry(manifest: Manifest) -> LedgerEntry:
    return LedgerEntry.of(manifest.key, round(manifest.started_epoch * 1000))
