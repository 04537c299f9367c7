"""A program that uses the emulated GPUs through NVIDIA's own Python bindings, controlled line by line.

Each line on standard input is a JSON string of Python code, run in the module's namespace; the answer is a line of
JSON: `{"result": value of the name "result"}` or `{"error": name of the error}`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pynvml as n
from cuda.bindings import driver as d

PTX = b".version 8.0\n.target sm_80\n.address_size 64\n" + b"".join(
    b".visible .entry %s { ret; }\n" % entry
    for entry in (
        b"busy_ns(.param .u64 ns)",
        b"add_u32(.param .u64 at, .param .u64 count, .param .u32 value, .param .u64 ns)",
        b"mystery(.param .u64 x)",
    )
)
MIB = 1 << 20


class DriverError(Exception):
    """The error of a CUDA call, by CUDA's name."""


def ok(answer: tuple[Any, ...]) -> Any:
    """Return the values of a call, or raise its error."""
    if answer[0] != d.CUresult.CUDA_SUCCESS:
        raise DriverError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:]


def use(ordinal: int = 0) -> None:
    """Initialize CUDA and make a GPU's primary context current."""
    ok(d.cuInit(0))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(ordinal))))))


def alloc(mib: int) -> int:
    """Allocate device memory."""
    return int(ok(d.cuMemAlloc(mib * MIB)))


def fill(at: int, size: int, seed: int) -> str:
    """Fill device memory with random bytes; return their digest."""
    data = random.Random(seed).randbytes(size)  # noqa: S311
    ok(d.cuMemcpyHtoD(at, data, size))
    return hashlib.sha256(data).hexdigest()


def digest(at: int, size: int) -> str:
    """Return a digest of device memory."""
    data = ctypes.create_string_buffer(size)
    ok(d.cuMemcpyDtoH(ctypes.addressof(data), at, size))
    return hashlib.sha256(data.raw).hexdigest()


def launch(name: bytes, values: tuple[int, ...], types: tuple[Any, ...], stream: Any = 0) -> None:
    """Launch a kernel of the module above."""
    function = ok(d.cuModuleGetFunction(ok(d.cuModuleLoadData(PTX + b"\0")), name))
    ok(d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (values, types), 0))


def busy(ms: int, stream: Any = 0) -> None:
    """Keep the GPU busy; returns at once."""
    launch(b"busy_ns", (ms * 1_000_000,), (ctypes.c_uint64,), stream)


def handle(index: int = 0) -> Any:
    """Return NVML's handle of a GPU."""
    return n.nvmlDeviceGetHandleByIndex(index)


def processes(index: int = 0) -> dict[int, int]:
    """Return GPU memory in bytes by PID."""
    return {p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(handle(index))}


def lock(pid: int, timeout_ms: int = 0) -> None:
    """Call cuCheckpointProcessLock."""
    arguments = d.CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    ok(d.cuCheckpointProcessLock(pid, arguments))


def restore(pid: int, pairs: list[tuple[str, str]] | None = None) -> None:
    """Call cuCheckpointProcessRestore, with pairs of UUIDs."""
    arguments = None
    if pairs:
        made = []
        for old, new in pairs:
            pair = d.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = uuid(old), uuid(new)
            made.append(pair)
        arguments = d.CUcheckpointRestoreArgs()
        arguments.gpuPairs = made
        arguments.gpuPairsCount = len(made)
    ok(d.cuCheckpointProcessRestore(pid, arguments))


def uuid(text: str) -> Any:
    """Return NVML's UUID as a CUDA UUID."""
    made = d.CUuuid()
    ctypes.memmove(made.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
    return made


def state(pid: int) -> str:
    """Call cuCheckpointProcessGetState; return the state."""
    return str(ok(d.cuCheckpointProcessGetState(pid)).name.removeprefix("CU_PROCESS_STATE_").lower())


def resident(kind: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def opened() -> list[str]:
    """Return the targets of the process's descriptors."""
    files = Path("/proc/self/fd").iterdir()
    return [str(file.readlink()) for file in files if file.is_symlink()]


def main() -> None:
    """Execute the lines of standard input."""
    names = globals()
    names["threading"], names["os"] = threading, os
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line), names)  # noqa: S102
            answer = {"result": names["result"]}
        except DriverError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
