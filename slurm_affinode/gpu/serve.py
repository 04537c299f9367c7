"""An HTTP server for metrics: ``/metrics`` of one registry, with TLS, client certificates, bearer token."""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from slurm_affinode.errors import InputError, UnreachableError

CLIENT_TIMEOUT_S = 10.0
REQUEST_S = 15.0
"""A request and its answer are over by then, however slowly the client sends and reads."""
MAX_CLIENTS = 16
MAX_OF_ADDRESS = 4
"""A user whose jobs are better not measured must not take all the places."""
_PAGE = b"slurm-affinode exporter: metrics are at /metrics\n"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may read."""

    cert: Path | None = None
    """Certificate chain (PEM); with it only TLS is spoken."""
    key: Path | None = None
    """Its key, where ``cert`` does not hold it."""
    client_ca: Path | None = None
    """Clients need a certificate of this authority."""
    token: str | None = None
    """Clients need ``Authorization: Bearer TOKEN``."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._clients: Counter[str] = Counter()
        self._lock = threading.Lock()
        super().__init__(*arguments, **named)

    def server_bind(self) -> None:
        # Without the name look-up of the base class, which a node with a slow resolver would wait for.
        socket_name = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_name)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        # More clients than Prometheus ever opens: whoever they are, the node has other things to do.
        who = str(client_address[0])
        with self._lock:
            full = self._clients.total() >= MAX_CLIENTS or self._clients[who] >= MAX_OF_ADDRESS
            self._clients[who] += not full
        if full:
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(REQUEST_S, _hang_up, (request,))
        late.daemon = True
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            with self._lock:
                self._clients -= Counter((str(client_address[0]),))  # and forgets who has none

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or speaks no TLS, is not worth a line."""


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # of TLS, too: the thread that reads is not to be disturbed


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def setup(self) -> None:
        self.request.settimeout(self.timeout)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""


class MetricsServer:
    """Serves a registry until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, access: Access | None = None) -> None:
        """Start at once. Raises ``UnreachableError`` for the address, ``InputError`` for the certificates."""
        access = access or Access()
        context = _tls(access)
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            kind: type[_Server] = type("_FamilyServer", (_Server,), {"address_family": family})
            self._server = make_server(str(address[0]), port, _application(registry, access.token), kind, _Handler)
        except OSError as error:
            raise UnreachableError(
                f"{host}:{port}: cannot listen: {error.strerror or error}",
                hint="is another exporter running? --listen HOST:PORT",
            ) from error
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _tls(access: Access) -> ssl.SSLContext | None:
    if access.cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(access.cert, access.key)
        if access.client_ca is not None:
            context.load_verify_locations(access.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"the certificates cannot be used: {error}", where=str(access.cert)) from error
    return context


def _application(registry: CollectorRegistry, token: str | None) -> Callable[..., Iterable[bytes]]:
    metrics = make_wsgi_app(registry)
    wanted = None if token is None else f"Bearer {token}".encode()

    def serve(environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if wanted is not None and not hmac.compare_digest(given, wanted):
            respond("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"a bearer token is needed\n"]
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            respond("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Type", "text/plain")])
            return [b""]
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            answer: Iterable[bytes] = metrics(environ, respond)
            return answer
        respond("200 OK" if path == "/" else "404 Not Found", [("Content-Type", "text/plain")])
        return [_PAGE if path == "/" else b"not found\n"]

    return serve
