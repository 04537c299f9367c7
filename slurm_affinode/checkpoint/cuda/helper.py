"""The helper process that calls the CUDA driver: ``python -m slurm_affinode.checkpoint.cuda.helper``.

It is a separate, long-lived process because loading the driver takes seconds and because a call that never returns must
not block the agent. A request is a line of JSON, ``{"call": NAME, ...}``, and so is the answer: ``{"ok": VALUE}``,
``{"cuda": ERROR NAME}`` for an error of the driver, with its ``pid`` after a request for several, or
``{"unavailable": TEXT}``.

The driver identifies processes by PID. To rule out a reused PID, the process is held by descriptor during a call, and
the call succeeds only if the process still exists afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slurm_affinode.base.pidfd import Process, ProcessGoneError, processes
from slurm_affinode.checkpoint.cuda.driver import (
    Driver,
    DriverCallError,
    NotAvailableError,
    address,
    devices,
    restore_arguments,
)
from slurm_affinode.checkpoint.cuda.features import ENTRY_POINTS

UNKNOWN_PROCESS = "CUDA_ERROR_OPERATING_SYSTEM"
"""The error of drivers for a PID that does not exist."""
AT_ONCE = 16
"""Processes whose memory is moved at the same time."""


def _hello(driver: Driver) -> dict[str, Any]:
    """Return versions and functions of the driver and the bindings, without initializing CUDA."""
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
    """Return those of ``pids`` that use CUDA, each with its restore thread.

    CUDA is detected by the restore thread, as the state of processes without CUDA is "running" too. The driver must be
    initialized first: it returns the same error if it is not initialized as for a process without CUDA.
    """
    driver.initialise()
    states = []
    for process in processes(pids):
        try:
            thread = int(driver.call("cuCheckpointProcessGetRestoreThreadId", process.pid))
        except DriverCallError as error:
            # The error for a process that has ended differs between drivers (580, 595: CUDA_ERROR_OPERATING_SYSTEM).
            if str(error) in ("CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_VALUE") or process.ended():
                continue
            raise
        if not process.ended():
            states.append((process.pid, thread))
    return states


def _state(driver: Driver, pid: int) -> str:
    name: str = driver.call("cuCheckpointProcessGetState", pid).name
    return name.removeprefix("CU_PROCESS_STATE_").lower()


def _lock(driver: Driver, pid: int, timeout_ms: int) -> None:
    # The restore needs it: if CUDA cannot be initialized, do not begin; and the first resume need not wait for it.
    driver.initialise()
    arguments = driver.load().CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    driver.call("cuCheckpointProcessLock", pid, arguments)


def _checkpoint(driver: Driver, pids: list[int]) -> None:
    _at_once(pids, lambda pid: driver.call("cuCheckpointProcessCheckpoint", pid, None))


def _restore(driver: Driver, pids: list[int], pairs: Mapping[str, str] | None) -> None:
    driver.initialise()
    module = driver.load() if pairs else None

    def restore(pid: int) -> None:
        arguments = restore_arguments(module, pairs) if pairs else None
        driver.call("cuCheckpointProcessRestore", pid, arguments)

    _at_once(pids, restore)


def _at_once(pids: list[int], move: Callable[[int], object]) -> None:
    """Move the memory of each process in a thread. Raises the error of the first that failed, after all have ended.

    The driver moves some 2 GB/s for one process, by a thread of that process, and several processes at the same time;
    the bindings release Python's lock meanwhile.
    """

    def move_held(pid: int) -> None:
        try:
            with Process(pid) as process:
                process.check()
                move(pid)
                process.check()
        except ProcessGoneError:
            raise DriverCallError(UNKNOWN_PROCESS, pid) from None
        except DriverCallError as error:
            raise DriverCallError(str(error), pid) from None

    with ThreadPoolExecutor(min(len(pids), AT_ONCE)) as pool:
        moves = [pool.submit(move_held, pid) for pid in pids]
    for move_result in moves:
        move_result.result()


_CALLS: dict[str, Callable[..., Any]] = {
    "hello": _hello,
    "devices": devices,
    "users": _users,
    "state": _state,
    "lock": _lock,
    "checkpoint": _checkpoint,
    "restore": _restore,
    "unlock": lambda driver, pid: driver.call("cuCheckpointProcessUnlock", pid, None),
}


def answer(driver: Driver, line: str) -> str:
    """Return the answer to a request."""
    try:
        request = json.loads(line)
        call = _CALLS[request.pop("call")]
        if "pid" in request:
            with Process(request["pid"], started=request.pop("started", None)) as process:
                process.check()
                reply: dict[str, Any] = {"ok": call(driver, **request)}
                process.check()
        else:
            reply = {"ok": call(driver, **request)}
    except ProcessGoneError:
        reply = {"cuda": UNKNOWN_PROCESS}
    except DriverCallError as error:
        reply = {"cuda": str(error)} | ({} if error.pid is None else {"pid": error.pid})
    except NotAvailableError as error:
        reply = {"unavailable": str(error)}
    except Exception as error:  # the agent waits for an answer, so always send one
        reply = {"unavailable": f"{type(error).__name__}: {error}"}
    return json.dumps(reply)


def main() -> None:
    """Answer requests from standard input until it is closed."""
    driver = Driver()
    # Output of libraries must not be mistaken for an answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(answer(driver, line) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
