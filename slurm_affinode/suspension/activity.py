"""Samples of the activity of a job's GPUs and processes, the input of ``core.idle``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slurm_affinode.core.idle import GpuActivity, IdleRule, Sample
from slurm_affinode.gpu.interface import DriverMissing, GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import Device, ProcessUtilization, Reading, attributed, of_slurm
from slurm_affinode.model.suspension import Mode
from slurm_affinode.suspension.inplace.freezer import Freezer, LinuxFreezer
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.registry import WatchedJob

MIB = 1 << 20
FIRST_QUERY_S = 5.0
"""Look-back window of the first query for the processes of a GPU."""
_TICKS = os.sysconf("SC_CLK_TCK")
_SHARES = {"engine": "engine_active", "sm": "sm_active", "tensor": "tensor_active", "dram": "dram_active"}


@dataclass(slots=True)
class _Memory:
    """State kept for a job between two samples."""

    process_us: dict[str, int] = field(default_factory=dict)
    xids: dict[str, int] = field(default_factory=dict)
    host: tuple[float, int, int, int] | None = None
    """Time, CPU ticks, bytes of storage I/O, bytes read and written."""

    def record(self, device: Device, used: Sequence[ProcessUtilization]) -> None:
        """Record the time of the newest data, so that the next query returns only later data.

        It is capped at the current time: a time in the future would hide all activity until then.
        """
        if used:
            self.process_us[_key(device)] = min(max(usage.time_us for usage in used), int(time.time() * 1e6))


class Watch:
    """Samples the jobs of a node. All threads share one driver, which is locked during each query."""

    def __init__(
        self,
        driver: GpuDriver,
        inspector: Inspector,
        *,
        finder: JobFinder | None = None,
        freezer: Freezer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: a monotonic clock, in seconds."""
        self._driver = driver
        self._inspector = inspector
        self._finder = finder or JobFinder()
        self._freezer = freezer or LinuxFreezer()
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the driver: NVML is called by one thread at a time."""
        self._jobs: dict[int, _Memory] = {}

    @contextlib.contextmanager
    def driver(self) -> Iterator[GpuDriver]:
        """Lock the driver for the calling thread and yield it."""
        with self._lock:
            yield self._driver

    def devices(self) -> Sequence[Device]:
        """Return the node's devices. Raises ``DriverMissing``."""
        with self._lock:
            return self._driver.devices()

    def sample(self, job: WatchedJob, rule: IdleRule) -> Sample:
        """Sample the job's GPUs and processes: state now, and activity since the last call.

        Raises ``ExhaustedError`` only.
        """
        memory = self._jobs.setdefault(job.job_id, _Memory())
        in_place = job.option.mode is Mode.INPLACE
        # Slurm does not report the GPU indices of a job with shards.
        shares = in_place or (job.slurm is not None and not job.slurm.node_gpus)
        job_pids = frozenset(self._inspector.tree(job.init_pid)) if shares else None
        with self._lock:
            gpus = tuple(self._gpu(device, memory, job_pids, in_place=in_place) for device in job.devices or ())
        host = self._host(job.init_pid, memory) if rule.host_limits else {}
        # Last: a job that stops while it is sampled has been idle for another reason.
        return Sample(self._clock(), gpus, host, self._freezer.is_stopped_by_slurm(job.init_pid))

    def by_processes(self, job_id: int) -> tuple[Device, ...]:
        """Return the devices that processes of the job use, for a job with unknown GPUs."""
        with self._lock, contextlib.suppress(DriverMissing):
            return tuple(device for device in self._driver.devices() if self._is_on(device, job_id))
        return ()

    def forget(self, job_id: int) -> None:
        """Discard the state of a job that has left this node."""
        self._jobs.pop(job_id, None)

    def close(self) -> None:
        """Close the driver."""
        with self._lock:
            self._driver.close()

    def _is_on(self, device: Device, job_id: int) -> bool:
        """Return whether a process of the job uses the GPU.

        Its environment does not count: the user can change it.
        """
        with contextlib.suppress(GpuError):
            refs = (self._finder.find(process.pid) for process in self._driver.processes(device))
            return any(ref is not None and ref.job_id == job_id and ref.source != "environment" for ref in refs)
        return False

    def _gpu(self, device: Device, memory: _Memory, job_pids: frozenset[int] | None, *, in_place: bool) -> GpuActivity:
        """Return the activity of one GPU.

        ``job_pids``: the processes of a job that may share the GPU. For a job in place, other processes do not count as
        its activity.
        """
        name = name_of(device)
        shared = self._shared(device, memory, job_pids) if in_place and job_pids is not None else None
        if shared is not None:
            return shared
        try:
            reading = self._driver.read(device)
        except GpuError as error:
            return GpuActivity(name, {"utilization": None}, fault=str(error))
        signals = signals_of(reading)
        signals["processes"] = self._processes(device, memory)
        used = self._used(device, reading, job_pids)
        return GpuActivity(name, signals, used, self._xid(device, reading, memory))

    def _used(self, device: Device, reading: Reading, job_pids: frozenset[int] | None) -> int | None:
        """Return the memory in use on the GPU, in bytes.

        For a job that may share the GPU, only its own processes count, if the driver reports their memory.
        """
        if job_pids is not None:
            with contextlib.suppress(GpuError):
                used_mib = [process.used_mib for process in self._driver.processes(device) if process.pid in job_pids]
                if None not in used_mib:
                    return int(sum(filter(None, used_mib)) * MIB)
        return None if reading.fb_used_mib is None else int(reading.fb_used_mib * MIB)

    def _shared(self, device: Device, memory: _Memory, job_pids: frozenset[int]) -> GpuActivity | None:
        """Return the activity of the job's own processes.

        ``None``: no other process is on the GPU, or the driver does not attribute its activity to processes.
        """
        try:
            processes = self._driver.processes(device)
            if all(process.pid in job_pids for process in processes):
                return None
            since = memory.process_us.setdefault(_key(device), int((time.time() - FIRST_QUERY_S) * 1e6))
            used = self._driver.process_utilization(device, since)
            reading = self._driver.read(device)
        except GpuError:
            return None
        memory.record(device, used)
        if not attributed(used, reading):
            return None
        job_usages = [usage for usage in used if usage.pid in job_pids]
        busy, moved = (
            max((getattr(usage, of) for usage in job_usages), default=0.0) for of in ("sm_pct", "memory_pct")
        )
        signals: dict[str, float | None] = {"utilization": busy, "memory": moved, "processes": max(busy, moved)}
        used_mib = sum(process.used_mib or 0.0 for process in processes if process.pid in job_pids)
        return GpuActivity(name_of(device), signals, int(used_mib * MIB), self._xid(device, reading, memory))

    def _processes(self, device: Device, memory: _Memory) -> float | None:
        """Return the utilization of the busiest process since the last sample, in percent.

        0: no process was active. ``None``: the driver does not report it.
        """
        since = memory.process_us.setdefault(_key(device), int((time.time() - FIRST_QUERY_S) * 1e6))
        try:
            used = self._driver.process_utilization(device, since)
        except GpuError:
            return None
        memory.record(device, used)
        return max((max(usage.sm_pct, usage.memory_pct) for usage in used), default=0.0)

    @staticmethod
    def _xid(device: Device, reading: Reading, memory: _Memory) -> str | None:
        """Describe an XID error reported while the job was watched: the counters may have stopped since then."""
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
        # The counters of a process that has detached from its parent are lost when it ends.
        return {
            "cpu": max(0, cpu - before[1]) / _TICKS / passed * 100,
            "disk": max(0, disk - before[2]) / passed,
            "io": max(0, through - before[3]) / passed,
        }


def signals_of(reading: Reading) -> dict[str, float | None]:
    """Return the activity signals of a reading in percent; utilization is always present."""
    signals: dict[str, float | None] = {"utilization": reading.util_pct}
    if reading.memory_util_pct is not None:
        signals["memory"] = reading.memory_util_pct
    for signal, attribute in _SHARES.items():
        share = getattr(reading, attribute)
        if share is not None:
            signals[signal] = 100 * share
    return signals


def name_of(device: Device) -> str:
    """Return ``GPU 0``, or ``GPU 0.7`` for a MIG instance."""
    return f"GPU {device.index}" if device.mig is None else f"GPU {device.index}.{device.mig}"


def _key(device: Device) -> str:
    return device.uuid if device.mig is None else f"{device.uuid}/{device.mig}"


def by_index(devices: Sequence[Device], indices: Sequence[int]) -> tuple[Device, ...] | None:
    """Return the devices with these Slurm indices (``of_slurm``), or ``None`` if one of them is unknown.

    Source: slurm.conf(5), gres.conf(5), ``SLURM_JOB_GPUS`` in prolog_epilog.
    """
    matching = None if any(device.mig is not None for device in devices) else of_slurm(devices, indices)
    if matching is None or len(matching) != len(set(indices)):
        return None
    return tuple(sorted(matching, key=lambda device: device.index))
