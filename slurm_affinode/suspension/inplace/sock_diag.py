"""Pending data on the sockets of a network namespace, from the kernel's socket monitor: sock_diag(7).

No proxy and no packet capture: the kernel itself completes the handshake of a connection to a stopped process, keeps
the connection in the listener's queue, and counts the data that arrives on open ones. One dump for each family returns
all of it. (``pyroute2`` implements these messages among all others of netlink; three requests do not justify a
dependency of that size in a daemon that is to stay small.)

Layouts: ``linux/netlink.h``, ``inet_diag.h``, ``unix_diag.h``, ``tcp.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import socket
import struct
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Self

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Process
from slurm_affinode.base.threads import in_own_thread

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP = 0x301
"""``NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH``."""
_ERROR, _DONE, _INTERRUPTED = 2, 3, 0x10
_HEADER = struct.Struct("=IHHII")
_INET_REQUEST = struct.Struct("=BBBxI48x")
_INET = struct.Struct("=BBBBHH16s16s12xIIIII")
_UNIX_REQUEST = struct.Struct("=BxHIIIII")
_UNIX = struct.Struct("=BBBxIII")
_INET_INODE, _UNIX_INODE = slice(68, 72), slice(4, 8)
_ATTRIBUTE = struct.Struct("=HH")
_INET_INFO, _UNIX_NAME, _UNIX_PEER, _UNIX_RQLEN = 2, 0, 2, 4
_MAPPED = b"\0" * 10 + b"\xff" * 2
"""Prefix of an IPv4 address on an IPv6 socket."""
_SHOW_NAME, _SHOW_PEER, _SHOW_RQLEN = 0x1, 0x4, 0x10
_LAST_SENT, _LAST_RECEIVED, _BYTES_RECEIVED, _SEGMENTS_SENT = 44, 52, 128, 156
"""Offsets in ``struct tcp_info``."""
_PART = 256 << 10
_ANSWER_S = 2.0
_TRIES = 4
_CLONE_NEWNET = 0x40000000
_KERNEL = 0
"""The kernel's address on a netlink socket: netlink(7)."""
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")

ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LISTEN = 1, 2, 4, 5, 8, 10
_STATES = sum(1 << state for state in (ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LISTEN))
"""States in which data may arrive, including sockets that are connecting or have finished sending."""


_NO_DESCRIPTOR = frozenset({0})
"""Inode of connections that have not been accepted."""


class SockDiagError(AffinodeError):
    """The kernel does not report the sockets."""


@dataclass(frozen=True, slots=True)
class Sock:
    """One socket, TCP or UNIX."""

    inode: int
    family: str
    """``tcp`` or ``unix``."""
    state: int
    """``LISTEN``, ``ESTABLISHED``, ``CLOSE_WAIT``, ..., or another one for UNIX sockets without a peer."""
    waiting: int
    """For a listener: connections that have not been accepted. Otherwise: unread bytes (TCP counts the end of the
    peer's data as one)."""
    port: int = 0
    """TCP: the port on which it listens, or its local port."""
    received: int = 0
    """TCP: bytes received since it was opened."""
    received_ms: int | None = None
    """TCP: time since data last arrived; ``None``: unknown."""
    sent_ms: int | None = None
    """The same for sent data; time since it was opened if none was sent."""
    sent: int | None = None
    """TCP: data segments sent since it was opened; ``None``: unknown."""
    local: bytes = b""
    """The local end of a connection; empty: it has none."""
    remote: bytes = b""
    """The remote end."""
    name: bytes = b""
    """UNIX: its address, which an accepted socket has from its listener."""
    backlog: int = 0
    """TCP: number of connections that may wait at a listener."""

    @property
    def listens(self) -> bool:
        """Whether it accepts connections."""
        return self.state == LISTEN

    @property
    def unread(self) -> int:
        """Bytes available for reading."""
        return self.waiting - 1 if self.family == "tcp" and self.state == CLOSE_WAIT else self.waiting


class NetSpace:
    """A network namespace held by descriptor for the lifetime of the object. Thread-safe."""

    def __init__(self, fd: int) -> None:
        """``fd``: a descriptor of the namespace, such as ``/proc/PID/ns/net``; the object takes ownership of it."""
        self._fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)
        self.inode = os.fstat(fd).st_ino

    def __str__(self) -> str:
        return f"net:[{self.inode}]"

    @classmethod
    def of(cls, process: Process) -> Self:
        """Return the namespace of a process. Raises ``OSError``."""
        return cls(process.open("ns/net"))

    @classmethod
    def of_agent(cls) -> Self:
        """Return the namespace of this process. Raises ``OSError``."""
        return cls(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._finalizer()

    def socket(self) -> socket.socket:
        """Return a socket for queries in the namespace. Raises ``OSError``.

        A socket belongs to the namespace in which it was created: a separate thread enters the namespace and ends
        there. Only its network namespace changes: it runs this program, with this program's files and rights, and a
        user who owns the namespace can neither trace nor see it. With ``CAP_NET_ADMIN`` in the namespace that user can
        send messages to the socket, so it accepts only those of the kernel.
        """

        def open_socket() -> socket.socket:
            if self.inode != os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116 - a link of its own kind
                _enter(self._fd)
            return _open()

        return in_own_thread("netns", open_socket)


class SockDiag:
    """The sockets of one network namespace. For one thread at a time."""

    def __init__(self, space: NetSpace | None = None) -> None:
        """``space``: the namespace; ``None``: our own. Raises ``SockDiagError``."""
        try:
            self._socket = _open() if space is None else space.socket()
        except OSError as error:
            raise SockDiagError(f"{space or 'sock_diag'}: cannot be opened: {error}") from error
        self._number = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def dump(self, only: frozenset[int] | None = None, families: Collection[str] = ("tcp", "unix")) -> dict[int, Sock]:
        """Return the TCP sockets that listen or are connected, and all UNIX sockets, by inode.

        ``only``: only these inodes. ``families``: only these are queried; ``listen`` instead of ``tcp`` returns only
        those that listen, which costs much less: for the others the kernel walks its table of all connections. Raises
        ``SockDiagError``.
        """
        by_inode: dict[int, Sock] = {}
        states = _STATES if "tcp" in families else 1 << LISTEN if "listen" in families else 0
        for family in (socket.AF_INET, socket.AF_INET6) if states else ():
            request = _INET_REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_INFO - 1), states)
            by_inode.update((sock.inode, sock) for part in self._ask(request) for sock in _inet(part, only))
        if "unix" in families:
            request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_PEER | _SHOW_RQLEN, 0, 0)
            by_inode.update((sock.inode, sock) for part in self._ask(request) for sock in _unix(part, only))
        return by_inode

    def pending(self) -> dict[int, list[bytes]]:
        """Return port -> remote ends of the TCP connections that no process has accepted. Raises ``SockDiagError``."""
        by_inode: dict[int, list[bytes]] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _INET_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << ESTABLISHED | 1 << CLOSE_WAIT)
            for sock in (sock for part in self._ask(request) for sock in _inet(part, _NO_DESCRIPTOR)):
                by_inode.setdefault(sock.port, []).append(sock.remote)
        return by_inode

    def _ask(self, request: bytes) -> list[bytes]:
        for _ in range(_TRIES):
            self._number += 1
            header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, self._number, 0)
            try:
                self._socket.send(header + request)
                answers, whole = self._answers()
            except TimeoutError:
                raise SockDiagError("sock_diag does not respond") from None
            except OSError as error:
                raise SockDiagError(f"sock_diag: {error}") from error
            if whole:
                break
        return answers  # interrupted each time, but sockets that existed all the time are included

    def _answers(self) -> tuple[list[bytes], bool]:
        parts: list[bytes] = []
        whole = True
        deadline = time.monotonic() + _ANSWER_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            self._socket.settimeout(remaining_s)
            data, (sender, _) = self._socket.recvfrom(_PART)
            if sender != _KERNEL:  # not expected, as the socket is connected to the kernel
                continue
            for kind, flags, number, body in messages(data):
                if number != self._number:
                    continue  # of an earlier query that was abandoned
                whole = whole and not flags & _INTERRUPTED
                if kind == _DONE:
                    return parts, whole
                if kind == _ERROR:
                    code = -int.from_bytes(body[:4], "little", signed=True)
                    if code == errno.ENOENT:  # a kernel without this family
                        return parts, True
                    raise OSError(code, os.strerror(code))
                parts.append(body)
        raise TimeoutError


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield type, flags, number and body of each message; a truncated one at the end is omitted."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, number, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > len(data):
            return
        yield kind, flags, number, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size or offset + length > len(data):
            return
        yield kind, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def _inet(body: bytes, only: frozenset[int] | None = None) -> Iterator[Sock]:
    if len(body) < _INET.size or (only is not None and int.from_bytes(body[_INET_INODE], "little") not in only):
        return
    family, state, _, _, port, remote, source, destination, _, rqueue, wqueue, _, inode = _INET.unpack_from(body)
    info = next((value for kind, value in _attributes(body[_INET.size :]) if kind == _INET_INFO), b"")
    sent_ms = received_ms = sent = None
    received = 0
    if state != LISTEN and len(info) >= _BYTES_RECEIVED + 8:
        sent_ms, received_ms = (
            int.from_bytes(info[offset : offset + 4], "little") for offset in (_LAST_SENT, _LAST_RECEIVED)
        )
        received = int.from_bytes(info[_BYTES_RECEIVED : _BYTES_RECEIVED + 8], "little")
        if len(info) >= _SEGMENTS_SENT + 4:
            sent = int.from_bytes(info[_SEGMENTS_SENT : _SEGMENTS_SENT + 4], "little")
    ends = (b"", b"") if state == LISTEN else (_end(family, source, port), _end(family, destination, remote))
    backlog = wqueue if state == LISTEN else 0
    yield Sock(
        inode, "tcp", state, rqueue, socket.ntohs(port), received, received_ms, sent_ms, sent, *ends, backlog=backlog
    )


def _end(family: int, address: bytes, port: int) -> bytes:
    """Return one end of a TCP connection, the same for either family of the two sockets."""
    if family == socket.AF_INET:
        address = _MAPPED + address[:4]
    return address + port.to_bytes(2, "little")


def _unix(body: bytes, only: frozenset[int] | None = None) -> Iterator[Sock]:
    if len(body) < _UNIX.size or (only is not None and int.from_bytes(body[_UNIX_INODE], "little") not in only):
        return
    _, _, state, inode, _, _ = _UNIX.unpack_from(body)
    attributes = dict(_attributes(body[_UNIX.size :]))
    queue, peer = attributes.get(_UNIX_RQLEN, b""), attributes.get(_UNIX_PEER, b"")[:4]
    if len(queue) >= 8:
        waiting, name = int.from_bytes(queue[:4], "little"), attributes.get(_UNIX_NAME, b"")
        yield Sock(inode, "unix", state, waiting, local=body[_UNIX_INODE], remote=peer, name=name)


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _open() -> socket.socket:
    diag_socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
    try:
        diag_socket.connect((_KERNEL, 0))
    except OSError:
        diag_socket.close()
        raise
    return diag_socket


def socket_inodes(process: Process) -> frozenset[int]:
    """Return the inodes of the sockets that a process has open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in process.names("fd"):
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(process.link(f"fd/{name}"))
                if match is not None:
                    inodes.add(int(match[1]))
    return frozenset(inodes)
