"""Prometheus metrics of the last sweep, and the HTTP server for them (TLS, client certificates, bearer token).

Names, labels and units are those of dcgm-exporter (default-counters.csv). A value that the GPU does not provide is a
missing series, never 0. A GPU shared by several jobs has each series once per job, as in dcgm-exporter.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.base.seats import Seats, machine_of
from slurm_affinode.model.gpu import GpuSample, Reading, Sweep

Value = Callable[[Reading], float | None]
METRICS: tuple[tuple[str, str, str, Value], ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", lambda r: r.util_pct),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Memory utilization (in %).", lambda r: r.memory_util_pct),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB).", lambda r: r.fb_free_mib),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).", lambda r: r.fb_used_mib),
    ("DCGM_FI_DEV_FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB).", lambda r: r.fb_reserved_mib),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", lambda r: r.power_w),
    # By nature a counter, but prometheus-client would add a suffix that DCGM's name does not have.
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "unknown",
        "Total energy consumption since boot (in mJ).",
        lambda r: r.energy_mj,
    ),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", lambda r: r.temperature_c),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.", lambda r: r.xid),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the engine is active.", lambda r: r.engine_active),
    ("DCGM_FI_PROF_SM_ACTIVE", "gauge", "Ratio of cycles an SM has at least 1 warp assigned.", lambda r: r.sm_active),
    (
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "gauge",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda r: r.tensor_active,
    ),
    (
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "gauge",
        "Ratio of cycles the device memory interface is active.",
        lambda r: r.dram_active,
    ),
)  # fmt: skip


class LastSweep(Collector):
    """Sink that provides the last sweep to a registry, unless it is older than ``stale_s``."""

    def __init__(
        self,
        *,
        node: str,
        cluster: str | None,
        stale_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._node, self._cluster, self._stale_s, self._now = node, cluster, stale_s, now
        self._lock = threading.Lock()
        self._sweep: Sweep | None = None
        self._sweeps = 0

    def put(self, sweep: Sweep) -> None:
        """Replace the last sweep."""
        with self._lock:
            self._sweep = sweep
            self._sweeps += 1

    def close(self) -> None:
        """Provide no more sweeps."""
        with self._lock:
            self._sweep = None

    def gpus(self) -> Mapping[str, tuple[str, ...]]:
        """Return the UUIDs of the GPUs of each job in the last sweep, sorted."""
        with self._lock:
            sweep = self._sweep
        by_job: dict[str, set[str]] = {}
        for sample in sweep.samples if sweep is not None else ():
            for job in sample.jobs or ():
                by_job.setdefault(job, set()).add(sample.device.uuid)
        return {job: tuple(sorted(uuids)) for job, uuids in by_job.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        with self._lock:
            sweep, sweeps = self._sweep, self._sweeps
        fresh = sweep is not None and abs(self._now() - sweep.time_s) <= self._stale_s
        samples = sweep.samples if sweep is not None and fresh else ()
        labelled = [(sample.reading, labels) for sample in samples for labels in self._labels(sample)]
        for name, kind, text, value in METRICS:
            metric = Metric(name, text, kind)
            for reading, labels in labelled:
                number = value(reading)
                if number is not None:
                    metric.add_sample(name, labels, float(number))
            if metric.samples:
                yield metric
        yield from self._exporter_metrics(sweep, sweeps, fresh=fresh)

    def _exporter_metrics(self, sweep: Sweep | None, sweeps: int, *, fresh: bool) -> Iterator[Metric]:
        up = fresh and sweep is not None and sweep.driver_error is None
        values = [
            ("slurm_affinode_exporter_up", "gauge", "Whether the driver answered within the last periods.", float(up)),
            ("slurm_affinode_exporter_sweeps", "counter", "Times that the GPUs were sampled.", float(sweeps)),
        ]
        if up and sweep is not None:
            lost = (
                "slurm_affinode_exporter_gpus_failed",
                "gauge",
                "GPUs that could not be read.",
                float(len(sweep.faults)),
            )
            values.append(lost)
        for name, kind, text, value in values:
            metric = Metric(name, text, kind)
            metric.add_sample(name + ("_total" if kind == "counter" else ""), {}, value)
            yield metric

    def _labels(self, sample: GpuSample) -> list[dict[str, str]]:
        device = sample.device
        labels = {"gpu": str(device.index), "UUID": device.uuid, "Hostname": self._node}
        file = None if device.minor is None else f"nvidia{device.minor}"
        more = {"device": file, "pci_bus_id": device.pci, "modelName": device.model, "GPU_I_ID": device.mig,
                "GPU_I_PROFILE": device.mig_profile, "cluster": self._cluster}  # fmt: skip
        labels |= {name: text for name, text in more.items() if text is not None}
        return [{**labels, "hpc_job": job} for job in sample.jobs or ()] or [labels]


CLIENT_TIMEOUT_S = 10.0
REQUEST_S = 15.0
"""Time limit for a request and its response, however slow the client is."""
MAX_CLIENTS = 16
MAX_OF_ADDRESS = 4
"""Limit per machine: a user who wants to avoid measurement must not take all connections. If several machines take all
of them, the oldest one of the machine with the most gives way to another machine."""
_PAGE = b"slurm-affinode exporter: metrics are at /metrics\n"


@dataclass(frozen=True, slots=True)
class Access:
    """Access control of the endpoint."""

    cert: Path | None = None
    """Certificate chain (PEM); if set, only TLS is accepted."""
    key: Path | None = None
    """Its key, if not in ``cert``."""
    client_ca: Path | None = None
    """CA bundle; clients need a certificate signed by it."""
    token: str | None = None
    """Clients need ``Authorization: Bearer TOKEN``."""


@dataclass(frozen=True, slots=True)
class _Client:
    request: socket.socket
    holder: str
    opened: float


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._seats = Seats(MAX_CLIENTS, MAX_OF_ADDRESS)
        self._clients: dict[socket.socket, _Client] = {}
        self._lock = threading.Lock()
        """Guards the seats and their clients."""
        super().__init__(*arguments, **named)

    def server_bind(self) -> None:
        # The base class does a name lookup here, which blocks on a node with a slow resolver.
        socket_name = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_name)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        # Refuse more clients than Prometheus ever opens, to limit the load on the node.
        client = _Client(request, machine_of(str(client_address[0])), time.monotonic())
        with self._lock:
            seated = self._seats.take(client.holder)
            late = None if seated else self._seats.to_vacate(client.holder, self._clients.values())
            if late is not None:
                self._leave(late.request)
                seated = self._seats.take(client.holder)
            if seated:
                self._clients[request] = client
        if late is not None:
            _hang_up(late.request)
        if not seated:
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def _leave(self, request: socket.socket) -> None:
        client = self._clients.pop(request, None)
        if client is not None:
            self._seats.leave(client.holder)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(REQUEST_S, _hang_up, (request,))
        late.daemon = True
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            with self._lock:
                self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or do not speak TLS."""


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # TLS too: SSLSocket is bypassed, as a thread may use it


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def setup(self) -> None:
        self.request.settimeout(self.timeout)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()

    def log_message(self, *_: Any) -> None:
        """Do not log scrapes."""


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
    expected = None if token is None else f"Bearer {token}".encode()

    def serve(environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        authorization = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if expected is not None and not hmac.compare_digest(authorization, expected):
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
