"""Who is at the other end of a socket, by the kernel's account alone, and the processes of a job's PID namespace."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.gpu.jobs import JobFinder

_CRED = struct.Struct("iII")
_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)


class NotAShepherd(ValueError):  # noqa: N818 - names what is the case
    """A process that cannot be the shepherd of a job. The text says why, for the log."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that made a connection."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Identity:
    """A shepherd that the kernel vouches for."""

    job_id: int
    uid: int
    gid: int
    pid: int
    started: int
    """Ticks since boot."""


def peer_of(connection: socket.socket) -> Peer:
    """Process, user and group that connected (``SO_PEERCRED``)."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size)
    pid, uid, gid = _CRED.unpack(data)
    return Peer(pid, uid, gid)


def pidfd_of(connection: socket.socket, peer: Peer) -> int:
    """A descriptor of the process that connected, however often its number is given to others; the caller closes it.

    From Linux 6.5 on the kernel kept it at ``connect()``; before, it is that of the process that has the number now, so
    that this is to be asked at once. Raises ``OSError`` where it is gone.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEERPIDFD)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise
    return os.pidfd_open(peer.pid)


def has_ended(pidfd: int) -> bool:
    """Whether the process of a descriptor is over: what was read of its number may be another's then."""
    look = select.poll()
    look.register(pidfd, select.POLLIN)
    return bool(look.poll(0))


class Inspector:
    """Looks at processes in ``/proc``."""

    def __init__(self, proc: Path = Path("/proc"), finder: JobFinder | None = None) -> None:
        self._proc = proc
        self._finder = finder or JobFinder(proc)

    def identify(self, peer: Peer) -> Identity:
        """The job whose shepherd ``peer`` is. Raises ``NotAShepherd``.

        A shepherd is PID 1 of a PID namespace below this one, in this user namespace: only root makes one without the
        other, so that a user's own container cannot pass for one. Its job is that of its cgroup or of its root
        ``slurmstepd``; what its environment says does not count.
        """
        started = self._finder.started(peer.pid)
        if started is None:
            raise NotAShepherd(f"process {peer.pid} is gone")
        namespaces = self.ns_pids(peer.pid)
        if len(namespaces) < 2 or namespaces[-1] != 1:
            raise NotAShepherd(f"process {peer.pid} is not PID 1 of a PID namespace")
        if self._owner(peer.pid) != peer.uid:
            raise NotAShepherd(f"process {peer.pid} is not of user {peer.uid}, who connected")
        if self._user_namespace(peer.pid) != self._user_namespace(os.getpid()):
            raise NotAShepherd(f"process {peer.pid} is in a user namespace of its own")
        job = self._finder.find(peer.pid, started)
        if job is None or job.source == "environment":
            raise NotAShepherd(f"process {peer.pid} is of no job")
        return Identity(job.job_id, peer.uid, peer.gid, peer.pid, started)

    def started(self, pid: int) -> int | None:
        """When a process started, in ticks since boot; ``None``: it is gone."""
        return self._finder.started(pid)

    def ns_pids(self, pid: int) -> tuple[int, ...]:
        """Its PIDs from this namespace inwards; ``()``: it is gone."""
        # Not splitlines(): the process chooses its name, which comes first and may hold more than one kind of line end.
        for line in self._text(pid, "status").split("\n"):
            if line.startswith("NSpid:"):
                return tuple(int(word) for word in line.split()[1:])
        return ()

    def tree(self, init_pid: int) -> list[int]:
        """All processes of the PID namespace of ``init_pid``, itself first. PIDs are those of this namespace."""
        found, todo = [init_pid], [init_pid]
        while todo:
            for child in self._children(todo.pop()):
                found.append(child)
                todo.append(child)
        return found

    def cpu_ticks(self, pid: int) -> int | None:
        """Time on CPUs, of the process and of its children that have ended, in ticks."""
        fields = self._text(pid, "stat").rpartition(")")[2].split()
        try:
            return sum(int(fields[at]) for at in (11, 12, 13, 14))
        except (IndexError, ValueError):
            return None

    def io_bytes(self, pid: int) -> tuple[int, int] | None:
        """Bytes from and to storage, and through reads and writes of any kind."""
        values = dict(line.split(": ", 1) for line in self._text(pid, "io").splitlines() if ": " in line)
        try:
            return int(values["read_bytes"]) + int(values["write_bytes"]), int(values["rchar"]) + int(values["wchar"])
        except (KeyError, ValueError):
            return None

    def _children(self, pid: int) -> Iterator[int]:
        try:
            threads = list((self._proc / str(pid) / "task").iterdir())
        except OSError:
            return
        for thread in threads:
            for word in self._text(pid, f"task/{thread.name}/children").split():
                yield int(word)

    def _owner(self, pid: int) -> int | None:
        try:
            return (self._proc / str(pid)).stat().st_uid
        except OSError:
            return None

    def _user_namespace(self, pid: int) -> tuple[int, int] | None:
        try:
            status = (self._proc / str(pid) / "ns" / "user").stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._proc / str(pid) / name).read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""
