#!/usr/bin/python3
"""Memory: digests of private and shared areas, protections, a locked page, and a mapped program of its own."""

import ctypes
import hashlib
import mmap
import os

from moving import run, same

LIBC = ctypes.CDLL(None, use_errno=True)
areas = [bytearray(os.urandom(8 << 20)) for _ in range(4)]
digests = [hashlib.sha256(area).digest() for area in areas]
shared = mmap.mmap(-1, 1 << 20)
shared.write(os.urandom(1 << 20))
digest = hashlib.sha256(shared[:]).digest()
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\xb8\x2a\0\0\0\xc3")  # mov eax, 42; ret
answer = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
guard = mmap.mmap(-1, 3 * 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(guard))
LIBC.mprotect(ctypes.c_void_p(start + 4096), 4096, 0)


def protections():
    with open("/proc/self/maps") as file:
        return [line.split()[1] for line in file if start <= int(line.partition("-")[0], 16) < start + 3 * 4096]


before = protections()
if child := os.fork():
    pass
else:
    while hashlib.sha256(shared[:]).digest() == digest and os.getppid() != 1:
        os.sched_yield()
        __import__("time").sleep(0.5)
    os._exit(1)


def check():
    same([hashlib.sha256(area).digest() for area in areas], digests, "private memory")
    same(hashlib.sha256(shared[:]).digest(), digest, "shared memory")
    same(answer(), 42, "the mapped program")
    same(os.waitpid(child, os.WNOHANG), (0, 0), "the child that reads shared memory")


run(check, lambda: same(protections(), before, "protections"))
os.kill(child, 9)
