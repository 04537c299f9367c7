"""The consequences of a suspension: the job's comment, the mail to its owner, the ledger, the shared copy of the image.

None of them can fail the suspension; failures are retried or logged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.threads import Workers
from slurm_affinode.checkpoint.files import local_files, scratch_index
from slurm_affinode.checkpoint.files.local_files import INDEX, LIMIT
from slurm_affinode.checkpoint.interface import CheckpointError, Image
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.core.suspension import IN_PLACE
from slurm_affinode.core.wake_time import backoff_s
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import MailKind, Phase
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import LOG, LocalFiles, Location, Records
from slurm_affinode.suspension.job.process_tree import Processes
from slurm_affinode.suspension.mail import Mailer
from slurm_affinode.suspension.records.journal import JobJournal, JournalError
from slurm_affinode.suspension.records.record import SuspensionRecord


def comment(slurm: SlurmClient, job_id: int, agent_text: str | None) -> None:
    """Prepend ``agent_text`` to the owner's comment on a job; ``None`` removes our part. Failures are logged.

    Slurm does not change the comment of an ended job: it stays as it is, also in accounting.
    """
    try:
        before = slurm.job(job_id).comment
        after = messages.comment_of_owner(before) if agent_text is None else messages.comment(agent_text, before)
        if after != (before or ""):
            slurm.set_comment(job_id, after)
    except AffinodeError as error:
        LOG.warning("job %s: cannot set its comment: %s", job_id, error)


def require(slurm: SlurmClient, job: Job, nodes: tuple[str, ...]) -> None:
    """Set the nodes that Slurm requires for a pending job, unless they are set already. Raises ``AffinodeError``."""
    if job.nodes_required != nodes:
        slurm.set_required_nodes(job.job_id, nodes)


_RETRY_S, _RETRY_MAX_S = 15.0, 600.0
_COPIES_AT_ONCE = 2


class OwnerMails:
    """Mails to owners about the suspensions on a node, if enabled."""

    def __init__(self, node: str, mailer: Mailer, now: Callable[[], float] = time.time) -> None:
        self._node = node
        self._mailer = mailer
        self._now = now

    def send(
        self,
        record: SuspensionRecord,
        kind: MailKind,
        at_epoch: float | None = None,
        *,
        why: str | None = None,
        slept_s: float | None = None,
        ended: bool = False,
    ) -> None:
        """Queue a mail to the owner. Does not block.

        ``at_epoch``: defaults to now. ``ended``: see ``SuspensionMail``.
        """
        at_epoch = self._now() if at_epoch is None else at_epoch
        mail = record.mail(kind, self._node, at_epoch, why=why, slept_s=slept_s, ended=ended)
        if mail is not None:
            self._mailer.deliver(mail)

    def stop(self) -> None:
        """Deliver no more mails."""
        self._mailer.stop()


class SuspensionOutcomes:
    """Records the outcomes of suspensions, and copies their images to the shared store. One per agent."""

    def __init__(
        self, *, location: Location, slurm: SlurmClient, processes: Processes, records: Records, tiers: Tiers,
        files: LocalFiles, mails: OwnerMails, workers: Workers, whole_time_limit: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``whole_time_limit``: see ``SuspendSettings``."""
        self._node = location.node
        self._slurm = slurm
        self._processes = processes
        self._journal, self._ledger, self._notes = records.journal, records.ledger, records.notes
        self._tiers = tiers
        self._environments, self._created = files.environments, files.created
        self._scratch, self._scratch_records = files.scratch, files.scratch_records
        self._mails = mails
        self._whole_time_limit = whole_time_limit
        self._now = now
        self._copies = workers.queue("copy", _COPIES_AT_ONCE)

    def stop(self) -> None:
        """Stop all attempts; the journal records the remaining work."""
        self._copies.close()
        self._tiers.stop()
        self._mails.stop()

    # --- job not suspended

    def ran_on(self, journal: JobJournal, why: str) -> None:
        """Complete an aborted suspension. No comment is set if Slurm has ended the attempt meanwhile."""
        record = journal.record
        self._ledger.write(replace(record.ledger_entry(self._node), failure=messages.reason(why)))
        if self._processes.alive(record.init_pid, record.init_started):
            comment(self._slurm, record.key.job_id, messages.runs_on(why))
        self._close(journal)

    def lost(self, journal: JobJournal) -> None:
        """Record that the processes are gone without an image: Slurm starts the job afresh, or not at all."""
        record = journal.record
        entry = record.ledger_entry(self._node)
        if record.phase not in IN_PLACE:  # otherwise it freed its GPU memory until now
            entry = replace(entry, failure="its processes have ended")
        self._ledger.write(replace(entry, ended_ms=round(self._now() * 1000)))
        comment(self._slurm, record.key.job_id, messages.lost(self._node, record.why or "by hand"))
        self._close(journal)

    # --- job suspended

    def queued(self, journal: JobJournal) -> None:
        """Complete a suspension: the processes are gone and the job is queued. The image is copied later."""
        record = journal.record
        self._ledger.write(record.ledger_entry(self._node))
        self._limit_time(record)  # before the note, with which the job may be woken
        required = self._require(record)
        self._note(record, required)
        self.leave(record)
        job_id, tied_to = record.key.job_id, self._node if record.tied else None
        agent_text = messages.suspended(record.why or "", record.gpu_bytes or 0, record.called, tied_to=tied_to)
        comment(self._slurm, job_id, agent_text)
        self._mails.send(record, "suspended", record.phases.get(Phase.QUEUED), why=record.why)
        self._copies.post(self._copy, journal)  # if the agent exits during the copy, the next one continues it

    def _limit_time(self, record: SuspensionRecord) -> None:
        """Set the time limit to the remaining time: with the whole limit, each suspension would prolong the job."""
        if record.time_left_s is None or self._whole_time_limit:
            return
        minutes = max(1, math.ceil(record.time_left_s / 60))  # Slurm counts whole minutes
        try:
            self._slurm.set_time_limit(record.key.job_id, minutes)
        except AffinodeError as error:
            LOG.warning("job %s: cannot set its time limit: %s", record.key.job_id, error)

    def _require(self, record: SuspensionRecord) -> str | None:
        """Have Slurm start a tied job on this node only; return what it required before.

        Slurm changes the required nodes of pending jobs only, so what an earlier suspension has set is restored here.
        Returns ``None`` if nothing is required because of the job's files, or Slurm does not respond.
        """
        job_id, before = record.key.job_id, record.required_nodes
        if not record.tied and before is None:
            return None
        try:
            job = self._slurm.job(job_id)
            if record.tied:
                before = ",".join(job.nodes_required) if before is None else before
                require(self._slurm, job, (self._node,))
                return before
            if job.nodes_required == (self._node,):  # otherwise its owner has changed it
                require(self._slurm, job, tuple(filter(None, (before or "").split(","))))
        except AffinodeError as error:
            LOG.warning("job %s: cannot set its required nodes: %s", job_id, error)
        return None

    def leave(self, record: SuspensionRecord) -> None:
        """Remove the job's files in ``/dev/shm`` and ``/tmp`` from this node: the image has them."""
        self._environments.remove(record.key.job_id)
        self._created.remove(record.key.job_id)
        if record.seq is None:
            return
        for store in self._tiers.stores:
            with suppress(CheckpointError, OSError):
                image = store.get(record.key.name, record.seq)
                self._leave_scratch(record, store, image)
                index = partial(store.small_file, image, INDEX, LIMIT)
                removed = local_files.leave(index, record.owner)
                if removed:
                    LOG.info("job %s: %d node-local files removed", record.key.job_id, len(removed))
                return

    def _leave_scratch(self, record: SuspensionRecord, store: DirectoryStore, image: Image) -> None:
        """Remove closed files that were copied, and the record of the job: a return of the job begins anew."""
        if record.tied:
            return
        self._scratch_records.remove(record.key.job_id)
        if scratch_index.INDEX not in {file.path for file in image.manifest.files}:
            return
        index = store.small_file(image, scratch_index.INDEX, scratch_index.LIMIT, of_criu=False)
        removed = self._scratch.leave(index, record.owner)
        if removed:
            LOG.info("job %s: %d closed node-local files removed", record.key.job_id, removed)

    def _note(self, record: SuspensionRecord, required: str | None = None) -> None:
        """Write the note once per suspension: an existing one also records later requests and failures."""
        notes = self._notes
        new_note = replace(record.note(self._node, self._now()), required=required)
        noted = notes.read(new_note.cluster, new_note.job_id)
        if noted is not None and (noted.seq, noted.began_ms) == (new_note.seq, new_note.began_ms):
            return
        try:
            notes.write(new_note)
        except AffinodeError as error:
            LOG.warning("job %s: %s", record.key.job_id, error)

    def _copy(self, journal: JobJournal, failures: int = 0) -> None:
        record = journal.record
        try:
            self._publish(record)
        except AffinodeError as error:
            LOG.warning("job %s: its image is not in the shared store yet: %s", record.key.job_id, error)
            if self._asleep(record.key.job_id):
                pause_s = backoff_s(_RETRY_S, _RETRY_MAX_S, failures + 1)  # the image may be larger than the store
                self._copies.later(pause_s, self._copy, journal, failures + 1)
                return
        # The job may be restoring now, and its journal be in use for that.
        if not self._copies.stopping.is_set() and self._journal.of_job(record.key).phase is Phase.QUEUED:
            self._close(journal)

    def _publish(self, record: SuspensionRecord) -> None:
        """Copy the image to the shared store, if there is one. Raises ``AffinodeError`` if that has to be retried."""
        copy = None if record.seq is None else self._tiers.on_node(record.key.name, record.seq)
        if copy is None or self._tiers.shared_store is None:
            return
        self._tiers.publish(record.key.name, copy.image.manifest.seq)
        entry = LedgerEntry.of(record.key, record.began_ms)
        self._ledger.write(replace(entry, copied_ms=round(self._now() * 1000)))
        if self._asleep(record.key.job_id):
            self._note(record)

    def _asleep(self, job_id: int) -> bool:
        """Return whether the job has not ended, or Slurm does not respond."""
        try:
            job = self._slurm.job(job_id)
        except AffinodeError:
            return True
        return not job.has_ended

    # ---

    def _close(self, journal: JobJournal) -> None:
        try:
            journal.close()
        except JournalError as error:
            LOG.warning("%s", error)
