"""A process whose memory somebody else fills, as CRIU's restorer leaves it: run as a program by test_filling.py.

    faulting.py SOCKET NUMBER PAGES

Maps so many pages and says where they are. A first line has it hand them over under NUMBER and say that everything is
complete; each further one names a page, whose first byte it says, or is ``all``: the digest of all of them.
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
EVENTS = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6  # fork, remap, remove, unmap: those that CRIU asks for
UFFDIO_API, UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
FINISHED = 0x52535446


def main(path: str, number: int, pages: int) -> None:
    """Hand the memory over, then answer."""
    memory = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    uffd = ctypes.CDLL(None, use_errno=True).syscall(SYSCALL, os.O_CLOEXEC | os.O_NONBLOCK)
    if uffd < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    fcntl.ioctl(uffd, UFFDIO_API, bytearray(struct.pack("=QQQ", 0xAA, EVENTS, 0)))
    fcntl.ioctl(uffd, UFFDIO_REGISTER, bytearray(struct.pack("=QQQQ", address, pages * PAGE, 1, 0)))
    print(address, flush=True)
    sys.stdin.readline()  # it is listened
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(path)
        talk.sendall(struct.pack("=i", -(number + 1)))  # a zombie
        talk.sendall(struct.pack("=i", number))
        socket.send_fds(talk, [b"\0"], [uffd])
        os.close(uffd)
        talk.sendall(struct.pack("=i", FINISHED))
        for line in sys.stdin:
            said = hashlib.sha256(memory).hexdigest() if line == "all\n" else str(memory[int(line) * PAGE])
            print(said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
