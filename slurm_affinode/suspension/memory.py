"""Memory for a suspension or a wake: host memory for the contents of GPUs, and GPU memory for a process that returns.

A driver 580 that runs out of memory during a restore can never restore that process again (NVIDIA/cuda-checkpoint,
issue 44), so the required memory is recorded before the checkpoint and compared with the free memory before the
restore.

Host memory is limited by the node, by a cgroup, and by Slurm: with ``OverMemoryKill`` in ``JobAcctGatherParams``,
slurmstepd ends a job whose processes exceed ``--mem``, with or without cgroups. Source: slurm.conf(5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id
from slurm_affinode.base.text import size
from slurm_affinode.checkpoint.inspection import MemoryFacts, SpareMemory, TreeFacts
from slurm_affinode.checkpoint.interface import CheckpointError, CudaDriver, HelperLost, RestoreInterrupted
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import GpuFact, Phase
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension.context import LOG, Clock, Gpus, Reservations, SuspendSettings
from slurm_affinode.suspension.interface import AbortedError
from slurm_affinode.suspension.job.memory_limits import (
    STILL_RAISED,
    AllocatedMemory,
    LimitRoom,
    MemoryLimitError,
    MemoryLimits,
)
from slurm_affinode.suspension.job.process_tree import Processes, TreeGoneError
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.records.record import SuspensionFacts
from slurm_affinode.suspension.refusals import MARGIN as HOST_MARGIN
from slurm_affinode.suspension.refusals import SlurmFacts
from slurm_affinode.suspension.slurm_queue import MIB, memory_mib

MARGIN = 64 << 20
"""Bytes per GPU on top of the memory that was in use: the driver rounds up, and other processes come and go."""
_PAUSE_S = 1.0
_USE_UNKNOWN = "its memory use cannot be read while its memory limit is raised"


def shortage(
    needs: Mapping[str, int], free: Mapping[str, int | None], pairs: Mapping[str, str] | None = None
) -> str | None:
    """Return why the required memory does not fit, in one line; ``None`` if it fits or the free memory is unknown.

    ``needs``: UUID of a GPU -> bytes in use there; ``free``: UUID -> bytes free now; ``pairs``: old UUID -> new UUID.
    """
    needed: dict[str, int] = {}
    for uuid, held_bytes in needs.items():
        target = uuid if pairs is None else pairs.get(uuid, uuid)
        needed[target] = needed.get(target, 0) + held_bytes
    for uuid, held_bytes in needed.items():
        available = free.get(uuid)
        if held_bytes and available is not None and available < held_bytes + MARGIN:
            return f"{size(held_bytes + MARGIN)} are needed on {uuid}, {size(available)} are free there"
    return None


def cuda_users(cuda: CudaDriver, pids: Iterable[int]) -> frozenset[int]:
    """Return those of ``pids`` that use CUDA. Raises ``CheckpointError``.

    If the helper for the driver was lost, the next one is queried.
    """
    pids = tuple(pids)
    try:
        return cuda.users(pids)
    except HelperLost:
        return cuda.users(pids)


def held_by(by_uuid: Mapping[str, Mapping[int, int]], pids: Iterable[int]) -> dict[str, int]:
    """Return UUID -> bytes of these processes. ``by_uuid``: UUID -> PID -> bytes."""
    pid_set = frozenset(pids)
    by_gpu = {uuid: sum(count for pid, count in value.items() if pid in pid_set) for uuid, value in by_uuid.items()}
    return {uuid: count for uuid, count in by_gpu.items() if count}


def gpu_memory(gpus: Gpus, pids: Collection[int]) -> dict[str, int]:
    """Return UUID -> bytes of GPU memory that these processes hold. Raises ``GpuError``."""
    return held_by(gpus.processes(), pids) if pids else {}


def visible_gpus(
    cuda: CudaDriver, gpus: Gpus, allocated: Iterable[Device], held_bytes: Mapping[str, int] | None = None
) -> tuple[GpuFact, ...]:
    """Return every GPU that the CUDA driver lists, in its order. Raises ``CheckpointError`` and ``GpuError``.

    ``allocated``: the GPUs of the job; ``held_bytes``: UUID -> bytes that it holds.
    """
    device_by_uuid = {device.uuid: device for device in gpus.devices() if device.mig is None}
    allocated_uuids = {device.uuid for device in allocated}
    return tuple(
        GpuFact(
            uuid,
            (device_by_uuid[uuid].model if uuid in device_by_uuid else None) or "unknown",
            round((device_by_uuid[uuid].memory_mib or 0) * MIB) if uuid in device_by_uuid else 0,
            allocated=uuid in allocated_uuids,
            held_bytes=(held_bytes or {}).get(uuid, 0),
        )
        for uuid in cuda.devices()
    )


@dataclass(frozen=True, slots=True)
class Allowance:
    """Host memory for which the limit of a job was raised."""

    used_bytes: int
    """Use of the job before the limit was raised."""
    gpu_bytes: int
    """Its GPU memory."""

    def excess(self, used_bytes: int) -> int:
        """Return the bytes that the job uses beyond the allowance."""
        return max(0, used_bytes - self.used_bytes - self.gpu_bytes - HOST_MARGIN)


class HostMemory:
    """Host memory available to the jobs of a node."""

    def __init__(
        self, *, node: str, slurm: SlurmClient, configuration: SlurmFacts, processes: Processes, cuda: CudaDriver,
        gpus: Gpus, tiers: Tiers, settings: SuspendSettings, limits: MemoryLimits | None, reservations: Reservations,
        read_memory: Callable[[int], MemoryFacts], clock: Clock,
    ) -> None:  # fmt: skip
        """``limits``: the memory limits of jobs; ``None``: they are not known.

        ``read_memory``: host memory still available to the job of a process (PID).
        """
        self._node = node
        self._slurm = slurm
        self._configuration = configuration
        self._processes = processes
        self._cuda = cuda
        self._gpus = gpus
        self._tiers = tiers
        self._settings = settings
        self._limits = limits
        self._reservations = reservations
        self._read_memory = read_memory
        self._clock = clock

    def of(self, job: WatchedJob, tree: TreeFacts, gpu_bytes: int) -> MemoryFacts:
        """Return the host memory that a job may still use, less the reservations of other jobs.

        ``gpu_bytes``: its GPU memory, for which its memory limit may be raised.
        """
        facts = self._available(job.job_id, job.init_pid)
        room = self._room(job.job_id, job.init)
        if room is not None:
            spare = self._spare(job.job_id, job.init) if gpu_bytes + HOST_MARGIN > room.in_job else None
            facts = replace(facts, headroom=room.above, job_headroom=room.in_job, spare=spare)
        limits = self._limits
        if limits is not None and job.phase is Phase.RUNNING:
            facts = replace(facts, raised=limits.raised_bytes(job.job_id))
        limit_mib = 0 if job.slurm is None else memory_mib(job.slurm.tres_allocated.get("mem"))
        if not limit_mib or not self._configuration.ends_above_memory():
            return facts
        headroom = limit_mib * MIB - sum(process.memory for process in (*tree.processes, *tree.outside))
        return replace(facts, headroom=headroom if facts.headroom is None else min(headroom, facts.headroom))

    def _available(self, job_id: int, init_pid: int) -> MemoryFacts:
        facts = self._read_memory(init_pid)
        images = sum(tier.store.budget.promised for tier in self._tiers.tiers if not tier.durable)
        return replace(facts, available=max(0, facts.available - self._reservations.before(job_id) - images))

    def _room(self, job_id: int, init: Id) -> LimitRoom | None:
        """Return the memory left below limits that can be raised; ``None``: there are none."""
        if self._limits is None or not self._settings.raise_limit:
            return None
        return self._limits.room(job_id, init)

    def _spare(self, job_id: int, init: Id) -> SpareMemory | None:
        """Return the memory of this node that no job needs; ``None``: unknown."""
        limits = self._limits
        with suppress(OSError):
            return None if limits is None else self._spare_at(job_id, init)(limits.allocated(job_id, init))
        return None

    def _spare_at(self, job_id: int, init: Id) -> Callable[[AllocatedMemory], SpareMemory | None]:
        """Query Slurm, and return a function of the memory that is allocated after that. Raises ``OSError``."""
        limits, settings = self._limits, self._settings
        earlier = None if limits is None else limits.allocated(job_id, init)
        by_slurm, share = self._allocated(), self._configuration.allowed_memory_share()

        def spare(allocated: AllocatedMemory) -> SpareMemory | None:
            if by_slurm is None or earlier is None:
                return None
            promised = allocated.unused + allocated.starting(by_slurm, earlier, share)
            return SpareMemory(self._available(job_id, init.pid).available, promised, settings.memory_reserve)

        return spare

    def _allocated(self) -> int | None:
        """Return the bytes that Slurm has allocated on this node; ``None``: unknown."""
        try:
            used_mib = next((node.memory_used_mib for node in self._slurm.nodes() if node.name == self._node), None)
        except AffinodeError:
            return None
        return None if used_mib is None else round(used_mib * MIB)

    def make_room(
        self, job: WatchedJob, facts: SuspensionFacts, before: Callable[[], None] = lambda: None
    ) -> Allowance | None:
        """Raise the memory limit of a job if its GPU memory does not fit below it. Raises ``AbortedError``.

        ``before`` is called before the limit is raised, and may raise further errors.

        Call it right before the GPU memory moves: Slurm may have lowered the limit since the refusals were computed,
        and the processes may have allocated more since ``facts``. Raises ``GpuError``. Return the allowance for
        ``check_use``; ``None``: the limit was not raised.
        """
        job_id, init, limits = job.job_id, job.init, self._limits
        if limits is None or self._room(job_id, init) is None or not facts.cuda_pids:
            return None
        if not limits.lower(job_id):
            raise AbortedError(f"its memory limit is still raised for an earlier suspension: {STILL_RAISED}")
        gpu_bytes = max(facts.gpu_bytes or 0, sum(gpu_memory(self._gpus, facts.cuda_pids).values()))
        if (room := self._room(job_id, init)) is not None and room.in_job < gpu_bytes + HOST_MARGIN:
            before()
        used_bytes = limits.used(job_id, init)
        try:
            raised = self._raise(job_id, init, gpu_bytes + HOST_MARGIN)
        except MemoryLimitError as error:
            raise AbortedError(
                f"its GPU memory ({size(gpu_bytes)}) does not fit below its memory limit: {error}"
            ) from None
        if not raised:
            return None
        if used_bytes is None:
            raise AbortedError(_USE_UNKNOWN)
        return Allowance(used_bytes, gpu_bytes)

    def check_use(self, job: WatchedJob, allowance: Allowance | None) -> None:
        """Raise ``AbortedError`` if a job uses more memory than its GPU memory explains. ``allowance``: see above.

        Call it when the GPU memory has moved and no process of the job can allocate more: its processes that use CUDA
        ran while the limit was raised.
        """
        if allowance is None or self._limits is None:
            return
        used_bytes = self._limits.used(job.job_id, job.init)
        if used_bytes is None:
            raise AbortedError(_USE_UNKNOWN)
        if excess := allowance.excess(used_bytes):
            text = f"its processes have allocated {size(excess)} more than its GPU memory ({size(allowance.gpu_bytes)})"
            raise AbortedError(f"{text} while its memory limit was raised")

    def make_room_for_image(self, job_id: int, init: Id, image_bytes: int, check: Callable[[], None]) -> None:
        """Raise the memory limit of a job so that its processes can be restored. Raises ``RestoreFailed``.

        ``image_bytes``: their memory, including GPU memory. Waits for memory of the node for some time; ``check`` is
        called repeatedly, and an exception that it raises ends the wait.
        """
        deadline = self._clock.now() + self._settings.free_s
        while (room := self._room(job_id, init)) is not None:
            try:
                self._raise(job_id, init, image_bytes + HOST_MARGIN)
            except MemoryLimitError as error:
                if room.in_job >= image_bytes:
                    return
                if self._clock.now() >= deadline:
                    text = (
                        f"its memory ({size(image_bytes)}, with that of its GPUs) does not fit below its memory limit"
                    )
                    raise RestoreInterrupted(f"{text}: {error}") from None
            else:
                return
            check()
            self._clock.sleep(_PAUSE_S)

    def _raise(self, job_id: int, init: Id, needed: int) -> bool:
        """Raise the limits of a job if necessary; return whether it was. Raises ``MemoryLimitError``."""
        limits = self._limits
        room = self._room(job_id, init)
        if limits is None or room is None or room.in_job >= needed:
            return False
        try:
            more = limits.make_room(job_id, init, needed, self._spare_at(job_id, init))
        except OSError as error:
            raise MemoryLimitError(f"its memory limit cannot be raised: {error.strerror or error}") from error
        if more:
            LOG.info("job %s: its memory limit is raised by %s", job_id, size(more))
        return more > 0

    @contextmanager
    def promised(self, job: WatchedJob) -> Iterator[None]:
        """Reserve host memory for the job's GPU memory, so that concurrent suspensions leave room for it."""
        count = 0
        # If the amount is unknown, the suspension is refused for that reason.
        with suppress(CheckpointError, GpuError, TreeGoneError):
            members = self._processes.all_processes(job.init_pid, job.init_started)
            count = sum(gpu_memory(self._gpus, cuda_users(self._cuda, (member.pid for member in members))).values())
        with self._reservations.of(job.job_id, count):
            yield

    def moved(self, job: WatchedJob) -> None:
        """End the reservation: the node's free memory now accounts for it."""
        self._reservations.moved(job.job_id)
