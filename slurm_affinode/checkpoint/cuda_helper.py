"""The process that talks to the CUDA driver: ``python -m slurm_affinode.checkpoint.cuda_helper``.

A process of its own, because each first contact with the driver costs seconds, and because a call that never returns
must not take the agent with it. A request is a line of JSON, ``{"call": NAME, ...}``, its answer is one too: ``{"ok":
VALUE}``, ``{"cuda": ERROR NAME}`` for an error of the driver, ``{"unavailable": TEXT}``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slurm_affinode.checkpoint.abilities import ENTRY_POINTS


class DriverSaysError(Exception):
    """The driver's error, by its name."""


class NotAvailableError(Exception):
    """There is no driver, no bindings, or not this function."""


def _one_line(text: str) -> str:
    if "NVIDIA display driver" in text:
        return "no NVIDIA driver is installed (libcuda.so.1 is not found)"
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


def _hello(driver: Driver) -> dict[str, Any]:
    """What the bindings and the driver have. Nothing is initialised."""
    module = driver.load()
    cuda = driver.call("cuDriverGetVersion")
    structures = ("CUcheckpointLockArgs", "CUcheckpointGpuPair")
    return {
        "cuda": cuda,
        "functions": {name: _has(driver, name, since) for name, since in ENTRY_POINTS.items()},
        "bound": [name for name in (*ENTRY_POINTS, *structures) if hasattr(module, name)],
        "bindings": _bindings_version(),
    }


def _has(driver: Driver, function: str, since: int) -> bool:
    """Whether the driver has a function, in the meaning that it had in that CUDA version."""
    return bool(address(driver, function, since))


def address(driver: Driver, function: str, since: int) -> int:
    """Where a function of the driver is, in the meaning that it had in that CUDA version; 0: it has none."""
    try:
        found = driver.call("cuGetProcAddress", function.encode(), since, 0)
    except DriverSaysError:  # an older driver does not know that version at all
        return 0
    return int((found[0] if isinstance(found, tuple) else found) or 0)


def _bindings_version() -> str | None:
    try:
        return version("cuda-bindings")
    except PackageNotFoundError:
        return None


def devices(driver: Driver) -> list[str]:
    """UUIDs of all GPUs, in the driver's order."""
    driver.initialise()
    count = driver.call("cuDeviceGetCount")
    return [_uuid_text(driver.call("cuDeviceGetUuid", driver.call("cuDeviceGet", i))) for i in range(count)]


def _users(driver: Driver, pids: list[int]) -> list[int]:
    """The restore thread tells: the state of a process without CUDA is "running" too."""
    found = []
    for pid in pids:
        try:
            driver.call("cuCheckpointProcessGetRestoreThreadId", pid)
        except DriverSaysError as error:
            if str(error) in ("CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_VALUE"):
                continue
            raise
        found.append(pid)
    return found


def _state(driver: Driver, pid: int) -> str:
    name: str = driver.call("cuCheckpointProcessGetState", pid).name
    return name.removeprefix("CU_PROCESS_STATE_").lower()


def _lock(driver: Driver, pid: int, timeout_ms: int) -> None:
    arguments = driver.load().CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    driver.call("cuCheckpointProcessLock", pid, arguments)


def _restore(driver: Driver, pid: int, pairs: Mapping[str, str] | None) -> None:
    driver.initialise()
    arguments = restore_arguments(driver.load(), pairs) if pairs else None
    driver.call("cuCheckpointProcessRestore", pid, arguments)


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


def _store(driver: Driver, pid: int, directory: str, held: Mapping[str, int]) -> list[dict[str, Any]]:
    from slurm_affinode.checkpoint import cuda_storage  # noqa: PLC0415 - only where the driver has it

    return cuda_storage.storage_of(driver).out(pid, directory, held)


def _fetch(
    driver: Driver, pid: int, directory: str, stored: list[dict[str, Any]], pairs: Mapping[str, str] | None
) -> None:
    from slurm_affinode.checkpoint import cuda_storage  # noqa: PLC0415 - only where the driver has it

    cuda_storage.storage_of(driver).back(pid, directory, stored, pairs)


_CALLS: dict[str, Callable[..., Any]] = {
    "hello": _hello,
    "devices": devices,
    "users": _users,
    "state": _state,
    "lock": _lock,
    "checkpoint": lambda driver, pid: driver.call("cuCheckpointProcessCheckpoint", pid, None),
    "restore": _restore,
    "store": _store,
    "fetch": _fetch,
    "unlock": lambda driver, pid: driver.call("cuCheckpointProcessUnlock", pid, None),
}


def answer(driver: Driver, line: str) -> str:
    """The answer to one line."""
    try:
        request = json.loads(line)
        said: dict[str, Any] = {"ok": _CALLS[request.pop("call")](driver, **request)}
    except DriverSaysError as error:
        said = {"cuda": str(error)}
    except NotAvailableError as error:
        said = {"unavailable": str(error)}
    except Exception as error:  # an answer must come, whatever it is: the other side would wait
        said = {"unavailable": f"{type(error).__name__}: {error}"}
    return json.dumps(said)


def main() -> None:
    """Answer lines until there are no more."""
    driver = Driver()
    for line in sys.stdin:
        sys.stdout.write(answer(driver, line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # Not this copy of the module but the one that others import: its errors are theirs.
    from slurm_affinode.checkpoint.cuda_helper import main as run

    run()
