"""GPUs, their readings and processes, and the activity signals with their noise floors.

Missing is ``None``; 0 is a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

GPU_SIGNALS = ("utilization", "memory", "engine", "sm", "tensor", "dram", "processes")
"""Activity signals of a GPU, in percent. ``utilization`` and ``memory``: share of the driver's last sampling period in
which a kernel ran, or memory was used; ``engine``, ``sm``, ``tensor``, ``dram``: shares since the last sample, on GPUs
with these counters; ``processes``: the busiest process since the last sample."""

HOST_SIGNALS = ("cpu", "disk", "io")
"""Activity signals of a job's processes on the host. ``cpu``: percent of one core; ``disk``: bytes per second from and
to storage; ``io``: bytes per second through reads and writes of any kind, thus files, pipes and sockets."""

FLOORS_PCT: Mapping[str, float] = MappingProxyType({"engine": 0.02, "sm": 1e-6, "tensor": 1e-6, "dram": 0.05})
"""Signal of ``GPU_SIGNALS`` -> percent up to which it counts as 0: noise of the counters. An H200 reads 0.0062 % of
``engine`` while any process has a CUDA context, even if it does nothing (``make test-gpu``: test_idle); ten kernels of
one thread a second read 0.0084 %, and 2.7e-6 % of ``sm``, which an idle context leaves at 0. An unused L40S reads
0.0131 % of ``dram``; active fractions of 1.75e-9 have been seen. 1e-6 % of a minute is 0.6 us, shorter than any kernel.
A site's table (``agent.floors_pct``) replaces this one."""

FIELDS: Mapping[str, tuple[str, float]] = MappingProxyType({
    "util_pct": ("utilization", 1.0), "memory_util_pct": ("memory", 1.0), "engine_active": ("engine", 100.0),
    "sm_active": ("sm", 100.0), "tensor_active": ("tensor", 100.0), "dram_active": ("dram", 100.0),
})  # fmt: skip
"""Field of a sample or reading -> its signal, and the factor to percent."""


MIG, VGPU = "mig", "vgpu"
"""Kinds of devices that cannot measure every field: an instance of a divided GPU, and a GPU of a virtual machine."""

UNMEASURED: Mapping[str, frozenset[str]] = MappingProxyType({
    MIG: frozenset({"util_pct", "memory_util_pct", "power_w"}),
    VGPU: frozenset({"engine_active", "sm_active", "tensor_active", "dram_active", "power_w"}),
})  # fmt: skip
"""Kind of device -> fields that are no measurement on it, in any source. Sources differ in what they write instead:
NVML nothing, dcgm-exporter 0 or the value of the whole GPU (NVIDIA/dcgm-exporter#216). A GPU shared in time, or with
MPS, measures all fields; they cover all of its jobs together."""

VGPU_MODEL = r"-\d{1,3}[QCAB]$"
"""Names of virtual GPUs: ``NVIDIA A40-48Q``, ``GRID V100D-8C``."""


def kind_of(mig: str | None, model: str | None) -> str | None:
    """Return ``MIG``, ``VGPU``, or ``None`` for a device that measures every field of its source."""
    if mig is not None:
        return MIG
    return VGPU if model is not None and re.search(VGPU_MODEL, model) else None


FREE_MIB = 600.0
"""Memory reserved by the driver on an unused GPU."""


def total_mib(amounts: Iterable[float | None]) -> float | None:
    """Return the sum of amounts of memory; ``None`` if one of them is unknown."""
    total = 0.0
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total


def floor_of(field: str, floors_pct: Mapping[str, float]) -> float:
    """Return the value, in the unit of the field, up to which the field counts as 0."""
    signal, percent = FIELDS[field]
    return floors_pct.get(signal, 0.0) / percent


def without_noise(signals_pct: Mapping[str, float], floors_pct: Mapping[str, float]) -> dict[str, float]:
    """Return the signals by field, in percent, with values at or below the floor of their signal set to 0.

    The activity of processes, which is not a field of a sample, has the floor of ``processes``.
    """
    floors = {name: floors_pct.get(FIELDS.get(name, ("processes", 1.0))[0], 0.0) for name in signals_pct}
    return {name: 0.0 if value <= floors[name] else value for name, value in signals_pct.items()}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of this node, or one of its MIG instances."""

    uuid: str
    """``GPU-...``; for a MIG instance, that of the physical GPU."""
    index: int
    """Index on this node, as counted by NVML (by PCI address)."""
    pci: str | None = None
    """``00000000:E1:00.0``: upper case, eight-digit domain."""
    model: str | None = None
    memory_mib: float | None = None
    minor: int | None = None
    """The N of ``/dev/nvidiaN``."""
    mig: str | None = None
    """GPU instance ID of a MIG instance; ``None`` for a whole GPU."""
    mig_profile: str | None = None
    """``1g.10gb``."""


class Numbered(Protocol):
    """A GPU with a device file."""

    @property
    def minor(self) -> int | None:
        """The N of ``/dev/nvidiaN``; ``None``: unknown."""
        ...


G = TypeVar("G", bound=Numbered)


def of_slurm(gpus: Sequence[G], indices: Iterable[int]) -> list[G] | None:
    """Return those of all GPUs of a node that have these Slurm indices; ``None``: unknown.

    Slurm counts the device files in gres.conf. Their number is not NVML's index on every host: there, ``/dev/nvidia0``
    may be the GPU with index 6 (PrincetonUniversity/jobstats#34). If the number of a device file is unknown, only the
    indices of all GPUs identify GPUs.
    """
    minors = set(indices)
    if all(gpu.minor is not None for gpu in gpus):
        return [gpu for gpu in gpus if gpu.minor in minors]
    return list(gpus) if minors == set(range(len(gpus))) else None


@dataclass(frozen=True, slots=True)
class Reading:
    """State of one device at one moment. Shares of activity are 0-1 since the last reading."""

    util_pct: float | None = None
    """0-100: share of the driver's last sampling period in which a kernel ran."""
    engine_active: float | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    memory_util_pct: float | None = None
    """0-100: share of the driver's last sampling period in which device memory was read or written."""
    fb_used_mib: float | None = None
    """Without memory reserved by the driver, if the driver reports the two separately."""
    fb_free_mib: float | None = None
    fb_reserved_mib: float | None = None
    fb_total_mib: float | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """Millijoules since the driver was loaded."""
    temperature_c: float | None = None
    xid: int | None = None
    """The last XID error since monitoring began; 0: none; ``None``: not monitored."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds a context on a device."""

    pid: int
    used_mib: float | None
    kind: str
    """``compute`` or ``graphics``."""


@dataclass(frozen=True, slots=True)
class ProcessUtilization:
    """Utilization of a device by a process, as sampled by the driver."""

    pid: int
    time_us: int
    """Microseconds since the epoch."""
    sm_pct: float
    memory_pct: float


def attributed(used: Iterable[ProcessUtilization], reading: Reading) -> bool:
    """Return whether the processes that the driver lists as active explain the activity of their GPU.

    Only then was a process idle that is not among them. Otherwise, the driver does not attribute the activity to
    processes (MPS), or not to any that is visible here (PID namespaces).
    """
    active = any(max(usage.sm_pct, usage.memory_pct) > 0 for usage in used)
    return active or not any(value and value > 0 for value in (reading.util_pct, reading.memory_util_pct))


@dataclass(frozen=True, slots=True)
class JobRef:
    """The job that a process belongs to, and the source of that information."""

    job_id: int
    step: str | None
    """``batch``, ``extern``, ``0``, ...; ``None``: unknown."""
    source: str
    """``cgroup``, ``slurmstepd`` (an ancestor), or ``environment``, which users can set themselves."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One device at the moment of a sweep."""

    device: Device
    reading: Reading
    jobs: tuple[str, ...] | None
    """IDs of the jobs that have the device, ascending; ``()``: none; ``None``: not known."""


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A device that could not be read."""

    device: Device | None
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """All devices of the node at one moment."""

    time_s: float
    """Seconds since the epoch."""
    samples: tuple[GpuSample, ...] = ()
    faults: tuple[GpuFault, ...] = ()
    driver_error: str | None = None
    """Why no device could be queried: the driver is not available."""
