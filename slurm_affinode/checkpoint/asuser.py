"""Files of a job, opened with the rights of its user: the kernel decides, and not root.

What a job has open, and what its shepherd hands over, is the user's choice. A descriptor that may only read would
become one that writes if root opened it again through ``/proc/self/fd``. So that is done in a thread of its own whose
rights on files are the user's (``setfsuid(2)``, which also takes away root's), with the user's groups.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slurm_affinode import kerneltext
from slurm_affinode.pinned import PROC, Process

T = TypeVar("T")
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
MOST_ID = (1 << 32) - 2
"""The largest number of a user or a group; the next one stands for none."""
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "ppc64le": 81, "riscv64": 159}
"""The call itself: libc's function of that name changes the groups of all threads."""
_SYS_SETRESUID = {"x86_64": (117, 119), "aarch64": (147, 149), "ppc64le": (164, 169), "riscv64": (147, 149)}
"""setresuid(2) and setresgid(2), as above."""


@dataclass(frozen=True, slots=True)
class User:
    """Whose rights count."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def user_of(pid: int, uid: int, gid: int, *, started: int | None = None, proc: Path = PROC) -> User:
    """A job's user, with the groups that a process of the job has; without groups where that is another's process."""
    try:
        with Process(pid, started=started, proc=proc) as process:
            facts = process.status()
    except OSError:
        return User(uid, gid)
    if set(facts.get("Uid", "").split()) != {str(uid)}:
        return User(uid, gid)
    return User(uid, gid, kerneltext.numbers(facts.get("Groups", "")))


def as_user(
    user: User, call: Callable[[], T], *, namespace_fd: int | None = None, effective: bool = False
) -> T:  # fmt: skip
    """What ``call`` gives, made with the user's rights on files; what it raises is raised here.

    Only root can take another's; for anybody else ``call`` is made as it is. ``namespace_fd``: a mount namespace whose
    root is the root of all paths meanwhile. ``effective``: the effective IDs are the user's, too, which sockets show to
    their peers (``SO_PEERCRED``); the real ones stay root's, so that the user can signal no thread. Raises ``OSError``
    where the rights cannot be taken, or the namespace not be entered: then nothing was done.
    """
    if namespace_fd is None and (os.geteuid() != 0 or user.uid == 0):
        return call()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if namespace_fd is not None:
                _enter(namespace_fd)
            if os.geteuid() == 0 and user.uid != 0:
                _become(user, effective=effective)
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="as-user")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(namespace_fd: int) -> None:
    """This thread alone: with a root and a working directory of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_FS) != 0 or libc.setns(namespace_fd, _CLONE_NEWNS) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"the mount namespace cannot be entered: {os.strerror(error)}")


def _become(user: User, *, effective: bool = False) -> None:
    """This thread alone, for good: it ends soon."""
    if not all(0 <= one <= MOST_ID for one in (user.uid, user.gid, *user.groups)):
        # ctypes takes a number modulo 2**32: 4294967296 would be root.
        raise OSError(errno.EINVAL, "setfsuid: not the number of a user or group")
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYS_SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(38, f"the number of setgroups(2) on {platform.machine()} is not known")
    groups = (ctypes.c_uint32 * len(user.groups))(*user.groups)
    if libc.syscall(number, len(user.groups), groups) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setgroups: {os.strerror(error)}")
    for change, wanted in ((libc.setfsgid, user.gid), (libc.setfsuid, user.uid)):
        change(ctypes.c_uint32(wanted))
        if change(ctypes.c_uint32(0xFFFFFFFF)) != ctypes.c_int32(wanted).value:  # says what it is, and changes nothing
            raise OSError(1, "setfsuid: the user's rights cannot be taken")
    if effective:
        setresuid, setresgid = _SYS_SETRESUID[platform.machine()]
        for call, wanted in ((setresgid, user.gid), (setresuid, user.uid)):
            if libc.syscall(call, ctypes.c_uint32(0xFFFFFFFF), ctypes.c_uint32(wanted), ctypes.c_uint32(0xFFFFFFFF)):
                error = ctypes.get_errno()
                raise OSError(error, f"setresuid: {os.strerror(error)}")
