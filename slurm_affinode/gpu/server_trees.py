"""Process trees of model servers: the GPU processes that a server started, and those that outlive it.

A server is a listening TCP socket that has responded as an inference engine. As long as it exists, the GPU processes
below the processes that hold the socket are remembered. Such a process is orphaned once nothing listens at the port
and every process that held the socket above it has ended.

A process is not orphaned if its server is slow, stopped or suspended, if another process now listens at the port, or
if the process itself is the server. If the server ended before it was observed, it is unknown whether a process is
orphaned; such a process is not reported.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.pidfd import PROC, Id, Process, ancestors
from slurm_affinode.gpu.interface import GpuDriver
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import total_mib

MOST_DESCRIPTORS = 4096
"""Descriptors of a process that are examined."""
MOST_PROCESSES = 4096
"""GPU processes that are remembered."""
TRUSTED = frozenset({"cgroup", "slurmstepd"})
"""Sources of a process's job that its user does not control."""
_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[([0-9]{1,20})\]")

EngineName = tuple[str, str | None, str | None]
"""Engine, model and rank. The user chooses the latter two."""


@dataclass(frozen=True, slots=True)
class ServerPort:
    """A listening socket that has responded as one or more engines."""

    inode: int
    job: int
    port: int
    address: str
    """Host and port, as in the metrics."""
    user: str
    engines: tuple[EngineName, ...]


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process of a job on one or more GPUs, held."""

    process: Process
    job: int
    used_mib: float | None


@dataclass(frozen=True, slots=True)
class LostServer:
    """The server of an orphaned process."""

    port: ServerPort
    pids: tuple[int, ...]
    """The processes that held its socket above the orphaned one."""
    since: float
    """When its end was first noticed, in seconds since the epoch."""


@dataclass(slots=True)
class _Server:
    port: ServerPort
    processes: set[Id] = field(default_factory=set)


@dataclass(slots=True)
class _Member:
    """A GPU process that was seen below a server."""

    job: int
    servers: dict[int, _Server] = field(default_factory=dict)
    """By the inode of the socket."""
    lost_s: float | None = None


def listening(*, proc: Path = PROC) -> dict[int, tuple[str, int]]:
    """Return inode -> address and port of the listening TCP sockets of this network namespace. Raises ``OSError``."""
    net = proc / "self" / "net"
    rows = kernel_text.lines(net / "tcp")[1:]
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        rows += kernel_text.lines(net / "tcp6")[1:]
    by_pid: dict[int, tuple[str, int]] = {}
    for row in rows:
        words = row.split()
        if len(words) < 10 or words[3] != _LISTEN:
            continue
        address, _, port = words[1].partition(":")
        host, inode = _host(address), kernel_text.number(words[9])
        number = kernel_text.number(port, 16)
        if host is not None and inode and number:
            by_pid[inode] = host, number
    return by_pid


def _host(text: str) -> str | None:
    """Return the address to connect to for one written by the kernel: words of 32 bits in the byte order of the CPU."""
    if len(text) not in (8, 32):
        return None
    words = [kernel_text.number(text[offset : offset + 8], 16) for offset in range(0, len(text), 8)]
    if any(word is None for word in words):
        return None
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return "127.0.0.1" if packed == bytes(4) else socket.inet_ntop(socket.AF_INET, packed)
    return "::1" if packed == bytes(16) else socket.inet_ntop(socket.AF_INET6, packed)


def sockets_of(process: Process) -> Iterator[int]:
    """Yield the inodes of the sockets that a process holds. Raises ``OSError``, ``ExhaustedError``."""
    for name in process.names("fd", MOST_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            match = _SOCKET.fullmatch(process.link(f"fd/{name}"))
            if match is not None:
                yield int(match[1])


def holders(driver: GpuDriver, finder: JobFinder, *, proc: Path = PROC) -> list[GpuHolder]:
    """Return the processes of jobs on the GPUs, each once. Jobs named by the environment alone do not count.

    Raises ``GpuError``, ``ExhaustedError``.
    """
    used: dict[int, list[float | None]] = {}
    for device in driver.devices():
        for holder in driver.processes(device):
            used.setdefault(holder.pid, []).append(holder.used_mib)
    result = []
    for pid, amounts in used.items():
        with contextlib.suppress(OSError):  # it has ended
            process = Process(pid, proc=proc)
            ref = finder.of(process)
            if ref is not None and ref.source in TRUSTED:
                result.append(GpuHolder(process, ref.job_id, total_mib(amounts)))
    return result


class ServerTrees:
    """Remembers the servers above each GPU process. Thread-safe. ``now`` returns seconds since the epoch."""

    def __init__(self, finder: JobFinder, *, proc: Path = PROC, now: Callable[[], float] = time.time) -> None:
        self._finder, self._proc, self._now = finder, proc, now
        self._lock = threading.Lock()
        self._members: dict[Id, _Member] = {}

    def update(self, servers: Iterable[ServerPort], on_gpu: Sequence[GpuHolder]) -> None:
        """Note which of the GPU processes are below which servers. Forgets processes that have ended."""
        by_job: dict[int, dict[int, ServerPort]] = {}
        for port in servers:
            by_job.setdefault(port.job, {})[port.inode] = port
        for holder in on_gpu:
            with contextlib.suppress(OSError):  # it has ended
                self._note(holder, by_job.get(holder.job, {}))
        with self._lock:
            trees = list(self._members)
        ended_trees = [tree for tree in trees if not self._alive(tree)]
        with self._lock:
            for ended in ended_trees:
                self._members.pop(ended, None)
        for holder in on_gpu:
            self.lost(holder.process, holder.job)  # notes the time

    def _note(self, holder: GpuHolder, ports: Mapping[int, ServerPort]) -> None:
        if not ports:
            return
        for above in ancestors(holder.process, proc=self._proc):
            ref = self._finder.of(above)
            if ref is None or ref.job_id != holder.job:
                return
            with contextlib.suppress(OSError):
                held_ports = [inode for inode in sockets_of(above) if inode in ports]
                with self._lock:
                    for inode in held_ports:
                        self._add(holder, ports[inode], above.id)

    def _add(self, holder: GpuHolder, port: ServerPort, process: Id) -> None:
        key = holder.process.id
        if key not in self._members and len(self._members) >= MOST_PROCESSES:
            return
        member = self._members.setdefault(key, _Member(holder.job))
        server = member.servers.setdefault(port.inode, _Server(port))
        server.port = port
        server.processes.add(process)

    def lost(self, process: Process, job: int) -> LostServer | None:
        """Return the server of a GPU process that has ended; ``None``: it has none, it serves, or that is unknown.

        ``job``: the job of the process now, which must be that of the server. Raises ``ExhaustedError``.
        """
        try:
            key, has_ended = process.id, process.ended()
        except OSError:
            return None
        with self._lock:
            member = self._members.get(key)
            servers = [(server.port, tuple(server.processes)) for server in member.servers.values()] if member else []
        if member is None or has_ended or not servers or member.job != job:
            return None
        ended = not any(self._alive(process) for _, processes in servers for process in processes)
        if ended:
            # Also if the socket is now another one: a server may have been restarted in place of the ended one.
            try:
                open_ports = {port for _, port in listening(proc=self._proc).values()}
            except OSError:
                return None
            ended = not any(port.port in open_ports for port, _ in servers)
        with self._lock:
            member.lost_s = None if not ended else member.lost_s or self._now()
            since = member.lost_s
        if since is None:
            return None
        pids = sorted({process.pid for _, processes in servers for process in processes})
        return LostServer(servers[-1][0], tuple(pids), since)

    def _alive(self, identity: Id) -> bool:
        """Return whether a process may still run. A zombie does not."""
        try:
            with Process(identity.pid, started=identity.started, proc=self._proc) as process:
                return not process.ended()
        except ProcessLookupError:
            return False
        except OSError:
            return True
