"""Requests to the exporter, from any client that reaches its port."""

from __future__ import annotations

import contextlib
import io
import re
import socket
from collections.abc import Iterator
from random import Random

from prometheus_client import CollectorRegistry, Gauge

from fuzz.mutation import mutated, some
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.gpu import exporter
from slurm_affinode.gpu.exporter import Access, MetricsServer

_METRIC = "a metric of a job"
_TOKEN = b"0123456789abcdef"
_SEEDS = (
    b"GET /metrics HTTP/1.1\r\nHost: c1\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n",
    b"GET /metrics?name[]=x HTTP/1.0\r\nAccept: application/openmetrics-text\r\nAccept-Encoding: gzip\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
    b"HEAD / HTTP/1.1\r\n\r\n",
)
_WORDS = (
    b"\r\n", b"\n", b" ", b"HTTP/1.1", b"HTTP/0.9", b"HTTP/9999999999.1", b"/../../etc/passwd", b"%00", b"%2e%2e/",
    b"Authorization: Bearer ", b"Authorization: Bearer \xe9", b"Content-Length: -1\r\n", b"Content-Length: 9e9\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"name[]=", b"\xff" * 40, b"X: y\r\n" * 120,
    b"a" * 66000, b"\0", b"//", b"http://c1/metrics",
)  # fmt: skip
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")


def _request(rng: Random) -> bytes:
    return some(rng, (b"token\n", b"free\n")) + mutated(rng, some(rng, _SEEDS), _WORDS, 1 << 17)


@contextlib.contextmanager
def _requests() -> Iterator[Check]:
    """Each request is answered once, not with a fault; without the token, no metric is in the answer."""
    registry = CollectorRegistry()
    Gauge("fuzz", _METRIC, registry=registry).set(1)
    servers = {
        b"token": MetricsServer(registry, "127.0.0.1", 0, Access(token=_TOKEN.decode())),
        b"free": MetricsServer(registry, "127.0.0.1", 0),
    }

    def check(data: bytes) -> bool:
        kind, _, request = data.partition(b"\n")
        client, connection = socket.socketpair()
        with client, connection, contextlib.redirect_stderr(io.StringIO()) as errors:
            for end in (client, connection):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            exporter._Handler(connection, ("192.0.2.1", 1), servers[kind]._server)
            connection.close()
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        status = _STATUS.match(answer)
        if errors.getvalue() or b"Traceback" in answer or (status is not None and status[1] == b"500"):
            raise Wrong(f"{answer[:200]!r} {errors.getvalue()[-500:]}")
        if kind == b"token" and _TOKEN not in request and (_METRIC.encode() in answer or b"fuzz 1" in answer):
            raise Wrong("metrics without the token")
        return status is not None and status[1] == b"200"

    try:
        yield check
    finally:
        for server in servers.values():
            server.close()


TARGETS = (Target("exporter-request", "requests to the exporter", _request, _requests, (OSError,)),)
