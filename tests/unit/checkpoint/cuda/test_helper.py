"""Replies of the helper for the CUDA driver, on fake bindings."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from background import started_of

from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.cuda.driver import Driver
from slurm_affinode.checkpoint.cuda.helper import answer
from slurm_affinode.checkpoint.interface import CudaError

GONE = 2**22 + 1
"""No process has this PID."""


class Code(Enum):
    """``CUresult``."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_OPERATING_SYSTEM = 304


class Bindings:
    """``cuda.bindings.driver`` with the functions that a test provides."""

    CUresult = Code

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions)


def ask(bindings: Bindings, call: str, **arguments: Any) -> Any:
    """Return the helper's reply."""
    return json.loads(answer(Driver(bindings), json.dumps({"call": call, **arguments})))


def test_users_of_cuda_exclude_processes_that_have_ended() -> None:
    """Drivers 580 and 595 report a missing process as OPERATING_SYSTEM; for a live one it is an error."""
    codes = {1: Code.CUDA_SUCCESS, 2: Code.CUDA_ERROR_NOT_INITIALIZED, GONE: Code.CUDA_ERROR_OPERATING_SYSTEM}
    bindings = Bindings(
        cuInit=lambda flags: (Code.CUDA_SUCCESS,), cuCheckpointProcessGetRestoreThreadId=lambda pid: (codes[pid], 5)
    )
    assert ask(bindings, "users", pids=[1, 2, GONE]) == {"ok": [[1, 5]]}
    codes[os.getpid()] = Code.CUDA_ERROR_OPERATING_SYSTEM
    assert ask(bindings, "users", pids=[os.getpid()]) == {"cuda": "CUDA_ERROR_OPERATING_SYSTEM"}


def test_memory_of_several_processes_is_moved_at_once() -> None:
    """Each call waits for the other: one after the other, neither would return."""
    both, own_pid = threading.Barrier(2, timeout=60), os.getpid()

    def move(pid: int, arguments: object) -> tuple[Code]:
        both.wait()
        return (Code.CUDA_SUCCESS if pid == own_pid else Code.CUDA_ERROR_NOT_INITIALIZED,)

    bindings = Bindings(cuCheckpointProcessCheckpoint=move)
    reply = ask(bindings, "checkpoint", pids=[own_pid, os.getppid()])
    assert reply == {"cuda": "CUDA_ERROR_NOT_INITIALIZED", "pid": os.getppid()}
    assert ask(bindings, "checkpoint", pids=[GONE]) == {"cuda": "CUDA_ERROR_OPERATING_SYSTEM", "pid": GONE}


def test_uninitialized_driver_is_not_taken_for_processes_without_cuda() -> None:
    """The driver returns the same code in both cases. If it cannot be initialized, the users are unknown."""
    begun: list[int] = []

    def thread_of(pid: int) -> tuple[Code, int]:
        return (Code.CUDA_SUCCESS if begun else Code.CUDA_ERROR_NOT_INITIALIZED, 5)

    def init(code: Code) -> Callable[..., Any]:
        return lambda flags: (begun.append(flags) if code is Code.CUDA_SUCCESS else None, (code,))[1]

    broken = Bindings(cuInit=init(Code.CUDA_ERROR_OPERATING_SYSTEM), cuCheckpointProcessGetRestoreThreadId=thread_of)
    assert ask(broken, "users", pids=[1]) == {"cuda": "CUDA_ERROR_OPERATING_SYSTEM"}
    sound = Bindings(cuInit=init(Code.CUDA_SUCCESS), cuCheckpointProcessGetRestoreThreadId=thread_of)
    assert ask(sound, "users", pids=[1]) == {"ok": [[1, 5]]}


def test_cuda_is_initialized_before_a_process_is_locked() -> None:
    """A restore needs CUDA to be initialized, which takes long the first time and may fail."""
    done: list[str] = []

    def called(name: str, code: Code) -> Callable[..., Any]:
        return lambda *_: (done.append(name), (code,))[1]

    arguments = {"pid": os.getpid(), "timeout_ms": 50}
    broken = Bindings(cuInit=called("init", Code.CUDA_ERROR_NOT_INITIALIZED))
    assert ask(broken, "lock", **arguments) == {"cuda": "CUDA_ERROR_NOT_INITIALIZED"}
    sound = Bindings(
        cuInit=called("init", Code.CUDA_SUCCESS), cuCheckpointProcessLock=called("lock", Code.CUDA_SUCCESS),
        CUcheckpointLockArgs=SimpleNamespace,
    )  # fmt: skip
    driver = Driver(sound)
    for _ in range(2):
        assert json.loads(answer(driver, json.dumps({"call": "lock", **arguments}))) == {"ok": None}
    assert done == ["init", "init", "lock", "lock"]


def test_call_for_a_process_that_has_ended_is_not_made() -> None:
    """Nor is one for another process that has its PID."""
    states = {"cuCheckpointProcessGetState": lambda pid: (Code.CUDA_SUCCESS, SimpleNamespace(name="X"))}
    gone = {"cuda": "CUDA_ERROR_OPERATING_SYSTEM"}
    started = started_of(os.getpid())
    assert ask(Bindings(**states), "state", pid=os.getpid(), started=started) == {"ok": "x"}
    assert ask(Bindings(**states), "state", pid=os.getpid(), started=started - 1) == gone
    assert ask(Bindings(**states), "state", pid=GONE) == gone


def test_process_with_the_pid_of_another_is_not_locked() -> None:
    """The agent sends the start time of the process."""
    locked: list[int] = []
    bindings = Bindings(
        cuInit=lambda flags: (Code.CUDA_SUCCESS,), CUcheckpointLockArgs=SimpleNamespace,
        cuCheckpointProcessLock=lambda pid, _: (locked.append(pid), (Code.CUDA_SUCCESS,))[1],
    )  # fmt: skip

    class Helper:
        def ask(self, line: bytes, *, timeout_s: float) -> bytes:
            return answer(Driver(bindings), line.decode()).encode()

        def close(self) -> None: ...

    cuda = Cuda(driver_version=lambda: None, start=lambda _: Helper())
    started = started_of(os.getpid())
    with pytest.raises(CudaError, match="CUDA_ERROR_OPERATING_SYSTEM"):
        cuda.lock(os.getpid(), timeout_ms=50, started=started - 1)
    assert locked == []
    cuda.lock(os.getpid(), timeout_ms=50, started=started)
    assert locked == [os.getpid()]


@pytest.mark.parametrize(
    ("call", "answered"), [("state", {"cuda": "CUDA_ERROR_OPERATING_SYSTEM"}), ("users", {"ok": []})]
)
def test_reply_for_a_process_that_ends_during_the_call_is_discarded(call: str, answered: Any) -> None:
    """The driver may have reached another process that has its PID by then."""
    with subprocess.Popen(["sleep", "1000"]) as child:

        def end(pid: int) -> Any:
            child.kill()
            child.wait()
            return Code.CUDA_SUCCESS, SimpleNamespace(name="X") if call == "state" else 5

        bindings = Bindings(
            cuInit=lambda flags: (Code.CUDA_SUCCESS,), cuCheckpointProcessGetState=end,
            cuCheckpointProcessGetRestoreThreadId=end,
        )  # fmt: skip
        assert ask(bindings, call, **({"pid": child.pid} if call == "state" else {"pids": [child.pid]})) == answered


def test_unknown_call_is_answered() -> None:
    """Otherwise the client would wait."""
    assert "KeyError" in ask(Bindings(), "sing")["unavailable"]
