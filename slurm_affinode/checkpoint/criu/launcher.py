"""Start a program as root inside the namespaces of a job. The namespaces and the program are passed as descriptors.

This is a separate program (``python -I -S criu_launcher.py ...``) with few imports, so that it does not delay small
restores. The only path it opens inside the namespaces is ``/proc/sys/kernel/ns_last_pid``. The program that it starts
has the cgroups and CPUs of the job, no supplementary groups, and its own session keyring, because the restored process
tree inherits these from CRIU (``restore_creds`` in ``criu/pie/restorer.c`` does not change the groups if the image
lists none).
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
"""Exit status if the program could not be started."""


def main(arguments: list[str]) -> int:
    """Start a program, wait for it, and return its exit status, or 128 plus the signal that killed it.

    ``arguments``: descriptors of the program, the PID namespace and the mount namespace; value for ``ns_last_pid``
    (0: unchanged); descriptors of ``cgroup.procs`` and CPU numbers, each as a comma-separated list; the arguments of
    the program, beginning with ``argv[0]``.
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
    """Set up cgroups, CPUs, groups, keyring and namespaces for the program. Raises ``OSError``."""
    for fd in cgroups:
        os.write(fd, b"0")
        os.close(fd)
    if cpus:
        try:  # noqa: SIM105 - contextlib takes longer to import than all of this
            os.sched_setaffinity(0, cpus)
        except OSError:
            pass  # the CPUs allowed by the cgroup have changed meanwhile
    _new_session_keyring()
    os.setgroups([])
    for fd, kind in ((pid_ns, _NEWPID), (mount_ns, _NEWNS)):
        _call("setns", fd, kind)
        os.close(fd)
    os.chdir("/")


def _new_session_keyring() -> None:
    """Join a new session keyring, so that the job cannot read keys of the agent's session. Raises ``OSError``."""
    machine = os.uname().machine
    number = _SYS_KEYCTL.get(machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of keyctl(2) on {machine} is not known")
    try:
        _call("syscall", number, _JOIN_SESSION_KEYRING, None)
    except OSError as error:
        if error.errno != errno.ENOSYS:  # kernel without key management
            raise


def _set_last_pid(last: int) -> None:
    """Set ``ns_last_pid``, so that CRIU and its helpers take no PID that the job needs.

    A child writes it, because ``setns(2)`` moves only children to the PID namespace. Its own PID is free again when it
    has ended.
    """
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
        # Kill CRIU if this program dies: otherwise CRIU would keep holding the process tree.
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
