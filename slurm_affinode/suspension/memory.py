"""Memory for a suspension or a wake: host memory for the contents of GPUs, and GPU memory for a process that returns.

A driver 580 that runs out of memory during a restore can never restore that process again (NVIDIA/cuda-checkpoint,
issue 44), so the required memory is recorded before the checkpoint and compared with the free memory before the
restore.

Host memory is limited by the node, by a cgroup, and by Slurm: with ``OverMemoryKill`` in ``JobAcctGatherParams``,
slurmstepd ends a job whose processes exceed ``--mem``, with or without cgroups. Source: slurm.conf(5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from slurm_affinode.base.text import size
from slurm_affinode.checkpoint.inspection import MemoryFacts, TreeFacts
from slurm_affinode.checkpoint.interface import CheckpointError, HelperLost
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import GpuFact
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.process_tree import TreeGoneError
from slurm_affinode.suspension.refusals import SlurmFacts
from slurm_affinode.suspension.registry import WatchedJob
from slurm_affinode.suspension.slurm_queue import MIB, memory_mib

MARGIN = 64 << 20
"""Bytes per GPU on top of the memory that was in use: the driver rounds up, and other processes come and go."""


def shortage(
    needs: Mapping[str, int], free: Mapping[str, int | None], pairs: Mapping[str, str] | None = None
) -> str | None:
    """Return why the required memory does not fit, in one line; ``None`` if it fits or the free memory is unknown.

    ``needs``: UUID of a GPU -> bytes in use there; ``free``: UUID -> bytes free now; ``pairs``: old UUID -> new UUID.
    """
    wanted: dict[str, int] = {}
    for uuid, held in needs.items():
        there = uuid if pairs is None else pairs.get(uuid, uuid)
        wanted[there] = wanted.get(there, 0) + held
    for uuid, held in wanted.items():
        left = free.get(uuid)
        if held and left is not None and left < held + MARGIN:
            return f"{size(held + MARGIN)} are needed on {uuid}, {size(left)} are free there"
    return None


def cuda_users(parts: Parts, pids: Iterable[int]) -> frozenset[int]:
    """Return those of ``pids`` that use CUDA. Raises ``CheckpointError``.

    If the helper for the driver was lost, the next one is queried.
    """
    pids = tuple(pids)
    try:
        return parts.cuda.users(pids)
    except HelperLost:
        return parts.cuda.users(pids)


def held_by(by_uuid: Mapping[str, Mapping[int, int]], pids: Iterable[int]) -> dict[str, int]:
    """Return UUID -> bytes of these processes. ``by_uuid``: UUID -> PID -> bytes."""
    mine = frozenset(pids)
    found = {uuid: sum(count for pid, count in one.items() if pid in mine) for uuid, one in by_uuid.items()}
    return {uuid: count for uuid, count in found.items() if count}


def gpu_memory(parts: Parts, pids: Collection[int]) -> dict[str, int]:
    """Return UUID -> bytes of GPU memory that these processes hold. Raises ``GpuError``."""
    return held_by(parts.gpus.processes(), pids) if pids else {}


def visible_gpus(
    parts: Parts, allocated: Iterable[Device], held: Mapping[str, int] | None = None
) -> tuple[GpuFact, ...]:
    """Return every GPU that the CUDA driver lists, in its order. Raises ``CheckpointError`` and ``GpuError``.

    ``allocated``: the GPUs of the job; ``held``: UUID -> bytes that it holds.
    """
    known = {device.uuid: device for device in parts.gpus.devices() if device.mig is None}
    mine = {device.uuid for device in allocated}
    return tuple(
        GpuFact(
            uuid,
            (known[uuid].model if uuid in known else None) or "unknown",
            round((known[uuid].memory_mib or 0) * MIB) if uuid in known else 0,
            allocated=uuid in mine,
            held_bytes=(held or {}).get(uuid, 0),
        )
        for uuid in parts.cuda.devices()
    )


class HostMemory:
    """Host memory available to the jobs of a node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._slurm = SlurmFacts(parts)

    def of(self, job: WatchedJob, tree: TreeFacts) -> MemoryFacts:
        """Return the host memory that a job may still use, less the reservations of other jobs."""
        facts = self._parts.memory(job.init_pid)
        facts = replace(facts, available=max(0, facts.available - self._parts.reservations.before(job.job_id)))
        limit_mib = 0 if job.slurm is None else memory_mib(job.slurm.tres_allocated.get("mem"))
        if not limit_mib or not self._slurm.ends_above_memory():
            return facts
        left = limit_mib * MIB - sum(one.memory for one in (*tree.processes, *tree.outside))
        return replace(facts, headroom=left if facts.headroom is None else min(left, facts.headroom))

    @contextmanager
    def promised(self, job: WatchedJob) -> Iterator[None]:
        """Reserve host memory for the job's GPU memory, so that concurrent suspensions leave room for it."""
        parts, count = self._parts, 0
        # If the amount is unknown, the suspension is refused for that reason.
        with suppress(CheckpointError, GpuError, TreeGoneError):
            members = parts.processes.everybody(job.init_pid, job.init_started)
            count = sum(gpu_memory(parts, cuda_users(parts, (one.pid for one in members))).values())
        with parts.reservations.of(job.job_id, count):
            yield

    def moved(self, job: WatchedJob) -> None:
        """End the reservation: the node's free memory now accounts for it."""
        self._parts.reservations.moved(job.job_id)
