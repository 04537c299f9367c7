"""Access to the CUDA driver through NVIDIA's bindings: errors, GPUs and argument structures.

Only the helper process (``helper.py``) uses this module, for the reasons given there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from slurm_affinode.base.text import one_line

LIBRARY = "libcuda.so.1"


class DriverCallError(Exception):
    """The driver returned an error; the text is the name of the error."""

    def __init__(self, name: str, pid: int | None = None) -> None:
        """``pid``: of the process, where several were requested."""
        super().__init__(name)
        self.pid = pid


class NotAvailableError(Exception):
    """The driver, the bindings or this function is missing."""


def _reason(text: str) -> str:
    if "NVIDIA display driver" in text:
        return f"{LIBRARY}, the part of NVIDIA's driver that computes, is not found"
    return one_line(text)


class Driver:
    """The driver through NVIDIA's bindings, loaded by the first call and initialized once."""

    def __init__(self, module: Any = None) -> None:
        """``module``: replacement for ``cuda.bindings.driver``."""
        self._module = module
        self._initialised = False

    def load(self) -> Any:
        """Return the bindings. Raises ``NotAvailableError``."""
        if self._module is None:
            try:
                from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency of 30 MB
            except ImportError as error:
                raise NotAvailableError(f"cuda-bindings is not installed ({error})") from None
            self._module = driver
        return self._module

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the driver API and return its value. Raises ``DriverCallError``, ``NotAvailableError``."""
        module = self.load()
        entry = getattr(module, function, None)
        if entry is None:
            raise NotAvailableError(f"these cuda-bindings have no {function}")
        try:
            answer = entry(*arguments)
        except RuntimeError as error:  # the bindings raise it if the library or the function is missing
            raise NotAvailableError(_reason(f"{function}: {error}")) from None
        if answer[0] != module.CUresult.CUDA_SUCCESS:
            raise DriverCallError(answer[0].name)
        return answer[1] if len(answer) == 2 else answer[1:] or None

    def initialise(self) -> None:
        """Call ``cuInit``, which some drivers require before a restore. Creates no context and uses no GPU memory."""
        if not self._initialised:
            self.call("cuInit", 0)
            self._initialised = True


def address(driver: Driver, function: str, since: int) -> int:
    """Return the address of a driver function as of CUDA version ``since``, or 0 if the driver does not have it."""
    try:
        pointer = driver.call("cuGetProcAddress", function.encode(), since, 0)
    except DriverCallError:  # older drivers reject newer versions
        return 0
    return int((pointer[0] if isinstance(pointer, tuple) else pointer) or 0)


def devices(driver: Driver) -> list[str]:
    """Return the UUIDs of all GPUs, in the driver's order."""
    driver.initialise()
    count = driver.call("cuDeviceGetCount")
    return [_uuid_text(driver.call("cuDeviceGetUuid", driver.call("cuDeviceGet", i))) for i in range(count)]


def restore_arguments(module: Any, pairs: Mapping[str, str]) -> Any:
    """Return a ``CUcheckpointRestoreArgs`` with these pairs of UUIDs (old -> new)."""
    arguments = module.CUcheckpointRestoreArgs()
    gpu_pairs = []
    for old, new in pairs.items():
        pair = module.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = _uuid(module, old), _uuid(module, new)
        gpu_pairs.append(pair)
    arguments.gpuPairs = gpu_pairs
    arguments.gpuPairsCount = len(gpu_pairs)
    return arguments


def _uuid(module: Any, text: str) -> Any:
    uuid = module.CUuuid()
    ctypes.memmove(uuid.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
    return uuid


def _uuid_text(value: Any) -> str:
    digits = bytes(value.bytes).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
