"""Waking one job that sleeps in place: its processes are let go, then its GPU memory moves back, then it is unlocked.

In this order, because a stopped process cannot take its memory back; what it asks of CUDA waits until it is unlocked.
That there is room on the GPU has been seen to before: a restore that runs out of memory fails for good.
"""

from __future__ import annotations

from dataclasses import replace

from slurm_affinode.agent import words
from slurm_affinode.agent.aftermath import entry_of, mail_owner
from slurm_affinode.agent.inplace.freezer import FreezeError, Freezer
from slurm_affinode.agent.inplace.sleeper import Sleeper
from slurm_affinode.agent.parts import Parts
from slurm_affinode.checkpoint.interface import CheckpointError, CudaError, CudaState, HelperLost
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.suspension import Phase

_ATTEMPTS = 3
_PAUSE_S = 0.5


class NotWoken(AffinodeError):  # noqa: N818 - names what is the case
    """It sleeps on, whole; the text says why."""


class Waking:
    """The steps of a wake, each of them idempotent."""

    def __init__(self, parts: Parts, freezer: Freezer, freeze_s: float) -> None:
        """``freeze_s``: for the processes to stop."""
        self._parts = parts
        self._freezer = freezer
        self._freeze_s = freeze_s

    def thaw(self, sleeper: Sleeper) -> None:
        """Let the processes go. Raises ``NotWoken``, ``TreeGoneError``, ``JournalError``."""
        if sleeper.thawed:
            return
        self._mark(sleeper, Phase.WAKING)
        try:
            self._freezer.thaw(sleeper.init_pid, sleeper.init_started, sleeper.how, stay=sleeper.stay)
        except FreezeError as error:
            raise NotWoken(str(error)) from None
        sleeper.thawed = True

    def wake(self, sleeper: Sleeper) -> None:
        """All of it. Raises ``NotWoken``: it is frozen again, and ``TreeGoneError`` where it has ended."""
        parts = self._parts
        began = parts.now()
        try:
            self.thaw(sleeper)
            self._restore(sleeper)
        except CheckpointError as error:
            self._back(sleeper, str(error))
            raise NotWoken(str(error)) from None
        self._told(sleeper, began)

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
        """A restore that failed: what was restored goes out again, so that the others have the GPU; then frozen."""
        parts = self._parts
        for pid in self._there(sleeper):
            try:
                if parts.cuda.state(pid) is CudaState.LOCKED:
                    parts.cuda.checkpoint(pid)
            except CheckpointError as error:
                parts.log.warning("job %s: process %s keeps its GPU memory: %s", sleeper.job_id, pid, error)
        parts.ledger.write(replace(entry_of(sleeper.record, parts.node), restore_failure=words.one(why)))
        self._mark(sleeper, Phase.FROZEN)
        try:
            self._freezer.freeze(sleeper.init_pid, sleeper.init_started, sleeper.how, timeout_s=self._freeze_s)
        except FreezeError as error:
            # What it asks of CUDA waits all the same.
            parts.log.warning("job %s: is not frozen again: %s", sleeper.job_id, error)
            return
        sleeper.thawed = False

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
        record.close()
        parts.log.info(
            "job %s: awake after %s, %.0f ms after it was asked for (%s)", sleeper.job_id,
            words.span(asked - sleeper.since_epoch), (now - asked) * 1000, sleeper.asked_why or "no reason given",
        )  # fmt: skip

    def gone(self, sleeper: Sleeper) -> None:
        """Its processes have ended: the ledger is told, the journal closed."""
        parts = self._parts
        entry = entry_of(sleeper.record, parts.node)
        parts.ledger.write(replace(entry, ended_ms=round(parts.now() * 1000)))
        sleeper.record.close()

    def _mark(self, sleeper: Sleeper, phase: Phase) -> None:
        if sleeper.record.phase is not phase:
            sleeper.record.write(phase)
        self._parts.registry.set_phase(sleeper.job_id, phase)
