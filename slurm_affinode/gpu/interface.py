"""The interface to a GPU driver for the sampler and the agent, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading


class GpuError(UnreachableError):
    """A request to the driver failed."""


class DriverMissing(GpuError):  # noqa: N818 - names what is the case
    """No driver, or it went away: no GPU of the node is available. The next ``devices()`` tries again."""


class GpuLost(GpuError):  # noqa: N818
    """One GPU no longer responds (it fell off the bus, or needs a reset); the others do."""


class NotSupported(GpuError):  # noqa: N818
    """This GPU or this driver does not support the request."""


class NotPermitted(GpuError):  # noqa: N818
    """The driver grants the request only to root."""


class GpuDriver(Protocol):
    """The GPUs of a node. Not thread-safe.

    Queries change nothing and may be repeated; two calls of ``read`` share the counters of activity, which are means
    since the last call. A query fails with ``DriverMissing`` (no GPU can be queried; the next call tries to open the
    driver again), ``GpuLost`` (also if the device is no longer a GPU of this node), ``NotSupported``, ``NotPermitted``,
    or, for another error of the driver, ``GpuError``. ``tests/conformance/gpu_driver.py`` has the tests that every
    implementation passes.
    """

    def devices(self) -> Sequence[Device]:
        """Return the available devices, by index. Raises ``DriverMissing``.

        The list is that of the open driver: if the driver goes away, the next query of a device fails, and then this.
        """
        ...

    def faults(self) -> Sequence[GpuFault]:
        """Return the GPUs that the driver counts but could not open when the devices were last enumerated.

        Never raises; empty before the first call of ``devices``.
        """
        ...

    def read(self, device: Device) -> Reading:
        """Return the current values of a device, None if not provided. Raises ``GpuLost`` and ``DriverMissing``."""
        ...

    def free_mib(self, device: Device) -> float | None:
        """Return the free memory only, which is faster than ``read``. Raises as ``read``."""
        ...

    def processes(self, device: Device) -> Sequence[GpuProcess]:
        """Return the processes on the device that are visible from here, each once. Raises ``GpuError``."""
        ...

    def process_utilization(self, device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
        """Return the last sample of each process after ``since_us``; empty: all were idle. Raises ``GpuError``."""
        ...

    def version(self) -> str:
        """Return the driver's version, such as ``580.95.05``. Raises ``DriverMissing``."""
        ...

    def close(self) -> None:
        """Close the driver. Idempotent, and never raises. The next use opens it again; listed devices remain valid."""
        ...
