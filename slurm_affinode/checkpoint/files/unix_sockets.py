"""UNIX sockets with names in the file system, recreated with the rights of their user.

CRIU would remove the name, bind and connect as root, wherever a link in the path may lead by then. So such a socket is
created in advance, in the job's own mount namespace, by a thread with the user's file system rights, and CRIU inherits
it. A connection by name from one socket of the tree to another is made by CRIU itself and cannot be inherited, so it is
refused at dump time. An accepted connection has the name of its listening socket. A
connection to a service (``service_connections.py``) is inherited as a socket whose other end is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import struct
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from slurm_affinode.checkpoint.files.file_table import DATAGRAM, ESTABLISHED, LISTEN, FileTable, UnixSocket
from slurm_affinode.checkpoint.interface import restore_failure
from slurm_affinode.checkpoint.user_files import User, as_user

_KEEP_FLAGS = os.O_NONBLOCK | os.O_ASYNC
_PASSSEC = 34
_F_GETOWN_EX = 16
# Fields of sk_opts_entry (images/sk-opts.proto) that are plain integer options of SOL_SOCKET.
_OPTIONS = {9: socket.SO_RCVLOWAT, 8: socket.SO_PRIORITY, 11: socket.SO_PASSCRED, 12: _PASSSEC}
_BUFFERS = {1: 32, 2: 33}  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
_TIMES = {(3, 4): socket.SO_SNDTIMEO, (5, 6): socket.SO_RCVTIMEO}
_SHUTDOWN = {1: socket.SHUT_RD, 2: socket.SHUT_WR, 3: socket.SHUT_RDWR}
_LONGEST = 108  # bytes, of sun_path


def made_before(table: FileTable) -> list[UnixSocket]:
    """Return the sockets that CRIU must inherit, because it would bind, connect or listen as root."""
    external = {socket.ino for socket in table.sockets if socket.external and socket.path is not None}
    before = []
    for unix_socket in table.sockets:
        if unix_socket.closed:
            before.append(unix_socket)
        if unix_socket.external or (unix_socket.type != DATAGRAM and unix_socket.state == ESTABLISHED):
            continue
        if unix_socket.path is not None or unix_socket.peer in external or unix_socket.state == LISTEN:
            before.append(unix_socket)
    return before


def refusal(table: FileTable, queued: Collection[int] = ()) -> str | None:
    """Return why the sockets of an image could not be restored, or ``None``. ``queued``: those with unread data."""
    socket_by_ino = {socket.ino: socket for socket in made_before(table)}
    external = {socket.ino: socket for socket in table.sockets if socket.external}
    for unix_socket in table.sockets:
        peer = socket_by_ino.get(unix_socket.peer) if unix_socket.peer else None
        if peer is not None and peer.closed:
            continue  # the end of the service
        if peer is not None and peer.state == LISTEN:
            return f"a connection to its socket {_name(peer)} is not accepted yet"
        if peer is not None:
            return f"one of its datagram sockets is connected to another one by name: {_name(peer)}"
    for unix_socket in socket_by_ino.values():
        if unix_socket.closed and unix_socket.id in queued:
            return f"its connection to {_name(external[unix_socket.peer])} has data that is not read yet"
        if unix_socket.id in queued:
            return f"its socket {_name(unix_socket)} has data that is not read yet"
        if unix_socket.signals:
            return f"its socket {_name(unix_socket)} sends signals"
        if unix_socket.peer and unix_socket.peer not in external:
            return f"its socket {_name(unix_socket)} is connected to another one of the tree"
        if unix_socket.peer and not (external[unix_socket.peer].path or "/").startswith("/"):
            return f"its socket is connected to {_name(external[unix_socket.peer])}, which is not a full path"
    return None


def state_lost(opened: socket.socket) -> str | None:
    """Return a state of a UNIX socket with which it could not be created in advance, or ``None``.

    CRIU dumps some of these sockets, and fails for others once the dump has begun. Raises ``OSError``.
    """
    listens = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens and not _is_receiver(opened):
        return None
    _, owner = struct.unpack("ii", fcntl.fcntl(opened, _F_GETOWN_EX, bytes(8)))
    if owner:
        return "UNIX that sends signals"
    poll = select.poll()
    poll.register(opened, select.POLLIN)
    if not poll.poll(0):
        return None
    return "UNIX with a connection to accept" if listens else "UNIX with a message to receive"


def _is_receiver(opened: socket.socket) -> bool:
    """Return whether it is a datagram socket with a name in the file system."""
    name = opened.getsockname()
    return opened.type == socket.SOCK_DGRAM and isinstance(name, str) and bool(name)


def _name(socket: UnixSocket) -> str:
    return socket.path or socket.name.decode("utf-8", "backslashreplace") or "without a name"


def make(namespace_fd: int, user: User, table: FileTable) -> dict[int, socket.socket]:
    """Create the sockets of ``made_before``: entry -> socket. ``namespace_fd``: the job's mount namespace.

    Raises ``RestoreFailed``.
    """
    needed = made_before(table)
    if not needed:
        return {}
    names = {socket.ino: socket for socket in table.sockets}
    new_sockets: dict[int, socket.socket] = {}

    def call() -> None:
        for unix_socket in needed:
            try:
                new_sockets[unix_socket.id] = _create(
                    unix_socket, names.get(unix_socket.peer) if unix_socket.peer else None
                )
            except OSError as error:
                raise restore_failure(f"{_name(unix_socket)}: its socket cannot be made", error) from None

    try:
        # Peers see the effective IDs at the time of listen or connect, and would trust root's.
        as_user(user, call, namespace_fd=namespace_fd, effective=True)
        for entry in needed:
            _set_options(new_sockets[entry.id], entry)  # some need rights that the user does not have
    except BaseException:
        for unix_socket in new_sockets.values():
            unix_socket.close()
        raise
    return new_sockets


def _create(unix_socket: UnixSocket, peer: UnixSocket | None) -> socket.socket:
    new_socket = _closed(unix_socket) if unix_socket.closed else socket.socket(socket.AF_UNIX, unix_socket.type & 0xF)
    try:
        if unix_socket.name:
            _bind(new_socket, unix_socket)
        if unix_socket.state == LISTEN:
            new_socket.listen(unix_socket.backlog)
        if peer is not None and not unix_socket.closed:
            new_socket.connect(peer.path or peer.name)
        if unix_socket.shutdown in _SHUTDOWN:
            new_socket.shutdown(_SHUTDOWN[unix_socket.shutdown])
        flags = fcntl.fcntl(new_socket, fcntl.F_GETFL)
        fcntl.fcntl(new_socket, fcntl.F_SETFL, (flags & ~_KEEP_FLAGS) | (unix_socket.flags & _KEEP_FLAGS))
    except BaseException:
        new_socket.close()
        raise
    return new_socket


def _closed(unix_socket: UnixSocket) -> socket.socket:
    """Return a connected socket whose other end is closed."""
    new_socket, peer_socket = socket.socketpair(socket.AF_UNIX, unix_socket.type & 0xF)
    peer_socket.close()
    return new_socket


def _bind(new_socket: socket.socket, unix_socket: UnixSocket) -> None:
    if unix_socket.path is None:
        new_socket.bind(unix_socket.name)
        return
    if len(unix_socket.name) > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, "its name is too long")
    if unix_socket.directory is not None:
        os.chdir(unix_socket.directory)
    path = Path(unix_socket.path)
    mode = 0o777 if unix_socket.mode is None else unix_socket.mode & 0o777
    aside = path.with_name(f".aside.{uuid.uuid4().hex}") if unix_socket.deleted and _file_mode(path) else None
    if aside is not None:
        path.rename(aside)
    elif stat.S_ISSOCK(_file_mode(path)):
        path.unlink()  # its own socket, from the previous attempt
    created = _make_directories(path) if unix_socket.deleted else []
    umask = os.umask(~mode & 0o777)  # of this thread only
    try:
        new_socket.bind(unix_socket.path)
    finally:
        os.umask(umask)
    if unix_socket.deleted:
        path.unlink()
    if aside is not None:
        aside.rename(path)
    for directory in reversed(created):
        with suppress(OSError):
            directory.rmdir()


def _file_mode(path: Path) -> int:
    """Return the mode of a file, 0 if it does not exist."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _make_directories(path: Path) -> list[Path]:
    """Create the missing parent directories and return them."""
    missing = [above for above in reversed(path.parents) if not _file_mode(above)]
    for directory in missing:
        directory.mkdir(mode=0o700)
    return missing


def _set_options(new_socket: socket.socket, unix_socket: UnixSocket) -> None:
    """Set the options that programs use on UNIX sockets, as far as the kernel accepts them."""
    for field, option in _BUFFERS.items():
        if unix_socket.options.get(field, 0) < 1 << 31:
            with suppress(OSError):
                new_socket.setsockopt(
                    socket.SOL_SOCKET, option, unix_socket.options.get(field, 0) // 2
                )  # the kernel doubles it
    for field, option in _OPTIONS.items():
        if 0 < unix_socket.options.get(field, 0) < 1 << 31:
            with suppress(OSError):
                new_socket.setsockopt(socket.SOL_SOCKET, option, unix_socket.options[field])
    for (seconds, micro), option in _TIMES.items():
        value = unix_socket.options.get(seconds, 0), unix_socket.options.get(micro, 0)
        if any(value) and max(value) < 1 << 62:
            new_socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *value))
