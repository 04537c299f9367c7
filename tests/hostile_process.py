"""A process whose user has made its arguments and environment as large as its address space."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

HUGE = 1 << 40
"""Bytes of arguments and environment, without any memory: they are a mapping of zeros."""
_PROGRAM = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size = int(sys.argv[1])
begin = libc.mmap(None, size, 1, 0x4022, -1, 0)  # PROT_READ; MAP_NORESERVE, MAP_ANONYMOUS, MAP_PRIVATE
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
code, end, stack, heap = (int(fields[number - 3]) for number in (26, 27, 28, 47))
data = [int(fields[number - 3]) for number in (45, 46)]
numbers = [code, end, *data, heap, heap + 4096, stack, begin, begin + size, begin, begin + size, 0]
arguments = (ctypes.c_uint64 * 13)(*numbers, 0xFFFFFFFF << 32)  # struct prctl_mm_map: no auxv, no exe_fd
PR_SET_MM, PR_SET_MM_MAP = 35, 14
if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, arguments, ctypes.sizeof(arguments), 0) != 0:
    sys.exit(f"prctl: errno {ctypes.get_errno()}")
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def huge_arguments() -> Iterator[int]:
    """Run such a process and yield its PID; skip the test on a kernel without checkpoints."""
    argv = [sys.executable, "-c", _PROGRAM, str(HUGE)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                pytest.skip("the kernel has no PR_SET_MM_MAP")
            yield process.pid
        finally:
            process.stdin.close()


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
"""


def in_a_gibibyte(program: str, pid: int) -> str:
    """Run a Python program with 1 GiB of memory, and ``sys.argv[1]`` the PID; return what it prints."""
    argv = [sys.executable, "-c", _LIMITED + program, str(pid)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
