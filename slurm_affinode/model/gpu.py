"""GPUs, what they showed at a moment, and the processes on them. Missing is ``None``; 0 is a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of this node, or one of its MIG instances."""

    uuid: str
    """``GPU-...``, of the physical GPU also for a MIG instance."""
    index: int
    """On this node, as NVML counts (by PCI address)."""
    pci: str | None = None
    """``00000000:E1:00.0``: upper case, eight-digit domain."""
    model: str | None = None
    memory_mib: float | None = None
    minor: int | None = None
    """The N of ``/dev/nvidiaN``."""
    mig: str | None = None
    """GPU instance id of a MIG instance; None for a whole GPU."""
    mig_profile: str | None = None
    """``1g.10gb``."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one device showed at a moment. Shares of activity are 0-1 since the last reading."""

    util_pct: float | None = None
    """0-100: share of the driver's last sampling period in which a kernel ran."""
    engine_active: float | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    memory_util_pct: float | None = None
    """0-100: share of the driver's last sampling period in which device memory was read or written."""
    fb_used_mib: float | None = None
    """Without what the driver reserves, where it tells the two apart."""
    fb_free_mib: float | None = None
    fb_reserved_mib: float | None = None
    fb_total_mib: float | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """Millijoules since the driver was loaded."""
    temperature_c: float | None = None
    xid: int | None = None
    """The last XID error since it is watched; 0: none was seen; None: cannot be watched."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds a context on a device."""

    pid: int
    used_mib: float | None
    kind: str
    """``compute`` or ``graphics``."""


@dataclass(frozen=True, slots=True)
class ProcessUtilization:
    """How much of a device a process used, as the driver sampled it."""

    pid: int
    time_us: int
    """Microseconds of the epoch."""
    sm_pct: float
    memory_pct: float


@dataclass(frozen=True, slots=True)
class JobRef:
    """The job that a process belongs to, and how that is known."""

    job_id: int
    step: str | None
    """``batch``, ``extern``, ``0``, ...; None where it is not said."""
    source: str
    """``cgroup``, ``slurmstepd`` (an ancestor), or ``environment``: the last a user could have set himself."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One device at the moment of a sweep."""

    device: Device
    reading: Reading
    jobs: tuple[str, ...] | None
    """Ids of the jobs that have the device, ascending; ``()``: none has; None: not known."""


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
    """Seconds of the epoch."""
    samples: tuple[GpuSample, ...] = ()
    faults: tuple[GpuFault, ...] = ()
    driver_error: str | None = None
    """Why no device could be asked: the driver is not there."""
