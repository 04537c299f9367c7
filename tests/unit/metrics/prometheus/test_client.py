"""The Prometheus client against valid and invalid responses of a fake server, over real sockets."""

from __future__ import annotations

import base64
import gzip
import json
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_http import GOOD, Answer, Fake, serving
from prometheus_server import Certificates

from slurm_affinode.base.config import PrometheusConfig
from slurm_affinode.base.errors import AffinodeError, ConfigError, UnreachableError
from slurm_affinode.metrics.prometheus.client import Client, RefusedError, TooMuchError
from slurm_affinode.metrics.prometheus.server import ENV_PASSWORD, ENV_TOKEN, Server, checked_url


def client(fake: Fake, **how: Any) -> Client:
    """Return a client that does not wait between retries; ``sleep`` records the wait times."""
    slept: list[float] = []
    largest = how.pop("largest", 2**20)
    return Client(Server(fake.url, **how), sleep=slept.append, largest=largest)


def waits(made: Client) -> list[float]:
    """Return the recorded wait times of ``made``, in seconds."""
    return made.sleep.__self__  # type: ignore[attr-defined]


def test_instant_query_returns_series() -> None:
    """The request parameters give the time with milliseconds."""
    with serving(Answer()) as fake:
        assert client(fake).instant("up", 1793520000123) == [{"metric": {}, "value": [1, "2"]}]
    (method, path, params, headers), = fake.requests  # fmt: skip
    assert (method, path) == ("GET", "/api/v1/query")
    assert params == {"query": ["up"], "time": ["1793520000.123"]}
    assert "Authorization" not in headers


def test_long_query_is_sent_by_post() -> None:
    """Most servers and proxies limit the length of URLs."""
    with serving(Answer()) as fake:
        client(fake).instant("x" * 5000, 0)
    assert fake.requests[0][0] == "POST"
    assert fake.requests[0][2]["query"] == ["x" * 5000]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_temporary_error_is_retried(status: int) -> None:
    """The wait grows; the third attempt succeeds."""
    with serving(Answer("", status), Answer("", status), Answer()) as fake:
        made = client(fake)
        assert made.instant("up", 0)
    first, second = waits(made)
    assert 0.3 < first < 0.7
    assert 0.7 < second < 1.3


def test_retry_after_header_is_honored() -> None:
    """``Retry-After`` overrides the backoff, up to a limit."""
    with serving(Answer("", 429, headers={"Retry-After": "7"}), Answer("", 429, headers={"Retry-After": "9999"}),
                 Answer()) as fake:  # fmt: skip
        made = client(fake)
        made.instant("up", 0)
    assert waits(made) == [7, 60]


@pytest.mark.parametrize("retry_after", ["Fri, 20 Nov 2026 08:00:00 GMT", "\xb2", ""])
def test_invalid_retry_after_is_ignored(retry_after: str) -> None:
    """It can be a date, or a character that only looks like a digit."""
    with serving(Answer("", 503, headers={"Retry-After": retry_after}), Answer()) as fake:
        made = client(fake)
        made.instant("up", 0)
    (waited,) = waits(made)
    assert 0.3 < waited < 0.7


def test_persistent_error_is_unreachable_after_five_attempts() -> None:
    """The exit status is 3."""
    with serving(Answer(json.dumps({"status": "error", "error": "shutting down"}), 503)) as fake:
        with pytest.raises(UnreachableError, match=r"HTTP 503: shutting down") as caught:
            client(fake).instant("up", 0)
        assert len(fake.requests) == 5
    assert caught.value.exit_code == 3


def test_refused_connection_names_the_url() -> None:
    """The exit status is 3."""
    with serving(Answer()) as fake:
        pass
    with pytest.raises(UnreachableError, match=f"{fake.url}: cannot be reached: Connection refused"):
        client(fake).instant("up", 0)


@pytest.mark.parametrize("status", [401, 403])
def test_rejected_credentials_are_not_retried(status: int) -> None:
    """The exit status is 2; the hint names the options for credentials."""
    with serving(Answer("no", status, "text/plain")) as fake:
        with pytest.raises(AffinodeError, match=f"HTTP {status}") as caught:
            client(fake).instant("up", 0)
        assert len(fake.requests) == 1
    assert caught.value.exit_code == 2
    assert "--token-file" in str(caught.value.hint)


def test_redirect_is_not_followed() -> None:
    """Credentials must not reach a server that they were not meant for."""
    with serving(Answer()) as other, serving(Answer("", 302, headers={"Location": f"{other.url}/login"})) as fake:
        with pytest.raises(AffinodeError, match=f"redirects to {other.url}/login"):
            client(fake, token="secret").instant("up", 0)
        assert other.requests == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer("<!DOCTYPE html><title>Log in</title>", kind="text/html"), "a web page"),
        (Answer("404 page not found", 404, "text/plain"), "has no Prometheus API"),
        (Answer("[1, 2]"), "not from Prometheus"),
        (Answer('{"status": "success", "data": {"result": []}}'), "not from Prometheus"),
        (Answer(json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error"}), 400), "parse error"),
    ],
)
def test_response_of_another_kind_of_server_is_rejected(answer: Answer, message: str) -> None:
    """The exit status is 2, the error is one line, and the request is not retried."""
    with serving(answer) as fake:
        with pytest.raises(RefusedError, match=message) as caught:
            client(fake).instant("up", 0)
        assert len(fake.requests) == 1
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "cut",
    [Answer(GOOD[:40]), Answer(GOOD[:40], length=len(GOOD)), Answer("garbage", kind="application/octet-stream")],
    ids=["the JSON ends early", "the connection ends early", "no JSON"],
)
def test_truncated_response_is_retried(cut: Answer) -> None:
    """Two truncated responses are followed by a complete one."""
    with serving(cut, cut, Answer()) as fake:
        assert client(fake).instant("up", 0)
    with serving(cut) as fake, pytest.raises(UnreachableError):
        client(fake).instant("up", 0)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(json.dumps({"status": "error", "errorType": "execution", "error": "too many samples"}), 422),
        Answer(json.dumps({"status": "error", "errorType": "timeout", "error": "query timed out"}), 503),
        Answer(json.dumps({"status": "error", "error": "exceeded maximum resolution of 11,000 points"}), 400),
        Answer("", 413),
        Answer("", 504),
    ],
)
def test_too_large_query_is_not_retried(answer: Answer) -> None:
    """It must be split into smaller queries."""
    with serving(answer) as fake:
        with pytest.raises(TooMuchError):
            client(fake).instant("up", 0)
        assert len(fake.requests) == 1


def test_size_of_response_is_limited() -> None:
    """The limit also applies to the decompressed size."""
    packed = gzip.compress(b" " * 2**20 + GOOD.encode())
    for answer in (Answer(" " * 2000 + GOOD), Answer(packed, headers={"Content-Encoding": "gzip"})):
        with serving(answer) as fake, pytest.raises(TooMuchError, match="an answer of more than"):
            client(fake, largest=1000).instant("up", 0)
    with serving(Answer(packed, headers={"Content-Encoding": "gzip"})) as fake:
        assert client(fake, largest=2**21).instant("up", 0)


def test_slow_response_times_out() -> None:
    gate = threading.Event()
    with serving(Answer(before=lambda: gate.wait(30))) as fake:
        try:
            with pytest.raises(TooMuchError, match=r"timed out after 0.2 s"):
                client(fake, timeout_s=0.2).instant("up", 0)
        finally:
            gate.set()


def test_warnings_are_kept() -> None:
    """A partial response, for example, has warnings."""
    body = json.dumps({**json.loads(GOOD), "warnings": ["store a is down"], "isPartial": True})
    with serving(Answer(body)) as fake:
        made = client(fake)
        made.instant("up", 0)
        made.instant("up", 0)
    assert made.warnings == {"store a is down": 2, "the answer is partial (isPartial)": 2}


def test_credentials_and_headers_are_sent() -> None:
    """Covers bearer tokens, basic authentication and headers of the site."""
    with serving(Answer()) as fake:
        client(fake, token="t0ken").instant("up", 0)
        client(fake, username="me", password="pä").instant("up", 0)
        client(fake, extra={"X-Scope-OrgID": "hpc"}).instant("up", 0)
    bearer, basic, extra = (request[3] for request in fake.requests)
    assert bearer["Authorization"] == "Bearer t0ken"
    assert basic["Authorization"] == f"Basic {base64.b64encode('me:pä'.encode()).decode()}"
    assert {name.lower(): value for name, value in extra.items()}["x-scope-orgid"] == "hpc"


def test_tls_certificate_is_verified(certificates: Certificates) -> None:
    """A certificate of an unknown CA is rejected; ``ca_file`` or ``insecure`` make the client accept it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with serving(Answer(), tls=context) as fake:
        with pytest.raises(UnreachableError, match="certificate cannot be verified") as caught:
            client(fake).instant("up", 0)
        assert "--ca-file" in str(caught.value.hint)
        assert client(fake, ca_file=certificates.authority, token="t").instant("up", 0)
        assert client(fake, insecure=True).instant("up", 0)
        with pytest.raises(UnreachableError):
            client(Fake([], url=fake.url.replace("https", "http"))).instant("up", 0)
    assert fake.requests[0][3]["Authorization"] == "Bearer t"


def test_client_certificate_is_sent(certificates: Certificates) -> None:
    """The server requires one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    context.load_verify_locations(certificates.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    with serving(Answer(), tls=context) as fake:
        with pytest.raises(UnreachableError):
            client(fake, ca_file=certificates.authority).instant("up", 0)
        certificate = {"cert_file": certificates.certificate, "key_file": certificates.key}
        assert client(fake, ca_file=certificates.authority, **certificate).instant("up", 0)


def test_proxy_environment_variables_are_honored(monkeypatch: pytest.MonkeyPatch) -> None:
    """``no_proxy`` lists exceptions."""
    with serving(Answer()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert Client(Server("http://prometheus.invalid:9090")).instant("up", 0)
        assert proxy.requests[0][3]["Host"] == "prometheus.invalid:9090"
        with serving(Answer()) as fake:
            client(fake).instant("up", 0)
            assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://prometheus:9090", "http://prometheus:9090"),
        (" HTTPS://metrics.example.org/prometheus/ ", "https://metrics.example.org/prometheus"),
        ("http://prometheus:9090/api/v1/query_range?query=up", "http://prometheus:9090"),
        ("http://[::1]:9090/graph", "http://[::1]:9090"),
    ],
)
def test_url_is_normalized(text: str, url: str) -> None:
    """Pasted URLs of API endpoints and pages are accepted."""
    assert checked_url(text) == url


@pytest.mark.parametrize(
    "text", ["prometheus:9090", "ftp://prometheus", "http://", "http://a:port", "http://a b", "", "http://me:pw@host"]
)
def test_invalid_url_is_rejected(text: str) -> None:
    """URLs with a password are rejected, and the error does not contain it."""
    with pytest.raises(AffinodeError) as caught:
        checked_url(text)
    assert "pw" not in str(caught.value)


def test_secrets_come_from_files_and_environment(tmp_path: Path) -> None:
    """They never come from the configuration or the command line, and never occur in a ``repr``."""
    secret = tmp_path / "token"
    secret.write_text("t0ken\n")
    url = "http://prometheus:9090"
    of_file = Server.of(PrometheusConfig(url=url, token_file=secret), env={ENV_TOKEN: "e"})
    assert of_file.headers() == {"Authorization": "Bearer t0ken"}
    assert Server.of(PrometheusConfig(url=url), env={ENV_TOKEN: "e"}).headers() == {"Authorization": "Bearer e"}
    basic = Server.of(PrometheusConfig(url=url, username="me"), env={ENV_PASSWORD: "pw", ENV_TOKEN: "e"})
    assert (basic.username, basic.password, basic.token) == ("me", "pw", None)
    assert "pw" not in repr(basic)
    assert basic.exposed
    assert not Server.of(PrometheusConfig(url="http://localhost:9090", username="me"), env={}).exposed


@pytest.mark.parametrize("content", ["", "one\ntwo", "t\x01", None])
def test_invalid_secret_file_is_rejected(tmp_path: Path, content: str | None) -> None:
    """The file is empty, has several lines or control characters, or does not exist."""
    secret = tmp_path / "token"
    if content is not None:
        secret.write_text(content)
    with pytest.raises(ConfigError):
        Server.of(PrometheusConfig(url="http://prometheus", token_file=secret), env={})


def test_invalid_tls_files_are_rejected(tmp_path: Path) -> None:
    """They are checked before anything is sent."""
    bad = tmp_path / "ca.pem"
    bad.write_text("no certificate")
    for how in ({"ca_file": bad}, {"cert_file": bad}, {"ca_file": tmp_path / "none"}, {"key_file": bad}):
        with pytest.raises(ConfigError):
            Server("https://prometheus", **how).tls()
    with pytest.raises(AffinodeError, match="no Prometheus server is named"):
        Server.of(PrometheusConfig(), env={})
