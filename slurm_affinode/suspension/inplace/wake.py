"""Wake of one job that sleeps in place: its processes are thawed, its GPU memory moves back, it is unlocked.

In this order, because a stopped process cannot restore its memory; its CUDA calls block until it is unlocked. A process
with children and without GPU memory of its own is thawed last, when they are at rest again: the master of a server ends
workers that have not moved for a while (gunicorn's ``timeout``), which would be all of them. Free GPU memory is checked
before each restore: one that runs out of memory fails permanently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import span
from slurm_affinode.checkpoint.interface import CheckpointError, CudaDriver, CudaError, CudaState, HelperLost
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import Phase
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import LOG, Clock
from slurm_affinode.suspension.inplace.freezer import SIGNALS, FreezeError, Freezer
from slurm_affinode.suspension.inplace.gpu_sharing import Sharing
from slurm_affinode.suspension.inplace.queue import Deadline
from slurm_affinode.suspension.inplace.sleeper import ProcessState, Sleeper
from slurm_affinode.suspension.inplace.sockets import Sockets, unnoticed
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Member, stopped
from slurm_affinode.suspension.job.registry import Registry
from slurm_affinode.suspension.notify import OwnerMails
from slurm_affinode.suspension.records.journal import JobJournal, JournalError
from slurm_affinode.suspension.records.ledger import SuspensionLedger
from slurm_affinode.suspension.records.record import SuspensionFacts

_ATTEMPTS = 3
_PAUSE_S = 0.5
_CALM_CHECKS, _CHECK_S = 2, 0.01
"""Checks of the thawed processes before their supervisors are thawed."""
_AHEAD_S = 0.5
"""After this time the supervisors are thawed even if the others are busy: these have moved while their GPU memory
returned."""


class NotWoken(AffinodeError):  # noqa: N818 - names what is the case
    """The job still sleeps, or has its GPU memory but cannot be thawed completely; the text states the reason."""


class NoGpuRoom(AffinodeError):  # noqa: N818 - names what is the case
    """Other jobs have taken the memory that was free a moment ago: the job still sleeps, and nothing was done."""


class Waking:
    """The steps of a wake, each of them idempotent."""

    def __init__(
        self, *, node: str, slurm: SlurmClient, cuda: CudaDriver, registry: Registry, ledger: SuspensionLedger,
        freezer: Freezer, sharing: Sharing, sockets: Sockets, mails: OwnerMails, limits: MemoryLimits | None,
        clock: Clock, freeze_s: float,
    ) -> None:  # fmt: skip
        """``limits``: the memory limits of jobs; ``None``: they are not known.

        ``freeze_s``: time-out for the processes to stop.
        """
        self._node = node
        self._slurm = slurm
        self._cuda = cuda
        self._registry = registry
        self._ledger = ledger
        self._mails = mails
        self._limits = limits
        self._clock = clock
        self._freezer = freezer
        self._sharing = sharing
        self._sockets = sockets
        self._freeze_s = freeze_s
        self._open: list[JobJournal] = []
        """Journals of running jobs that could not be closed."""

    def freeze_again(self, sleeper: Sleeper) -> str:
        """Freeze a job of the last agent again, since its freeze may have been interrupted.

        Returns why it has to wake, or an empty text. A job that moves long after it was frozen was thawed meanwhile,
        and may be handling a signal.
        """
        pids = self._before_a_freeze(sleeper)
        frozen_s = self._clock.now() - sleeper.journal.record.phases[Phase.FROZEN]
        if frozen_s > self._freeze_s and self._freezer.moving(pids, sleeper.facts.mechanism) is not None:
            sleeper.thawing.signalled = True
            return "its processes were let go while there was no agent"
        try:
            self._freeze(sleeper)
        except FreezeError as error:
            return f"it could not be frozen again: {error}"
        return unnoticed(self._sockets, sleeper.journal.record) or ""

    def _before_a_freeze(self, sleeper: Sleeper) -> tuple[int, ...]:
        """Return its processes. Those that run now were not stopped by the job: they are thawed with the others."""
        members = self._members(sleeper)
        sleeper.stay &= frozenset(stopped(members))
        return tuple(member.pid for member in members)

    def thaw(self, sleeper: Sleeper) -> None:
        """Thaw all processes. Raises ``NotWoken``, ``TreeGoneError``."""
        thawing = sleeper.thawing
        with thawing.lock:
            self._lead(sleeper)
            if thawing.processes is ProcessState.RUNNING:
                return
            calm = 0
            for _ in range(round(_AHEAD_S / _CHECK_S)):
                calm = 0 if self._freezer.busy(thawing.leading) else calm + 1
                # Checks of many processes take time themselves; a clock that was set back also ends the loop.
                if calm == _CALM_CHECKS or not 0 <= self._clock.now() - thawing.leading_epoch < _AHEAD_S:
                    break
                self._clock.sleep(_CHECK_S)
            self._thaw_rest(sleeper)

    def _lead(self, sleeper: Sleeper) -> None:
        """Thaw the processes without children, and those with GPU memory to restore. ``thawing.lock`` is held."""
        if sleeper.thawing.processes is not ProcessState.STOPPED:
            return
        self._mark(sleeper, Phase.WAKING, sleeper.request_facts)
        members = self._members(sleeper)
        pids = {member.pid for member in members}
        above = {member.parent for member in members} & pids - set(sleeper.cuda)
        self._continue(sleeper, sleeper.stay | above)
        sleeper.thawing.lead(tuple(sorted(pids - above)), self._clock.now(), complete=not above)

    def _thaw_rest(self, sleeper: Sleeper) -> None:
        """Thaw everything that was stopped for the suspension. ``thawing.lock`` is held."""
        # A job that Slurm has suspended meanwhile continues when Slurm resumes it: with SIGCONT to all of it, or by
        # thawing its cgroup, which also holds processes that leave the cgroup of their freeze.
        if sleeper.facts.mechanism != SIGNALS or not self._freezer.is_stopped_by_slurm(sleeper.facts.init_pid):
            self._continue(sleeper, sleeper.stay, sleeper.thawing.leading)
        sleeper.thawing.complete()

    def _continue(self, sleeper: Sleeper, stay: frozenset[int], going: Collection[int] = ()) -> None:
        try:
            self._freezer.thaw(
                sleeper.facts.init_pid, sleeper.facts.init_started, sleeper.facts.mechanism, stay=stay, going=going
            )
        except FreezeError as error:
            raise NotWoken(str(error)) from None

    def wake(self, sleeper: Sleeper) -> None:
        """Do all steps. Raises ``NotWoken``, ``NoGpuRoom``, and ``TreeGoneError`` if the job has ended."""
        began = self._clock.now()
        why = self._short(sleeper)
        if why is not None:
            raise NoGpuRoom(why)
        try:
            with sleeper.thawing.lock:
                self._lead(sleeper)
            self._restore(sleeper)
        except CheckpointError as error:
            self._roll_back(sleeper, str(error))
            raise NotWoken(str(error)) from None
        self.thaw(sleeper)
        self._announce(sleeper, began)

    def _short(self, sleeper: Sleeper) -> str | None:
        """Return why the memory that was not restored yet does not fit."""
        try:
            return self._sharing.shortage(sleeper)
        except GpuError as error:
            return str(error)

    def _remaining_processes(self, sleeper: Sleeper) -> list[int]:
        """Return its CUDA processes that have not ended."""
        members = self._members(sleeper)
        pids = {member.pid for member in members}
        return [pid for pid in sleeper.cuda if pid in pids]

    def _restore(self, sleeper: Sleeper) -> None:
        """Restore all processes before unlocking any: they may wait for each other."""
        self._restore_together(sleeper)
        for state in (CudaState.CHECKPOINTED, CudaState.LOCKED):
            for pid in self._remaining_processes(sleeper):
                self._leave(sleeper, pid, state)

    def _restore_together(self, sleeper: Sleeper) -> None:
        """Restore several processes at once. ``_leave`` restores those that remain, and reports a lack of memory."""
        cuda, pids = self._cuda, self._remaining_processes(sleeper)
        try:
            waiting = [pid for pid in pids if cuda.state(pid) is CudaState.CHECKPOINTED]
            if len(waiting) > 1 and self._short(sleeper) is None:
                cuda.restore(*waiting)
        except HelperLost as error:
            LOG.info("job %s: %s; its processes are restored one after another", sleeper.job_id, error)
        except CudaError:
            # Otherwise it may be that of a process that has ended.
            if set(pids) <= set(self._remaining_processes(sleeper)):
                raise

    def _leave(self, sleeper: Sleeper, pid: int, state: CudaState) -> None:
        """Move a process out of ``state`` if it is in it; retry if the helper for the driver was lost."""
        cuda = self._cuda
        lost: HelperLost | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._clock.sleep(_PAUSE_S)
            try:
                current = cuda.state(pid)
                if current is CudaState.FAILED:
                    raise CudaError(f"the CUDA state of process {pid} is lost: the driver calls it failed")  # noqa: TRY301
                if current is not state:
                    return
                if state is CudaState.CHECKPOINTED:
                    why = self._short(sleeper)
                    if why is not None:
                        raise CudaError(why)  # noqa: TRY301
                    cuda.restore(pid)
                else:
                    cuda.unlock(pid)
            except HelperLost as error:
                lost = error
                continue
            except CudaError:
                if pid not in self._remaining_processes(sleeper):
                    return  # it has ended meanwhile
                raise
            return
        raise lost or CudaError(f"process {pid} stays {state.value}")

    def _roll_back(self, sleeper: Sleeper, why: str) -> None:
        """Roll back a failed restore: move restored memory out again for other jobs, and freeze the processes."""
        for pid in self._remaining_processes(sleeper):
            try:
                if self._cuda.state(pid) is CudaState.LOCKED:
                    self._cuda.checkpoint(pid)
            except CheckpointError as error:
                LOG.warning("job %s: process %s keeps its GPU memory: %s", sleeper.job_id, pid, error)
        self._ledger.write(
            replace(sleeper.journal.record.ledger_entry(self._node), restore_failure=messages.reason(why))
        )
        with sleeper.thawing.lock:
            if sleeper.thawing.signalled:  # its signal handlers run
                return
            self._before_a_freeze(sleeper)
            self._mark(sleeper, Phase.FROZEN, SuspensionFacts(stopped_pids=tuple(sorted(sleeper.stay))))
            try:
                self._freeze(sleeper)
            except FreezeError as error:
                # Its CUDA calls block nevertheless. Processes that did stop would not continue at the next attempt.
                LOG.warning("job %s: cannot be frozen again: %s", sleeper.job_id, error)
                sleeper.thawing.forget_lead()
                self._thaw_rest(sleeper)
                return
            sleeper.thawing.stop()
            # Processes may have ended or started while they ran: record the current ones.
            sleeper.pids = tuple(member.pid for member in self._members(sleeper))

    def _announce(self, sleeper: Sleeper, began: float) -> None:
        record = sleeper.journal.record
        self._registry.set_phase(sleeper.job_id, Phase.RUNNING)
        requested = began if sleeper.requested_epoch is None else sleeper.requested_epoch
        now = self._clock.now()
        self._ledger.write(
            replace(
                record.ledger_entry(self._node),
                released_ms=round(requested * 1000),
                restoring_ms=round(began * 1000),
                restored_ms=round(now * 1000),
                restored_node=self._node,
            )
        )
        if sleeper.announced:
            self._mails.send(record, "restored", now, slept_s=requested - sleeper.facts.since_epoch)
        if self._limits is not None:
            self._limits.lower(sleeper.job_id)
        self._close(sleeper.journal)
        LOG.info(
            "job %s: awake after %s, %.0f ms after the wake request (%s)", sleeper.job_id,
            span(requested - sleeper.facts.since_epoch), (now - requested) * 1000,
            sleeper.request_why or "no reason given",
        )  # fmt: skip

    def record_end(self, sleeper: Sleeper) -> None:
        """Record in the ledger that its processes have ended, and close the journal."""
        self._freezer.clear(sleeper.facts.mechanism)
        entry = sleeper.journal.record.ledger_entry(self._node)
        self._ledger.write(replace(entry, ended_ms=round(self._clock.now() * 1000)))
        self._close(sleeper.journal)

    def end(self, sleeper: Sleeper, why: str) -> None:
        """Cancel a job that has waited too long."""
        slurm = self._slurm
        try:
            reason = messages.reason(f"ended by slurm-affinode: {why}")
            slurm.set_comment(sleeper.job_id, messages.comment(reason, slurm.job(sleeper.job_id).comment))
            slurm.cancel(sleeper.job_id)
        except AffinodeError as error:
            sleeper.place.deadline = Deadline.MISSED  # retried
            LOG.warning("job %s: cannot be ended: %s", sleeper.job_id, error)

    @property
    def unfinished(self) -> bool:
        """Whether there is something to ``tidy``."""
        return bool(self._open)

    def tidy(self) -> None:
        """Close the journals that could not be closed before."""
        for journal in tuple(self._open):
            with suppress(JournalError):
                journal.close()
                self._open.remove(journal)

    def _close(self, journal: JobJournal) -> None:
        try:
            journal.close()
        except JournalError as error:
            self._open.append(journal)
            LOG.warning("job %s: runs, but its journal cannot be closed yet: %s", journal.key.job_id, error)

    def _freeze(self, sleeper: Sleeper) -> None:
        facts = sleeper.facts
        self._freezer.freeze(facts.init_pid, facts.init_started, facts.mechanism, timeout_s=self._freeze_s)

    def _members(self, sleeper: Sleeper) -> Sequence[Member]:
        return self._freezer.members(sleeper.facts.init_pid, sleeper.facts.init_started)

    def _mark(self, sleeper: Sleeper, phase: Phase, facts: SuspensionFacts) -> None:
        """Record the phase in the journal, if possible: a full disk must not keep a job from its GPU.

        The next agent also wakes jobs from the phases before ``waking``.
        """
        try:
            if sleeper.journal.phase is not phase:
                sleeper.journal.write(phase, facts)
        except JournalError as error:
            LOG.warning("job %s: continues without its journal: %s", sleeper.job_id, error)
        self._registry.set_phase(sleeper.job_id, phase)
