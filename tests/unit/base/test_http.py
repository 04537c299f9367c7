"""The HTTP client against hostile and broken servers, over real sockets."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_http import Answer, Question, serving

from slurm_affinode.base.http import HttpError, HttpResponse, fetch, tls_context

TLS = tls_context(None)
SECRET = {"Authorization": "Bearer t0ken"}


def get(
    url: str, *, headers: dict[str, str] | None = None, largest: int | None = 1000, timeout_s: float = 5.0,
    follow: bool = False,
) -> HttpResponse:  # fmt: skip
    return fetch(url, headers=headers or {}, timeout_s=timeout_s, largest=largest, tls=TLS, follow=follow)


@contextmanager
def replying(*blocks: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """Run a server that sends bytes to its only client, whatever the request is."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            for block in blocks:
                if done.wait(pause_s):
                    break
                try:
                    connection.sendall(block)
                except OSError:
                    break

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


def test_redirect_is_followed_without_credentials_to_another_server() -> None:
    """To the same server they are sent again; by default no redirect is followed."""
    with serving(Answer("metrics")) as other:
        answers = {
            "/": Answer("", 302, headers={"Location": "/same"}),
            "/same": Answer("", 302, headers={"Location": f"{other.url}/other"}),
        }

        def judge(question: Question) -> Answer:
            return answers[question[1]]

        with serving(judge=judge) as fake:
            assert get(fake.url + "/", headers=SECRET).status == 302
            assert get(fake.url + "/", headers=SECRET, follow=True).body == b"metrics"
            assert [request[3].get("Authorization") for request in fake.requests] == ["Bearer t0ken"] * 3
        assert "Authorization" not in other.requests[0][3]


def test_endless_redirects_are_an_error() -> None:
    with serving(Answer("", 302, headers={"Location": "/"})) as fake, pytest.raises(HttpError, match="redirect"):
        get(fake.url, follow=True)


@pytest.mark.parametrize("token", ["t0ken\r\nX-Other: 1", "t0ken\n", "t0\0ken"])
def test_error_of_an_invalid_header_does_not_quote_it(token: str) -> None:
    """It may hold a secret. Nothing is sent."""
    with serving(Answer()) as fake:
        with pytest.raises(HttpError) as caught:
            get(fake.url, headers={"Authorization": f"Bearer {token}"})
        assert fake.requests == []
    assert "t0" not in str(caught.value)
    assert caught.value.fault == "request"


@pytest.mark.parametrize(
    "reply",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
     b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000],
)  # fmt: skip
def test_response_that_is_not_http_is_an_error_of_one_line(reply: bytes) -> None:
    with replying(reply) as url, pytest.raises(HttpError) as caught:
        get(url)
    assert caught.value.fault == "response"
    assert "\n" not in str(caught.value)


def test_slow_response_ends_at_the_timeout_of_the_whole_request() -> None:
    """Each of its blocks arrives in time."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    with replying(head, *[b"x"] * 900, pause_s=0.05) as url, pytest.raises(HttpError) as caught:
        get(url, timeout_s=0.3)
    assert caught.value.fault == "timeout"


def test_encodings_that_were_not_requested_are_not_decoded() -> None:
    """Nested or other encodings can expand a small response without limit."""
    body = gzip.compress(gzip.compress(b"x" * 100_000))
    for encoding in ("gzip, gzip", "zstd", "br", "deflate"):
        with serving(Answer(body, headers={"Content-Encoding": encoding})) as fake:
            assert get(fake.url).body == body


def test_body_is_not_read_if_no_size_is_given() -> None:
    with serving(Answer("x" * 10_000)) as fake:
        assert get(fake.url, largest=None).body == b""
        with pytest.raises(HttpError) as caught:
            get(fake.url, largest=9_999)
    assert caught.value.fault == "size"


def test_socks_proxy_of_the_session_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ssh -D`` and a desktop set ``ALL_PROXY``, which is not meant for a Prometheus beside this machine."""
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:1")
    with serving(Answer("direct")) as fake:
        assert get(fake.url).body == b"direct"


def test_proxy_may_be_named_without_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(Answer("by proxy")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
        assert get("http://prometheus.invalid:9090/").body == b"by proxy"


def test_proxy_that_refuses_a_tunnel_is_an_error_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with replying(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n") as proxy:
        monkeypatch.setenv("https_proxy", proxy.replace("http://", "http://me:pw@"))
        with pytest.raises(HttpError, match="407 Proxy Authentication Required") as caught:
            get("https://prometheus.invalid:9090/")
    assert caught.value.fault == "connection"
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "ftp://me:pw@127.0.0.1:1", "http://me:pw@[::1"])
def test_unusable_proxy_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(HttpError) as caught:
        get("http://prometheus.invalid:9090/")
    assert caught.value.fault == "request"
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://a\x00b/", "http://exa mple/", "http://\u2024/", "http://[::1/"])
def test_invalid_url_is_an_error_of_one_line(url: str) -> None:
    with pytest.raises(HttpError) as caught:
        get(url)
    assert "\n" not in str(caught.value)
