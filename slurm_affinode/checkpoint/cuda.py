"""The CUDA driver's checkpoint API, through one long-lived process (``cuda_helper``).

What a driver can do is known by its version (NVIDIA's ``cuda-checkpoint`` release notes): lock and checkpoint 570,
other GPUs 580, CUDA IPC 610, custom storage 615.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_affinode import process
from slurm_affinode.checkpoint.interface import (
    Capabilities,
    CudaError,
    CudaState,
    CudaUnavailable,
    HelperLost,
    LockTimeout,
)
from slurm_affinode.errors import UnreachableError

_CHECKPOINT, _MIGRATION, _IPC, _CUSTOM_STORAGE = 570, 580, 610, 615
_VERSION = re.compile(r"(\d+)(?:\.\d+)*")

_MEANING = {
    "CUDA_ERROR_NOT_SUPPORTED": "it uses something that cannot be checkpointed (managed memory, IPC, MPS, MIG)",
    "CUDA_ERROR_OUT_OF_MEMORY": "there is not enough memory on the GPU",
    "CUDA_ERROR_NOT_PERMITTED": "not allowed",
    "CUDA_ERROR_ILLEGAL_STATE": "the process is not in the state for it",
    "CUDA_ERROR_INVALID_VALUE": "there is no such process, or the GPUs do not fit",
    "CUDA_ERROR_NOT_INITIALIZED": "the process does not use CUDA",
    "CUDA_ERROR_NOT_READY": "the GPU was busy until the time-out",
}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds after which a call of the driver is given up."""

    start: float = 60.0
    """The first contact: a driver without persistence takes long to load."""
    quick: float = 15.0
    move: float = 900.0
    """Moving memory between GPU and host: 2 GB/s for 1.8 TB."""
    grace: float = 10.0
    """On top of the time-out of a lock, which the driver keeps itself."""


class Conversation(Protocol):
    """A child that answers lines (``process.Child``)."""

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        """An answer, or ``ChildEndedError``."""
        ...

    def close(self) -> None:
        """End it."""
        ...


def _start(env: Mapping[str, str] | None) -> Conversation:
    return process.Child([sys.executable, "-P", "-m", "slurm_affinode.checkpoint.cuda_helper"], env=env)


class Cuda:
    """``CudaDriver`` through the helper. One for the whole agent; calls of several threads follow one another.

    A helper that dies or does not answer is replaced when the next call comes; the call itself fails (``HelperLost``).
    """

    def __init__(
        self,
        *,
        driver_version: Callable[[], str | None],
        mig: Callable[[], bool] = lambda: False,
        start: Callable[[Mapping[str, str] | None], Conversation] = _start,
        deadlines: Deadlines | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``driver_version``: as NVML tells it (``580.95.05``); CUDA has no such call. ``env``: of the helper."""
        self._driver_version = driver_version
        self._mig = mig
        self._start = start
        self._deadlines = deadlines or Deadlines()
        # The agent may run with a subset for itself; the driver's order of all GPUs is what pairs need.
        self._env = {k: v for k, v in (env or os.environ).items() if k != "CUDA_VISIBLE_DEVICES"}
        self._lock = threading.Lock()
        self._child: Conversation | None = None
        self._facts: dict[str, Any] | None = None

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None

    def capabilities(self) -> Capabilities:
        """What the driver can do. Never raises."""
        version = self._driver_version()
        try:
            facts = self._hello()
        except CudaError as error:
            return Capabilities(version, why_not=str(error))
        return capabilities_of(version, facts, mig=self._mig())

    def devices(self) -> tuple[str, ...]:
        """UUIDs of all GPUs that the driver shows, in its order."""
        return tuple(self._ask("devices", "list the GPUs", self._deadlines.start))

    def users(self, pids: Iterable[int]) -> frozenset[int]:
        """Those of ``pids`` that use CUDA."""
        asked = sorted(set(pids))
        deadline = self._deadlines.quick + 0.05 * len(asked)
        return frozenset(self._ask("users", "look for CUDA processes", deadline, pids=asked)) if asked else frozenset()

    def state(self, pid: int) -> CudaState:
        """Where a process stands."""
        return CudaState(self._ask("state", f"read the state of process {pid}", self._deadlines.quick, pid=pid))

    def lock(self, pid: int, *, timeout_ms: int) -> None:
        """RUNNING -> LOCKED, or ``LockTimeout``."""
        if timeout_ms <= 0:
            raise ValueError("a lock needs a time-out: without one it may wait for ever")
        try:
            deadline = timeout_ms / 1000 + self._deadlines.grace
            self._ask("lock", f"lock process {pid}", deadline, pid=pid, timeout_ms=timeout_ms)
        except CudaError as error:
            if error.code == "CUDA_ERROR_NOT_READY":
                raise LockTimeout(
                    f"process {pid} could not be locked within {timeout_ms / 1000:g} s: its GPU is busy",
                    code=error.code,
                ) from None
            raise

    def checkpoint(self, pid: int) -> None:
        """LOCKED -> CHECKPOINTED."""
        self._ask("checkpoint", f"move the GPU memory of process {pid} out", self._deadlines.move, pid=pid)

    def restore(self, pid: int, *, pairs: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED, on other GPUs by ``pairs``. Raises ``CudaUnavailable`` where the driver cannot."""
        if pairs is not None and not self.capabilities().migration:
            raise CudaUnavailable(f"driver {self._driver_version()} cannot restore on other GPUs ({_MIGRATION} can)")
        given = dict(pairs) if pairs is not None else None
        self._ask("restore", f"move the GPU memory of process {pid} back", self._deadlines.move, pid=pid, pairs=given)

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING."""
        self._ask("unlock", f"unlock process {pid}", self._deadlines.quick, pid=pid)

    def _hello(self) -> dict[str, Any]:
        if self._facts is None:
            self._facts = dict(self._ask("hello", "reach the driver", self._deadlines.start))
        return self._facts

    def _ask(self, call: str, what: str, deadline_s: float, **arguments: Any) -> Any:
        line = json.dumps({"call": call, **arguments}).encode()
        with self._lock:
            fresh = self._child is None
            try:
                if self._child is None:
                    self._child = self._start(self._env)
                limit = deadline_s + (self._deadlines.start if fresh else 0)
                said = json.loads(self._child.ask(line, timeout_s=limit))
            except (process.ChildEndedError, UnreachableError, ValueError) as error:
                self._child = None
                raise HelperLost(f"cannot {what}: the helper for the CUDA driver {error}") from None
        if "cuda" in said:
            code = str(said["cuda"])
            raise CudaError(f"cannot {what}: {_MEANING.get(code, 'the driver failed')} ({code})", code=code)
        if "unavailable" in said:
            raise CudaUnavailable(f"cannot {what}: {said['unavailable']}")
        return said["ok"]


def capabilities_of(version: str | None, facts: Mapping[str, Any], *, mig: bool) -> Capabilities:
    """What a driver of this version can do with these bindings (the helper's ``hello``)."""
    match = _VERSION.match(version or "")
    major = int(match[1]) if match else None
    why = None
    if major is None:
        why = "the driver does not tell its version"
    elif major < _CHECKPOINT:
        why = f"driver {version} cannot checkpoint ({_CHECKPOINT} can)"
    elif facts["missing"]:
        why = f"the installed cuda-bindings lack cuCheckpointProcess{facts['missing'][0]} (12.9 has it)"
    elif mig:
        why = "MIG is on, and MIG instances cannot be checkpointed"
    if why is not None or major is None:
        return Capabilities(version, why_not=why)
    return Capabilities(
        version,
        checkpoint=True,
        migration=major >= _MIGRATION and bool(facts["pairs"]),
        ipc=major >= _IPC,
        custom_storage=major >= _CUSTOM_STORAGE and bool(facts["custom_storage"]),
    )
