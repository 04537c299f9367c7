"""Starts a program of root's inside the namespaces of a job: entered by descriptor, executed by descriptor.

A program of its own (``python -I -S launcher.py ...``) that imports next to nothing, since a small restore should not
wait for it. It looks up no name inside the namespaces. What it starts has the cgroups and CPUs of the job, no
supplementary groups, and a session keyring of its own: CRIU passes on to the restored tree what it has itself
(``restore_creds`` in ``criu/pie/restorer.c`` leaves the groups as they are where the image lists none).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_NEWNS, _NEWPID = 0x00020000, 0x20000000
_JOIN_SESSION_KEYRING = 1
_SET_PDEATHSIG, _SIGKILL = 1, 9
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271, "riscv64": 219}
_LAST_PID = "/proc/sys/kernel/ns_last_pid"
FAILED = 125
"""Exit status where the program was not started."""


def main(arguments: list[str]) -> int:
    """Start a program and wait for it; its exit status, or 128 and its signal.

    ``arguments``: descriptors of the program, the PID and the mount namespace; the number before those that are taken
    in the namespace (0: as it is); descriptors of ``cgroup.procs`` and numbers of CPUs, separated by commas; the
    program's own arguments.
    """
    program, pid_ns, mount_ns, last_pid = map(int, arguments[:4])
    cgroups, cpus = ([int(word) for word in text.split(",") if word] for text in arguments[4:6])
    try:
        _prepare(pid_ns, mount_ns, cgroups, cpus)
        if last_pid:
            _set_last_pid(last_pid)
        child = os.fork()
    except OSError as error:
        return _fail(f"the job's namespaces cannot be entered: {error}")
    if child == 0:
        _execute(program, arguments[6:])
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _prepare(pid_ns: int, mount_ns: int, cgroups: list[int], cpus: list[int]) -> None:
    """Become what the program is to be started from. Raises ``OSError``."""
    for fd in cgroups:
        os.write(fd, b"0")
        os.close(fd)
    if cpus:
        try:  # noqa: SIM105 - contextlib takes longer to import than all of this
            os.sched_setaffinity(0, cpus)
        except OSError:
            pass  # its cgroup allows others by now
    _new_session_keyring()
    os.setgroups([])
    for fd, kind in ((pid_ns, _NEWPID), (mount_ns, _NEWNS)):
        _call("setns", fd, kind)
        os.close(fd)
    os.chdir("/")


def _new_session_keyring() -> None:
    """Without it a restored job would read the keys of the agent's session. Raises ``OSError``."""
    machine = os.uname().machine
    number = _SYS_KEYCTL.get(machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of keyctl(2) on {machine} is not known")
    try:
        _call("syscall", number, _JOIN_SESSION_KEYRING, None)
    except OSError as error:
        if error.errno != errno.ENOSYS:  # a kernel without keys
            raise


def _set_last_pid(last: int) -> None:
    """Let numbers that the job needs be free: by a process of the namespace, whose own number is free again then."""
    child = os.fork()
    if child == 0:
        try:
            fd = os.open(_LAST_PID, os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, str(last).encode())
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        number = os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.ESRCH
        raise OSError(number, os.strerror(number), _LAST_PID)


def _execute(program: int, argv: list[str]) -> None:
    try:
        # The end of this program ends CRIU as well, which would otherwise hold the process tree.
        _call("prctl", _SET_PDEATHSIG, _SIGKILL)
        os.execve(program, argv, dict(os.environ))  # noqa: S606 - a descriptor
    except OSError as error:
        _fail(f"{argv[0]}: {error.strerror}")
    os._exit(FAILED)


def _call(name: str, *arguments: int | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _fail(why: str) -> int:
    os.write(2, f"{why}\n".encode(errors="backslashreplace"))
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
