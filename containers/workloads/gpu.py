"""Operations of the workloads on a GPU, through the CUDA driver API: hold memory, compute, verify memory.

They run on NVIDIA GPUs and on the emulated driver: the kernel is PTX that polls the clock of the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver

MIB = 1024 * 1024
PATTERN_BYTES = 4 * MIB

# busy_ns(ns): one thread that polls the clock until the time has passed. A GPU that runs any kernel counts as
# fully utilized for that time.
BUSY_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry busy_ns(.param .u64 ns)
{
    .reg .pred %p;
    .reg .u64 %t<4>;
    ld.param.u64 %t0, [ns];
    mov.u64 %t1, %globaltimer;
LOOP:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, %t0;
    @%p bra LOOP;
    ret;
}
\0"""


class CudaError(Exception):
    """A call of the driver failed."""

    def __init__(self, call: str, code: driver.CUresult) -> None:
        super().__init__(f"{call}: {code.name}")
        self.code = code


def call(function: Any, *arguments: Any) -> Any:
    """Call the driver; return its result: an empty tuple, a value, or a tuple of values. Raises ``CudaError``."""
    code, *values = function(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(function.__name__, code)
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory that contains a pattern, and the digest of the pattern."""

    address: int
    size_bytes: int
    digest: str


class Gpu:
    """One of the GPUs in ``CUDA_VISIBLE_DEVICES``, with its primary context."""

    def __init__(self, ordinal: int = 0) -> None:
        call(driver.cuInit, 0)
        self.device = call(driver.cuDeviceGet, ordinal)
        self.uuid = format_uuid(bytes(call(driver.cuDeviceGetUuid, self.device).bytes))
        self.context = call(driver.cuDevicePrimaryCtxRetain, self.device)
        self.activate()
        module = call(driver.cuModuleLoadData, BUSY_PTX)
        self._busy = call(driver.cuModuleGetFunction, module, b"busy_ns")

    def activate(self) -> None:
        """Make the context of this GPU current in the calling thread."""
        call(driver.cuCtxSetCurrent, self.context)

    def compute(self, seconds: float) -> None:
        """Keep the GPU busy for a time, with kernels of at most a quarter of a second, and wait for them."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            arguments = ((round(min(left, 0.25) * 1e9),), (ctypes.c_uint64,))
            call(driver.cuLaunchKernel, self._busy, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)
            call(driver.cuCtxSynchronize)

    def hold(self, size_bytes: int, seed: int = 0) -> Buffer:
        """Allocate device memory, and write a pattern that depends on the seed to its first and last bytes."""
        address = int(call(driver.cuMemAlloc, size_bytes))
        for offset, length in _edges(size_bytes):
            pattern = random.Random(seed + offset).randbytes(length)  # noqa: S311  (a pattern, not a secret)
            call(driver.cuMemcpyHtoD, address + offset, pattern, length)
        return Buffer(address, size_bytes, self._digest(address, size_bytes))

    def intact(self, buffer: Buffer) -> bool:
        """Return whether the memory still contains its pattern."""
        return self._digest(buffer.address, buffer.size_bytes) == buffer.digest

    def _digest(self, address: int, size_bytes: int) -> str:
        digest = hashlib.sha256()
        for offset, length in _edges(size_bytes):
            host = bytearray(length)
            call(driver.cuMemcpyDtoH, (ctypes.c_char * length).from_buffer(host), address + offset, length)
            digest.update(host)
        return digest.hexdigest()


def _edges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the parts of a buffer that contain the pattern."""
    first = min(size_bytes, PATTERN_BYTES)
    yield 0, first
    last = min(size_bytes - first, PATTERN_BYTES)
    if last:
        yield size_bytes - last, last


def format_uuid(raw: bytes) -> str:
    """Format a UUID as nvidia-smi and NVML do."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def log(phase: str, **values: object) -> None:
    """Print one line of progress for tests: the time, the phase and its values."""
    stamp = f"{time.time():.3f}"
    job = os.environ.get("SLURM_JOB_ID", "-")
    words = [stamp, f"job={job}", f"pid={os.getpid()}", phase, *(f"{k}={v}" for k, v in values.items())]
    # In one write, also if Python does not buffer: other processes write to the same file.
    print(" ".join(words) + "\n", end="", flush=True)


def steps(least: int, until: Path | None) -> Iterator[int]:
    """Yield numbers of steps from 1: at least ``least``, and more until the file exists."""
    for step in itertools.count(1):
        if step > least and (until is None or until.exists()):
            return
        yield step


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all workloads."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument("--memory-mib", type=int, default=256, metavar="N", help="device memory to hold")
    return result


def start(options: argparse.Namespace, ordinal: int = 0) -> tuple[Gpu, Buffer]:
    """Open the GPU, allocate its memory and log both."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gpu = Gpu(ordinal)
    buffer = gpu.hold(options.memory_mib * MIB, seed=os.getpid())
    log("start", gpu=gpu.uuid, memory_mib=options.memory_mib)
    return gpu, buffer


def finish(gpu: Gpu, buffer: Buffer) -> int:
    """Verify the memory; return the exit status: 0, or 9 if the memory has changed."""
    intact = gpu.intact(buffer)
    log("end", memory="intact" if intact else "damaged")
    return 0 if intact else 9
