"""A program that measures copies between a GPU and host memory of several kinds: ``python copying.py DIRECTORY``.

The kinds differ in whether pages are populated before the copy, in their size, and in whether they are locked. Results
are the seconds for allocating the memory, a copy out and a copy in, in blocks like those of a suspension.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

import protocol  # type: ignore[import-not-found]
from cuda.bindings import driver as d

MIB = 1 << 20
BLOCK = 64 * MIB
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE


def ok(answer: tuple[Any, ...]) -> Any:
    """Return the values of a call, or raise its error by name."""
    if answer[0] != d.CUresult.CUDA_SUCCESS:
        raise OSError(answer[0].name)
    return answer[1] if len(answer) == 2 else answer[1:] or None


class HostMemory:
    """Host memory of one kind."""

    def __init__(self, size: int, advice: tuple[int, ...], *, register: bool = False, pinned: bool = False) -> None:
        self.size, self._register, self._pinned = size, register, pinned
        if pinned:
            self.at = int(ok(d.cuMemHostAlloc(size, 0)))
            return
        self.at = int(_libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, _FLAGS, -1, 0) or 0)
        for flag in advice:
            if _libc.madvise(self.at, size, flag) != 0:
                raise OSError(ctypes.get_errno(), "madvise")
        if register:
            ok(d.cuMemHostRegister(self.at, size, 0))

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            ok(d.cuMemFreeHost(self.at))
            return
        if self._register:
            ok(d.cuMemHostUnregister(self.at))
        _libc.munmap(self.at, self.size)


KINDS: dict[str, Callable[[int], HostMemory]] = {
    "pageable, small pages": lambda size: HostMemory(size, (MADV_NOHUGEPAGE,)),
    "pageable, huge pages": lambda size: HostMemory(size, (MADV_HUGEPAGE,)),
    "pre-faulted, small pages": lambda size: HostMemory(size, (MADV_NOHUGEPAGE, MADV_POPULATE_WRITE)),
    "pre-faulted, huge pages": lambda size: HostMemory(size, (MADV_HUGEPAGE, MADV_POPULATE_WRITE)),
    "pinned by the driver": lambda size: HostMemory(size, (), pinned=True),
    "huge pages, pre-faulted, then pinned": lambda size: HostMemory(
        size, (MADV_HUGEPAGE, MADV_POPULATE_WRITE), register=True
    ),
}


class Copying:
    """Copies between host memory and a GPU."""

    def __init__(self) -> None:
        ok(d.cuInit(0))
        ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(0))))))
        self._stream = ok(d.cuStreamCreate(0))

    def measure(self, mib: int, rounds: int = 3) -> list[dict[str, Any]]:
        """Return the best round of each kind, in seconds, or why it is not available."""
        size = mib * MIB
        at = int(ok(d.cuMemAlloc(size)))
        ok(d.cuMemsetD32(at, 1, size // 4))
        try:
            return [self._kind(name, make, at, size, rounds) for name, make in KINDS.items()]
        finally:
            ok(d.cuMemFree(at))

    def _kind(self, name: str, make: Callable[[int], HostMemory], at: int, size: int, rounds: int) -> dict[str, Any]:
        best = {"make_s": float("inf"), "first_out_s": float("inf"), "out_s": float("inf"), "in_s": float("inf")}
        try:
            for _ in range(rounds):
                memory, made_s = _timed(lambda: make(size))
                try:
                    times = {
                        "make_s": made_s,
                        "first_out_s": self._copy(memory.at, at, size, out=True),
                        "out_s": self._copy(memory.at, at, size, out=True),
                        "in_s": self._copy(memory.at, at, size, out=False),
                    }
                finally:
                    memory.close()
                best = {key: min(best[key], value) for key, value in times.items()}
        except (OSError, RuntimeError) as error:
            return {"kind": name, "bytes": size, "why_not": str(error)}
        return {"kind": name, "bytes": size, **best}

    def _copy(self, host: int, at: int, size: int, *, out: bool) -> float:
        began = time.monotonic()
        for done in range(0, size, BLOCK):
            now = min(BLOCK, size - done)
            if out:
                ok(d.cuMemcpyDtoHAsync(host + done, at + done, now, self._stream))
            else:
                ok(d.cuMemcpyHtoDAsync(at + done, host + done, now, self._stream))
        ok(d.cuStreamSynchronize(self._stream))
        return time.monotonic() - began


def _timed(action: Callable[[], HostMemory]) -> tuple[HostMemory, float]:
    began = time.monotonic()
    return action(), time.monotonic() - began


def main() -> None:
    """Execute the commands in the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    protocol.detach()
    copying = protocol.built(options.directory, Copying)
    protocol.serve(options.directory, {"measure": copying.measure})


if __name__ == "__main__":
    main()
