#!/usr/bin/python3
"""Files: positions, a removed one, one without a name, appended ones, holes, mappings, and one shared with a child."""

import mmap
import os
import subprocess
import tempfile

from moving import run, same

home = os.path.expanduser("~")
removed = tempfile.TemporaryFile(dir=home)
removed.write(b"without a name")
removed.flush()
appended = tempfile.NamedTemporaryFile(dir=home)
appending = os.open(appended.name, os.O_WRONLY | os.O_APPEND)
holes = tempfile.NamedTemporaryFile(dir=home)
os.pwrite(holes.fileno(), b"end", 1 << 30)
mapped = mmap.mmap(removed.fileno(), 14)
anonymous = mmap.mmap(-1, 64 << 20)
anonymous[: 32 << 20 : 4096] = bytes(at % 251 for at in range(8192))
pattern = bytes(anonymous[: 32 << 20 : 4096])
unnamed = os.open(home, os.O_RDWR | os.O_TMPFILE, 0o640)
os.write(unnamed, b"complete")
shared = tempfile.TemporaryFile(dir=home)
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=shared, bufsize=0)
lines = 0


def check():
    global lines
    same(os.pread(removed.fileno(), 100, 0), b"without a name", "the removed file")
    same(bytes(mapped), b"without a name", "the mapping of the removed file")
    os.write(appending, b"line\n")
    child.stdin.write(b"line\n")
    lines += 1
    same(os.stat(appended.name).st_size, 5 * lines, "the size of the file that is appended to")
    while os.lseek(shared.fileno(), 0, os.SEEK_CUR) < 5 * lines:
        pass
    same(os.lseek(shared.fileno(), 0, os.SEEK_CUR), 5 * lines, "the position that a child shares")
    same(os.pread(holes.fileno(), 10, (1 << 30) - 1), b"\0end", "the file with a hole")
    same(bytes(anonymous[: 32 << 20 : 4096]), pattern, "anonymous memory")


run(check)
name = f"{home}/named-{os.getpid()}"
os.link(f"/proc/self/fd/{unnamed}", name, src_dir_fd=0, follow_symlinks=True)  # linkat(2) follows links on request only
same((open(name, "rb").read(), os.stat(name).st_mode & 0o777), (b"complete", 0o640), "the file that had no name")
os.unlink(name)
