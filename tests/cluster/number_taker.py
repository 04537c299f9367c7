"""Reuse the PID of an ended process as a user: as PID 1 of namespaces in which programs of the user are mounted.

``number_taker.py NUMBER UID DIRECTORY``, run as root on a node. A user would fork until the PID comes round again.
Here the kernel's next PID is set instead, to save that time; everything else is done with the user's rights. A
program that is run in place of one of root's appends a line to DIRECTORY/ran, with the user namespace and the UID it
has there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

ATTEMPTS = 200
PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/opt/slurm-affinode/bin")
NAMES = ("sh", "bash", "criu", "criu-pausing", "nsenter", "python", "python3", "sleep", "cat", "true")
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def main() -> None:
    """Try until the PID is reused, then wait."""
    number, uid, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    (directory / "pid").write_text(str(os.getpid()))  # lead the session of all processes of this program
    programs = directory / "own"
    programs.mkdir(exist_ok=True)
    for name in NAMES:
        program = programs / name
        program.write_text(
            "#!/bin/bash -p\n"
            f'echo "$0 uid=$(/usr/bin/id -u) $(/usr/bin/readlink /proc/self/ns/user)" >>{directory}/ran\n'
        )
        program.chmod(0o755)
    # The container mounts the kernel's file read-only; a mount of our own is writable.
    os.unshare(os.CLONE_NEWNS)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)
    for _ in range(ATTEMPTS):
        if taken(libc, number, uid, programs):
            (directory / "taken").touch()
            time.sleep(120)
            return
    sys.exit(f"PID {number} could not be reused")


def taken(libc: ctypes.CDLL, number: int, uid: int, programs: Path) -> bool:
    """Try once: a process of the user creates namespaces, and its child is their PID 1."""
    ready, go = os.pipe(), os.pipe()
    maker = os.fork()
    if maker == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: otherwise its files in /proc belong to root
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWPID | os.CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {uid} 1")
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        child = os.fork()
        if child == 0:
            become_init(libc, programs)
        os.write(ready[1], b"y" if child == number else b"n")
        if child != number:
            os.kill(child, signal.SIGKILL)
            os._exit(0)
        os.waitpid(child, 0)
        os._exit(0)
    os.read(ready[0], 1)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
    os.write(go[1], b"g")
    got = os.read(ready[0], 1) == b"y"
    if not got:
        os.waitpid(maker, 0)
    for fd in (*ready, *go):
        os.close(fd)
    return got


def become_init(libc: ctypes.CDLL, programs: Path) -> None:
    """As PID 1, mount programs of the user over those of the node."""
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    for place in PLACES:
        libc.mount(os.fsencode(programs), place.encode(), None, MS_BIND, None)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
