"""Identification of the process at the other end of a socket, and inspection of the processes of a job."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.node_config import RUN_DIR, SHEPHERD
from slurm_affinode.base.pidfd import PROC, NotContainedError, Process, namespace, own_namespace
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.suspension.job.announcements import DIRECTORY, Announcement, AnnouncementError, Announcements

_CRED = struct.Struct("iII")
_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
_STEPD = re.compile(r".*/slurmstepd(?:-[a-z]+)?(?: \(deleted\))?")
"""slurmstepd, also while it is being upgraded; Debian calls it slurmstepd-wlm."""
_RESTORED_INTO = ("net", "ipc", "uts", "cgroup")
"""Namespaces that a restored process tree inherits from the agent, not from its shepherd."""


class NotAShepherd(ValueError):  # noqa: N818 - names what is the case
    """A process cannot be the shepherd of a job. The text states the reason, for the log."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that opened a connection."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Identity:
    """A shepherd identified by the kernel. The IDs of its owner are those that root has announced."""

    job_id: int
    uid: int
    gid: int
    pid: int
    started: int
    """Ticks since boot."""
    groups: tuple[int, ...] = ()
    foreign: tuple[str, ...] = ()
    """Its network, IPC, UTS and cgroup namespaces that are not the node's."""
    process: Process | None = field(default=None, compare=False)
    """The shepherd; ``pidfd.namespace`` holds its namespaces."""


def peer_of(connection: socket.socket) -> Peer:
    """Return the process, user and group that connected (``SO_PEERCRED``)."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size)
    pid, uid, gid = _CRED.unpack(data)
    return Peer(pid, uid, gid)


def pidfd_of(connection: socket.socket, peer: Peer) -> int:
    """Return a pidfd of the process that connected; the caller closes it.

    Since Linux 6.5 it refers to the process at the time of ``connect()``, even if the PID was reused. On older kernels
    it refers to the process that has the PID now, so call this at once. Raises ``OSError`` if the process is gone.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PEERPIDFD)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise
    with Process(peer.pid) as process:
        return os.dup(process.pidfd)


def has_ended(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended; data read by its PID may then belong to another process."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Inspector:
    """Reads processes from ``/proc``."""

    def __init__(
        self,
        proc: Path = PROC,
        finder: JobFinder | None = None,
        *,
        announcements: Announcements | None = None,
        shepherd: Path = SHEPHERD,
    ) -> None:
        """``announcements``: the shepherds announced by the plugin; ``shepherd``: the installed program."""
        self._proc = proc
        self._finder = finder or JobFinder(proc)
        self._announcements = announcements or Announcements(RUN_DIR / DIRECTORY)
        self._shepherd = shepherd

    def identify(self, peer: Peer) -> Identity:
        """Return the identity of the shepherd ``peer``. Raises ``NotAShepherd``.

        A shepherd is the process that root has announced as the shepherd of the job, is PID 1 of a PID namespace that
        root has created below a task of ``slurmstepd``, and executes the shepherd's program; see docs/agent.md. Neither
        its messages nor its environment count. The caller has a pidfd of the process that connected, and checks
        afterwards that it is alive: until then its PID cannot have been reused.
        """
        try:
            process = Process(peer.pid, proc=self._proc)
            identity = self._examined(process, peer)
            process.check()
        except ProcessLookupError:
            raise NotAShepherd(f"process {peer.pid} is gone") from None
        except OSError as error:
            raise NotAShepherd(f"process {peer.pid} cannot be examined: {error}") from error
        return identity

    def _examined(self, process: Process, peer: Peer) -> Identity:
        status = process.status()
        numbers = status.get("NSpid", "").split()
        if len(numbers) < 2 or numbers[-1] != "1":
            raise NotAShepherd(f"process {peer.pid} is not PID 1 of a PID namespace")
        if set(status.get("Uid", "").split()) != {str(peer.uid)}:
            raise NotAShepherd(f"process {peer.pid} does not belong to user {peer.uid}, who connected")
        if process.namespace("user") != own_namespace("user", proc=self._proc):
            raise NotAShepherd(f"process {peer.pid} is in a user namespace of its own")
        job = self._finder.find(peer.pid, process.started)
        if job is None or job.source == "environment":
            raise NotAShepherd(f"process {peer.pid} belongs to no job")
        announced = self._announced(job.job_id)
        _check_announcement(process, peer, announced)
        self._check_program(process, announced)
        parent = self._parent(process, announced)
        if len(numbers) != len(parent.status().get("NSpid", "").split()) + 1:
            raise NotAShepherd(f"the PID namespace of process {peer.pid} is not directly below that of its parent")
        self._check_root(process)
        foreign = tuple(kind for kind in _RESTORED_INTO if process.namespace(kind) not in self._node_namespaces(kind))
        try:
            job_namespace = namespace(process.id, process=process, proc=self._proc)
        except NotContainedError as error:
            raise NotAShepherd(str(error)) from error
        owner = announced.owner
        return Identity(
            job.job_id, owner.uid, owner.gid, peer.pid, process.started, owner.groups, foreign, job_namespace.init
        )  # fmt: skip

    def _announced(self, job_id: int) -> Announcement:
        try:
            announced = self._announcements.of(job_id)
        except AnnouncementError as error:
            raise NotAShepherd(f"the announcement for job {job_id} cannot be used: {error}") from error
        if announced is None:
            raise NotAShepherd(f"no shepherd was announced for job {job_id}")
        return announced

    def _check_program(self, process: Process, announced: Announcement) -> None:
        """Check that the process executes the announced or the installed program.

        After an upgrade, a running job still executes the announced program.
        """
        program = _inode(process.facts("exe"))
        if program == announced.program:
            return
        try:
            installed: tuple[int, int] | None = _inode(self._shepherd.stat())
        except OSError:
            installed = None
        if program != installed:
            raise NotAShepherd(f"process {process.pid} does not execute the shepherd's program")

    def _parent(self, process: Process, announced: Announcement) -> Process:
        """Return the keeper: a task of root's ``slurmstepd``, which the shepherd does not outlive."""
        parent = Process(process.stat().parent, proc=self._proc)
        if (parent.pid, parent.started) != (announced.keeper, announced.keeper_started):
            raise NotAShepherd(f"the parent of process {process.pid} is not the announced task of Slurm's")
        if set(parent.status().get("Uid", "").split()) != {"0"}:
            raise NotAShepherd(f"the parent of process {process.pid} is not of root")
        facts = parent.facts("exe")
        if not _STEPD.fullmatch(parent.link("exe")) or facts.st_uid != 0:
            raise NotAShepherd(f"the parent of process {process.pid} is not slurmstepd")
        if facts.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH):
            raise NotAShepherd(f"the parent of process {process.pid} executes a program that users can start or change")
        if parent.namespace("pid") != own_namespace("pid", proc=self._proc):
            raise NotAShepherd(f"the parent of process {process.pid} is not in this PID namespace")
        parent.check()
        if process.stat().parent != parent.pid:
            raise NotAShepherd(f"process {process.pid} has lost its parent")
        return parent

    def _check_root(self, process: Process) -> None:
        # The agent may have its own mounts (ProtectSystem=), but with the same file system at the root.
        agent = Process(os.getpid(), proc=self._proc)
        if _inode(process.facts("root")) != _inode(agent.facts("root")) or _root_mount(process) != _root_mount(agent):
            raise NotAShepherd(f"the root directory of process {process.pid} is not the node's")

    def _node_namespaces(self, kind: str) -> set[tuple[int, int] | None]:
        """Return the node's namespaces of this kind; a service may have its own host name (ProtectHostname=)."""
        inodes: set[tuple[int, int] | None] = {own_namespace(kind, proc=self._proc)}
        if kind == "uts":
            inodes.add(Process(1, proc=self._proc).namespace(kind))
        return inodes

    def started(self, pid: int) -> int | None:
        """Return the start time of a process in ticks since boot, or ``None`` if it is gone."""
        return self._finder.started(pid)

    def tree(self, init_pid: int) -> list[int]:
        """Return all processes of the PID namespace of ``init_pid``, itself first. PIDs are those of this namespace."""
        pids, todo = [init_pid], [init_pid]
        while todo:
            for child in self._children(todo.pop()):
                pids.append(child)
                todo.append(child)
        return pids

    def cpu_ticks(self, pid: int) -> int | None:
        """Return the CPU time of the process and its ended children, in ticks."""
        fields = self._text(pid, "stat").rpartition(")")[2].split()
        try:
            return sum(int(fields[index]) for index in (11, 12, 13, 14))
        except (IndexError, ValueError):
            return None

    def io_bytes(self, pid: int) -> tuple[int, int] | None:
        """Return the bytes of storage I/O, and the bytes of reads and writes of any kind."""
        values = kernel_text.table(self._text(pid, "io").split("\n"))
        try:
            return int(values["read_bytes"]) + int(values["write_bytes"]), int(values["rchar"]) + int(values["wchar"])
        except (KeyError, ValueError):
            return None

    def _children(self, pid: int) -> Iterator[int]:
        try:
            with Process(pid, proc=self._proc) as process:
                for thread in process.names("task"):
                    with contextlib.suppress(FileNotFoundError):  # it has ended
                        yield from kernel_text.numbers(process.text(f"task/{thread}/children"))
        except (OSError, ValueError):
            return

    def _text(self, pid: int, name: str) -> str:
        try:
            with Process(pid, proc=self._proc) as process:
                return process.text(name)
        except OSError:
            return ""


def _check_announcement(process: Process, peer: Peer, announced: Announcement) -> None:
    if (announced.pid, announced.started) != (peer.pid, process.started):
        raise NotAShepherd(f"another process was announced as the shepherd of job {announced.job_id}")
    if announced.owner.uid != peer.uid:
        raise NotAShepherd(f"the shepherd of job {announced.job_id} was announced for user {announced.owner.uid}")
    if announced.owner.gid != peer.gid:
        raise NotAShepherd(f"the shepherd of job {announced.job_id} was announced for group {announced.owner.gid}")
    namespaces = process.namespace("pid"), process.namespace("mnt")
    if namespaces != (announced.pid_namespace, announced.mount_namespace):
        raise NotAShepherd(f"process {peer.pid} is not in the namespaces that were announced")


def _inode(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _root_mount(process: Process) -> tuple[str, str] | None:
    """Return the device and the directory in its file system that are mounted at a process's root.

    The uppermost mount counts.
    """
    mount = None
    for line in process.text("mountinfo").split("\n"):
        words = line.split(" ")
        if len(words) > 4 and words[4] == "/":
            mount = words[2], words[3]
    return mount
