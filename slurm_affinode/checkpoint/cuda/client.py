"""The CUDA driver's checkpoint API, through one long-lived process (``helper.py``).

The features of the driver are detected first (``features.py``); a call that needs a missing feature fails with the
name of the feature before the driver is called.

The helper uses ``cuda-bindings``. ``cuda-core`` wraps the same calls (``cuda.core.checkpoint.Process``), but it
converts the driver's error names, which are needed here, to text, does not support the states of custom storage, and
adds NumPy and 16 MB to a process that runs as long as the node.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_affinode.base import kernel_text, process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import PROC, Process
from slurm_affinode.checkpoint.cuda import features as cuda_features
from slurm_affinode.checkpoint.interface import (
    Capabilities,
    CudaError,
    CudaState,
    CudaUnavailable,
    Feature,
    HelperLost,
    LockTimeout,
)

_MEANING = {
    "CUDA_ERROR_NOT_SUPPORTED": "it uses something that the driver cannot checkpoint",
    "CUDA_ERROR_OUT_OF_MEMORY": "there is not enough memory on the GPU",
    "CUDA_ERROR_NOT_PERMITTED": "not allowed",
    "CUDA_ERROR_ILLEGAL_STATE": "the process is not in the state for it",
    "CUDA_ERROR_INVALID_VALUE": "there is no such process, or the GPUs do not fit",
    "CUDA_ERROR_NOT_INITIALIZED": "the process does not use CUDA",
    "CUDA_ERROR_NOT_READY": "the GPU was busy until the time-out",
    "CUDA_ERROR_NO_DEVICE": "it shows no GPU: MIG is on and has no instance, or none may be used here",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "its library and its kernel module differ in version",
    "CUDA_ERROR_SYSTEM_NOT_READY": "it is not ready: is nvidia-fabricmanager running?",
    "CUDA_ERROR_OPERATING_SYSTEM": "it ended, cannot be reached, or a restore of it ran out of GPU memory before",
}


_NO_MPS = "/nonexistent"
"""MPS directory of the helper, which must not be an MPS client: ``cuInit`` blocks while another user has clients."""
_INITIALISE = frozenset({"devices", "users", "lock", "restore"})
"""Calls for which the helper initializes CUDA (once)."""
_COSTS = {"VmRSS": 1, "VmSwap": 10}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of driver calls, in seconds."""

    start: float = 60.0
    """Added for starting the helper and for initializing CUDA: without persistence mode the driver loads slowly."""
    quick: float = 15.0
    move: float = 900.0
    """Moving GPU memory of unknown size."""
    begin: float = 60.0
    speed: float = 1e9
    """Moving GPU memory of known size: ``begin`` seconds plus one second per ``speed`` bytes. Drivers are two to five
    times as fast."""
    grace: float = 10.0
    """Added to the timeout of a lock, which the driver enforces itself."""

    def of_move(self, *sizes: int | None) -> float:
        """Return the timeout for moving these numbers of bytes; ``None``: unknown size."""
        known_sizes = [size for size in sizes if size is not None]
        return self.move if len(known_sizes) < len(sizes) else self.begin + sum(known_sizes) / self.speed


def host_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Return an upper bound of the GPU memory of a checkpointed process, from its host memory; ``None`` if unknown.

    Swapped memory counts ten times, because it takes longer to restore.
    """
    try:
        with Process(pid, proc=proc) as process:
            status = process.status()
    except OSError:
        return None
    sizes = {name: size for name in _COSTS if (size := kernel_text.kib(status.get(name))) is not None}
    return sum(_COSTS[name] * size for name, size in sizes.items()) if "VmRSS" in sizes else None


def _start(env: Mapping[str, str] | None) -> process.Helper:
    return process.Child(process.of_module("slurm_affinode.checkpoint.cuda.helper"), env=env)


def _with_pids(what: str, pids: Sequence[int | None]) -> str:
    """Return the text of an error with the processes in place of ``process {pid}``, if it has that."""
    return what.replace("process {pid}", f"process{'es' * (len(pids) > 1)} {', '.join(map(str, pids))}")


class Cuda:
    """Implementation of ``CudaDriver`` with the helper. There is one per agent; calls are serialized.

    If the helper dies or does not respond, the call fails with ``HelperLost`` and the next call starts a new helper.
    """

    def __init__(
        self,
        *,
        driver_version: Callable[[], str | None],
        mig: Callable[[], bool] = lambda: False,
        held_bytes: Callable[[int], int | None] = lambda pid: None,
        start: Callable[[Mapping[str, str] | None], process.Helper] = _start,
        deadlines: Deadlines | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``driver_version``: returns NVML's driver version (``580.95.05``), for which CUDA has no call.

        ``held_bytes``: returns the GPU memory of a process; ``None``: unknown. ``env``: environment of the helper.
        """
        self._driver_version = driver_version
        self._mig = mig
        self._held_bytes = held_bytes
        self._start = start
        self._deadlines = deadlines or Deadlines()
        # The agent may see only a subset of the GPUs, but GPU pairs need the driver's order of all GPUs.
        self._env = {k: v for k, v in (env or os.environ).items() if k != "CUDA_VISIBLE_DEVICES"}
        self._env["CUDA_MPS_PIPE_DIRECTORY"] = _NO_MPS
        self._lock = threading.Lock()
        """Guards the helper process: one request at a time."""
        self._child: process.Helper | None = None
        self._initialised = False
        self._facts: dict[str, Any] | None = None

    def close(self) -> None:
        """Terminate the helper."""
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None

    def capabilities(self) -> Capabilities:
        """Return the driver's checkpoint features. Never raises."""
        version, machine = self._driver_version(), os.uname().machine
        try:
            facts = self._hello()
        except CudaError as error:
            return cuda_features.unavailable(version, str(error), machine=machine)
        return cuda_features.capabilities_of(
            version, cuda_features.DriverFacts.of(facts), mig=self._mig(), machine=machine
        )

    def require(self, feature: Feature) -> None:
        """Raise ``CudaUnavailable`` with the name of the feature if this driver does not support it."""
        why = cuda_features.refusal(feature, self.capabilities())
        if why is not None:
            raise CudaUnavailable(why)

    def devices(self) -> tuple[str, ...]:
        """Return the UUIDs of all GPUs that the driver lists, in its order."""
        return tuple(self._ask("devices", "list the GPUs", self._deadlines.start))

    def users(self, pids: Iterable[int]) -> frozenset[int]:
        """Return those of ``pids`` that use CUDA."""
        return frozenset(pid for pid, _ in self._users(pids))

    def restore_threads(self, pids: Iterable[int]) -> frozenset[int]:
        """Return the driver's restore threads in those of ``pids`` that use CUDA."""
        return frozenset(thread for _, thread in self._users(pids))

    def _users(self, pids: Iterable[int]) -> list[tuple[int, int]]:
        unique = sorted(set(pids))
        deadline = self._deadlines.quick + 0.05 * len(unique)
        return self._ask("users", "search for CUDA processes", deadline, pids=unique) if unique else []

    def state(self, pid: int) -> CudaState:
        """Return the checkpoint state of a process."""
        return CudaState(self._ask("state", f"read the state of process {pid}", self._deadlines.quick, pid=pid))

    def lock(self, pid: int, *, timeout_ms: int, started: int | None = None) -> None:
        """RUNNING -> LOCKED. Raises ``LockTimeout``. ``started``: see ``CudaDriver``."""
        if timeout_ms <= 0:
            raise ValueError("a lock needs a time-out: without one it may wait forever")
        try:
            deadline = timeout_ms / 1000 + self._deadlines.grace
            self._ask("lock", f"lock process {pid}", deadline, pid=pid, timeout_ms=timeout_ms, started=started)
        except CudaError as error:
            if error.code == "CUDA_ERROR_NOT_READY":
                raise LockTimeout(
                    f"process {pid} could not be locked within {timeout_ms / 1000:g} s: its GPU is busy",
                    code=error.code,
                ) from None
            raise

    def checkpoint(self, *pids: int) -> None:
        """LOCKED -> CHECKPOINTED, all at once."""
        deadline = self._deadlines.of_move(*map(self._held_bytes, pids))
        try:
            self._move("checkpoint", "out", pids, deadline)
        except CudaError as error:
            if error.code != "CUDA_ERROR_NOT_SUPPORTED":
                raise
            raise CudaError(f"{error}: {self._unsupported()}", code=error.code) from None

    def restore(self, *pids: int, pairs: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED, all at once.

        Raises ``CudaUnavailable`` if ``pairs`` is given and the driver cannot migrate.
        """
        if pairs is not None:
            self.require(Feature.MIGRATION)
        pair_map = dict(pairs) if pairs is not None else None
        self._move("restore", "back", pids, self._deadlines.of_move(*map(host_bytes, pids)), pairs=pair_map)

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING."""
        self._ask("unlock", f"unlock process {pid}", self._deadlines.quick, pid=pid)

    def _move(self, call: str, where: str, pids: Sequence[int], deadline_s: float, **arguments: Any) -> None:
        if pids:
            self._ask(call, f"move the GPU memory of process {{pid}} {where}", deadline_s, pids=list(pids), **arguments)

    def _unsupported(self) -> str:
        """Return the likely reasons for an unsupported checkpoint."""
        ipc = next((row for row in self.capabilities().table if row.feature is Feature.IPC), None)
        if ipc is None or ipc.available:
            return f"managed memory, MPS, MIG, or CUDA IPC without a job file ({cuda_features.JOB_FILE})"
        return f"managed memory, MPS, MIG, or CUDA IPC ({ipc.why})"

    def _hello(self) -> dict[str, Any]:
        if self._facts is None:
            self._facts = dict(self._ask("hello", "reach the driver", self._deadlines.start))
        return self._facts

    def _ask(self, call: str, what: str, deadline_s: float, **arguments: Any) -> Any:
        line = json.dumps({"call": call, **arguments}).encode()
        pids = arguments.get("pids") or [None]
        with self._lock:
            fresh = self._child is None
            try:
                if self._child is None:
                    self._child, self._initialised = self._start(self._env), False
                begins = call in _INITIALISE and not self._initialised
                limit = deadline_s + (fresh + begins) * self._deadlines.start
                reply = json.loads(self._child.ask(line, timeout_s=limit))
                self._initialised |= begins and "ok" in reply
            except (process.ChildEndedError, UnreachableError, ValueError) as error:
                if self._child is not None and isinstance(error, ValueError):  # otherwise it has ended
                    self._child.close()
                self._child = None
                raise HelperLost(f"cannot {_with_pids(what, pids)}: the helper for the CUDA driver {error}") from None
            except BaseException:
                # A late answer would be mistaken for the answer to the next request.
                child, self._child = self._child, None
                if child is not None:
                    child.close()
                raise
        what = _with_pids(what, [reply["pid"]] if "pid" in reply else pids)
        if "cuda" in reply:
            code = str(reply["cuda"])
            raise CudaError(f"cannot {what}: {_MEANING.get(code, 'the driver failed')} ({code})", code=code)
        if "unavailable" in reply:
            raise CudaUnavailable(f"cannot {what}: {reply['unavailable']}")
        return reply["ok"]
