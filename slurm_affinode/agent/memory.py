"""Host memory that GPU memory may move into: of the node, below a cgroup's limit, below one that Slurm watches over.

Where ``JobAcctGatherParams`` has ``OverMemoryKill``, slurmstepd adds up the memory of a job's processes each time it
samples them and ends the job above its ``--mem``, with or without cgroups. Source: slurm.conf(5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.queue import MIB, memory_mib
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.slurmfacts import SlurmFacts
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.checkpoint.facts import MemoryFacts, TreeFacts
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.gpu.interface import GpuError


class HostMemory:
    """For the jobs of a node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._slurm = SlurmFacts(parts)

    def of(self, job: WatchedJob, tree: TreeFacts) -> MemoryFacts:
        """What a job may still use, and others have not been promised."""
        facts = self._parts.memory(job.init_pid)
        facts = replace(facts, available=max(0, facts.available - self._parts.reservations.before(job.job_id)))
        limit_mib = 0 if job.slurm is None else memory_mib(job.slurm.tres_allocated.get("mem"))
        if not limit_mib or not self._slurm.ends_above_memory():
            return facts
        left = limit_mib * MIB - sum(one.memory for one in (*tree.processes, *tree.outside))
        return replace(facts, headroom=left if facts.headroom is None else min(left, facts.headroom))

    @contextmanager
    def promised(self, job: WatchedJob, held: Callable[[frozenset[int]], Mapping[str, int]]) -> Iterator[None]:
        """While this lasts, others that are suspended at the same time leave room for what will move in.

        ``held``: UUID -> bytes on GPUs of these processes.
        """
        parts, count = self._parts, 0
        # Where that cannot be told the suspension is refused for it.
        with suppress(CheckpointError, GpuError, TreeGoneError):
            members = parts.processes.everybody(job.init_pid, job.init_started)
            count = sum(held(parts.cuda.users(one.pid for one in members)).values())
        with parts.reservations.of(job.job_id, count):
            yield

    def moved(self, job: WatchedJob) -> None:
        """It is in host memory: the node's free memory tells."""
        self._parts.reservations.moved(job.job_id)
