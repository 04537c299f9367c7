"""Rollback of a suspension: the job's own processes continue unharmed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from slurm_affinode.base.pidfd import ExhaustedError, Id
from slurm_affinode.checkpoint.files import deleted_files, inet_sockets
from slurm_affinode.checkpoint.interface import CheckpointError, CudaDriver, CudaState
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.suspension.context import LOG
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Member, Processes, TreeGoneError
from slurm_affinode.suspension.records.journal import JobJournal
from slurm_affinode.suspension.records.record import SuspensionRecord

_ATTEMPTS = 5
_PAUSE_S = 1.0


class Rollback:
    """Rolls back a suspension from its journal alone, so that this also works after a crash, and repeatedly."""

    def __init__(
        self, processes: Processes, cuda: CudaDriver, tiers: Tiers, limits: MemoryLimits | None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """``limits``: the memory limits of jobs; ``None``: they are not known."""
        self._processes = processes
        self._cuda = cuda
        self._tiers = tiers
        self._limits = limits
        self._sleep = sleep

    def resume(self, journal: JobJournal) -> bool:
        """Continue the processes, restore CUDA memory, and unlock; return whether all of it succeeded.

        Processes that were stopped before the suspension remain stopped.
        """
        record = journal.record
        try:
            members = self._all_processes(record)
        except TreeGoneError:
            deleted_files.forget_lost(record.removed or (), record.owner)
            return True
        if record.seq is not None:
            tree = [member.id for member in members]
            inet_sockets.end_repair(tree)
            deleted_files.forget(Id(record.init_pid, record.init_started), tree, record.owner)
        # Continue first: a stopped process cannot restore its GPU memory. Its CUDA calls block until it is unlocked.
        stopped = set(record.stopped_pids or ())
        self._processes.resume(member for member in members if member.pid not in stopped)
        running = {member.pid for member in members}
        # Restore all before unlocking any: they may wait for each other.
        pids = [pid for pid in record.cuda_pids or () if pid in running]
        with contextlib.suppress(CheckpointError):  # each is then restored by itself
            self._cuda.restore(*[p for p in pids if self._cuda.state(p) is CudaState.CHECKPOINTED])
        restored = [self._leave(record.key.job_id, pid, CudaState.CHECKPOINTED) for pid in pids]
        unlocked = [self._leave(record.key.job_id, pid, CudaState.LOCKED) for pid in pids]
        if self._limits is not None:
            self._limits.lower(record.key.job_id)
        return all((*restored, *unlocked))

    def _all_processes(self, record: SuspensionRecord) -> Sequence[Member]:
        """Return the processes of the job. Without free descriptors, try again: otherwise they stay stopped."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(_PAUSE_S)
            try:
                return self._processes.all_processes(record.init_pid, record.init_started)
            except ExhaustedError as error:
                LOG.warning("job %s: not rolled back yet: %s", record.key.job_id, error)
                why = error
        raise why

    def _leave(self, job_id: int, pid: int, state: CudaState) -> bool:
        """Move the process out of ``state`` if it is in that state; return whether that succeeded."""
        why: CheckpointError | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._sleep(_PAUSE_S)
            try:
                if self._cuda.state(pid) is not state:
                    return True
                if state is CudaState.CHECKPOINTED:
                    self._cuda.restore(pid)
                else:
                    self._cuda.unlock(pid)
            except CheckpointError as error:
                why = error
            else:
                return True
        LOG.error("job %s: process %s stays %s: %s", job_id, pid, state.value, why)
        return False

    def drop_image(self, journal: JobJournal) -> None:
        """Remove this suspension's image, complete or not: it must not be found once the job runs on."""
        record = journal.record
        if record.seq is None:
            return
        for store in self._tiers.stores:
            try:
                store.discard(record.key, record.seq)
            except (CheckpointError, OSError) as error:
                LOG.warning("job %s: cannot remove its image: %s", record.key.job_id, error)
