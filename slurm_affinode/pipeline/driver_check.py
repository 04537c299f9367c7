"""``doctor``: the check of the NVIDIA driver. Read-only.

It imports little, since it also runs where only the checkpoint package and its bindings are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_affinode.checkpoint.cuda import features as cuda_features
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.cuda.driver import LIBRARY
from slurm_affinode.checkpoint.interface import Capabilities, CudaError, Feature
from slurm_affinode.gpu.interface import DriverMissing, GpuDriver, GpuError
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.gpu import Device
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check

USED_FOR = {
    Feature.LOCK: "every suspension",
    Feature.CHECKPOINT: "every suspension",
    Feature.RESTORE: "every return",
    Feature.MIGRATION: "a return to other GPUs, or another node's",
    Feature.IPC: "jobs whose processes share GPU memory",
    Feature.CUSTOM_STORAGE: "make test-gpu and bench-gpu alone",
}
"""Use of each driver feature in this package."""
_LOADED = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""Exist while NVIDIA's kernel driver is loaded, also in a container with a GPU."""


@dataclass(frozen=True, slots=True)
class CudaReport:
    """Checkpoint support of the NVIDIA driver of this machine."""

    capabilities: Capabilities
    gpus: tuple[Device, ...] = ()
    hint: str | None = None
    """Advice if the driver is installed and does not respond."""

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return feature, first driver branch with it, its use, whether it is available, and why."""
        return [
            (row.feature.value, str(row.since), USED_FOR[row.feature], "yes" if row.available else "no", row.why)
            for row in self.capabilities.table
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON output."""
        can = self.capabilities
        return {
            "driver": can.driver,
            "cuda": can.cuda,
            "bindings": can.bindings,
            "checkpoint": can.checkpoint,
            "why_not": can.why_not,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "features": [
                {"feature": row.feature.name.lower(), "name": row.feature.value, "since": row.since,
                 "used_for": USED_FOR[row.feature], "available": row.available, "why": row.why}
                for row in can.table
            ],
        }  # fmt: skip


def check_cuda(
    gpus: Callable[[], GpuDriver] = NvmlDriver, cuda: Callable[..., Cuda] = Cuda, *, loaded: Sequence[Path] = _LOADED
) -> CudaReport:
    """Query the driver, without changes, CUDA contexts or use of GPU memory. Raises nothing."""
    with closing(gpus()) as driver:
        try:
            devices = tuple(driver.devices())
            version: str | None = driver.version()
        except GpuError as error:
            if isinstance(error, DriverMissing) and not any(path.exists() for path in loaded):
                return CudaReport(cuda_features.unavailable(None, "there is no NVIDIA driver here"))
            return CudaReport(cuda_features.unavailable(None, str(error)), hint=error.hint or "nvidia-smi has to work")
    mig = bool(devices) and all(_has_mig(device, devices) for device in devices if device.mig is None)
    with closing(cuda(driver_version=lambda: version, mig=lambda: mig)) as helper:
        can = helper.capabilities()
        if can.checkpoint:
            try:
                helper.devices()  # the driver may be unusable although the library reports the features
            except CudaError as error:
                can = replace(can, checkpoint=False, why_not=str(error))
        return CudaReport(can, devices)


def _has_mig(gpu: Device, devices: Sequence[Device]) -> bool:
    return any(device.uuid == gpu.uuid and device.mig is not None for device in devices)


def check(report: CudaReport) -> Check:
    """Return the result of the driver check."""
    can = report.capabilities
    if can.driver is None:
        status = SKIPPED if report.hint is None else PROBLEM
        return Check("CUDA checkpoint", status, can.why_not or "there is no NVIDIA driver here", report.hint)
    if not can.checkpoint:
        return Check("CUDA checkpoint", PROBLEM, can.why_not or "not possible", _hint(can))
    has = [row.feature.value for row in can.table if row.available]
    lacks = [row.feature.value for row in can.table if not row.available]
    count = sum(gpu.mig is None for gpu in report.gpus)
    detail = f"driver {can.driver}, CUDA {can.cuda}, {count} GPU{'s' * (count != 1)}: {', '.join(has)}"
    return Check("CUDA checkpoint", OK, detail + (f"; not: {', '.join(lacks)}" if lacks else ""))


def no_bindings(can: Capabilities) -> bool:
    """Return whether the CUDA bindings are not installed."""
    return can.bindings is None and "cuda-bindings" in (can.why_not or "")


def _hint(can: Capabilities) -> str:
    if no_bindings(can):
        return "pip install 'slurm-affinode[cuda]'"
    if LIBRARY in (can.why_not or ""):
        return "install the driver's library for CUDA; in a container NVIDIA_DRIVER_CAPABILITIES has to name compute"
    if all(row.available for row in can.table if row.feature in (Feature.LOCK, Feature.CHECKPOINT, Feature.RESTORE)):
        return "without MIG, and with a driver that is whole (nvidia-smi), programs can use CUDA here"
    return "the table below lists the missing features; suspension needs driver 570 or newer (595 on ARM), without MIG"
