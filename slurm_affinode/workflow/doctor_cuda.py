"""What the NVIDIA driver of this machine can do for a suspension: a table, feature by feature.

Imports little, so that it also runs where only the checkpoint part of the package and its bindings are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from slurm_affinode.checkpoint import abilities
from slurm_affinode.checkpoint.cuda import Cuda
from slurm_affinode.checkpoint.cuda_driver import LIBRARY
from slurm_affinode.checkpoint.interface import Capabilities, CudaError, Feature
from slurm_affinode.gpu.interface import DriverMissing, GpuError
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.gpu import Device
from slurm_affinode.workflow.check import OK, PROBLEM, SKIPPED, Check

USED_FOR = {
    Feature.LOCK: "every suspension",
    Feature.CHECKPOINT: "every suspension",
    Feature.RESTORE: "every return",
    Feature.MIGRATION: "a return to other GPUs, or another node's",
    Feature.IPC: "jobs whose processes share GPU memory",
    Feature.CUSTOM_STORAGE: "make test-gpu and bench-gpu alone",
}
"""What this package needs a feature for."""
_LOADED = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""There while the kernel has NVIDIA's driver, in a container that was given a GPU, too."""


class Gpus(Protocol):
    """What is asked of NVML."""

    def devices(self) -> Sequence[Device]:
        """Raises ``DriverMissing``."""
        ...

    def version(self) -> str:
        """Raises ``DriverMissing``."""
        ...

    def close(self) -> None:
        """Let the driver go."""
        ...


@dataclass(frozen=True, slots=True)
class CudaReport:
    """The driver of this machine."""

    capabilities: Capabilities
    gpus: tuple[Device, ...] = ()
    hint: str | None = None
    """What to do about a driver that is here and does not answer."""

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Feature, first branch of the driver that has it, what for, whether it is here, and why."""
        return [
            (one.feature.value, str(one.since), USED_FOR[one.feature], "yes" if one.available else "no", one.why)
            for one in self.capabilities.table
        ]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        can = self.capabilities
        return {
            "driver": can.driver,
            "cuda": can.cuda,
            "bindings": can.bindings,
            "checkpoint": can.checkpoint,
            "why_not": can.why_not,
            "gpus": [asdict(one) for one in self.gpus],
            "features": [
                {"feature": one.feature.name.lower(), "name": one.feature.value, "since": one.since,
                 "used_for": USED_FOR[one.feature], "available": one.available, "why": one.why}
                for one in can.table
            ],
        }  # fmt: skip


def look(
    gpus: Callable[[], Gpus] = NvmlDriver, cuda: Callable[..., Cuda] = Cuda, *, loaded: Sequence[Path] = _LOADED
) -> CudaReport:
    """Ask the driver. Nothing is changed, no context is made, no GPU memory taken. Raises nothing."""
    with closing(gpus()) as driver:
        try:
            devices = tuple(driver.devices())
            version: str | None = driver.version()
        except GpuError as error:
            if isinstance(error, DriverMissing) and not any(path.exists() for path in loaded):
                return CudaReport(abilities.nothing(None, "there is no NVIDIA driver here"))
            return CudaReport(abilities.nothing(None, str(error)), hint=error.hint or "nvidia-smi has to work")
    mig = bool(devices) and all(_has_mig(one, devices) for one in devices if one.mig is None)
    with closing(cuda(driver_version=lambda: version, mig=lambda: mig)) as helper:
        can = helper.capabilities()
        if can.checkpoint:
            try:
                helper.devices()  # what the library says of itself may be right, and the driver be unusable
            except CudaError as error:
                can = replace(can, checkpoint=False, migration=False, ipc=False, custom_storage=False,
                              why_not=str(error))  # fmt: skip
        return CudaReport(can, devices)


def _has_mig(gpu: Device, devices: Sequence[Device]) -> bool:
    return any(one.uuid == gpu.uuid and one.mig is not None for one in devices)


def check(report: CudaReport) -> Check:
    """One line of ``doctor``."""
    can = report.capabilities
    if can.driver is None:
        status = SKIPPED if report.hint is None else PROBLEM
        return Check("CUDA checkpoint", status, can.why_not or "there is no NVIDIA driver here", report.hint)
    if not can.checkpoint:
        return Check("CUDA checkpoint", PROBLEM, can.why_not or "not possible", _hint(can))
    has = [one.feature.value for one in can.table if one.available]
    lacks = [one.feature.value for one in can.table if not one.available]
    count = sum(one.mig is None for one in report.gpus)
    detail = f"driver {can.driver}, CUDA {can.cuda}, {count} GPU{'s' * (count != 1)}: {', '.join(has)}"
    return Check("CUDA checkpoint", OK, detail + (f"; not: {', '.join(lacks)}" if lacks else ""))


def no_bindings(can: Capabilities) -> bool:
    """They are not installed."""
    return can.bindings is None and "cuda-bindings" in (can.why_not or "")


def _hint(can: Capabilities) -> str:
    if no_bindings(can):
        return "pip install 'slurm-affinode[cuda]'"
    if LIBRARY in (can.why_not or ""):
        return "install the driver's library for CUDA; in a container NVIDIA_DRIVER_CAPABILITIES has to name compute"
    if all(one.available for one in can.table if one.feature in (Feature.LOCK, Feature.CHECKPOINT, Feature.RESTORE)):
        return "without MIG, and with a driver that is whole (nvidia-smi), programs can use CUDA here"
    return "the table below says what is missing; suspension needs driver 570 or newer (595 on ARM), without MIG"
