"""A GPU driver in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from slurm_affinode.gpu.interface import DriverMissing, GpuError, GpuLost
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading

A100 = Device("GPU-a", 0, "00000000:07:00.0", "NVIDIA A100", 81920.0, 0)
OTHER = replace(A100, uuid="GPU-b", index=1, pci="00000000:0F:00.0", minor=1)
IDLE = Reading(util_pct=0.0, fb_used_mib=10.0, fb_free_mib=81910.0, fb_total_mib=81920.0, power_w=60.5, xid=0)


@dataclass
class FakeDriver:
    """A driver with given values; an error in place of a value is raised."""

    readings: dict[Device, Reading | GpuError] = field(default_factory=lambda: {A100: IDLE, OTHER: IDLE})
    running: dict[Device, list[GpuProcess] | GpuError] = field(default_factory=dict)
    missing: str | None = None
    unopened: tuple[GpuFault, ...] = ()
    closed: int = 0

    def devices(self) -> list[Device]:
        self._loaded()
        return list(self.readings)

    def faults(self) -> tuple[GpuFault, ...]:
        return self.unopened

    def read(self, device: Device) -> Reading:
        self._loaded()
        reading = self.readings.get(device, GpuLost(f"{device.uuid} is no longer a GPU of this node"))
        if isinstance(reading, GpuError):
            raise reading
        return reading

    def free_mib(self, device: Device) -> float | None:
        return self.read(device).fb_free_mib

    def processes(self, device: Device) -> list[GpuProcess]:
        self.read(device)
        value = self.running.get(device, [])
        if isinstance(value, GpuError):
            raise value
        return value

    def process_utilization(self, device: Device, since_us: int = 0) -> list[ProcessUtilization]:
        self.read(device)
        return []

    def version(self) -> str:
        self._loaded()
        return "580.95.05"

    def close(self) -> None:
        self.closed += 1

    def _loaded(self) -> None:
        if self.missing:
            raise DriverMissing(self.missing)
