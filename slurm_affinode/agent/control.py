"""Sockets for ``status``, ``suspend``, ``wake``, prolog and epilog: local, and over the network with munge.

Each connection carries one request and one reply, each a single line. On local sockets they are JSON, and the kernel
identifies the caller. Over the network both are munge credentials: that of the request identifies the caller, names the
node it is meant for and is accepted once there; that of the reply can be decoded by that user only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_affinode.agent import munge
from slurm_affinode.agent.client import ROOTS
from slurm_affinode.agent.listeners import AcceptLoop, listen_tcp, listen_unix
from slurm_affinode.agent.requests import Caller, RequestError
from slurm_affinode.agent.throttle import Pace, Seldom
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.seats import Seats, machine_of
from slurm_affinode.base.threads import Workers, WorkQueue, surviving
from slurm_affinode.base.users import name_of_user
from slurm_affinode.suspension.job.peers import peer_of

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024
REQUEST_S = 10.0
"""Timeout for receiving a request."""
ANSWER_S = 20.0
"""Timeout for sending the reply."""
MAX_CONNECTIONS = 256
"""For the users of this node. Root's connections are not limited, and those of the network are counted separately."""
MAX_NETWORK_CONNECTIONS = 128
MAX_PER_HOLDER = 32
"""For one user of the node, or one address."""
REQUESTS_PER_S = 10.0
BURST = 100
"""Per user or address, except for local root: each request over the network starts two munge programs."""
WORKERS = 6
"""For the users of this node, and as many for the network."""
ROOTS_WORKERS = 32
"""The epilogs of a node's jobs wait at the same time for the processes that the jobs left on their GPUs."""

Answer = Callable[[Mapping[str, Any], Caller], dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Pool:
    """Limits and workers shared by callers of one kind. The kinds do not compete with each other."""

    seats: Seats
    pace: Pace
    requests: WorkQueue


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    holder: Hashable
    opened: float
    uid: int | None
    """``None``: over the network."""
    pool: _Pool
    received: bytearray = field(default_factory=bytearray)


class ControlServer:
    """Accepts requests in one thread and answers them in worker threads, with separate ones for root."""

    def __init__(
        self,
        answer: Answer,
        workers: Workers,
        *,
        path: Path,
        address: tuple[str, int] | None,
        node: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``address``: where other nodes connect; ``None``: only local requests. Raises ``UnreachableError``."""
        self._answer = answer
        self._node = node
        self._clock = clock
        self._seldom = Seldom()
        self._seats_lock = threading.Lock()
        """Guards the seats of all connections."""
        self._open: set[_Connection] = set()
        self._tcp: socket.socket | None = None
        self._unix: list[socket.socket] = []
        try:
            self._unix.append(listen_unix(path, socket.SOCK_STREAM))
            # A separate socket, so that users who fill the queue of the other one cannot block a prolog.
            self._unix.append(listen_unix(path.with_name(ROOTS), socket.SOCK_STREAM, mode=0o600))
            if address is not None:
                self._tcp = listen_tcp(*address)
        except AffinodeError:
            for sock in self._unix:
                sock.close()
            raise
        self._loop = AcceptLoop(self._run, "control", self._seldom)
        # Prolog and epilog do not wait for users' requests, however many there are, and users of this node do not wait
        # for requests from the network.
        self._root, self._users, self._network = (
            _Pool(
                Seats(seats, MAX_PER_HOLDER),
                Pace(REQUESTS_PER_S, BURST, clock),
                workers.queue(name, at_once, last=True),
            )
            for seats, at_once, name in (
                (MAX_CONNECTIONS, ROOTS_WORKERS, "control of root"),
                (MAX_CONNECTIONS, WORKERS, "control"),
                (MAX_NETWORK_CONNECTIONS, WORKERS, "control of the network"),
            )
        )

    @property
    def port(self) -> int | None:
        """The TCP port for other nodes, or ``None`` if requests over the network are disabled."""
        return None if self._tcp is None else self._tcp.getsockname()[1]

    def start(self) -> None:
        """Start accepting requests."""
        self._loop.start([*self._unix, *(() if self._tcp is None else (self._tcp,))])

    def stop(self) -> None:
        """Close all connections and sockets."""
        self._loop.stop()
        for pool in (self._root, self._users, self._network):
            pool.requests.close()
        for connection in tuple(self._open):
            connection.sock.close()
        for sock in (*self._unix, self._tcp):
            if sock is not None:
                sock.close()
        self._loop.close()

    # --- the accepting thread

    def _run(self) -> None:
        while True:
            first = min((connection.opened for connection in self._open), default=None)
            timeout = None if first is None else max(0.0, first + REQUEST_S - self._clock())
            ready = self._loop.wait(timeout)
            if ready is None:
                return
            for key in ready:
                if isinstance(key.fileobj, socket.socket) and key.data is None:
                    self._accept(key.fileobj)
                elif key.data in self._open:  # else it was closed in favor of another connection
                    self._receive(key.data)
            late = self._clock() - REQUEST_S
            for connection in [connection for connection in self._open if connection.opened <= late]:
                self._release(connection)
                self._end(connection)

    def _accept(self, listener: socket.socket) -> None:
        accepted = self._loop.accept(listener, "a request")
        if accepted is None:
            return
        sock, address = accepted
        try:
            uid = None if listener is self._tcp else peer_of(sock).uid
        except OSError:
            sock.close()
            return
        holder: Hashable = uid if uid is not None else machine_of(address[0])
        pool = self._network if uid is None else self._root if uid == 0 else self._users
        if uid != 0 and not pool.pace.take(holder):
            self._turn_away(sock, holder, "requests")
            return
        if not self._seated(pool, holder, reserved=uid == 0):
            self._turn_away(sock, holder, "connections")
            return
        connection = _Connection(sock, holder, self._clock(), uid, pool)
        self._open.add(connection)
        self._loop.selector.register(sock, selectors.EVENT_READ, connection)

    def _seated(self, pool: _Pool, holder: Hashable, *, reserved: bool) -> bool:
        """Take a seat. If none is free, drop a connection without a request from a holder with more of them."""
        with self._seats_lock:
            if pool.seats.take(holder, reserved=reserved):
                return True
            last = pool.seats.to_vacate(holder, [connection for connection in self._open if connection.pool is pool])
        if last is None:
            return False
        self._release(last)
        self._end(last)
        with self._seats_lock:
            return pool.seats.take(holder)

    def _turn_away(self, sock: socket.socket, holder: object, what: str) -> None:
        if self._seldom.now(holder):
            log.warning("%s has too many %s: refused another one", _shown(holder), what)
        if isinstance(holder, int):  # over the network, only replies signed by munge are accepted
            reason = f"the agent has too many {what} of yours: ask again in a moment"
            with contextlib.suppress(OSError):
                sock.send(_dump(_refusal("too-often", reason, None, 3)) + b"\n")
        sock.close()

    def _receive(self, connection: _Connection) -> None:
        try:
            part = connection.sock.recv(MAX_REQUEST_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        connection.received += part
        line, newline, _ = bytes(connection.received).partition(b"\n")
        if len(line) > MAX_REQUEST_BYTES or (not part and not line):
            self._release(connection)
            self._end(connection)
        elif newline or not part:
            self._release(connection)
            connection.pool.requests.post(self._handle, connection, line)

    def _release(self, connection: _Connection) -> None:
        """Remove a connection from the accepting thread."""
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(connection.sock)
        self._open.discard(connection)

    def _end(self, connection: _Connection) -> None:
        connection.sock.close()
        with self._seats_lock:
            connection.pool.seats.leave(connection.holder)

    # --- the answering threads

    def _handle(self, connection: _Connection, line: bytes) -> None:
        with surviving(log, "a request of %s could not be answered", _shown(connection.holder)):
            try:
                answer = self._local(line, connection.uid) if connection.uid is not None else self._remote(line)
                connection.sock.settimeout(ANSWER_S)
                connection.sock.sendall(answer + b"\n")
            except OSError:
                pass  # the client has disconnected
            except AffinodeError as error:
                if self._seldom.now(connection.holder):
                    log.warning("a request of %s is refused: %s", _shown(connection.holder), error)
        self._end(connection)

    def _local(self, line: bytes, uid: int) -> bytes:
        return _dump(self._reply(line, Caller(uid, name_of_user(uid), local=True)))

    def _remote(self, line: bytes) -> bytes:
        message = munge.decode(line)
        caller = Caller(message.uid, name_of_user(message.uid), local=False)
        return munge.encode(_dump(self._reply(message.payload, caller)), only_uid=message.uid)

    def _reply(self, payload: bytes, caller: Caller) -> dict[str, Any]:
        with surviving(log, "a request of uid %d could not be answered", caller.uid):
            try:
                request = parse_request(payload)
                if not caller.local and request.get("to") != self._node:
                    raise RequestError("bad-request", "the request is meant for another node", exit_code=2)
                return {"ok": True, **self._answer(request, caller)}
            except AffinodeError as error:
                code = error.code if isinstance(error, RequestError) else _code_of(error)
                return _refusal(code, str(error), error.hint, error.exit_code)
        return _refusal("fault", "an internal error of the agent; see its log", None, 3)


def parse_request(payload: bytes) -> dict[str, Any]:
    """Parse a request, one line of JSON. Raises ``RequestError``."""
    try:
        request = json.loads(payload)
    except (ValueError, RecursionError):
        raise RequestError("bad-request", "the request is not JSON", exit_code=2) from None
    if not isinstance(request, dict) or request.get("service") != "slurm-affinode":
        raise RequestError("bad-request", "the request is not one of slurm-affinode", exit_code=2)
    return request


def _code_of(error: AffinodeError) -> str:
    refusal = getattr(error, "refusal", None)
    return str(getattr(refusal, "code", "failed"))


def _refusal(code: str, message: str, hint: str | None, exit_code: int) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": message, "hint": hint, "exit_code": exit_code}}


def _dump(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=True, separators=(",", ":")).encode()


def _shown(holder: object) -> str:
    return f"uid {holder}" if isinstance(holder, int) else str(holder)
