"""Server of the socket that shepherds connect to: one thread that never blocks on a client and trusts no input."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slurm_affinode.agent.listeners import AcceptLoop, listen_unix, receive
from slurm_affinode.agent.throttle import Seldom
from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.base.seats import Seats
from slurm_affinode.base.text import one_line
from slurm_affinode.base.threads import surviving
from slurm_affinode.suspension.job.peers import Identity, NotAShepherd, Peer, has_ended, peer_of, pidfd_of
from slurm_affinode.suspension.job.shepherd import (
    MAX_PACKET_BYTES,
    BadMessage,
    Exited,
    Hello,
    Outgoing,
    Reaped,
    Signalled,
    Started,
    decode,
    encode,
)
from slurm_affinode.suspension.job.streams import close, stuck

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
MAX_PER_USER = 256
"""Each job has one connection, and a user may have many jobs on a node."""
HELLO_S = 10.0
"""Timeout for the hello message, after which a connection is closed."""
STREAMS = 3
MOST_REAPED = 64
"""Reports of ended processes that are kept for each connection; the shepherd keeps as many."""


class ShepherdEvents(Protocol):
    """Handles messages of shepherds. Called by the server's thread, so it must not block."""

    def hello(self, who: Identity, hello: Hello, link: Connection, fds: tuple[int, ...]) -> bool:
        """Handle the hello of a shepherd and take ownership of ``fds``. Return ``False`` to close the connection."""
        ...

    def started(self, job_id: int, root: int, link: Connection) -> None:
        """The script was started."""
        ...

    def signalled(self, job_id: int, number: int) -> None:
        """Slurm has sent the job a signal."""
        ...

    def on_disconnect(self, job_id: int, link: Connection, status: int | None) -> None:
        """The connection has ended. ``status``: exit status of the root process, ``None`` if not reported."""
        ...


class Connection:
    """Connection of one shepherd; implements ``registry.Link``."""

    def __init__(self, sock: socket.socket, peer: Peer, pidfd: int, opened: float) -> None:
        self.sock = sock
        self.peer = peer
        self.pidfd = pidfd
        """Of the process that connected; -1 after its hello."""
        self.opened = opened
        self.who: Identity | None = None
        self.status: int | None = None
        self._reaped: dict[int, int] = {}
        self._lock = threading.Lock()
        """Guards the socket: workers send while the server thread closes."""
        self._open = True

    @property
    def holder(self) -> int:
        """The user that its seat counts for."""
        return self.peer.uid

    @property
    def open(self) -> bool:
        """Whether the shepherd is connected."""
        return self._open

    def status_of(self, pid: int) -> int | None:
        """See ``registry.Link``."""
        return self._reaped.get(pid)

    def forget_status(self, pid: int) -> None:
        """See ``registry.Link``."""
        self._reaped.pop(pid, None)

    def reaped(self, pid: int, status: int) -> None:
        """Record that a process of the job has ended."""
        self._reaped.pop(pid, None)
        if len(self._reaped) >= MOST_REAPED:
            del self._reaped[next(iter(self._reaped))]
        self._reaped[pid] = status

    def send(self, message: Outgoing) -> bool:
        """Send a message without blocking. Return ``False`` if the shepherd is gone or does not read."""
        with self._lock:
            if not self._open:
                return False
            try:
                self.sock.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return False
            return True

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._open:
                self._open = False
                self.sock.close()
        self.forget()

    def forget(self) -> None:
        """Close the pidfd: the shepherd is identified, or the connection has ended."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class ShepherdServer:
    """Accepts shepherds. ``identify`` is ``Inspector.identify`` or a stand-in."""

    def __init__(
        self,
        path: Path,
        events: ShepherdEvents,
        identify: Callable[[Peer], Identity],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._events = events
        self._identify = identify
        self._clock = clock
        self._seats = Seats(MAX_CONNECTIONS, MAX_PER_USER)
        self._seldom = Seldom()
        self._connections: set[Connection] = set()
        self._listener = listen_unix(path, socket.SOCK_SEQPACKET)
        self._loop = AcceptLoop(self._run, "shepherds", self._seldom)

    def start(self) -> None:
        """Start accepting connections."""
        self._loop.start([self._listener])

    def stop(self) -> None:
        """Close everything. Shepherds reconnect to the next agent, which replaces the socket file."""
        self._loop.stop()
        for connection in tuple(self._connections):
            connection.close()
        self._listener.close()
        self._loop.close()

    def _run(self) -> None:
        while True:
            waiting = [
                connection.opened + HELLO_S - self._clock()
                for connection in self._connections
                if connection.who is None
            ]
            ready = self._loop.wait(max(0.0, min(waiting)) if waiting else None)
            if ready is None:
                return
            for key in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:  # else it was dropped in favor of another one
                    self._serve(key.data)
            late = self._clock() - HELLO_S
            for connection in [
                connection for connection in self._connections if connection.who is None and connection.opened <= late
            ]:
                self._drop(connection, "no output")

    def _accept(self) -> None:
        accepted = self._loop.accept(self._listener, "a shepherd")
        if accepted is None:
            return
        sock, _ = accepted
        try:
            peer = peer_of(sock)
            pidfd = pidfd_of(sock, peer)
        except (OSError, ExhaustedError):
            sock.close()
            return
        if not self._seated(peer.uid):
            if self._seldom.now(peer.uid):
                log.warning("uid %d has too many connections: refused another one", peer.uid)
            os.close(pidfd)
            sock.close()
            return
        connection = Connection(sock, peer, pidfd, self._clock())
        self._connections.add(connection)
        self._loop.selector.register(sock, selectors.EVENT_READ, connection)

    def _seated(self, uid: int) -> bool:
        """Take a seat. If none is free, drop a connection without a hello of a user with more of them."""
        if self._seats.take(uid, reserved=uid == 0):
            return True
        last = self._seats.to_vacate(uid, [connection for connection in self._connections if connection.who is None])
        if last is None:
            return False
        self._drop(last)
        return self._seats.take(uid)

    def _serve(self, connection: Connection) -> None:
        peer = connection.peer
        with surviving(log, "uid %d, process %d: a message could not be handled", peer.uid, peer.pid) as fault:
            self._receive(connection)
        if fault.error is not None:
            self._drop(connection)

    def _receive(self, connection: Connection) -> None:
        fds: list[int] = []
        if stuck(connection.peer.uid):  # the kernel closes descriptors that are not received
            self._drop(connection, "files that it handed over cannot be closed")
            return
        try:
            packet, fds, flags = receive(connection.sock, MAX_PACKET_BYTES + 1, STREAMS)
            if not packet:
                self._drop(connection)
                return
            self._take(connection, packet, fds, whole=not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))
        except (BlockingIOError, ConnectionResetError):
            # Reset: the shepherd ended before it had read all messages. Those that it sent can still be read.
            return
        except (OSError, ExhaustedError, BadMessage, NotAShepherd) as error:
            self._drop(connection, str(error))
        finally:
            close(fds, connection.peer.uid)

    def _take(self, connection: Connection, packet: bytes, fds: list[int], *, whole: bool) -> None:
        if not whole:
            raise BadMessage("a packet that is too long, or with too many descriptors")
        message = decode(packet)
        if isinstance(message, Hello):
            self._greet(connection, message, fds)
        elif connection.who is None:
            raise BadMessage("its first message was not hello")
        elif isinstance(message, Started):
            self._events.started(connection.who.job_id, message.root, connection)
        elif isinstance(message, Signalled):
            self._events.signalled(connection.who.job_id, message.number)
        elif isinstance(message, Reaped):
            connection.reaped(message.pid, message.status)
        elif isinstance(message, Exited):
            connection.status = message.status

    def _greet(self, connection: Connection, message: Hello, fds: list[int]) -> None:
        """Identify the sender of a hello; descriptors that it passes are removed from ``fds``."""
        if connection.who is not None:
            raise BadMessage("it sent hello twice")
        who = self._identify(connection.peer)
        if has_ended(connection.pidfd):  # its PID may have been reused by a shepherd
            raise NotAShepherd(f"process {connection.peer.pid} has ended")
        connection.forget()
        if who.job_id != message.job_id:
            raise NotAShepherd(f"it claims to be job {message.job_id}, but belongs to job {who.job_id}")
        connection.who = who
        passed, fds[:] = tuple(fds), []
        if not self._events.hello(who, message, connection, passed):
            self._drop(connection)

    def _drop(self, connection: Connection, why: str | None = None) -> None:
        if connection not in self._connections:  # already dropped, before a later error
            return
        peer = connection.peer
        if why is not None and self._seldom.now(peer.uid):
            log.warning("uid %d, process %d: connection closed: %s", peer.uid, peer.pid, one_line(why))
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(connection.sock)
        connection.close()
        self._connections.discard(connection)
        self._seats.leave(peer.uid)
        if connection.who is not None:
            self._events.on_disconnect(connection.who.job_id, connection, connection.status)
