"""A FUSE file system that mirrors a directory; runs as a program and is stalled by SIGSTOP (``stalling.py``).

    passthrough.py DIRECTORY MOUNTPOINT

Needs root and ``/dev/fuse``. Prints ``mounted``, then handles requests until it is killed. Numbers and structures are
those of ``linux/fuse.h``.
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH208 - system calls, as they come in
from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable

HEADER = struct.Struct("=IIQQIIII")
ENTRY, ATTRIBUTES, OPENED = struct.Struct("=QQQQII"), struct.Struct("=QII"), struct.Struct("=QII")
FACTS, SET = struct.Struct("=QQQQQQIIIIIIIIII"), struct.Struct("=IIQQQQQQIIIIIIII")
STATFS, READ = struct.Struct("=QQQQQIIII24x"), struct.Struct("=QQI")
UNWANTED = os.O_DIRECT | os.O_NOFOLLOW
FORGET, BATCH_FORGET, INTERRUPT = 2, 42, 36


class Passthrough:
    """State of the mirrored directory, and a handler for each request."""

    def __init__(self, root: str) -> None:
        self.paths, self.numbers = {1: root}, {root: 1}
        self.listed: dict[int, list[str]] = {}
        self.last = 1
        self.calls: dict[int, Callable[[str, bytes], bytes]] = {
            1: lambda path, data: self.entry(inside(path, data)),
            3: lambda path, data: ATTRIBUTES.pack(0, 0, 0) + self.facts(path),
            4: self.set, 9: self.mkdir, 10: self.unlink, 11: self.rmdir, 12: self.rename, 45: self.rename2,
            13: self.link, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs, 18: self.release,
            20: self.nothing, 25: self.nothing, 26: self.init, 27: self.opendir, 28: self.readdir, 29: self.nothing,
            30: self.nothing, 35: self.create,
        }  # fmt: skip

    def answer(self, call: int, node: int, data: bytes) -> bytes:
        """Raises ``OSError``."""
        if call not in self.calls:
            raise OSError(errno.ENOSYS, "")
        return self.calls[call](self.paths.get(node, ""), data)

    def entry(self, path: str) -> bytes:
        facts = self.facts(path)
        if path not in self.numbers:
            self.last += 1
            self.numbers[path], self.paths[self.last] = self.last, path
        return ENTRY.pack(self.numbers[path], 0, 0, 0, 0, 0) + facts

    @staticmethod
    def facts(path: str) -> bytes:
        status = os.lstat(path)
        times = int(status.st_atime), int(status.st_mtime), int(status.st_ctime)
        attributes = status.st_mode, status.st_nlink, status.st_uid, status.st_gid
        return FACTS.pack(status.st_ino, status.st_size, status.st_blocks, *times, 0, 0, 0, *attributes, 0, 4096, 0)

    def nothing(self, path: str, data: bytes) -> bytes:
        return b""

    def init(self, path: str, data: bytes) -> bytes:
        return struct.pack("=IIIIHHIIHH28x", 7, 31, 1 << 16, 0, 12, 10, 1 << 17, 1, 32, 0)

    def set(self, path: str, data: bytes) -> bytes:
        valid, _, _, size, _, _, _, _, _, _, _, mode, _, uid, gid, _ = SET.unpack_from(data)
        if valid & 1:
            os.chmod(path, mode & 0o7777)
        if valid & 6:
            os.lchown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(path, size)
        return ATTRIBUTES.pack(0, 0, 0) + self.facts(path)

    def mkdir(self, path: str, data: bytes) -> bytes:
        made = inside(path, data, 8)
        os.mkdir(made, struct.unpack_from("=I", data)[0] & 0o7777)
        return self.entry(made)

    def unlink(self, path: str, data: bytes) -> bytes:
        os.unlink(inside(path, data))
        self.numbers.pop(inside(path, data), None)
        return b""

    def rmdir(self, path: str, data: bytes) -> bytes:
        os.rmdir(inside(path, data))
        self.numbers.pop(inside(path, data), None)
        return b""

    def rename(self, path: str, data: bytes, names: int = 8) -> bytes:
        before, after = data[names:].split(b"\0")[:2]
        old = inside(path, before)
        new = inside(self.paths[struct.unpack_from("=Q", data)[0]], after)
        os.rename(old, new)
        self.numbers.pop(new, None)
        for number, known in list(self.paths.items()):
            if known == old or known.startswith(old + "/"):
                self.numbers.pop(known, None)
                self.paths[number] = new + known[len(old) :]
                self.numbers[self.paths[number]] = number
        return b""

    def rename2(self, path: str, data: bytes) -> bytes:
        return self.rename(path, data, 16)

    def link(self, path: str, data: bytes) -> bytes:
        os.link(self.paths[struct.unpack_from("=Q", data)[0]], inside(path, data, 8))
        return self.entry(inside(path, data, 8))

    def open(self, path: str, data: bytes) -> bytes:
        (flags,) = struct.unpack_from("=I", data)
        return OPENED.pack(os.open(path, flags & ~(UNWANTED | os.O_EXCL | os.O_CREAT | os.O_APPEND)), 0, 0)

    def create(self, path: str, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("=II", data)
        made = inside(path, data, 16)
        opened = OPENED.pack(os.open(made, flags & ~UNWANTED | os.O_CREAT, mode & 0o7777), 0, 0)
        return self.entry(made) + opened

    def read(self, path: str, data: bytes) -> bytes:
        fd, at, size = READ.unpack_from(data)
        return os.pread(fd, size, at)

    def write(self, path: str, data: bytes) -> bytes:
        fd, at, size = READ.unpack_from(data)
        return struct.pack("=II", os.pwrite(fd, data[40 : 40 + size], at), 0)

    def statfs(self, path: str, data: bytes) -> bytes:
        item = os.statvfs(path)
        blocks = item.f_blocks, item.f_bfree, item.f_bavail
        return STATFS.pack(*blocks, item.f_files, item.f_ffree, item.f_bsize, 255, item.f_frsize, 0)

    def release(self, path: str, data: bytes) -> bytes:
        os.close(struct.unpack_from("=Q", data)[0])
        return b""

    def opendir(self, path: str, data: bytes) -> bytes:
        handle = len(self.listed) + 1
        self.listed[handle] = [".", "..", *os.listdir(path)]
        return OPENED.pack(handle, 0, 0)

    def readdir(self, path: str, data: bytes) -> bytes:
        handle, at, size = READ.unpack_from(data)
        out = b""
        for number, text in enumerate(self.listed[handle][at:], at + 1):
            name = text.encode()
            row = struct.pack("=QQII", number, number, len(name), 0) + name
            row += bytes(-len(row) % 8)
            if len(out) + len(row) > size:
                break
            out += row
        return out


def inside(path: str, data: bytes, at: int = 0) -> str:
    """Return the path of the name at a byte of a request, in a directory."""
    return path + "/" + data[at:].split(b"\0")[0].decode()


def main(root: str, place: str) -> None:
    """Mount the file system and handle requests."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if libc.mount(b"passthrough", place.encode(), b"fuse", 6, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    shown = Passthrough(root)
    while True:
        try:
            request = os.read(fd, 1 << 18)
        except OSError:  # unmounted
            return
        _, call, unique, node, *_ = HEADER.unpack_from(request)
        if call in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        reply, wrong = b"", 0
        try:
            reply = shown.answer(call, node, request[HEADER.size :])
        except OSError as error:
            wrong = error.errno or errno.EIO
        os.write(fd, struct.pack("=IiQ", 16 + len(reply), -wrong, unique) + reply)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
