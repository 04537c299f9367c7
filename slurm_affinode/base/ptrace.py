"""ptrace(2). The kernel detaches what a thread traces when the thread ends."""

from __future__ import annotations

import ctypes
import os
from functools import cache

SYSCALL, DETACH, SETOPTIONS = 24, 17, 0x4200
GETREGSET, SETREGSET, SEIZE, INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
GETSIGMASK, SETSIGMASK = 0x420A, 0x420B
GET_SYSCALL_USER_DISPATCH_CONFIG = 0x4211
"""Requests (``linux/ptrace.h``)."""


def ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    """Make a request for a thread. Raises ``OSError``."""
    if _libc().ptrace(request, thread, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    return libc
