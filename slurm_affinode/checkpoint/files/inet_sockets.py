"""IPv4 and IPv6 sockets: addresses of the node, which another node does not have, and connections.

CRIU binds a socket to the address in the image (``inet_bind`` in ``criu/sk-inet.c``) and fails where the address
does not exist. So a dump records to which network interface each address belongs, and a restore replaces an address
that the node does not have with that of its interface of the same name, else with the one from which it sends to other
networks. Only addresses of the old node are replaced, so an address that no node had at the dump stays as it is.

TCP connections between processes of the job are restored, with the data on their way: those of ``torchrun``, gloo and
NCCL. All others are closed, and clients outside the job have to look up the new address, as after a restart. CRIU
restores either all connections or none, so the image of a job with connections of its own holds all of them
(``--tcp-established``), and a restore replaces those with an end elsewhere by closed sockets. For a job without any,
CRIU need not look into connections that will be closed (``--tcp-close``).

CRIU reads a connection in the kernel's repair mode (``TCP_REPAIR`` in ``net/ipv4/tcp.c``), and leaves it there if the
dump is complete and the tree stays stopped (``cr_dump_finish`` in ``criu/cr-dump.c``). In that mode, receiving fails
(EPERM), nothing is sent, and the other end is not notified when the process ends. So each dump ends the mode, and so
does a rollback, for an agent that was killed during a dump.

CRIU creates the sockets as root, and sets ``SO_REUSEPORT`` until it has bound them. The kernel lets sockets with that
option share a port if they belong to the same user, and distributes connections among them. So a restore is refused if
one of its ports is in use by root, or by another restored job.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.base import json_values, kernel_text
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import PROC, Id, Process
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files.file_table import FILES, Type
from slurm_affinode.checkpoint.image.criu_images import (
    BadImage,
    Message,
    bodies,
    encoded,
    framed,
    integer,
    message,
    read_image,
    spans,
    varint,
)
from slurm_affinode.checkpoint.image.private_image import PrivateImage
from slurm_affinode.checkpoint.interface import RestoreInterrupted

INDEX = "addresses.json"
_MAGICS = 8  # bytes
_ENTRY = 4
"""Field of ``inet_sk_entry`` in ``file_entry`` (``images/fdinfo.proto``)."""
_SOURCE, _PEER = 11, 12
"""Fields of ``inet_sk_entry`` (``images/sk-inet.proto``): addresses in words of 32 bits, in network byte order."""
_PROTOCOL, _STATE, _SOURCE_PORT, _PEER_PORT, _SHUTDOWN = 5, 6, 7, 8, 19
_TCP, _CLOSED, _BOTH_WAYS = 6, 7, 3
"""Values of the fields above: IPPROTO_TCP, TCP_CLOSE, and ``BOTH`` of ``sk_shutdown``."""
_TABLES = {_TCP: ("tcp", "tcp6"), socket.IPPROTO_UDP: ("udp", "udp6")}
"""Files of ``/proc/net`` for each protocol with ports."""
_LISTENING = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""
_STREAM = "tcp-stream-"
"""Prefix of the files of connections."""
_MAPPED = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address in ``/proc/net/tcp6``."""
_LIMIT = 1 << 20
_REPAIR = 19
"""``TCP_REPAIR`` in ``linux/tcp.h``."""
_SIOCGIFCONF, _SIOCGIFCONF_BYTES = 0x8912, 40
"""An entry of ``struct ifconf`` on 64-bit machines: the name (16 bytes) and a ``struct sockaddr``."""
_NAME, _ADDRESS = slice(0, 16), slice(20, 24)
_TCP_INFO, _TCP_INFO_BYTES, _WAITING_AT = 11, 104, 24
"""``tcpi_unacked`` of a listening socket is the number of connections that wait to be accepted (``linux/tcp.h``)."""
_UNACCEPTED_STATES = ("01", "08")
"""ESTABLISHED and CLOSE_WAIT: sockets that a process has closed are in other states."""
_CORK = 1
"""``UDP_CORK`` in ``linux/udp.h``."""
_MCAST_MSFILTER = 48
_GROUP_FILTER, _GROUP_AT = 264 + 8, 8
"""Size of ``struct group_filter``, without sources but one, and the offset of the address (``linux/in.h``)."""
_MOST_INTERFACES = 4096
_OUTSIDE_ADDRESSES = {4: "192.0.2.1", 6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849). Connecting a UDP socket sends nothing."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[Address | None, int]
"""Address and port of one end of a connection."""
CLOSE, KEEP = ("--tcp-close",), ("--tcp-established",)
"""Options of CRIU."""
KEEP_AT_DUMP = (*KEEP, "--network-lock=skip")
"""The tree is stopped, and what arrives from elsewhere belongs to a connection that will be closed: no need to have a
packet filter drop it."""


# --- connections


def options(members: Iterable[Process]) -> tuple[str, ...]:
    """Return CRIU's options for a dump of these processes, which are stopped."""
    return KEEP_AT_DUMP if connected(members) else CLOSE


@dataclass(frozen=True, slots=True)
class BoundPort:
    """A local port of a socket in an image."""

    protocol: int
    number: int
    address: str
    """As in ``/proc/net``; empty: all addresses."""


def ports(table: bytes) -> frozenset[BoundPort]:
    """Return the ports in ``files.img`` to which CRIU binds sockets. Raises ``BadImage``."""
    bound = set()
    for body in bodies(table):
        fields = _socket(body)
        if fields is not None:
            protocol, number = integer(fields, _PROTOCOL), integer(fields, _SOURCE_PORT)
            connection = protocol == _TCP and integer(fields, _PEER_PORT)
            if number and protocol in _TABLES and not connection:
                address = "".join(f"{word:08X}" for word in _words(fields, _SOURCE))
                bound.add(BoundPort(protocol, number, _address(address)))
    return frozenset(bound)


def _address(text: str) -> str:
    return text.removeprefix(_MAPPED) if text.strip("0") else ""


def refuse_shared(requested: Collection[BoundPort], exempt: Collection[str] = (), *, proc: Path = PROC) -> None:
    """Raise ``RestoreFailed`` if one of the ports is in use by root. ``exempt``: inodes of sockets not to count."""
    for protocol in {request.protocol for request in requested}:
        foreign_addresses: dict[int, set[str]] = {}
        for name in _TABLES[protocol]:
            with suppress(FileNotFoundError):  # a kernel without IPv6
                for line in kernel_text.lines(proc / "self" / "net" / name):
                    words = line.split()
                    if len(words) > 9 and words[7] == "0" and words[9] not in exempt:
                        address, _, port = words[1].partition(":")
                        if protocol != _TCP or words[3] == _LISTENING:
                            foreign_addresses.setdefault(kernel_text.number(port, 16) or 0, set()).add(
                                _address(address)
                            )
        for inet_request in requested:
            used_addresses = (
                foreign_addresses.get(inet_request.number, set()) if inet_request.protocol == protocol else set()
            )
            if used_addresses and (not inet_request.address or used_addresses & {"", inet_request.address}):
                raise RestoreInterrupted(
                    f"its port {inet_request.number} is in use on this node by root or by another restored job"
                )


def connected(members: Iterable[Process]) -> bool:
    """Return whether a TCP connection has both ends in these processes."""
    inodes: set[str] = set()
    tables: dict[str, bytes] = {}
    for process in members:
        job_inodes = sockets_of(process)
        with suppress(OSError):
            if job_inodes and (space := process.link("ns/net")) not in tables:
                tables[space] = process.read("net/tcp") + process.read("net/tcp6")
        inodes |= job_inodes
    ends = set()
    for table in tables.values():
        for line in table.decode("ascii", "replace").split("\n"):
            words = line.split()
            if len(words) > 9 and words[9] in inodes:
                local_end, peer_end = (word.removeprefix(_MAPPED) for word in words[1:3])
                if (peer_end, local_end) in ends:
                    return True
                ends.add((local_end, peer_end))
    return False


def sockets_of(process: Process) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    return set(_socket_fds(process))


def _socket_fds(process: Process) -> dict[str, int]:
    """Return the inodes of the sockets that a process has open, and a descriptor of each."""
    fds = {}
    with suppress(OSError):
        for name in process.names("fd"):
            with suppress(OSError):
                target = process.link(f"fd/{name}")
                if target.startswith("socket:["):
                    fds[target[8:-1]] = int(name)
    return fds


def state_lost(process: Process, opened: socket.socket) -> str | None:
    """Return a state of a network socket of a process that CRIU does not carry, or ``None``.

    A socket leaves its multicast groups. A connection between processes of the job that has not been accepted yet
    would have only one end. Raises ``OSError``.
    """
    if opened.proto == _TCP:
        return "TCP with a connection to accept" if _has_unaccepted(process, opened) else None
    if opened.proto == socket.IPPROTO_UDP and opened.getsockopt(socket.IPPROTO_UDP, _CORK):
        return "UDP with a datagram that is not complete"
    return "UDP in a multicast group" if _in_group(process, opened) else None


def _has_unaccepted(process: Process, listening: socket.socket) -> bool:
    """Return whether a process of the same user on this node waits for a connection to be accepted."""
    if not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    info = listening.getsockopt(_TCP, _TCP_INFO, _TCP_INFO_BYTES)
    if not int.from_bytes(info[_WAITING_AT : _WAITING_AT + 4], "little"):
        return False
    uid = process.status().get("Uid", "").split()[0]
    rows = [line.split() for line in (process.text("net/tcp") + process.text("net/tcp6")).split("\n")]
    ends = [(row[1].removeprefix(_MAPPED), row[2].removeprefix(_MAPPED), row) for row in rows if len(row) > 9]
    clients = {(local_end, peer_end) for local_end, peer_end, row in ends if row[9] != "0" and row[7] == uid}
    port = f"{listening.getsockname()[1]:04X}"
    return any(
        (peer_end, local_end) in clients
        for local_end, peer_end, row in ends
        if row[9] == "0" and row[3] in _UNACCEPTED_STATES and local_end.rpartition(":")[2] == port
    )


def _in_group(process: Process, opened: socket.socket) -> bool:
    """Return whether a socket is a member of one of the multicast groups of its network namespace."""
    groups = _groups_of_version_4(process) if opened.family == socket.AF_INET else _groups_of_version_6(process)
    level = socket.IPPROTO_IP if opened.family == socket.AF_INET else socket.IPPROTO_IPV6
    return any(_is_member(opened, level, interface, address) for interface, address in groups)


def _is_member(opened: socket.socket, level: int, interface: int, address: bytes) -> bool:
    """Return whether the kernel has a filter of the socket for a group. ``address``: a ``struct sockaddr``."""
    request = bytearray(_GROUP_FILTER)
    request[:4] = interface.to_bytes(4, "little")
    request[_GROUP_AT : _GROUP_AT + len(address)] = address
    room, length = (ctypes.c_char * len(request)).from_buffer(request), ctypes.c_uint32(len(request))
    libc = ctypes.CDLL(None)
    return int(libc.getsockopt(opened.fileno(), level, _MCAST_MSFILTER, room, ctypes.byref(length))) == 0


def _groups_of_version_4(process: Process) -> Iterator[tuple[int, bytes]]:
    interface = 0
    for line in process.text("net/igmp").split("\n")[1:]:
        words = line.split()
        if words and not line[0].isspace():
            interface = kernel_text.number(words[0]) or 0
        elif words and len(words[0]) == 8:
            address = int(words[0], 16).to_bytes(4, "little")
            yield interface, struct.pack("HH4s", socket.AF_INET, 0, address)


def _groups_of_version_6(process: Process) -> Iterator[tuple[int, bytes]]:
    for line in process.text_if_readable("net/igmp6").split("\n"):  # absent in a kernel without IPv6
        words = line.split()
        if len(words) > 2 and len(words[2]) == 32:
            yield (
                kernel_text.number(words[0]) or 0,
                struct.pack("HHI16s", socket.AF_INET6, 0, 0, bytes.fromhex(words[2])),
            )


def reusable(tree: Iterable[Id]) -> frozenset[str]:
    """Return the inodes of the TCP sockets of these processes that have ``SO_REUSEADDR``. Never raises."""
    return frozenset(
        inode for inode, tcp in _tcp_sockets(tree) if tcp.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    )


def end_repair(tree: Iterable[Id], reused: Collection[str] | None = None) -> None:
    """End the repair mode of TCP connections, in which a dump leaves them. Never raises.

    ``reused``: what ``reusable`` has returned before the dump; ``None``: not known. The mode replaces that option.
    Without it, a server that is started again cannot bind the port of its last connections for a minute.
    """
    for inode, tcp in _tcp_sockets(tree):
        with suppress(OSError):
            in_repair = tcp.getsockopt(_TCP, _REPAIR)
            if in_repair:
                tcp.setsockopt(_TCP, _REPAIR, 0)
            if inode in reused if reused is not None else in_repair:
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def free_ports(tree: Iterable[Id]) -> None:
    """Let other sockets bind the ports of TCP connections of these processes once they have ended. Never raises.

    The kernel keeps the ports of a closed connection for a minute (TIME_WAIT), also from a restore on this node. It
    makes an exception if both sockets have ``SO_REUSEADDR``, which CRIU sets while it binds.
    """
    for _, tcp in _tcp_sockets(tree):
        with suppress(OSError):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _tcp_sockets(tree: Iterable[Id]) -> Iterator[tuple[str, socket.socket]]:
    """Yield each TCP socket of these processes with its inode, as a descriptor that is open until the next one."""
    inodes: set[str] = set()
    for pid, started in tree:
        with suppress(OSError, UnreachableError), Process(pid, started=started) as process:
            for inode, fd in _socket_fds(process).items():
                if inode in inodes:
                    continue
                with suppress(OSError, UnreachableError), process.as_socket(fd) as opened:
                    inodes.add(inode)
                    if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.proto == _TCP:
                        yield inode, opened


def restored(image: PrivateImage) -> tuple[str, ...]:
    """Close the connections in an image that have an end outside the job; return CRIU's options for the restore.

    Raises ``BadImage``.
    """
    if not any(name.startswith(_STREAM) for name in image.names()):
        return CLOSE
    image.replace(FILES, without_outside(image.read(FILES)))
    return KEEP


def without_outside(table: bytes) -> bytes:
    """Return ``files.img`` with closed sockets for the connections with one end in it. Raises ``BadImage``."""
    ends = {_ends(fields) for body in bodies(table) if (fields := _connection(body)) is not None}
    packed = bytearray(table[:_MAGICS])
    for body in bodies(table):
        fields = _connection(body)
        outside = fields is not None and tuple(reversed(_ends(fields))) not in ends
        packed += framed(_changed(body, _shut) if outside else body)
    return bytes(packed)


def _connection(body: bytes) -> Message | None:
    """Return the fields of a TCP connection in an entry of the file table."""
    fields = _socket(body)
    if fields is None or integer(fields, _PROTOCOL) != _TCP or not integer(fields, _PEER_PORT):
        return None
    return fields


def _ends(fields: Message) -> tuple[End, End]:
    return (
        (_decoded(_words(fields, _SOURCE)), integer(fields, _SOURCE_PORT)),
        (_decoded(_words(fields, _PEER)), integer(fields, _PEER_PORT)),
    )


def _shut(inner: bytes) -> bytes:
    """Return a socket like one whose connection CRIU has closed: without a port, and shut down in both directions."""
    values = {_STATE: _CLOSED, _SOURCE_PORT: 0, _PEER_PORT: 0, _SHUTDOWN: _BOTH_WAYS}
    rest = b"".join(inner[begin:end] for number, _, begin, end in spans(inner) if number not in values)
    return rest + b"".join(encoded(number, value) for number, value in values.items())


# --- addresses


def addresses(*, proc: Path = PROC) -> dict[Address, str]:
    """Return the addresses of this network namespace and their interfaces, without those of loopback interfaces."""
    by_address = {**_version_4(), **_version_6(proc)}
    return {address: name for address, name in by_address.items() if not address.is_loopback}


def _version_4() -> dict[Address, str]:
    room = array.array("B", bytes(_SIOCGIFCONF_BYTES * _MOST_INTERFACES))
    request = struct.pack("iP", len(room), room.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        (length, _) = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))
    rows = (bytes(room[offset : offset + _SIOCGIFCONF_BYTES]) for offset in range(0, length, _SIOCGIFCONF_BYTES))
    return {ipaddress.IPv4Address(row[_ADDRESS]): os.fsdecode(row[_NAME].split(b"\0")[0]) for row in rows}


def _version_6(proc: Path) -> dict[Address, str]:
    by_address: dict[Address, str] = {}
    with suppress(OSError):  # a kernel without IPv6
        for line in (proc / "self" / "net" / "if_inet6").read_text(encoding="ascii").splitlines():
            number, *_, name = line.split()
            by_address[ipaddress.IPv6Address(bytes.fromhex(number))] = name
    return by_address


def record(directory_fd: int, interfaces: Mapping[Address, str]) -> None:
    """Record in CRIU's directory the interfaces of the addresses that sockets of the dump have.

    ``interfaces``: those of this node. Raises ``BadImage``.
    """
    used = {address for body in bodies(read_image(directory_fd, FILES)) for address in _addresses_of(body)}
    index = {str(address): name for address, name in interfaces.items() if address in used}
    if index:
        root_directory.write(directory_fd, INDEX, json.dumps(index).encode())


def move(image: PrivateImage, interfaces: Mapping[Address, str]) -> dict[Address, Address]:
    """Replace the addresses in an image that this node does not have; return old address -> new address.

    ``interfaces``: those of this node. Raises ``BadImage``, and ``RestoreFailed`` if there is none to replace it.
    """
    if INDEX not in image.names():
        return {}
    old = recorded(image.read(INDEX))
    moved = {
        address: _counterpart(address, name, interfaces) for address, name in old.items() if address not in interfaces
    }
    if moved:
        image.replace(FILES, replaced(image.read(FILES), moved))
    return moved


def recorded(index: bytes) -> dict[Address, str]:
    """Decode the record of a dump: address -> interface. Raises ``BadImage``."""
    try:
        table = json_values.table(json_values.loads(index))
        return {ipaddress.ip_address(text): json_values.typed(str, name) for text, name in table.items()}
    except ValueError as error:
        raise BadImage(f"{INDEX}: {error}") from None


def replaced(table: bytes, moved: Mapping[Address, Address]) -> bytes:
    """Return ``files.img`` with other addresses. Raises ``BadImage``."""
    return table[:_MAGICS] + b"".join(framed(_with(body, moved.get)) for body in bodies(table))


def _counterpart(address: Address, name: str, interfaces: Mapping[Address, str]) -> Address:
    """Return the address of this node for one of another node."""
    same = [value for value, interface in interfaces.items() if interface == name and _alike(value, address)]
    if same:
        return same[0]
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError, ValueError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((_OUTSIDE_ADDRESSES[address.version], 9))
        local = ipaddress.ip_address(sock.getsockname()[0])
        if local in interfaces:
            return local
    raise RestoreInterrupted(
        f"it has a socket at {address}, the address of {name} on its former node, and this node has none in its place"
    )


def _alike(address: Address, other_address: Address) -> bool:
    return address.version == other_address.version and address.is_link_local == other_address.is_link_local


def _addresses_of(body: bytes) -> Iterator[Address]:
    """Yield the addresses in an entry of the file table; none if it is not a network socket."""
    fields = _socket(body)
    if fields is not None:
        for field in (_SOURCE, _PEER):
            address = _decoded(_words(fields, field))
            if address is not None:
                yield address


def _socket(body: bytes) -> Message | None:
    """Return the fields of a network socket in an entry of the file table."""
    facts = message(body)
    inner = facts.get(_ENTRY, [None])[0]
    return message(inner) if facts.get(1) == [Type.INETSK] and isinstance(inner, bytes) else None


def _words(fields: Message, field: int) -> list[int]:
    return [word for word in fields.get(field, []) if isinstance(word, int)]


def _decoded(words: list[int]) -> Address | None:
    """Return the address, an IPv4 one also if it is mapped to IPv6; ``None`` if it is none, or the wildcard."""
    if len(words) not in (1, 4) or not any(words) or not all(word < 1 << 32 for word in words):
        return None
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    if len(words) == 1:
        return ipaddress.IPv4Address(packed)
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address


def _with(body: bytes, new_for: Callable[[Address], Address | None]) -> bytes:
    """Return an entry of the file table with other addresses."""
    if not any(new_for(address) for address in _addresses_of(body)):
        return body
    return _changed(body, lambda inner: _with_addresses(inner, new_for))


def _changed(body: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return an entry of the file table with another network socket."""
    packed = bytearray()
    for number, value, begin, end in spans(body):
        if number == _ENTRY and isinstance(value, bytes):
            packed += encoded(number, change(value))
        else:
            packed += body[begin:end]
    return bytes(packed)


def _with_addresses(inner: bytes, new_for: Callable[[Address], Address | None]) -> bytes:
    words: dict[int, list[int]] = {_SOURCE: [], _PEER: []}
    packed = bytearray()
    for number, value, begin, end in spans(inner):
        if number in words and isinstance(value, int):
            words[number].append(value)
        else:
            packed += inner[begin:end]
    for field, old in words.items():
        address = _decoded(old)
        new = None if address is None else new_for(address)
        for word in old if new is None else _encoded(new, len(old)):
            packed += varint(field << 3) + varint(word)
    return bytes(packed)


def _encoded(address: Address, words: int) -> list[int]:
    packed = address.packed
    if words == 4 and address.version == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    return [int.from_bytes(packed[offset : offset + 4], "little") for offset in range(0, len(packed), 4)]
