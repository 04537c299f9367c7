"""The consequences of a suspension: the job's comment, the mail to its owner, the ledger, the shared copy of the image.

None of them can fail the suspension; failures are retried or logged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint import local_files
from slurm_affinode.checkpoint.interface import CheckpointError, Image
from slurm_affinode.core.suspension import IN_PLACE
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import MailKind, Phase, SuspendOption, SuspensionMail
from slurm_affinode.suspension import mail, messages
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.journal import JournalError, Record
from slurm_affinode.suspension.shared_state import Note


def comment(parts: Parts, job_id: int, own: str | None) -> None:
    """Prepend ``own`` to the owner's comment on a job; ``None`` removes our part. Failures are logged.

    Slurm does not change the comment of an ended job: it stays as it is, also in accounting.
    """
    try:
        before = parts.slurm.job(job_id).comment
        after = messages.theirs(before) if own is None else messages.comment(own, before)
        if after != (before or ""):
            parts.slurm.set_comment(job_id, after)
    except AffinodeError as error:
        parts.log.warning("job %s: its comment is not set: %s", job_id, error)


_RETRY_S = 15.0
_COPIES_AT_ONCE = 2


def entry_of(record: Record, node: str) -> LedgerEntry:
    """Return the ledger entry of a suspension, from its journal."""
    facts, phases = record.facts, record.phases
    option = SuspendOption.parse(facts["option"]) if "option" in facts else None

    def ms(phase: Phase) -> int | None:
        return round(phases[phase.value] * 1000) if phase.value in phases else None

    return LedgerEntry(
        cluster=record.key.cluster,
        job_id=record.key.job_id,
        submit=record.key.submit_epoch,
        began_ms=round(float(facts["began"]) * 1000),
        seq=facts.get("seq"),
        user=facts.get("user"),
        uid=facts.get("uid"),
        account=facts.get("account"),
        partition=facts.get("partition"),
        node=node,
        mode=None if option is None else option.mode.value,
        why=None if facts.get("why") is None else messages.one(facts["why"]),
        window_s=None if option is None else option.window_s,
        gpus=facts.get("gpus"),
        gpu_model=facts.get("gpu_model"),
        gpu_bytes=facts.get("gpu_bytes"),
        image_bytes=facts.get("image_bytes"),
        locked_ms=ms(Phase.LOCKED),
        parked_ms=ms(Phase.PARKED),
        dumped_ms=ms(Phase.DUMPED),
        queued_ms=ms(Phase.QUEUED),
    )


def mail_owner(
    parts: Parts,
    record: Record,
    kind: MailKind,
    at_epoch: float | None = None,
    *,
    why: str | None = None,
    slept_s: float | None = None,
    ended: bool = False,
) -> None:
    """Queue a mail to the owner about a suspension in this node's journal, if enabled. Does not block.

    ``at_epoch``: defaults to now. ``ended``: see ``SuspensionMail``.
    """
    facts, key = record.facts, record.key
    if not facts.get("user"):
        return
    once = mail.event(key, facts["began"]) + (".ended" if ended else "")
    parts.mailer.tell(
        SuspensionMail(
            kind, key.cluster, key.job_id, facts["user"], parts.node, parts.now() if at_epoch is None else at_epoch,
            once, shown=facts.get("shown"), job_name=facts.get("name"), partition=facts.get("partition"), why=why,
            gpus=facts.get("gpus"), gpu_model=facts.get("gpu_model"), gpu_bytes=facts.get("gpu_bytes"),
            slept_s=slept_s, wake=SuspendOption.parse(facts["option"]).wake, in_place=bool(facts.get("in_place")),
            on_request=bool(facts.get("on_request", facts.get("sockets"))), ended=ended,
        )
    )  # fmt: skip


class Aftermath:
    """Handles the consequences of suspensions. One per agent; its threads end with the agent."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turn = threading.Semaphore(_COPIES_AT_ONCE)
        self._copies: list[threading.Thread] = []
        self._stop = threading.Event()
        self._later: Callable[[Record], None] = lambda record: None

    def on_later(self, call: Callable[[Record], None]) -> None:
        """Set the handler of suspensions that have to wait for Slurm."""
        self._later = call

    def later(self, record: Record) -> None:
        """Hand a suspension over to recovery, since Slurm does not respond."""
        self._later(record)

    def stop(self) -> None:
        """Stop all attempts; the journal records the remaining work."""
        self._stop.set()
        self._parts.tiers.stop()
        self._parts.mailer.stop()

    def settle(self) -> None:
        """Wait for the copies in progress."""
        for thread in list(self._copies):
            thread.join()

    # --- job not suspended

    def ran_on(self, record: Record, why: str) -> None:
        """Complete an aborted suspension. No comment is set if Slurm has ended the attempt meanwhile."""
        parts, facts = self._parts, record.facts
        parts.ledger.write(_failed(record, parts.node, why))
        if parts.processes.alive(int(facts["init_pid"]), int(facts["init_started"])):
            comment(parts, record.key.job_id, messages.runs_on(why))
        self._close(record)

    def lost(self, record: Record) -> None:
        """Record that the processes are gone without an image: Slurm starts the job afresh, or not at all."""
        parts = self._parts
        why = record.facts.get("why") or "by hand"
        entry = entry_of(record, parts.node)
        if record.phase not in IN_PLACE:  # otherwise it freed its GPU memory until now
            entry = replace(entry, failure="its processes are gone")
        parts.ledger.write(replace(entry, ended_ms=round(parts.now() * 1000)))
        comment(parts, record.key.job_id, messages.lost(parts.node, why))
        self._close(record)

    # --- job suspended

    def queued(self, record: Record) -> None:
        """Complete a suspension: the processes are gone and the job is queued. The image is copied in a thread."""
        parts, facts = self._parts, record.facts
        parts.ledger.write(entry_of(record, parts.node))
        self._note(record)
        self._leave(record)
        job_id = record.key.job_id
        shown = str(facts.get("shown") or job_id)
        comment(parts, job_id, messages.suspended(facts.get("why") or "", facts.get("gpu_bytes") or 0, shown))
        mail_owner(parts, record, "suspended", record.phases.get(Phase.QUEUED.value), why=facts.get("why"))
        # A daemon thread: if the agent exits during a copy, the next one continues it.
        thread = threading.Thread(target=self._copy, args=(record,), name=f"copy-{job_id}", daemon=True)
        self._copies = [*(one for one in self._copies if one.is_alive()), thread]
        thread.start()

    def _leave(self, record: Record) -> None:
        """Remove the job's files in ``/dev/shm`` and ``/tmp`` from this node: the image has them."""
        for store in self._parts.tiers.stores:
            with suppress(CheckpointError, OSError):
                criu = store.open_criu(store.get(record.key.name, int(record.facts["seq"])))
                try:
                    removed = local_files.leave(criu)
                finally:
                    os.close(criu)
                if removed:
                    self._parts.log.info("job %s: %d node-local files removed", record.key.job_id, len(removed))
                return

    def _note(self, record: Record) -> None:
        """Write the note once per suspension: an existing one also records later requests and failures."""
        notes, made = self._parts.notes, self.note_of(record)
        there = notes.read(made.cluster, made.job_id)
        if there is not None and (there.seq, there.began_ms) == (made.seq, made.began_ms):
            return
        try:
            notes.write(made)
        except AffinodeError as error:
            self._parts.log.warning("job %s: %s", record.key.job_id, error)

    def note_of(self, record: Record) -> Note:
        """Return the note for a suspended job, for other nodes."""
        facts = record.facts
        option = SuspendOption.parse(facts["option"])
        return Note(
            cluster=record.key.cluster, job_id=record.key.job_id, submit=record.key.submit_epoch,
            restarts=facts["restarts"], seq=facts["seq"], uid=facts["uid"], node=self._parts.node,
            began_ms=round(float(facts["began"]) * 1000),
            since_epoch=record.phases.get(Phase.QUEUED.value, self._parts.now()),
            why=messages.one(facts.get("why") or ""),
            gpus=facts.get("gpus") or 0, gpu_bytes=facts.get("gpu_bytes") or 0,
            image_bytes=facts.get("image_bytes") or 0, wake=option.wake, user=facts.get("user"),
            shown=facts.get("shown"),
            trouble=None if facts.get("trouble") is None else messages.one(facts["trouble"]),
            passed=None if facts.get("passed") is None else messages.one(facts["passed"]),
        )  # fmt: skip

    def _copy(self, record: Record) -> None:
        parts = self._parts
        while not self._stop.is_set():
            try:
                if self.local_image(record) is None or parts.shared is None:
                    break
                with self._turn:
                    parts.tiers.publish(record.key.name, int(record.facts["seq"]))
                began_ms = round(float(record.facts["began"]) * 1000)
                key = record.key
                parts.ledger.write(
                    LedgerEntry(
                        key.cluster, key.job_id, key.submit_epoch, began_ms, copied_ms=round(parts.now() * 1000)
                    )
                )
                if self._asleep(record):
                    self._note(record)
                break
            except AffinodeError as error:
                parts.log.warning("job %s: its image is not in the shared store yet: %s", record.key.job_id, error)
                if not self._asleep(record):
                    break
                self._stop.wait(_RETRY_S)
        # The job may be restoring by now, and its journal be in use for that.
        if not self._stop.is_set() and parts.journal.record(record.key).phase is Phase.QUEUED:
            self._close(record)

    def _asleep(self, record: Record) -> bool:
        """Return whether the job has not ended, or Slurm does not respond."""
        try:
            job = self._parts.slurm.job(record.key.job_id)
        except AffinodeError:
            return True
        return not job.ended

    def local_image(self, record: Record) -> Image | None:
        """Return the image of this suspension in a store of this node, or ``None`` if there is no complete one."""
        seq = record.facts.get("seq")
        copy = None if seq is None else self._parts.tiers.on_node(record.key.name, int(seq))
        return None if copy is None else copy.image

    # ---

    def _close(self, record: Record) -> None:
        try:
            record.close()
        except JournalError as error:
            self._parts.log.warning("%s", error)


def _failed(record: Record, node: str, why: str) -> LedgerEntry:
    entry = entry_of(record, node)
    return entry.merged(
        LedgerEntry(entry.cluster, entry.job_id, entry.submit, entry.began_ms, failure=messages.one(why))
    )
