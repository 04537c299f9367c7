"""A program that computes on a GPU through the CUDA driver API: ``python worker.py DIRECTORY [--ordinal N]``.

It allocates memory in place of weights and optimizer state, changes all of it in each step, as a CUDA graph if the
driver supports them, and can return a digest of every byte. Its results depend only on its seed and its steps, so two
runs are equal bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import random
import sys
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels
import protocol
from cuda.bindings import driver as d

MIB = 1 << 20
PIECE = 1024 * MIB
SAMPLE = 4096
BLOCK = 64 * MIB
_GRID, _THREADS = 1024, 256


def ok(answer: tuple[Any, ...]) -> Any:
    """Return the values of a call, or raise its error by name."""
    if answer[0] != d.CUresult.CUDA_SUCCESS:
        raise OSError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:] or None


@dataclass
class Piece:
    """One allocation."""

    at: int
    size: int


@dataclass
class Work:
    """The memory and the operations of the program."""

    ordinal: int
    pieces: list[Piece] = field(default_factory=list)
    more: list[Piece] = field(default_factory=list)
    graph: Any = None
    step: int = 0

    def __post_init__(self) -> None:
        ok(d.cuInit(0))
        self.device = ok(d.cuDeviceGet(self.ordinal))
        ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(self.device))))
        module = ok(d.cuModuleLoadData(kernels.PTX))
        self._add = ok(d.cuModuleGetFunction(module, b"add_u32"))
        self._busy = ok(d.cuModuleGetFunction(module, b"busy_ns"))
        self._stream = ok(d.cuStreamCreate(0))

    def setup(self, mib: int, seed: int = 1, graph: bool = True) -> dict[str, Any]:
        """Allocate ``mib`` MiB, half for weights and half for optimizer state, and initialize every byte."""
        left = mib * MIB
        while left:
            size = min(left, PIECE)
            piece = Piece(int(ok(d.cuMemAlloc(size))), size)
            ok(d.cuMemsetD32(piece.at, (seed * 2654435761 + len(self.pieces)) & 0xFFFFFFFF, size // 4))
            edge = random.Random(seed + len(self.pieces)).randbytes(min(size, MIB))  # noqa: S311 - a pattern
            ok(d.cuMemcpyHtoD(piece.at, edge, len(edge)))
            self.pieces.append(piece)
            left -= size
        ok(d.cuCtxSynchronize())
        why = self._capture() if graph else "not asked for"
        return {"uuid": bytes(ok(d.cuDeviceGetUuid(self.device)).bytes).hex(), "graph": why is None, "why": why}

    def steps(self, count: int, busy_ms: int = 0) -> list[int]:
        """Compute this many steps; return the checksum of each."""
        result = []
        for _ in range(count):
            self.step += 1
            for number, piece in enumerate(self.pieces):
                self._launch_add(piece, (self.step * 40503 + number) & 0xFFFFFFFF, busy_ms * 1_000_000)
            if self.graph is not None:
                ok(d.cuGraphLaunch(self.graph, self._stream))
            ok(d.cuStreamSynchronize(self._stream))
            result.append(self.sample())
        return result

    def digest(self) -> str:
        """Return a digest of all memory."""
        whole = hashlib.sha256()
        buffers = [bytearray(BLOCK) for _ in range(8)]
        views = [(ctypes.c_char * BLOCK).from_buffer(buffer) for buffer in buffers]
        under_way: list[Future[bytes]] = []

        def digest_of(number: int, size: int) -> bytes:
            return hashlib.sha256(memoryview(buffers[number])[:size]).digest()

        with ThreadPoolExecutor(len(buffers)) as pool:
            for count, (at, size) in enumerate(self._blocks()):
                if len(under_way) == len(buffers):
                    whole.update(under_way.pop(0).result())
                number = count % len(buffers)
                ok(d.cuMemcpyDtoH(views[number], at, size))
                under_way.append(pool.submit(digest_of, number, size))
            for outcome in under_way:
                whole.update(outcome.result())
        return whole.hexdigest()

    def busy(self, seconds: float) -> None:
        """Launch a kernel with this duration; returns at once."""
        arguments = ((int(seconds * 1e9),), (ctypes.c_uint64,))
        ok(d.cuLaunchKernel(self._busy, 1, 1, 1, 1, 1, 1, 0, self._stream, arguments, 0))

    def wait(self) -> None:
        """Wait for all launched kernels."""
        ok(d.cuCtxSynchronize())

    def work(self, seconds: float, wait_ms: int = 20) -> None:
        """Compute and move memory for a time in short kernels; with ``wait_ms=0`` they only move memory."""
        until = time.monotonic() + seconds
        piece = self.pieces[0]
        half = piece.size // 2
        while time.monotonic() < until:
            for _ in range(8):
                ok(d.cuMemcpyDtoDAsync(piece.at + half, piece.at, half, self._stream))
                self._launch_add(piece, 1, wait_ms * 1_000_000)
            ok(d.cuStreamSynchronize(self._stream))

    def hold(self, mib: int) -> None:
        """Allocate more memory, as another user of the GPU would."""
        size = mib * MIB
        piece = Piece(int(ok(d.cuMemAlloc(size))), size)
        self.more.append(piece)
        ok(d.cuMemsetD8(piece.at, 7, min(size, 64 * MIB)))
        ok(d.cuCtxSynchronize())

    def release(self) -> None:
        """Free that memory."""
        while self.more:
            ok(d.cuMemFree(self.more.pop().at))

    def drop(self) -> None:
        """Free all memory."""
        self.release()
        while self.pieces:
            ok(d.cuMemFree(self.pieces.pop().at))

    def _launch_add(self, piece: Piece, value: int, ns: int = 0) -> None:
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        arguments = ((piece.at, piece.size // 4, value, ns), types)
        ok(d.cuLaunchKernel(self._add, _GRID, 1, 1, _THREADS, 1, 1, 0, self._stream, arguments, 0))

    def _capture(self) -> str | None:
        """Capture a graph with one kernel per piece; return why there is none, or ``None``."""
        try:
            ok(d.cuStreamBeginCapture(self._stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
            for number, piece in enumerate(self.pieces):
                self._launch_add(piece, 77 + number)
            self.graph = ok(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(self._stream)), 0))
        except RuntimeError as error:  # raised by the bindings if the driver lacks the function
            return f"the driver has no CUDA graphs ({error})"
        return None

    def sample(self) -> int:
        result, view = 0, (ctypes.c_char * SAMPLE)()
        for piece in self.pieces:
            ok(d.cuMemcpyDtoH(view, piece.at, SAMPLE))
            result = zlib.crc32(view.raw, result)
            ok(d.cuMemcpyDtoH(view, piece.at + piece.size - SAMPLE, SAMPLE))
            result = zlib.crc32(view.raw, result)
        return result

    def _blocks(self) -> list[tuple[int, int]]:
        return [
            (piece.at + done, min(BLOCK, piece.size - done))
            for piece in self.pieces
            for done in range(0, piece.size, BLOCK)
        ]


def main() -> None:
    """Execute the commands in the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ordinal", type=int, default=0)
    options = parser.parse_args()
    protocol.detach()
    work = protocol.built(options.directory, lambda: Work(options.ordinal))
    names = ("setup", "steps", "digest", "busy", "wait", "work", "hold", "release", "drop")
    protocol.serve(options.directory, {name: getattr(work, name) for name in names})


if __name__ == "__main__":
    main()
