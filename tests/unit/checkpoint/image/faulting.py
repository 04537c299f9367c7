"""A process whose memory another process fills, as with CRIU's restorer; test_page_filler.py runs it as a program.

    faulting.py SOCKET NUMBER PAGES

It maps PAGES pages and prints their address. The first line on its input makes it send their userfaultfd under NUMBER
and report that the restore has finished. Each further line is a page, whose first byte is printed, or ``all``, for the
digest of all pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import platform
import socket
import struct
import sys

PAGE = 4096
SYSCALL = {"x86_64": 323, "aarch64": 282}[platform.machine()]
EVENTS = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6  # fork, remap, remove, unmap: the events that CRIU requests
UFFDIO_API, UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
FINISHED = 0x52535446


def main(path: str, number: int, pages: int) -> None:
    """Send the userfaultfd, then print pages or the digest."""
    memory = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    uffd = ctypes.CDLL(None, use_errno=True).syscall(SYSCALL, os.O_CLOEXEC | os.O_NONBLOCK)
    if uffd < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    fcntl.ioctl(uffd, UFFDIO_API, bytearray(struct.pack("=QQQ", 0xAA, EVENTS, 0)))
    fcntl.ioctl(uffd, UFFDIO_REGISTER, bytearray(struct.pack("=QQQQ", address, pages * PAGE, 1, 0)))
    print(address, flush=True)
    sys.stdin.readline()  # the socket listens
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(path)
        talk.sendall(struct.pack("=i", -(number + 1)))  # a zombie
        talk.sendall(struct.pack("=i", number))
        socket.send_fds(talk, [b"\0"], [uffd])
        os.close(uffd)
        talk.sendall(struct.pack("=i", FINISHED))
        for line in sys.stdin:
            text = hashlib.sha256(memory).hexdigest() if line == "all\n" else str(memory[int(line) * PAGE])
            print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
