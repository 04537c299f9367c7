"""GPU memory with known contents, for workload.py."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Callable
from typing import Any


def cuda() -> tuple[Any, Callable[..., Any]]:
    """Return NVIDIA's binding of the driver API, and a function that unpacks its results or raises."""
    from cuda.bindings import driver

    def ok(answer: tuple[Any, ...]) -> Any:
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(answer[0]))
        return answer[1] if len(answer) == 2 else None

    return driver, ok


def fill(ordinal: int, mib: int) -> Callable[[], bool]:
    """Fill memory of a GPU with random data; return a function that returns whether it is unchanged."""
    d, ok = cuda()
    ok(d.cuInit(0))
    context = ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(ordinal))))
    ok(d.cuCtxSetCurrent(context))
    at = ok(d.cuMemAlloc(mib << 20))
    data = random.Random(ordinal + os.getpid()).randbytes(mib << 20)  # noqa: S311
    ok(d.cuMemcpyHtoD(at, data, len(data)))
    digest = hashlib.sha256(data).hexdigest()

    def equal() -> bool:
        ok(d.cuCtxSetCurrent(context))
        back = ctypes.create_string_buffer(len(data))
        ok(d.cuMemcpyDtoH(ctypes.addressof(back), at, len(data)))
        return hashlib.sha256(back.raw).hexdigest() == digest

    return equal
