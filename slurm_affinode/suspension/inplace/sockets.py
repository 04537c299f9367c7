"""The sockets of a job, and whether a request is waiting on them.

The kernel counts the bytes received on a TCP connection, but not on a UNIX one: what was read there between the last
check and the freeze leaves no trace on the socket. But then the reading thread no longer waits where it did, so the
wait positions of the threads are compared as well.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from slurm_affinode.base.pidfd import PROC, processes
from slurm_affinode.base.text import span
from slurm_affinode.suspension.inplace.sock_diag import NetSpace, Sock, SockDiag, SockDiagError, socket_inodes
from slurm_affinode.suspension.records.record import SocketState, SuspensionRecord

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SocketTable = Mapping[int, Sock]
"""Inode -> socket, for one job at one moment."""
_ANSWERED_S = 30.0
"""Minimum time that a server is given to answer without its GPU, however short its idle window: a request that it has
already read would not wake it."""
_DRIVER_SOCKET = b"\0cuda-uvmfd-"
"""Prefix of the name (``@cuda-uvmfd-NAMESPACE-PID``) of the socket on which CUDA listens in each of its processes, for
those that it shares memory with. No request arrives there, and a job that has no other socket cannot receive
requests."""


def at_rest(now: SocketTable, earlier: SocketTable, *, within_s: float) -> str | None:
    """Return why a running job must not be suspended now; ``None`` if no client waits for it.

    A request that was read and not answered leaves no trace in a queue. So a connection counts as waiting if data
    arrived within ``within_s`` (the idle window; at least half a minute on a connection made to the job) and nothing
    was sent after that. Unread bytes that were also there at an ``earlier`` look are not about to be read by the job,
    unless they arrived within that time, too.
    """
    ports = {sock.port for sock in now.values() if sock.listens and sock.family == "tcp"}
    read_unseen = uncounted(now)
    for sock in _from_others(now):
        before = earlier.get(sock.inode)
        if sock.listens:
            if sock.waiting:
                return f"a connection waits{_place_text(sock)}"
            continue
        if before is None and sock.inode in read_unseen:
            return f"a connection was made{_place_text(sock)}"
        came = sock.received_ms
        recent = came is not None and came < within_s * 1000
        fresh = before is None or before.unread != sock.unread or recent
        if sock.unread > 0 and fresh:
            return f"bytes wait on a connection{_place_text(sock)}"
        waits_s = max(within_s, _ANSWERED_S) if sock.port in ports else within_s
        if came is not None and came < waits_s * 1000 and _unanswered(sock):
            return f"data that arrived {span(came / 1000)} ago{_place_text(sock)} has not been answered"
    return None


def _unanswered(sock: Sock) -> bool:
    """Return whether data arrived and nothing was sent after it.

    The kernel's clock for both is coarse (up to 10 ms), and starts for both when a connection is made.
    """
    if not sock.received or sock.received_ms is None or sock.sent_ms is None:
        return False
    return sock.received_ms < sock.sent_ms or sock.sent == 0


def meanwhile(before: SocketTable, after: SocketTable) -> str | None:
    """Return what arrived for the job from the look ``before`` its locks until it was frozen; ``None``: nothing.

    It may have been read by then, with its answer waiting for the GPU: so all arrivals count, not only unread data.
    """
    for sock in _from_others(after):
        known_sock = before.get(sock.inode)
        if sock.listens:
            if sock.waiting:
                return f"a connection waits{_place_text(sock)}"
        elif known_sock is None:
            return f"a connection was made{_place_text(sock)}"
        elif sock.unread > max(0, known_sock.unread):
            return f"bytes wait on a connection{_place_text(sock)}"
        elif sock.received - known_sock.received > (
            sock.state != known_sock.state
        ):  # the end of a stream counts as a byte
            return f"something came{_place_text(sock)}"
    return None


def uncounted(table: SocketTable) -> frozenset[int]:
    """Return connections to the job on which bytes may arrive and be read unnoticed: UNIX sockets do not count them."""
    names = {sock.name for sock in table.values() if sock.listens and sock.name}
    return frozenset(sock.inode for sock in _from_others(table) if sock.remote and sock.name in names)


def can_be(table: SocketTable) -> bool:
    """Return whether a request from outside the job can arrive on one of these sockets.

    UNIX sockets without a name belong to a client, or cannot be reached: most programs have one, as the C library keeps
    its connection to the daemon of the user database (sssd, nscd).
    """
    return any(sock.family == "tcp" or bool(sock.name) for sock in _from_others(table))


def _from_others(table: SocketTable) -> Iterator[Sock]:
    """Yield the sockets on which others may send requests.

    Connections with both ends in the job are omitted, since communication between its own processes is not a request;
    so are those of CUDA itself.
    """
    ends = {(sock.local, sock.remote) for sock in table.values() if sock.remote}
    return (
        sock
        for sock in table.values()
        if (sock.remote, sock.local) not in ends and not sock.name.startswith(_DRIVER_SOCKET)
    )


def _place_text(sock: Sock) -> str:
    return f" on port {sock.port}" if sock.family == "tcp" else " on a UNIX socket"


Waits = Mapping[int, str]
"""Thread -> where it waits in the kernel: its stack pointer and program counter; empty: it runs."""
_DRIVER_THREAD = b"cuda"
"""Prefix of the names of CUDA's own threads: they move when GPU memory does."""


def waits(pids: Iterable[int], proc: Path = PROC) -> dict[int, str]:
    """Return the wait positions of the threads of these processes.

    CUDA's own threads, and those that the kernel does not report, are omitted. A stopped thread is reported as it was
    before.
    """
    positions = {}
    for process in processes(pids, proc=proc):
        for thread in process.threads():
            with contextlib.suppress(OSError):
                if not process.read(f"task/{thread}/comm").startswith(_DRIVER_THREAD):
                    positions[thread] = _place(process.text(f"task/{thread}/syscall"))
    return positions


def _place(line: str) -> str:
    """Return the position in proc(5)'s ``syscall``, without the number: an interrupted call may change it."""
    words = line.split()
    return " ".join(words[-2:]) if len(words) > 1 else ""


def went_on(before: Waits, after: Waits) -> bool:
    """Return whether a thread that waited is elsewhere now, or is new; a thread that ran before does not count."""
    return any(thread not in before or "" != before[thread] != place for thread, place in after.items())


@dataclass(frozen=True, slots=True)
class JobSockets:
    """The sockets of a job, and the network namespaces that they may be in.

    A socket is in the namespace in which it was created, whichever process has it now: a server in a container may have
    received a listener of the node. So each socket is looked up in the namespaces of all processes, and in the agent's
    own.
    """

    spaces: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Inode of the namespace -> inodes of sockets that may be there."""
    namespaces: Mapping[int, NetSpace] = field(default_factory=dict)
    """Inode of the namespace -> the namespace."""

    def __bool__(self) -> bool:
        """Return whether there are any sockets."""
        return any(self.spaces.values())


class Diag(Protocol):
    """The part of ``sock_diag.SockDiag`` that is used; see there."""

    def dump(self, only: frozenset[int] | None = None, families: Collection[str] = ("tcp", "unix")) -> dict[int, Sock]:
        """See ``SockDiag``."""
        ...

    def pending(self) -> dict[int, list[bytes]]:
        """See ``SockDiag``."""
        ...

    def close(self) -> None:
        """See ``SockDiag``."""
        ...


class Sockets(Protocol):
    """The network state that suspension in place needs."""

    def of_processes(self, pids: Iterable[int]) -> JobSockets:
        """Return the sockets of these processes."""
        ...

    def read(self, job_sockets: JobSockets) -> SocketTable:
        """Return their state now. Raises ``SockDiagError``. Thread-safe."""
        ...

    def observations(self, owners: Mapping[int, JobSockets]) -> Mapping[int, SocketTable]:
        """Return the same for several jobs, with one query for each namespace. For one thread.

        Jobs in a namespace that does not respond are omitted.
        """
        ...

    def readers(self, pids: Iterable[int], table: SocketTable) -> tuple[int, ...]:
        """Return those of these processes that may read uncounted bytes: they have a UNIX connection to the job."""
        ...

    def waits(self, pids: Iterable[int]) -> Waits:
        """Return the wait positions of the threads of these processes."""
        ...


class NodeSockets:
    """``Sockets`` for this machine."""

    def __init__(
        self, *, open_diag: Callable[[NetSpace], Diag] = SockDiag, proc: Path = PROC, probes: Sequence[Network] = (),
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """``probes``: networks whose connections are no requests. ``warn`` is called once for a namespace that does not
        respond.
        """
        self._open = open_diag
        self._probes = probes
        self._proc = proc
        self._warn = warn
        self._diags: dict[int, Diag] = {}
        self._unreadable: set[int] = set()
        self._families: dict[int, tuple[frozenset[int], tuple[str, ...]]] = {}
        """Namespace -> the sockets queried last, and their families."""

    def of_processes(self, pids: Iterable[int]) -> JobSockets:
        """See ``Sockets``."""
        inodes: set[int] = set()
        spaces: dict[int, NetSpace] = {}
        for process in processes(pids, proc=self._proc):
            with contextlib.suppress(OSError):
                space = NetSpace.of(process)
                spaces.setdefault(space.inode, space)
                inodes |= socket_inodes(process)
        if spaces:
            with contextlib.suppress(OSError):
                space = NetSpace.of_agent()
                spaces.setdefault(space.inode, space)
        return JobSockets(dict.fromkeys(spaces, frozenset(inodes)), spaces)

    def read(self, job_sockets: JobSockets) -> SocketTable:
        """See ``Sockets``."""
        table: dict[int, Sock] = {}
        for space, inodes in job_sockets.spaces.items():
            if inodes:
                diag = self._open(job_sockets.namespaces[space])
                try:
                    table.update(without_probes(diag, diag.dump(inodes), self._probes))
                finally:
                    diag.close()
        return table

    def observations(self, owners: Mapping[int, JobSockets]) -> Mapping[int, SocketTable]:
        """See ``Sockets``."""
        places = {
            space: job_sockets.namespaces[space]
            for job_sockets in owners.values()
            for space, inodes in job_sockets.spaces.items()
            if inodes
        }
        for space in self._diags.keys() - places.keys():  # otherwise it would keep the namespace of an ended job
            self._diags.pop(space).close()
            self._families.pop(space, None)
        only = {
            space: frozenset().union(*(job_sockets.spaces.get(space, frozenset()) for job_sockets in owners.values()))
            for space in places
        }
        dumps = {space: self._dump(net_space, only[space]) for space, net_space in places.items()}
        tables: dict[int, SocketTable] = {}
        for job_id, job_sockets in owners.items():
            socks_by_inode: dict[int, Sock] = {}
            for space, inodes in job_sockets.spaces.items():
                dump = dumps.get(space)
                if inodes and dump is None:
                    break
                socks_by_inode.update(_of(dump or {}, inodes))
            else:
                tables[job_id] = socks_by_inode
        return tables

    def readers(self, pids: Iterable[int], table: SocketTable) -> tuple[int, ...]:
        """See ``Sockets``."""
        inodes = uncounted(table)
        if not inodes:
            return ()
        return tuple(process.pid for process in processes(pids, proc=self._proc) if inodes & socket_inodes(process))

    def waits(self, pids: Iterable[int]) -> Waits:
        """See ``Sockets``."""
        return waits(pids, self._proc)

    def _dump(self, net_space: NetSpace, only: frozenset[int]) -> dict[int, Sock] | None:
        space = net_space.inode
        try:
            diag = self._diags.get(space)
            if diag is None:
                diag = self._diags[space] = self._open(net_space)
            # Sleeping jobs open no sockets: the kinds of their sockets are determined once.
            before, families = self._families.get(space, (frozenset(), ()))
            if before == only:
                table = diag.dump(only, families)
            else:
                table = diag.dump(only)
                self._families[space] = only, _kinds(table.values())
            table = without_probes(diag, table, self._probes)
        except SockDiagError as error:
            if (kept_space := self._diags.pop(space, None)) is not None:
                kept_space.close()
            if space not in self._unreadable:
                self._unreadable.add(space)
                self._warn(f"what waits on the sockets of sleeping jobs is not known: {error}")
            return None
        self._unreadable.discard(space)
        return table

    def close(self) -> None:
        """Close the sockets used for queries."""
        for diag in self._diags.values():
            diag.close()
        self._diags.clear()


def _kinds(socks: Iterable[Sock]) -> tuple[str, ...]:
    """Return the families that ``SockDiag.dump`` needs to report these again."""
    kinds = {"unix" if sock.family == "unix" else "listen" if sock.listens else "tcp" for sock in socks}
    return tuple(sorted(kinds - {"listen"} if "tcp" in kinds else kinds))


def without_probes(diag: Diag, table: dict[int, Sock], probes: Sequence[Network]) -> dict[int, Sock]:
    """Return the sockets without what health checks from ``probes`` do to them. Raises ``SockDiagError``.

    A connection that was not accepted does not say which listener it waits at. So the connections that wait at a port
    are health checks only if all of them are. They still fill the queue, and the kernel drops requests to a full one,
    which their clients repeat after a second: a full queue counts as a request.
    """
    if not probes:
        return table
    other_socks = {inode: sock for inode, sock in table.items() if not (sock.remote and _from(sock, probes))}
    ports = {sock.port for sock in other_socks.values() if sock.family == "tcp" and sock.listens and sock.waiting}
    if not ports:
        return other_socks
    listeners = [sock for sock in diag.dump(None, ("listen",)).values() if sock.port in ports]
    pending = diag.pending()  # after the listeners: a connection that arrives in between is among them
    for port in ports:
        queues = [sock for sock in listeners if sock.port == port]
        clients = pending.get(port, ())
        full = any(sock.waiting >= sock.backlog for sock in queues)
        if (
            not full
            and len(clients) >= sum(sock.waiting for sock in queues)
            and all(_is_in(address, probes) for address in clients)
        ):
            other_socks |= {
                inode: replace(sock, waiting=0)
                for inode, sock in other_socks.items()
                if sock.listens and sock.port == port
            }
    return other_socks


def _from(sock: Sock, probes: Sequence[Network]) -> bool:
    return sock.family == "tcp" and _is_in(sock.remote, probes)


def _is_in(end: bytes, networks: Sequence[Network]) -> bool:
    """Return whether an end of a TCP connection, see ``Sock``, is in one of these networks."""
    address = ipaddress.IPv6Address(end[:16])
    return any((address.ipv4_mapped or address) in network for network in networks)


def _of(dump: Mapping[int, Sock], inodes: frozenset[int]) -> SocketTable:
    return {inode: dump[inode] for inode in inodes if inode in dump}


def unnoticed(sockets: Sockets, record: SuspensionRecord) -> str | None:
    """Return what may have been read uncounted since a suspension began; ``None``: nothing.

    Only for a frozen job: a thread of a running one may be elsewhere for a moment, and return.
    """
    if record.waits and went_on(record.waits, sockets.waits(record.reader_pids or ())):
        return "something may have been read on a UNIX socket"
    return None


def states_of(table: SocketTable) -> dict[int, SocketState]:
    """Return the state of sockets in the form used by the journal."""
    return {
        sock.inode: SocketState(sock.family, sock.state, sock.waiting, sock.port, sock.received)
        for sock in table.values()
    }


def table_of(states: Mapping[int, SocketState]) -> SocketTable:
    """Return the state of sockets from the journal."""
    return {inode: Sock(inode, *state) for inode, state in states.items()}
