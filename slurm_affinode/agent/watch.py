"""What the GPUs and the processes of a job do at a moment, as the samples that ``core.idle`` takes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slurm_affinode.agent.peers import Inspector
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.core.idle import GpuActivity, IdleRule, Sample
from slurm_affinode.gpu.interface import DriverMissing, GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import Device, ProcessUtilization, Reading
from slurm_affinode.model.suspension import Mode

MIB = 1 << 20
FIRST_LOOK_S = 5.0
"""How far back the first look at the processes of a GPU goes."""
_TICKS = os.sysconf("SC_CLK_TCK")
_SHARES = {"engine": "engine_active", "sm": "sm_active", "tensor": "tensor_active", "dram": "dram_active"}


@dataclass(slots=True)
class _Memory:
    """What has to be remembered of a job between two samples."""

    process_us: dict[str, int] = field(default_factory=dict)
    xids: dict[str, int] = field(default_factory=dict)
    host: tuple[float, int, int, int] | None = None
    """Time, CPU ticks, bytes of storage, bytes of reads and writes."""

    def seen(self, device: Device, used: Sequence[ProcessUtilization]) -> None:
        """What comes next is newer than these; a time that is still to come would hide what is done until then."""
        if used:
            self.process_us[_key(device)] = min(max(one.time_us for one in used), int(time.time() * 1e6))


class Watch:
    """Samples jobs. One driver for all threads: it is locked while it is asked."""

    def __init__(
        self,
        driver: GpuDriver,
        inspector: Inspector,
        *,
        finder: JobFinder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: seconds that only go forward."""
        self._driver = driver
        self._inspector = inspector
        self._finder = finder or JobFinder()
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[int, _Memory] = {}

    @contextlib.contextmanager
    def driver(self) -> Iterator[GpuDriver]:
        """The driver, for this thread alone while the context lasts."""
        with self._lock:
            yield self._driver

    def devices(self) -> Sequence[Device]:
        """The node's devices. Raises ``DriverMissing``."""
        with self._lock:
            return self._driver.devices()

    def sample(self, job: WatchedJob, rule: IdleRule) -> Sample:
        """What the job's GPUs and processes show now, and did since the last call. Raises nothing."""
        memory = self._jobs.setdefault(job.job_id, _Memory())
        in_place = job.option.mode is Mode.INPLACE
        # Slurm numbers the GPUs of a job, but not those of one with shards.
        shares = in_place or (job.slurm is not None and not job.slurm.node_gpus)
        own = frozenset(self._inspector.tree(job.init_pid)) if shares else None
        with self._lock:
            gpus = tuple(self._gpu(device, memory, own, in_place=in_place) for device in job.devices or ())
        host = self._host(job.init_pid, memory) if rule.host_limits else {}
        return Sample(self._clock(), gpus, host)

    def by_processes(self, job_id: int) -> tuple[Device, ...]:
        """The devices on which a job has processes: what is left where nobody says which GPUs it was given."""
        with self._lock, contextlib.suppress(DriverMissing):
            return tuple(device for device in self._driver.devices() if self._is_on(device, job_id))
        return ()

    def forget(self, job_id: int) -> None:
        """The job is gone from this node."""
        self._jobs.pop(job_id, None)

    def close(self) -> None:
        """Let the driver go."""
        with self._lock:
            self._driver.close()

    def _is_on(self, device: Device, job_id: int) -> bool:
        """Whether a process of the job is on a GPU; its environment, which it may write itself, does not count."""
        with contextlib.suppress(GpuError):
            refs = (self._finder.find(process.pid) for process in self._driver.processes(device))
            return any(ref is not None and ref.job_id == job_id and ref.source != "environment" for ref in refs)
        return False

    def _gpu(self, device: Device, memory: _Memory, own: frozenset[int] | None, *, in_place: bool) -> GpuActivity:
        """``own``: the processes of a job that may share the GPU. In place what others do there is not its activity."""
        name = name_of(device)
        shared = self._shared(device, memory, own) if in_place and own is not None else None
        if shared is not None:
            return shared
        try:
            reading = self._driver.read(device)
        except GpuError as error:
            return GpuActivity(name, {"utilization": None}, fault=str(error))
        signals: dict[str, float | None] = {"utilization": reading.util_pct}
        if reading.memory_util_pct is not None:
            signals["memory"] = reading.memory_util_pct
        for signal, attribute in _SHARES.items():
            share = getattr(reading, attribute)
            if share is not None:
                signals[signal] = 100 * share
        signals["processes"] = self._processes(device, memory)
        used = self._used(device, reading, own)
        return GpuActivity(name, signals, used, self._xid(device, reading, memory))

    def _used(self, device: Device, reading: Reading, own: frozenset[int] | None) -> int | None:
        """Bytes in use there; of a job that may share the GPU those of its own processes, where the driver has them."""
        if own is not None:
            with contextlib.suppress(GpuError):
                held = [one.used_mib for one in self._driver.processes(device) if one.pid in own]
                if None not in held:
                    return int(sum(filter(None, held)) * MIB)
        return None if reading.fb_used_mib is None else int(reading.fb_used_mib * MIB)

    def _shared(self, device: Device, memory: _Memory, own: frozenset[int]) -> GpuActivity | None:
        """What the job's own processes do; ``None`` where nobody else is on the GPU, or the driver cannot tell."""
        try:
            there = self._driver.processes(device)
            if all(one.pid in own for one in there):
                return None
            since = memory.process_us.setdefault(_key(device), int((time.time() - FIRST_LOOK_S) * 1e6))
            used = self._driver.process_utilization(device, since)
            reading = self._driver.read(device)
        except GpuError:
            return None
        memory.seen(device, used)
        mine = [one for one in used if one.pid in own]
        busy, moved = (max((getattr(one, of) for one in mine), default=0.0) for of in ("sm_pct", "memory_pct"))
        signals: dict[str, float | None] = {"utilization": busy, "memory": moved, "processes": max(busy, moved)}
        held = sum(one.used_mib or 0.0 for one in there if one.pid in own)
        return GpuActivity(name_of(device), signals, int(held * MIB), self._xid(device, reading, memory))

    def _processes(self, device: Device, memory: _Memory) -> float | None:
        """The busiest process since the last sample; 0 where none worked; ``None``: the driver cannot tell."""
        since = memory.process_us.setdefault(_key(device), int((time.time() - FIRST_LOOK_S) * 1e6))
        try:
            used = self._driver.process_utilization(device, since)
        except GpuError:
            return None
        memory.seen(device, used)
        return max((max(one.sm_pct, one.memory_pct) for one in used), default=0.0)

    @staticmethod
    def _xid(device: Device, reading: Reading, memory: _Memory) -> str | None:
        """An error that the driver reported while the job was watched: since then its counters may stand still."""
        if reading.xid is None:
            return None
        before = memory.xids.setdefault(_key(device), reading.xid)
        return None if reading.xid == before else f"XID {reading.xid} was reported while the job was on it"

    def _host(self, init_pid: int, memory: _Memory) -> dict[str, float | None]:
        now, cpu, disk, through = self._clock(), 0, 0, 0
        for pid in self._inspector.tree(init_pid):
            ticks, moved = self._inspector.cpu_ticks(pid), self._inspector.io_bytes(pid)
            cpu += ticks or 0
            disk += 0 if moved is None else moved[0]
            through += 0 if moved is None else moved[1]
        before, memory.host = memory.host, (now, cpu, disk, through)
        if before is None or now <= before[0]:
            return {}
        passed = now - before[0]
        # A process of which the parent does not know (it detached, and ended) takes its share with it.
        return {
            "cpu": max(0, cpu - before[1]) / _TICKS / passed * 100,
            "disk": max(0, disk - before[2]) / passed,
            "io": max(0, through - before[3]) / passed,
        }


def name_of(device: Device) -> str:
    """``GPU 0``, ``GPU 0.7`` for a MIG instance."""
    return f"GPU {device.index}" if device.mig is None else f"GPU {device.index}.{device.mig}"


def _key(device: Device) -> str:
    return device.uuid if device.mig is None else f"{device.uuid}/{device.mig}"


def by_index(devices: Sequence[Device], indices: Sequence[int]) -> tuple[Device, ...] | None:
    """The devices with Slurm's numbers; ``None`` where one of them is not there.

    Slurm counts the files of gres.conf: the number at the end of ``/dev/nvidiaN``, the driver's minor number. Source:
    slurm.conf(5), gres.conf(5), ``SLURM_JOB_GPUS`` in prolog_epilog.
    """
    known = {
        (device.index if device.minor is None else device.minor): device for device in devices if device.mig is None
    }
    if any(device.mig is not None for device in devices) or any(index not in known for index in indices):
        return None
    return tuple(sorted((known[index] for index in indices), key=lambda device: device.index))
