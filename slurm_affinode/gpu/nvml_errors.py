"""Errors of NVML as those of the interface."""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import Any

from slurm_affinode.gpu.interface import DriverMissing, GpuError, GpuLost, NotPermitted, NotSupported

_LIBRARY = "libnvidia-ml.so.1"
_PLACES = ("/usr/local/nvidia/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib")
"""Locations of NVIDIA's libraries in containers and other distributions, which the loader may not search."""


class ErrorKind(Enum):
    """Meaning of an error code of NVML for the caller."""

    DRIVER_GONE = auto()
    GPU_LOST = auto()
    UNSUPPORTED = auto()


_NAMES = {
    ErrorKind.DRIVER_GONE: ("UNINITIALIZED", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"),
    ErrorKind.GPU_LOST: ("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"),
    ErrorKind.UNSUPPORTED: ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"),
}


class NvmlErrors:
    """The error codes of a binding; an older one lacks some of them."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._kinds = {
            getattr(nvml, f"NVML_ERROR_{name}"): kind
            for kind, names in _NAMES.items()
            for name in names
            if hasattr(nvml, f"NVML_ERROR_{name}")
        }

    def kind(self, error: Any) -> ErrorKind | None:
        """Return the kind of an error; ``None``: another one."""
        return self._kinds.get(error.value)

    def is_fatal(self, error: Any) -> bool:
        """Return whether the GPU or the driver does not respond, so that no other value can be queried either."""
        return self.kind(error) in (ErrorKind.DRIVER_GONE, ErrorKind.GPU_LOST)

    def is_unsupported(self, error: Any) -> bool:
        """Return whether the driver or the GPU does not support the query."""
        return self.kind(error) is ErrorKind.UNSUPPORTED

    def translated(self, error: Any, what: str) -> GpuError:
        """Return the error of the interface. ``what``: what was queried."""
        kind = self.kind(error)
        text = f"{what}: NVML says: {error}"
        if kind is ErrorKind.GPU_LOST:
            return GpuLost(text, hint="see nvidia-smi and the kernel log (dmesg); it may need a reset")
        if kind is ErrorKind.UNSUPPORTED:
            return NotSupported(text)
        if error.value == self._nvml.NVML_ERROR_NO_PERMISSION:
            return NotPermitted(text, hint="run it as root")
        if kind is ErrorKind.DRIVER_GONE or error.value == self._nvml.NVML_ERROR_UNKNOWN:
            hint = "is NVIDIA's driver installed and loaded? nvidia-smi has to work"
            if error.value == self._nvml.NVML_ERROR_LIBRARY_NOT_FOUND and (place := _lies_in()) is not None:
                hint = f"{_LIBRARY} is in {place}, which is not searched: set LD_LIBRARY_PATH={place}, or run ldconfig"
            return DriverMissing(text, hint=hint)
        return GpuError(text)


def _lies_in() -> str | None:
    """Return the directory of NVML's library if the loader has not found it."""
    return next((place for place in _PLACES if (Path(place) / _LIBRARY).exists()), None)
