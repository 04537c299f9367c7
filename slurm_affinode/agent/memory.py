"""Host memory that GPU memory may move into: of the node, below a cgroup's limit, below one that Slurm watches over.

Where ``JobAcctGatherParams`` has ``OverMemoryKill``, slurmstepd adds up the memory of a job's processes each time it
samples them and ends the job above its ``--mem``, with or without cgroups. Source: slurm.conf(5).
"""

from __future__ import annotations

from dataclasses import replace

from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.queue import MIB, memory_mib
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.checkpoint.facts import MemoryFacts, TreeFacts
from slurm_affinode.errors import AffinodeError

_ASK_AGAIN_S = 600.0
"""How old what is known of Slurm's configuration may be."""


class HostMemory:
    """For the jobs of a node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked = -1e9
        self._kills = False

    def of(self, job: WatchedJob, tree: TreeFacts) -> MemoryFacts:
        """What a job may still use."""
        facts = self._parts.memory(job.init_pid)
        limit_mib = 0 if job.slurm is None else memory_mib(job.slurm.tres_allocated.get("mem"))
        if not limit_mib or not self._slurm_kills():
            return facts
        left = limit_mib * MIB - sum(one.memory for one in tree.processes)
        return replace(facts, headroom=left if facts.headroom is None else min(left, facts.headroom))

    def _slurm_kills(self) -> bool:
        parts = self._parts
        if parts.now() - self._asked >= _ASK_AGAIN_S:
            try:
                said = parts.slurm.config().get("JobAcctGatherParams", "")
            except AffinodeError:
                return self._kills
            self._asked, self._kills = parts.now(), "overmemorykill" in said.lower()
        return self._kills
