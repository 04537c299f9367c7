"""A real Prometheus for tests: private, on a free port of the loopback interface, ended by its process ID.

Its data comes from OpenMetrics text through ``promtool``. If Prometheus is not installed, the tests that need it are
skipped with the reason; with ``CI=true`` in the environment they fail.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from background import running
from servers import program_of
from waiting import wait_until

START_S = 60
KEPT = "100y"
"""Retention; long, because tests use arbitrary times."""


@dataclass(frozen=True)
class Certificates:
    """Files of a CA and of a server at 127.0.0.1 with a certificate of it."""

    authority: Path
    certificate: Path
    key: Path


@contextlib.contextmanager
def prometheus(
    directory: Path, history: str = "", *, web_config: Path | None = None, flags: Sequence[str] = ()
) -> Iterator[str]:
    """Run a server with ``history`` (OpenMetrics) in ``directory``; yield its URL, http even with TLS.

    A later server in the same directory has the data of the earlier ones.
    """
    program, promtool = program_of("prometheus"), program_of("promtool")
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    if history:
        text = directory / "history.om"
        text.write_text(history)
        backfill(promtool, text, data)
    (directory / "prometheus.yml").write_text("global: {scrape_interval: 1h}\n")
    argv = [
        program, f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={data}",
        f"--storage.tsdb.retention.time={KEPT}", "--web.listen-address=127.0.0.1:0",
        *([f"--web.config.file={web_config}"] if web_config else []), *flags,
    ]  # fmt: skip
    log = directory / "server.log"
    with running(argv, log) as process:
        yield f"http://127.0.0.1:{_await(process, log, tls=web_config is not None)}"


def _await(process: subprocess.Popen[bytes], log: Path, *, tls: bool) -> int:
    """Wait until the server is ready and return its port."""
    read_log = log.read_text

    def ready() -> int | None:
        if process.poll() is not None:
            pytest.fail(f"{process.args}: {read_log(errors='replace')}")
        # Prometheus chooses the port: one chosen here might be taken by another program.
        match = re.search(r'"Listening on".* address=127\.0\.0\.1:(\d+)', read_log(errors="replace"))
        if match is None:
            return None
        port = int(match[1])
        try:
            if tls:
                socket.create_connection(("127.0.0.1", port), timeout=START_S).close()
            else:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=START_S).close()
        except OSError:
            return None
        return port

    port = wait_until("Prometheus is ready", ready)
    assert port is not None
    return port


def backfill(promtool: str, text: Path, data: Path) -> None:
    """Create blocks in ``data`` from the OpenMetrics file ``text``."""
    _run([promtool, "tsdb", "create-blocks-from", "openmetrics", str(text), str(data)])


def record(url: str, rules: Path, data: Path, since: int, until: int) -> None:
    """Create blocks in ``data`` from the recording rules, evaluated on the server from ``since`` to ``until``."""
    span = [f"--start={since}", f"--end={until}", f"--url={url}", f"--output-dir={data}"]
    _run([program_of("promtool"), "tsdb", "create-blocks-from", "rules", *span, str(rules)])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus_of(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a function that starts a server with a history and returns its URL; all are ended with the test."""
    with contextlib.ExitStack() as stack:
        numbers = iter(range(100))

        def start(history: str = "", **how: Path) -> str:
            return stack.enter_context(prometheus(tmp_path / f"prometheus-{next(numbers)}", history, **how))

        yield start


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A CA for the test run, and a certificate of it."""
    openssl = program_of("openssl")
    directory = tmp_path_factory.mktemp("tls")

    def run(*argv: str) -> None:
        done = subprocess.run([openssl, *argv], capture_output=True, text=True, timeout=240, cwd=directory, check=False)
        assert done.returncode == 0, done.stderr

    (directory / "server.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "30",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    run("req", *ec, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    run("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "server.pem", "-days", "30", "-extfile", "server.ext")  # fmt: skip
    return Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
