"""The process that talks to the CUDA driver: ``python -m slurm_affinode.checkpoint.cuda_helper``.

A process of its own, because each first contact with the driver costs seconds, and because a call that never returns
must not take the agent with it. A request is a line of JSON, ``{"call": NAME, ...}``, its answer is one too: ``{"ok":
VALUE}``, ``{"cuda": ERROR NAME}`` for an error of the driver, ``{"unavailable": TEXT}``.

The driver takes a process by its number: the process is held during a call, and an answer is given only where it was
there all the while, so that no other process can have had the number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slurm_affinode.checkpoint.abilities import ENTRY_POINTS
from slurm_affinode.checkpoint.cuda_driver import (
    Driver,
    DriverSaysError,
    NotAvailableError,
    address,
    devices,
    restore_arguments,
)
from slurm_affinode.pinned import Process, ProcessGoneError, processes


def _hello(driver: Driver) -> dict[str, Any]:
    """What the bindings and the driver have. Nothing is initialised."""
    module = driver.load()
    cuda = driver.call("cuDriverGetVersion")
    structures = ("CUcheckpointLockArgs", "CUcheckpointGpuPair")
    return {
        "cuda": cuda,
        "functions": {name: bool(address(driver, name, since)) for name, since in ENTRY_POINTS.items()},
        "bound": [name for name in (*ENTRY_POINTS, *structures) if hasattr(module, name)],
        "bindings": _bindings_version(),
    }


def _bindings_version() -> str | None:
    try:
        return version("cuda-bindings")
    except PackageNotFoundError:
        return None


def _users(driver: Driver, pids: list[int]) -> list[tuple[int, int]]:
    """With the restore thread of each, which tells: the state of a process without CUDA is "running" too.

    A driver that is not initialised says so with the error by which it tells of a process without CUDA.
    """
    driver.initialise()
    found = []
    for process in processes(pids):
        try:
            thread = int(driver.call("cuCheckpointProcessGetRestoreThreadId", process.pid))
        except DriverSaysError as error:
            # Drivers differ in what they say of a process that has ended (580, 595: CUDA_ERROR_OPERATING_SYSTEM).
            if str(error) in ("CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_VALUE") or process.ended():
                continue
            raise
        if not process.ended():
            found.append((process.pid, thread))
    return found


def _state(driver: Driver, pid: int) -> str:
    name: str = driver.call("cuCheckpointProcessGetState", pid).name
    return name.removeprefix("CU_PROCESS_STATE_").lower()


def _lock(driver: Driver, pid: int, timeout_ms: int) -> None:
    # The restore wants it: where it cannot be done nothing is begun, and whoever wakes first does not wait for it.
    driver.initialise()
    arguments = driver.load().CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    driver.call("cuCheckpointProcessLock", pid, arguments)


def _restore(driver: Driver, pid: int, pairs: Mapping[str, str] | None) -> None:
    driver.initialise()
    arguments = restore_arguments(driver.load(), pairs) if pairs else None
    driver.call("cuCheckpointProcessRestore", pid, arguments)


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
        call = _CALLS[request.pop("call")]
        if "pid" in request:
            with Process(request["pid"], started=request.pop("started", None)) as process:
                process.check()
                said: dict[str, Any] = {"ok": call(driver, **request)}
                process.check()
        else:
            said = {"ok": call(driver, **request)}
    except ProcessGoneError:
        said = {"cuda": "CUDA_ERROR_OPERATING_SYSTEM"}  # as drivers say of a number that nobody has
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
    # What a library prints must not be taken for an answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(answer(driver, line) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
