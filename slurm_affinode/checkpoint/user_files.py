"""Access to files of a job with the rights of its user, so that the kernel checks them and root's rights do not apply.

The user controls the open files of a job and what its shepherd passes on. A read-only descriptor would become writable
if root reopened it through ``/proc/self/fd``. So files are opened in a separate thread with the file system rights of
the user (``setfsuid(2)``, which also drops root's) and the user's groups.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from slurm_affinode.base.threads import in_own_thread

T = TypeVar("T")
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
MOST_ID = (1 << 32) - 2
"""The largest user or group ID; the next number means none."""
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "ppc64le": 81, "riscv64": 159}
"""The system call itself: libc's function of that name changes the groups of all threads."""
_SYS_SETRESUID = {"x86_64": (117, 119), "aarch64": (147, 149), "ppc64le": (164, 169), "riscv64": (147, 149)}
"""setresuid(2) and setresgid(2), as above."""
_CAPABILITY_VERSION = 0x20080522
_CAP_SYS_RESOURCE = 24


@dataclass(frozen=True, slots=True)
class User:
    """The owner of a job, from records of root: the announcement of its shepherd, a journal or a manifest.

    Never from a process, which its user can exchange at any moment.
    """

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @property
    def is_root(self) -> bool:
        """Whether it has the rights of root or of root's group. Nothing is done as root for such a job."""
        return 0 in (self.uid, self.gid)


def as_user(
    user: User, call: Callable[[], T], *, namespace_fd: int | None = None, effective: bool = False
) -> T:  # fmt: skip
    """Run ``call`` with the user's file system rights; return its result and pass on its errors.

    Only root can change its rights; for other users ``call`` runs unchanged. ``namespace_fd``: a mount namespace, in
    which paths are resolved meanwhile. ``effective``: set the effective IDs as well, which sockets show to their peers
    (``SO_PEERCRED``); the real IDs stay root's, so that the user can signal no thread. Raises ``OSError`` if the rights
    cannot be set or the namespace cannot be entered, and ``PermissionError`` for a user or group with the rights of
    root, with whose rights nothing is done for a user. ``call`` has not run then.
    """
    if os.geteuid() == 0 and user.is_root:
        raise PermissionError(errno.EPERM, "root does not act with its own rights for a user")
    if namespace_fd is None and os.geteuid() != 0:
        return call()

    def run() -> T:
        if namespace_fd is not None:
            _enter(namespace_fd)
        if os.geteuid() == 0:
            _become(user, effective=effective)
        return call()

    return in_own_thread("as-user", run)


def _enter(namespace_fd: int) -> None:
    """Enter the namespace in this thread only, with a root and working directory of its own."""
    if _LIBC.unshare(_CLONE_FS) != 0 or _LIBC.setns(namespace_fd, _CLONE_NEWNS) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"the mount namespace cannot be entered: {os.strerror(error)}")


def _become(user: User, *, effective: bool = False) -> None:
    """Change this thread only, permanently: it ends soon."""
    if not all(0 <= group <= MOST_ID for group in (user.uid, user.gid, *user.groups)):
        # ctypes takes a number modulo 2**32, so 4294967296 would be root.
        raise OSError(errno.EINVAL, "setfsuid: not the number of a user or group")
    number = _SYS_SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(38, f"the number of setgroups(2) on {platform.machine()} is not known")
    groups = (ctypes.c_uint32 * len(user.groups))(*user.groups)
    if _LIBC.syscall(number, len(user.groups), groups) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setgroups: {os.strerror(error)}")
    for change, identity in ((_LIBC.setfsgid, user.gid), (_LIBC.setfsuid, user.uid)):
        change(ctypes.c_uint32(identity))
        if change(ctypes.c_uint32(0xFFFFFFFF)) != ctypes.c_int32(identity).value:  # only reads the current ID
            raise OSError(1, "setfsuid: the user's rights cannot be taken")
    _apply_quotas()
    if effective:
        setresuid, setresgid = _SYS_SETRESUID[platform.machine()]
        for call, identity in ((setresgid, user.gid), (setresuid, user.uid)):
            if _LIBC.syscall(call, ctypes.c_uint32(0xFFFFFFFF), ctypes.c_uint32(identity), ctypes.c_uint32(0xFFFFFFFF)):
                error = ctypes.get_errno()
                raise OSError(error, f"setresuid: {os.strerror(error)}")


def _apply_quotas() -> None:
    """Drop CAP_SYS_RESOURCE, which setfsuid(2) keeps, in this thread: it exceeds quotas and takes reserved blocks."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower 32 of each, then the upper
    failed = _LIBC.capget(header, sets)
    sets[0] &= ~(1 << _CAP_SYS_RESOURCE)
    if failed or _LIBC.capset(header, sets):
        error = ctypes.get_errno()
        raise OSError(error, f"capset: {os.strerror(error)}")
