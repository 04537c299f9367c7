"""What Slurm's configuration says about jobs on this node, asked now and then, and only by who needs it."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.checkpoint import preflight
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.cluster import Job

_OF_ITSELF = ("batch", "extern", "interactive")
_ASK_AGAIN_S = 600.0
"""How old it may be."""


def steps_of(job: Job) -> tuple[str, ...]:
    """Steps of ``srun`` that it runs now: those that every job has do not count."""
    return tuple(step.id for step in job.steps or () if step.step not in _OF_ITSELF)


class SlurmFacts:
    """While slurmctld is silent, what it said last holds; what it never said does not."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked = -1e9
        self._said: Mapping[str, str] = {}

    def ends_above_memory(self) -> bool:
        """Slurm itself ends jobs above their ``--mem``."""
        return "overmemorykill" in self._setting("JobAcctGatherParams")

    def some_gpus(self, job: WatchedJob) -> bool:
        """The driver needs all GPUs of the node for a checkpoint, and the job may use only some: the others are closed.

        Raises ``GpuError``.
        """
        parts = self._parts
        if not job.devices or not preflight.needs_all_gpus(parts.cuda.capabilities()):
            return False
        others = {device.uuid for device in parts.gpus.devices()} - {device.uuid for device in job.devices}
        closed = self._setting("ConstrainDevices") in ("yes", "true") and "task/cgroup" in self._setting("TaskPlugin")
        return bool(others) and closed

    def _setting(self, name: str) -> str:
        parts = self._parts
        if parts.now() - self._asked >= _ASK_AGAIN_S:
            try:
                self._said = parts.slurm.config()
                self._asked = parts.now()
            except AffinodeError:
                pass
        return self._said.get(name, "").lower()
