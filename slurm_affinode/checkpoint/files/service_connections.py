"""Connections to services of the node whose clients connect again when they are closed, such as SSSD.

glibc's modules for users and hosts keep a stream to their service open after a look-up. It has one end outside the job,
so CRIU cannot dump it. A dump passes over the connections in the site's list, with the plugin
(``spank/criu_device_files.c``), and a restore replaces each with a socket whose other end is closed: the client sees
the end of the stream, as after a restart of the service.

The kernel identifies the service: the address to which its listening socket was bound, and the user who called
listen(2) (``SO_PEERCRED``). A user can bind an address of that text elsewhere, but not as root or as the user of the
service.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slurm_affinode.base.pidfd import Process, ProcessGoneError

INODES_VARIABLE = "SLURM_AFFINODE_CLOSED_SOCKETS"
"""Environment variable of the plugin: inodes of sockets, separated by commas."""
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class ServiceConnection:
    """A connection of a process to a listed service."""

    inode: int
    address: str
    """The address of the service."""
    busy: bool
    """Whether it has data that one side has not read: a request, or the response."""


@dataclass(frozen=True, slots=True)
class Services:
    """The services whose connections are closed."""

    addresses: tuple[str, ...] = ()
    """Full paths of their sockets. In each part, ``*``, ``?`` and ``[...]`` are wildcards."""
    users: frozenset[int] = frozenset()
    """UIDs that they run as, besides root."""

    def names(self, address: str) -> bool:
        """Return whether an address is in the list."""
        parts = address.split("/")
        return any(_matches(parts, pattern.split("/")) for pattern in self.addresses)

    def of(self, process: Process) -> tuple[ServiceConnection, ...]:
        """Return the connections of a process to these services, each once.

        Raises ``ProcessGoneError``, and ``OSError`` if a socket cannot be examined.
        """
        connections: dict[int, ServiceConnection] = {}
        if not self.addresses:
            return ()
        for number in process.names("fd"):
            try:
                target = process.link(f"fd/{number}")
                if target.startswith("socket:["):
                    connection = self._connection(process, int(number))
                    if connection is not None:
                        connections[connection.inode] = connection
            except ProcessGoneError:
                raise
            except FileNotFoundError:
                continue  # closed meanwhile
        return tuple(connections.values())

    def _connection(self, process: Process, number: int) -> ServiceConnection | None:
        try:
            descriptor = process.descriptor(number)
        except ProcessGoneError:
            raise
        except OSError:
            with suppress(OSError):
                if not process.link(f"fd/{number}").startswith("socket:["):
                    return None
            raise
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # exchanged meanwhile
            os.close(descriptor)
            return None
        with socket.socket(fileno=descriptor) as duplicate:
            return self._examined(duplicate, process.facts().st_uid)

    def _examined(self, sock: socket.socket, owner: int) -> ServiceConnection | None:
        if sock.family != socket.AF_UNIX or sock.type == socket.SOCK_DGRAM:
            return None
        try:
            address = sock.getpeername()
        except OSError:
            return None  # not connected
        if not isinstance(address, str) or not address.startswith("/") or not self.names(address):
            return None
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != 0 and uid not in self.users - {owner}:
            return None
        return ServiceConnection(os.fstat(sock.fileno()).st_ino, address, _has_data(sock))


def _matches(parts: list[str], patterns: list[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _has_data(sock: socket.socket) -> bool:
    """Return whether a socket has unread data, or has sent data that its peer has not read (unix(7))."""
    return any(
        int.from_bytes(fcntl.ioctl(sock, request, bytes(4)), "little")
        for request in (termios.FIONREAD, termios.TIOCOUTQ)
    )


def environment(inodes: Iterable[int]) -> Mapping[str, str]:
    """Return the plugin's part of CRIU's environment."""
    return {INODES_VARIABLE: ",".join(map(str, sorted(inodes)))}


def addresses(connections: Collection[ServiceConnection]) -> str:
    """Return the addresses of the services, for a message."""
    return ", ".join(sorted({connection.address for connection in connections}))
