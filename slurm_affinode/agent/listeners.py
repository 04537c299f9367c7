"""Listening sockets in a directory that only root writes to, and the threads that accept connections on them."""

from __future__ import annotations

import array
import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_affinode.agent.throttle import Seldom
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.files import make_open

log = logging.getLogger(__name__)

BACKLOG = 512
STOP_S = 5.0


def prepare_directory(path: Path) -> None:
    """Create the directory of the sockets, which only its owner may write to. Raises ``UnreachableError``."""
    try:
        make_open(path)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UnreachableError(
                f"{path}: users other than {os.geteuid()} may write to it",
                hint=f"it holds the agent's sockets; try: chown root:root {path} && chmod 0755 {path}",
            )
    except OSError as error:
        raise UnreachableError(f"{path}: cannot be made: {error.strerror}", hint="run the agent as root") from error


def listen_unix(path: Path, kind: int, *, mode: int = 0o666) -> socket.socket:
    """Return a listening socket at ``path``, open to all or restricted by ``mode``.

    A socket of a dead agent is replaced. Raises ``UnreachableError`` if another agent listens there.
    """
    if _answers(path, kind):
        raise UnreachableError(f"{path}: another agent is running on this node")
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock.bind(str(path))
        # The kernel identifies the caller; permissions are checked for each request.
        path.chmod(mode)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UnreachableError(f"{path}: cannot listen there: {error.strerror or error}") from error
    return sock


def _answers(path: Path, kind: int) -> bool:
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            return error.errno is not None  # without an errno nothing was sent: the path is too long for a socket
        return True


def receive(sock: socket.socket, size: int, most_fds: int) -> tuple[bytes, list[int], int]:
    """Return a packet of at most ``size`` bytes, the descriptors that came with it, and ``recvmsg`` flags.

    The descriptors are closed in programs that the agent starts. ``socket.recv_fds`` leaves them open there, because it
    drops the flag that would close them (CPython 3.11). Raises ``OSError``.
    """
    fds = array.array("i")
    space = socket.CMSG_LEN(most_fds * fds.itemsize)
    packet, ancillary, flags, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, list(fds), flags


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a listening socket on an address. Raises ``UnreachableError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UnreachableError(f"{host}:{port}: cannot listen there: {error.strerror}") from error
    return sock


class AcceptLoop:
    """A thread that accepts and serves connections. ``seldom`` limits its warnings."""

    def __init__(self, run: Callable[[], None], name: str, seldom: Seldom) -> None:
        """``run`` is the thread's function; it calls ``wait`` until that returns ``None``."""
        self.selector = selectors.DefaultSelector()
        self.thread = threading.Thread(target=run, name=name, daemon=True)
        self._seldom = seldom
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Start the thread; connections come with ``data`` set, listeners without."""
        for listener in listeners:
            self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(self._wake_r, selectors.EVENT_READ)
        self.thread.start()

    def wait(self, timeout_s: float | None) -> list[selectors.SelectorKey] | None:
        """Return the sockets that can be read; ``None``: the thread is to end."""
        ready = [key for key, _ in self.selector.select(timeout_s)]
        return None if any(key.fileobj == self._wake_r for key in ready) else ready

    def accept(self, listener: socket.socket, what: str) -> tuple[socket.socket, Any] | None:
        """Return a new connection and its address, or ``None`` after a warning; ``what`` is the client, for it."""
        try:
            sock, address = listener.accept()
        except OSError as error:
            if self._seldom.now("accept"):
                log.warning("cannot accept %s: %s", what, error)
            # Without descriptors the accept fails again at once: pause instead of spinning.
            time.sleep(0.05)
            return None
        sock.setblocking(False)
        return sock, address

    def stop(self) -> None:
        """End the thread."""
        os.write(self._wake_w, b"x")
        if self.thread.is_alive():
            self.thread.join(STOP_S)

    def close(self) -> None:
        """Release its descriptors; the thread has ended."""
        self.selector.close()
        os.close(self._wake_r)
        os.close(self._wake_w)
