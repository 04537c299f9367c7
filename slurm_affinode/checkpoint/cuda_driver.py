"""The CUDA driver through NVIDIA's bindings, in this process: its errors, its GPUs, the structures that it takes.

Only the helper process (``cuda_helper``) uses it, for the reasons given there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

LIBRARY = "libcuda.so.1"


class DriverSaysError(Exception):
    """The driver's error, by its name."""


class NotAvailableError(Exception):
    """There is no driver, no bindings, or not this function."""


def _one_line(text: str) -> str:
    if "NVIDIA display driver" in text:
        return f"{LIBRARY}, the part of NVIDIA's driver that computes, is not found"
    return " ".join(text.split())


class Driver:
    """The driver through NVIDIA's bindings, loaded at the first call and initialised once."""

    def __init__(self, module: Any = None) -> None:
        """``module``: in place of ``cuda.bindings.driver``."""
        self._module = module
        self._initialised = False

    def load(self) -> Any:
        """The bindings. Raises ``NotAvailableError``."""
        if self._module is None:
            try:
                from cuda.bindings import driver  # noqa: PLC0415 - an optional dependency of 30 MB
            except ImportError as error:
                raise NotAvailableError(f"cuda-bindings is not installed ({error})") from None
            self._module = driver
        return self._module

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the driver API; its value. Raises the two errors above."""
        module = self.load()
        found = getattr(module, function, None)
        if found is None:
            raise NotAvailableError(f"these cuda-bindings have no {function}")
        try:
            answer = found(*arguments)
        except RuntimeError as error:  # how the bindings tell that the library or the function is not there
            raise NotAvailableError(_one_line(f"{function}: {error}")) from None
        if answer[0] != module.CUresult.CUDA_SUCCESS:
            raise DriverSaysError(answer[0].name)
        return answer[1] if len(answer) == 2 else answer[1:] or None

    def initialise(self) -> None:
        """``cuInit``: some drivers want it before a restore. It makes no context and takes no GPU memory."""
        if not self._initialised:
            self.call("cuInit", 0)
            self._initialised = True


def address(driver: Driver, function: str, since: int) -> int:
    """Where a function of the driver is, in the meaning that it had in that CUDA version; 0: it has none."""
    try:
        found = driver.call("cuGetProcAddress", function.encode(), since, 0)
    except DriverSaysError:  # an older driver does not know that version at all
        return 0
    return int((found[0] if isinstance(found, tuple) else found) or 0)


def devices(driver: Driver) -> list[str]:
    """UUIDs of all GPUs, in the driver's order."""
    driver.initialise()
    count = driver.call("cuDeviceGetCount")
    return [_uuid_text(driver.call("cuDeviceGetUuid", driver.call("cuDeviceGet", i))) for i in range(count)]


def restore_arguments(module: Any, pairs: Mapping[str, str] | None) -> Any:
    """``CUcheckpointRestoreArgs`` with pairs of UUIDs, or with none."""
    arguments = module.CUcheckpointRestoreArgs()
    made = []
    for old, new in (pairs or {}).items():
        pair = module.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = _uuid(module, old), _uuid(module, new)
        made.append(pair)
    if made:
        arguments.gpuPairs = made
        arguments.gpuPairsCount = len(made)
    return arguments


def _uuid(module: Any, text: str) -> Any:
    made = module.CUuuid()
    ctypes.memmove(made.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
    return made


def _uuid_text(value: Any) -> str:
    digits = bytes(value.bytes).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
