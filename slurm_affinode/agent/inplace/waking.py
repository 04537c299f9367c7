"""Waking one job that sleeps in place: its processes are let go, its GPU memory moves back, it is unlocked.

In this order, because a stopped process cannot take its memory back; what it asks of CUDA waits until it is unlocked.
A process that has others below it and no GPU memory of its own goes on last, when those are at rest again: a server's
master ends workers that have not moved for a while (gunicorn's ``timeout``), and it would find that of all of them.
That there is room on the GPU is looked at before each restore: one that runs out of memory fails for good.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from slurm_affinode.agent import words
from slurm_affinode.agent.aftermath import entry_of, mail_owner
from slurm_affinode.agent.inplace.freezer import FreezeError, Freezer, stopped
from slurm_affinode.agent.inplace.sharing import Sharing
from slurm_affinode.agent.inplace.sleeper import Sleeper
from slurm_affinode.agent.inplace.watching import Sockets, unnoticed
from slurm_affinode.agent.journal import JournalError, Record
from slurm_affinode.agent.parts import Parts
from slurm_affinode.checkpoint.interface import CheckpointError, CudaError, CudaState, HelperLost
from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import Phase

_ATTEMPTS = 3
_PAUSE_S = 0.5
_CALM_LOOKS, _LOOK_AGAIN_S = 2, 0.01
"""Those at processes that were let go, until what watches over them follows."""
_AHEAD_S = 0.5
"""By then it does, busy as they may be: while their GPU memory came back they have moved."""


class NotWoken(AffinodeError):  # noqa: N818 - names what is the case
    """It sleeps on, or has its GPU memory and cannot be let go whole; the text says why."""


class NoRoom(AffinodeError):  # noqa: N818 - names what is the case
    """Others have taken what was free a moment ago: it sleeps on, and nothing has been done."""


class Waking:
    """The steps of a wake, each of them idempotent."""

    def __init__(self, parts: Parts, freezer: Freezer, sharing: Sharing, sockets: Sockets, freeze_s: float) -> None:
        """``freeze_s``: for the processes to stop."""
        self._parts = parts
        self._freezer = freezer
        self._sharing = sharing
        self._sockets = sockets
        self._freeze_s = freeze_s
        self._open: list[Record] = []
        """Journals of jobs that run, which could not be closed."""

    def freeze_again(self, sleeper: Sleeper) -> str:
        """One of the last agent's, whose freeze may have been cut short; why it is to wake, empty: it sleeps on.

        One that moves long after it was frozen was let go meanwhile, and may be taking a signal.
        """
        pids = self._before_a_freeze(sleeper)
        frozen_s = self._parts.now() - sleeper.record.phases[Phase.FROZEN.value]
        if frozen_s > self._freeze_s and self._freezer.moving(pids, sleeper.how) is not None:
            sleeper.signalled = True
            return "its processes were let go while there was no agent"
        try:
            self._freezer.freeze(sleeper.init_pid, sleeper.init_started, sleeper.how, timeout_s=self._freeze_s)
        except FreezeError as error:
            return f"it could not be frozen again: {error}"
        return unnoticed(self._sockets, sleeper.record.facts) or ""

    def _before_a_freeze(self, sleeper: Sleeper) -> tuple[int, ...]:
        """Its processes. Those that run by now are none that its job has stopped: they go on with the others."""
        members = self._freezer.members(sleeper.init_pid, sleeper.init_started)
        sleeper.stay &= frozenset(stopped(members))
        return tuple(member.pid for member in members)

    def thaw(self, sleeper: Sleeper) -> None:
        """Let all processes go. Raises ``NotWoken``, ``TreeGoneError``."""
        with sleeper.turning:
            self._lead(sleeper)
            if sleeper.thawed:
                return
            calm = 0
            for _ in range(round(_AHEAD_S / _LOOK_AGAIN_S)):
                calm = 0 if self._freezer.busy(sleeper.ahead) else calm + 1
                # Looks at many processes take time themselves; a clock that was set back ends them, too.
                if calm == _CALM_LOOKS or not 0 <= self._parts.now() - sleeper.ahead_epoch < _AHEAD_S:
                    break
                self._parts.sleep(_LOOK_AGAIN_S)
            self._rest_goes_on(sleeper)

    def _lead(self, sleeper: Sleeper) -> None:
        """Let those go that have nobody below them, or GPU memory to take back. ``turning`` is held."""
        if sleeper.thawed or sleeper.ahead:
            return
        self._mark(sleeper, Phase.WAKING, **sleeper.asking)
        members = self._freezer.members(sleeper.init_pid, sleeper.init_started)
        pids = {member.pid for member in members}
        above = {member.parent for member in members} & pids - set(sleeper.cuda)
        self._go_on(sleeper, sleeper.stay | above)
        sleeper.ahead, sleeper.ahead_epoch = tuple(sorted(pids - above)), self._parts.now()
        sleeper.thawed = not above

    def _rest_goes_on(self, sleeper: Sleeper) -> None:
        """All that was stopped for the sleep. ``turning`` is held."""
        # What Slurm has suspended meanwhile goes on when Slurm says so, which lets all of it go.
        if not self._freezer.held(sleeper.init_pid):
            self._go_on(sleeper, sleeper.stay, sleeper.ahead)
        sleeper.thawed = True

    def _go_on(self, sleeper: Sleeper, stay: frozenset[int], going: Collection[int] = ()) -> None:
        try:
            self._freezer.thaw(sleeper.init_pid, sleeper.init_started, sleeper.how, stay=stay, going=going)
        except FreezeError as error:
            raise NotWoken(str(error)) from None

    def wake(self, sleeper: Sleeper) -> None:
        """All of it. Raises ``NotWoken``, ``NoRoom``, ``TreeGoneError`` where it has ended."""
        parts = self._parts
        began = parts.now()
        why = self._short(sleeper)
        if why is not None:
            raise NoRoom(why)
        try:
            with sleeper.turning:
                self._lead(sleeper)
            self._restore(sleeper)
        except CheckpointError as error:
            self._back(sleeper, str(error))
            raise NotWoken(str(error)) from None
        self.thaw(sleeper)
        self._told(sleeper, began)

    def _short(self, sleeper: Sleeper) -> str | None:
        """Why what it has not got back does not fit."""
        try:
            return self._sharing.shortage(sleeper)
        except GpuError as error:
            return str(error)

    def _there(self, sleeper: Sleeper) -> list[int]:
        """Its CUDA processes that have not ended."""
        members = self._freezer.members(sleeper.init_pid, sleeper.init_started)
        pids = {member.pid for member in members}
        return [pid for pid in sleeper.cuda if pid in pids]

    def _restore(self, sleeper: Sleeper) -> None:
        """All of them before any is let go: they may wait for each other."""
        for state in (CudaState.CHECKPOINTED, CudaState.LOCKED):
            for pid in self._there(sleeper):
                self._leave(sleeper, pid, state)

    def _leave(self, sleeper: Sleeper, pid: int, state: CudaState) -> None:
        """Out of ``state``, if the process is in it; again where the helper for the driver was lost over it."""
        cuda = self._parts.cuda
        lost: HelperLost | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._parts.sleep(_PAUSE_S)
            try:
                found = cuda.state(pid)
                if found is CudaState.FAILED:
                    raise CudaError(f"the CUDA state of process {pid} is lost: the driver calls it failed")  # noqa: TRY301
                if found is not state:
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
                if pid not in self._there(sleeper):
                    return  # it has ended meanwhile
                raise
            return
        raise lost or CudaError(f"process {pid} stays {state.value}")

    def _back(self, sleeper: Sleeper, why: str) -> None:
        """A restore that failed: what was restored goes out again, so that others have the GPU; then it is frozen."""
        parts = self._parts
        for pid in self._there(sleeper):
            try:
                if parts.cuda.state(pid) is CudaState.LOCKED:
                    parts.cuda.checkpoint(pid)
            except CheckpointError as error:
                parts.log.warning("job %s: process %s keeps its GPU memory: %s", sleeper.job_id, pid, error)
        parts.ledger.write(replace(entry_of(sleeper.record, parts.node), restore_failure=words.one(why)))
        with sleeper.turning:
            if sleeper.signalled:  # its handlers run
                return
            self._before_a_freeze(sleeper)
            self._mark(sleeper, Phase.FROZEN, stopped=sorted(sleeper.stay))
            try:
                self._freezer.freeze(sleeper.init_pid, sleeper.init_started, sleeper.how, timeout_s=self._freeze_s)
            except FreezeError as error:
                # What it asks of CUDA waits all the same. Those that did stop would not go on with the next attempt.
                parts.log.warning("job %s: is not frozen again: %s", sleeper.job_id, error)
                sleeper.ahead = ()  # they may have stopped, too
                self._rest_goes_on(sleeper)
                return
            sleeper.ahead, sleeper.thawed = (), False
            # While they ran some may have ended, and others begun: none of them is to be missed.
            sleeper.pids = tuple(one.pid for one in self._freezer.members(sleeper.init_pid, sleeper.init_started))

    def _told(self, sleeper: Sleeper, began: float) -> None:
        parts, record = self._parts, sleeper.record
        parts.registry.set_phase(sleeper.job_id, Phase.RUNNING)
        asked = began if sleeper.asked_epoch is None else sleeper.asked_epoch
        now = parts.now()
        parts.ledger.write(
            replace(
                entry_of(record, parts.node),
                released_ms=round(asked * 1000),
                restoring_ms=round(began * 1000),
                restored_ms=round(now * 1000),
                restored_node=parts.node,
            )
        )
        if sleeper.told:
            mail_owner(parts, record, "restored", now, slept_s=asked - sleeper.since_epoch)
        self._close(record)
        parts.log.info(
            "job %s: awake after %s, %.0f ms after it was asked for (%s)", sleeper.job_id,
            words.span(asked - sleeper.since_epoch), (now - asked) * 1000, sleeper.asked_why or "no reason given",
        )  # fmt: skip

    def gone(self, sleeper: Sleeper) -> None:
        """Its processes have ended: the ledger is told, the journal closed."""
        parts = self._parts
        entry = entry_of(sleeper.record, parts.node)
        parts.ledger.write(replace(entry, ended_ms=round(parts.now() * 1000)))
        self._close(sleeper.record)

    def end(self, sleeper: Sleeper, why: str) -> None:
        """Cancel a job that has waited too long."""
        slurm = self._parts.slurm
        try:
            said = words.one(f"ended by slurm-affinode: {why}")
            slurm.set_comment(sleeper.job_id, words.comment(said, slurm.job(sleeper.job_id).comment))
            slurm.cancel(sleeper.job_id)
        except AffinodeError as error:
            sleeper.overdue = False  # asked again
            self._parts.log.warning("job %s: cannot be ended: %s", sleeper.job_id, error)

    @property
    def unfinished(self) -> bool:
        """There is something to ``tidy``."""
        return bool(self._open)

    def tidy(self) -> None:
        """Close what could not be closed before."""
        for record in tuple(self._open):
            with suppress(JournalError):
                record.close()
                self._open.remove(record)

    def _close(self, record: Record) -> None:
        try:
            record.close()
        except JournalError as error:
            self._open.append(record)
            self._parts.log.warning("job %s: runs, and its journal is left for now: %s", record.key.job_id, error)

    def _mark(self, sleeper: Sleeper, phase: Phase, **facts: object) -> None:
        """In the journal where that can be written: a full disk must not keep a job from its GPU.

        The phases before ``waking`` are woken from by the next agent as well.
        """
        try:
            if sleeper.record.phase is not phase:
                sleeper.record.write(phase, **facts)
        except JournalError as error:
            self._parts.log.warning("job %s: goes on without its journal: %s", sleeper.job_id, error)
        self._parts.registry.set_phase(sleeper.job_id, phase)
