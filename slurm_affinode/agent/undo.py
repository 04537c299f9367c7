"""Taking a suspension back: the job's own processes go on as if nothing had been."""

from __future__ import annotations

from slurm_affinode.agent.journal import Record
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.checkpoint import remaps
from slurm_affinode.checkpoint.interface import CheckpointError, CudaState, HelperLost

_ATTEMPTS = 5
_PAUSE_S = 1.0


class Undo:
    """Works from the journal alone, so that it can be done after a crash, and again."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def resume(self, record: Record) -> bool:
        """SIGCONT to what was not stopped before, CUDA memory back, locks off; whether all of it succeeded."""
        parts, facts = self._parts, record.facts
        try:
            members = parts.processes.everybody(int(facts["init_pid"]), int(facts["init_started"]))
        except TreeGoneError:
            remaps.forget_lost(facts.get("removed", ()), (int(facts["uid"]), int(facts["gid"])))
            return True
        if "seq" in facts:
            remaps.forget([member.id for member in members], (int(facts["uid"]), int(facts["gid"])))
        # First: a stopped process cannot take its GPU memory back. Its calls wait until it is unlocked.
        stopped = set(facts.get("stopped", ()))
        parts.processes.resume(member for member in members if member.pid not in stopped)
        there = {member.pid for member in members}
        # All of them before any is let go: they may wait for each other.
        pids = [pid for pid in facts.get("cuda", ()) if pid in there]
        restored = [self._patiently(record, pid, CudaState.CHECKPOINTED) for pid in pids]
        unlocked = [self._patiently(record, pid, CudaState.LOCKED) for pid in pids]
        return all((*restored, *unlocked))

    def _patiently(self, record: Record, pid: int, state: CudaState) -> bool:
        """Leave ``state`` if the process is in it."""
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
            except HelperLost as error:
                why = error
            except CheckpointError as error:
                why = error
            else:
                return True
        self._parts.log.error("job %s: process %s stays %s: %s", record.key.job_id, pid, state.value, why)
        return False

    def drop_image(self, record: Record) -> None:
        """Remove this suspension's image, complete or not: it must not be found when the job runs on from here."""
        seq = record.facts.get("seq")
        if seq is None:
            return
        for store in self._parts.tiers.stores:
            try:
                store.discard(record.key, int(seq))
            except (CheckpointError, OSError) as error:
                self._parts.log.warning("job %s: its image is left: %s", record.key.job_id, error)
