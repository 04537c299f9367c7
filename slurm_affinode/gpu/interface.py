"""What the sampler and the agent need of a GPU driver, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slurm_affinode.errors import UnreachableError
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading


class GpuError(UnreachableError):
    """A question to the driver that has no answer."""


class DriverMissing(GpuError):  # noqa: N818 - names what is the case
    """No driver, or it went away: every GPU of the node is out of reach. The next ``devices()`` tries again."""


class GpuLost(GpuError):  # noqa: N818
    """One GPU does not answer any more (fell off the bus, needs a reset); the others do."""


class NotSupported(GpuError):  # noqa: N818
    """This GPU or this driver cannot say that."""


class NotPermitted(GpuError):  # noqa: N818
    """The driver tells this only to root."""


class GpuDriver(Protocol):
    """The GPUs of a node. Not for use by several threads at once."""

    def devices(self) -> Sequence[Device]:
        """The devices that can be asked, by index. Raises ``DriverMissing``."""
        ...

    def faults(self) -> Sequence[GpuFault]:
        """The GPUs that the driver counts but could not open when it was last asked for devices."""
        ...

    def read(self, device: Device) -> Reading:
        """What the device shows now; what it cannot say is None. Raises ``GpuLost`` and ``DriverMissing``."""
        ...

    def free_mib(self, device: Device) -> float | None:
        """Free memory alone, which is quicker than ``read`` and raises as that does."""
        ...

    def processes(self, device: Device) -> Sequence[GpuProcess]:
        """The processes on the device that are visible from here. Raises ``GpuError``."""
        ...

    def process_utilization(self, device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
        """The last sample of each process that is newer than ``since_us``; empty: none worked. Raises ``GpuError``."""
        ...

    def version(self) -> str:
        """The driver's version: ``580.95.05``. Raises ``DriverMissing``."""
        ...

    def close(self) -> None:
        """Let the driver go; the object can be used again."""
        ...
