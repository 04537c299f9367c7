"""The exporter: metrics with the names and labels of dcgm-exporter, and access control."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from gpu_fakes import A100, IDLE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.gpu import exporter
from slurm_affinode.gpu.exporter import Access, LastSweep, MetricsServer
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.model.gpu import GpuFault, GpuSample, Reading, Sweep

NOW = 1_795_234_200.0


@pytest.fixture
def shown():
    return LastSweep(node="c1", cluster=None, stale_s=20.0, now=lambda: NOW)


def text_of(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def series(text):
    return {
        (sample.name, sample.labels.get("UUID"), sample.labels.get("hpc_job")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_and_labels_are_those_of_dcgm_exporter(shown, sweep_at):
    shown.put(sweep_at(NOW))
    line = next(line for line in text_of(shown).splitlines() if line.startswith("DCGM_FI_DEV_FB_USED{"))
    assert line == (
        'DCGM_FI_DEV_FB_USED{Hostname="c1",UUID="GPU-a",device="nvidia0",gpu="0",hpc_job="7",'
        'modelName="NVIDIA A100",pci_bus_id="00000000:07:00.0"} 10.0'
    )


def test_missing_values_are_absent_and_zeros_are_exported(shown):
    """A reading without utilization has no such series; one of 0 has."""
    samples = (
        GpuSample(A100, Reading(fb_used_mib=0.0, power_w=12.5), ()),
        GpuSample(replace(A100, uuid="GPU-b", index=1), Reading(util_pct=0.0, sm_active=0.5), None),
    )
    shown.put(Sweep(NOW, samples))
    result = series(text_of(shown))
    dcgm_values = {(name, uuid): value for (name, uuid, _), value in result.items() if name.startswith("DCGM")}
    assert dcgm_values == {
        ("DCGM_FI_DEV_FB_USED", "GPU-a"): 0.0,
        ("DCGM_FI_DEV_POWER_USAGE", "GPU-a"): 12.5,
        ("DCGM_FI_DEV_GPU_UTIL", "GPU-b"): 0.0,
        ("DCGM_FI_PROF_SM_ACTIVE", "GPU-b"): 0.5,
    }


def test_shared_gpu_has_a_series_for_each_job(shown, sweep_at):
    shown.put(sweep_at(NOW, ("7", "12")))
    result = series(text_of(shown))
    assert {job for name, uuid, job in result if (name, uuid) == ("DCGM_FI_DEV_GPU_UTIL", "GPU-a")} == {"7", "12"}


def test_mig_instance_has_its_labels(shown):
    device = replace(A100, mig="7", mig_profile="1g.10gb")
    shown.put(Sweep(NOW, (GpuSample(device, IDLE, ()),)))
    text = text_of(shown)
    assert 'GPU_I_ID="7",GPU_I_PROFILE="1g.10gb"' in text


def test_old_sweep_is_not_exported(shown, sweep_at):
    """A sampler that hangs in the driver must not look like an idle GPU."""
    shown.put(sweep_at(NOW - 21))
    result = series(text_of(shown))
    assert not [name for name, _, _ in result if name.startswith("DCGM")]
    assert result["slurm_affinode_exporter_up", None, None] == 0
    shown.put(sweep_at(NOW))
    assert series(text_of(shown))["slurm_affinode_exporter_up", None, None] == 1


def test_missing_driver_and_lost_gpus_are_exported(shown):
    shown.put(Sweep(NOW, driver_error="no driver"))
    assert series(text_of(shown))["slurm_affinode_exporter_up", None, None] == 0
    shown.put(Sweep(NOW, faults=(GpuFault(None, 0, "lost"),)))
    assert series(text_of(shown))["slurm_affinode_exporter_gpus_failed", None, None] == 1


def test_scrape_can_be_ingested(shown, sweep_at, tmp_path):
    """The names of the metrics are known: both sources agree about a GPU."""
    shown.put(sweep_at(NOW, ("7",), replace(IDLE, util_pct=55.0, fb_reserved_mib=0.0)))
    path = tmp_path / "scrape.prom"
    path.write_text(text_of(shown))
    store = SampleStore(tmp_path / "history")
    options = ReadOptions(aliases=aliases.load(None, {}), start=datetime.fromtimestamp(NOW, UTC))
    assert not ingest_files(store, [path], options).failed
    [row] = store.scan().collect().filter(uuid="GPU-a").to_dicts()
    assert (row["node"], row["index"], row["job"], row["util_pct"], row["fb_total_mib"]) == (
        "c1",
        0,
        "7",
        55.0,
        81920.0,
    )


# --- over HTTP


@pytest.fixture
def registry(shown, sweep_at):
    shown.put(sweep_at(NOW))
    made = CollectorRegistry()
    made.register(shown)
    return made


def get(url, context=None, **headers):
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S, context=context) as answer:
        return answer.read().decode()


def test_metrics_are_served(registry):
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}"
        assert "DCGM_FI_DEV_GPU_UTIL" in get(f"{url}/metrics")
        assert "/metrics" in get(f"{url}/")
        for path, data, status in (("/etc/passwd", None, 404), ("/metrics", b"x", 405)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=DEADLINE_S)
            assert caught.value.code == status
            caught.value.close()
        with pytest.raises(UnreachableError, match="cannot listen"):
            MetricsServer(registry, "127.0.0.1", server.port)
    finally:
        server.close()


def test_one_address_cannot_occupy_all_connections(registry, monkeypatch):
    """A local user may hold many idle connections: Prometheus has another address."""
    monkeypatch.setattr(exporter, "machine_of", str)
    server = MetricsServer(registry, "", 0)
    try:
        with contextlib.ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(socket.create_connection(("127.0.0.2", server.port), DEADLINE_S, ("127.0.0.3", 0)))
            assert "DCGM_FI_DEV_GPU_UTIL" in get(f"http://127.0.0.1:{server.port}/metrics")
    finally:
        server.close()


def test_full_connections_are_shared_by_address(registry, monkeypatch):
    """Four addresses hold all connections: another one gets one of theirs, and they get no more."""
    monkeypatch.setattr(exporter, "machine_of", str)
    server = MetricsServer(registry, "", 0)
    try:
        with contextlib.ExitStack() as crowd:

            def connect(number):
                address = ("127.0.0.1", server.port)
                return crowd.enter_context(socket.create_connection(address, DEADLINE_S, (f"127.0.0.{number}", 0)))

            held = [connect(number) for number in range(2, 6) for _ in range(exporter.MAX_OF_ADDRESS)]
            wait_until("all are seated", lambda: len(server._server._clients), lambda count: count == len(held))
            assert "DCGM_FI_DEV_GPU_UTIL" in get(f"http://127.0.0.1:{server.port}/metrics")
            assert [connection.recv(1) for connection in select.select(held, [], [], 0)[0]] == [b""]
            assert connect(3).recv(1) == b""
    finally:
        server.close()


def test_local_user_has_one_address(registry):
    """Every loopback address can be the source of a connection."""
    server = MetricsServer(registry, "", 0)
    try:
        with contextlib.ExitStack() as crowd:
            held = []
            for number in range(2, 22):
                source = (f"127.0.0.{number}", 0)
                held.append(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S, source))
                crowd.enter_context(held[-1])
            refused = len(held) - exporter.MAX_OF_ADDRESS
            wait_until(
                "others are refused", lambda: len(select.select(held, [], [], 0)[0]), lambda count: count == refused
            )
    finally:
        server.close()


def dribble(sock):
    """Send a byte from time to time."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        sock.sendall(b"G")
        time.sleep(0.02)


def test_slow_request_times_out(registry, monkeypatch):
    """Each byte arrives before the timeout of a single read."""
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as slow, monkeypatch.context() as patch:
            patch.setattr(exporter, "REQUEST_S", 0.3)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                dribble(slow)
        assert "DCGM_FI_DEV_GPU_UTIL" in get(f"http://127.0.0.1:{server.port}/metrics")
    finally:
        server.close()


def test_token_is_required(registry):
    server = MetricsServer(registry, "127.0.0.1", 0, Access(token="s3cret"))
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        assert "DCGM" in get(url, Authorization="Bearer s3cret")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(url, **headers)
            assert caught.value.code == 401
            caught.value.close()
    finally:
        server.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    argv += [
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    done = subprocess.run(argv, cwd=directory, capture_output=True, check=False, timeout=240)
    if done.returncode != 0:
        pytest.skip("openssl cannot make a certificate here")
    return directory


def test_tls_with_client_certificates(registry, certificate):
    """A client without a certificate is refused; one that speaks plain HTTP does not stop the server."""
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    server = MetricsServer(registry, "127.0.0.1", 0, Access(cert, key, client_ca=cert))
    try:
        url = f"https://127.0.0.1:{server.port}/metrics"
        context = ssl.create_default_context(cafile=str(cert))
        with pytest.raises(OSError):  # noqa: PT011 - the kind depends on when the server's alert is read
            get(url, context)
        with pytest.raises(OSError):  # noqa: PT011
            get(url.replace("https", "http"))
        context.load_cert_chain(cert, key)
        assert "DCGM" in get(url, context)
    finally:
        server.close()


def test_unusable_certificates_are_reported(registry, tmp_path):
    with pytest.raises(InputError, match="certificates cannot be used"):
        MetricsServer(registry, "127.0.0.1", 0, Access(tmp_path / "none.pem"))
