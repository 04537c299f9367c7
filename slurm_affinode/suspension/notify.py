"""The consequences of a suspension: the job's comment, the mail to its owner, the ledger, the shared copy of the image.

None of them can fail the suspension; failures are retried or logged.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.files import local_files, scratch_index
from slurm_affinode.checkpoint.files.local_files import INDEX, LIMIT
from slurm_affinode.checkpoint.interface import CheckpointError, Image
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.core.suspension import IN_PLACE
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import MailKind, Phase
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.records.journal import JobJournal, JournalError
from slurm_affinode.suspension.records.record import SuspensionRecord


def comment(parts: Parts, job_id: int, own: str | None) -> None:
    """Prepend ``own`` to the owner's comment on a job; ``None`` removes our part. Failures are logged.

    Slurm does not change the comment of an ended job: it stays as it is, also in accounting.
    """
    try:
        before = parts.slurm.job(job_id).comment
        after = messages.comment_of_owner(before) if own is None else messages.comment(own, before)
        if after != (before or ""):
            parts.slurm.set_comment(job_id, after)
    except AffinodeError as error:
        parts.log.warning("job %s: cannot set its comment: %s", job_id, error)


def require(parts: Parts, job: Job, nodes: tuple[str, ...]) -> None:
    """Set the nodes that Slurm requires for a pending job, unless they are set already. Raises ``AffinodeError``."""
    if job.nodes_required != nodes:
        parts.slurm.set_required_nodes(job.job_id, nodes)


_RETRY_S = 15.0
_COPIES_AT_ONCE = 2


def mail_owner(
    parts: Parts,
    record: SuspensionRecord,
    kind: MailKind,
    at_epoch: float | None = None,
    *,
    why: str | None = None,
    slept_s: float | None = None,
    ended: bool = False,
) -> None:
    """Queue a mail to the owner about a suspension on this node, if enabled. Does not block.

    ``at_epoch``: defaults to now. ``ended``: see ``SuspensionMail``.
    """
    at_epoch = parts.now() if at_epoch is None else at_epoch
    mail = record.mail(kind, parts.node, at_epoch, why=why, slept_s=slept_s, ended=ended)
    if mail is not None:
        parts.mailer.deliver(mail)


class SuspensionOutcomes:
    """Records the outcomes of suspensions, and copies their images to the shared store. One per agent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._copies = parts.workers.queue("copy", _COPIES_AT_ONCE)

    def stop(self) -> None:
        """Stop all attempts; the journal records the remaining work."""
        self._copies.close()
        self._parts.tiers.stop()
        self._parts.mailer.stop()

    # --- job not suspended

    def ran_on(self, journal: JobJournal, why: str) -> None:
        """Complete an aborted suspension. No comment is set if Slurm has ended the attempt meanwhile."""
        parts, record = self._parts, journal.record
        parts.ledger.write(replace(record.ledger_entry(parts.node), failure=messages.reason(why)))
        if parts.processes.alive(record.init_pid, record.init_started):
            comment(parts, record.key.job_id, messages.runs_on(why))
        self._close(journal)

    def lost(self, journal: JobJournal) -> None:
        """Record that the processes are gone without an image: Slurm starts the job afresh, or not at all."""
        parts, record = self._parts, journal.record
        entry = record.ledger_entry(parts.node)
        if record.phase not in IN_PLACE:  # otherwise it freed its GPU memory until now
            entry = replace(entry, failure="its processes have ended")
        parts.ledger.write(replace(entry, ended_ms=round(parts.now() * 1000)))
        comment(parts, record.key.job_id, messages.lost(parts.node, record.why or "by hand"))
        self._close(journal)

    # --- job suspended

    def queued(self, journal: JobJournal) -> None:
        """Complete a suspension: the processes are gone and the job is queued. The image is copied later."""
        parts, record = self._parts, journal.record
        parts.ledger.write(record.ledger_entry(parts.node))
        self._limit_time(record)  # before the note, with which the job may be woken
        required = self._require(record)
        self._note(record, required)
        self.leave(record)
        job_id, tied_to = record.key.job_id, parts.node if record.tied else None
        own = messages.suspended(record.why or "", record.gpu_bytes or 0, record.called, tied_to=tied_to)
        comment(parts, job_id, own)
        mail_owner(parts, record, "suspended", record.phases.get(Phase.QUEUED), why=record.why)
        self._copies.post(self._copy, journal)  # if the agent exits during the copy, the next one continues it

    def _limit_time(self, record: SuspensionRecord) -> None:
        """Set the time limit to the remaining time: with the whole limit, each suspension would prolong the job."""
        if record.time_left_s is None or self._parts.settings.whole_time_limit:
            return
        minutes = max(1, math.ceil(record.time_left_s / 60))  # Slurm counts whole minutes
        try:
            self._parts.slurm.set_time_limit(record.key.job_id, minutes)
        except AffinodeError as error:
            self._parts.log.warning("job %s: cannot set its time limit: %s", record.key.job_id, error)

    def _require(self, record: SuspensionRecord) -> str | None:
        """Have Slurm start a tied job on this node only; return what it required before.

        Slurm changes the required nodes of pending jobs only, so what an earlier suspension has set is restored here.
        Returns ``None`` if nothing is required because of the job's files, or Slurm does not respond.
        """
        parts, job_id, before = self._parts, record.key.job_id, record.required_nodes
        if not record.tied and before is None:
            return None
        try:
            job = parts.slurm.job(job_id)
            if record.tied:
                before = ",".join(job.nodes_required) if before is None else before
                require(parts, job, (parts.node,))
                return before
            if job.nodes_required == (parts.node,):  # otherwise its owner has changed it
                require(parts, job, tuple(filter(None, (before or "").split(","))))
        except AffinodeError as error:
            parts.log.warning("job %s: cannot set its required nodes: %s", job_id, error)
        return None

    def leave(self, record: SuspensionRecord) -> None:
        """Remove the job's files in ``/dev/shm`` and ``/tmp`` from this node: the image has them."""
        self._parts.environments.remove(record.key.job_id)
        self._parts.created.remove(record.key.job_id)
        if record.seq is None:
            return
        for store in self._parts.tiers.stores:
            with suppress(CheckpointError, OSError):
                image = store.get(record.key.name, record.seq)
                self._leave_scratch(record, store, image)
                index = partial(store.small_file, image, INDEX, LIMIT)
                removed = local_files.leave(index, record.owner)
                if removed:
                    self._parts.log.info("job %s: %d node-local files removed", record.key.job_id, len(removed))
                return

    def _leave_scratch(self, record: SuspensionRecord, store: DirectoryStore, image: Image) -> None:
        """Remove closed files that were copied, and the record of the job: a return of the job begins anew."""
        parts = self._parts
        if record.tied:
            return
        parts.scratch_records.remove(record.key.job_id)
        if scratch_index.INDEX not in {one.path for one in image.manifest.files}:
            return
        index = store.small_file(image, scratch_index.INDEX, scratch_index.LIMIT, of_criu=False)
        removed = parts.scratch.leave(index, record.owner)
        if removed:
            parts.log.info("job %s: %d closed node-local files removed", record.key.job_id, removed)

    def _note(self, record: SuspensionRecord, required: str | None = None) -> None:
        """Write the note once per suspension: an existing one also records later requests and failures."""
        notes = self._parts.notes
        made = replace(record.note(self._parts.node, self._parts.now()), required=required)
        there = notes.read(made.cluster, made.job_id)
        if there is not None and (there.seq, there.began_ms) == (made.seq, made.began_ms):
            return
        try:
            notes.write(made)
        except AffinodeError as error:
            self._parts.log.warning("job %s: %s", record.key.job_id, error)

    def _copy(self, journal: JobJournal) -> None:
        parts, record = self._parts, journal.record
        try:
            self._publish(record)
        except AffinodeError as error:
            parts.log.warning("job %s: its image is not in the shared store yet: %s", record.key.job_id, error)
            if self._asleep(record.key.job_id):
                self._copies.later(_RETRY_S, self._copy, journal)
                return
        # The job may be restoring now, and its journal be in use for that.
        if not self._copies.stopping.is_set() and parts.journal.of_job(record.key).phase is Phase.QUEUED:
            self._close(journal)

    def _publish(self, record: SuspensionRecord) -> None:
        """Copy the image to the shared store, if there is one. Raises ``AffinodeError`` if that has to be retried."""
        parts = self._parts
        copy = None if record.seq is None else parts.tiers.on_node(record.key.name, record.seq)
        if copy is None or parts.shared is None:
            return
        parts.tiers.publish(record.key.name, copy.image.manifest.seq)
        entry = LedgerEntry.of(record.key, record.began_ms)
        parts.ledger.write(replace(entry, copied_ms=round(parts.now() * 1000)))
        if self._asleep(record.key.job_id):
            self._note(record)

    def _asleep(self, job_id: int) -> bool:
        """Return whether the job has not ended, or Slurm does not respond."""
        try:
            job = self._parts.slurm.job(job_id)
        except AffinodeError:
            return True
        return not job.ended

    # ---

    def _close(self, journal: JobJournal) -> None:
        try:
            journal.close()
        except JournalError as error:
            self._parts.log.warning("%s", error)
