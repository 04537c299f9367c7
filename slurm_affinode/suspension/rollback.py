"""Rollback of a suspension: the job's own processes continue unharmed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from slurm_affinode.base.pidfd import ExhaustedError, Id
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.interface import CheckpointError, CudaState
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.job.process_tree import Member, TreeGoneError
from slurm_affinode.suspension.records.journal import JobJournal
from slurm_affinode.suspension.records.record import SuspensionRecord

_ATTEMPTS = 5
_PAUSE_S = 1.0


class Rollback:
    """Rolls back a suspension from its journal alone, so that this also works after a crash, and repeatedly."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def resume(self, journal: JobJournal) -> bool:
        """Continue the processes, restore CUDA memory, and unlock; return whether all of it succeeded.

        Processes that were stopped before the suspension remain stopped.
        """
        parts, record = self._parts, journal.record
        try:
            members = self._all_processes(record)
        except TreeGoneError:
            deleted_files.forget_lost(record.removed or (), record.owner)
            return True
        if record.seq is not None:
            deleted_files.forget(
                Id(record.init_pid, record.init_started), [member.id for member in members], record.owner
            )
        # Continue first: a stopped process cannot restore its GPU memory. Its CUDA calls block until it is unlocked.
        stopped = set(record.stopped_pids or ())
        parts.processes.resume(member for member in members if member.pid not in stopped)
        there = {member.pid for member in members}
        # Restore all before unlocking any: they may wait for each other.
        pids = [pid for pid in record.cuda_pids or () if pid in there]
        with contextlib.suppress(CheckpointError):  # each is then restored by itself
            self._parts.cuda.restore(*[p for p in pids if self._parts.cuda.state(p) is CudaState.CHECKPOINTED])
        restored = [self._leave(record.key.job_id, pid, CudaState.CHECKPOINTED) for pid in pids]
        unlocked = [self._leave(record.key.job_id, pid, CudaState.LOCKED) for pid in pids]
        if self._parts.limits is not None:
            self._parts.limits.lower(record.key.job_id)
        return all((*restored, *unlocked))

    def _all_processes(self, record: SuspensionRecord) -> Sequence[Member]:
        """Return the processes of the job. Without free descriptors, try again: otherwise they stay stopped."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._parts.sleep(_PAUSE_S)
            try:
                return self._parts.processes.all_processes(record.init_pid, record.init_started)
            except ExhaustedError as error:
                self._parts.log.warning("job %s: not rolled back yet: %s", record.key.job_id, error)
                why = error
        raise why

    def _leave(self, job_id: int, pid: int, state: CudaState) -> bool:
        """Move the process out of ``state`` if it is in that state; return whether that succeeded."""
        cuda = self._parts.cuda
        why: CheckpointError | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._parts.sleep(_PAUSE_S)
            try:
                if cuda.state(pid) is not state:
                    return True
                if state is CudaState.CHECKPOINTED:
                    cuda.restore(pid)
                else:
                    cuda.unlock(pid)
            except CheckpointError as error:
                why = error
            else:
                return True
        self._parts.log.error("job %s: process %s stays %s: %s", job_id, pid, state.value, why)
        return False

    def drop_image(self, journal: JobJournal) -> None:
        """Remove this suspension's image, complete or not: it must not be found once the job runs on."""
        record = journal.record
        if record.seq is None:
            return
        for store in self._parts.tiers.stores:
            try:
                store.discard(record.key, record.seq)
            except (CheckpointError, OSError) as error:
                self._parts.log.warning("job %s: cannot remove its image: %s", record.key.job_id, error)
