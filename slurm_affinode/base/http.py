"""The HTTP client: one request, with limits of time and size, and proxies from the environment.

Proxies are those of ``urllib`` (``http_proxy``, ``https_proxy``, ``no_proxy``): httpx rejects every request if
``ALL_PROXY`` names a SOCKS server, as it often does in a user's session.
"""

from __future__ import annotations

import contextlib
import ssl
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.base.text import size

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
"""Timeout for connecting, if that of the whole request is not shorter."""

Fault = Literal["request", "certificate", "tls", "connection", "timeout", "size", "response"]


class HttpError(UnreachableError):
    """A request without a complete response. The text is the reason, without the URL."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete response of any status."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Names are not case-sensitive."""
    body: bytes


def fetch(
    url: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    largest: int | None,
    tls: ssl.SSLContext,
    body: bytes | None = None,
    follow: bool = False,
) -> HttpResponse:
    """Send GET, or POST with a ``body``, and return the response.

    ``timeout_s``: of the whole request. ``largest``: maximum bytes of its body, decompressed; ``None``: the body is not
    read. ``follow``: follow redirects, without credentials to another server. Raises ``HttpError``.
    """
    import httpx  # noqa: PLC0415 - takes 0.2 s, and most commands send no request

    ends = time.monotonic() + timeout_s
    sent = {"User-Agent": "slurm-affinode", "Accept-Encoding": "gzip", **headers}
    with _faults(), httpx.Client(
        verify=tls, proxy=_proxy(url), trust_env=False, follow_redirects=follow,
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
    ) as client, client.stream(
        "GET" if body is None else "POST", url, content=body,
        headers=[(name.encode(), value.encode()) for name, value in sent.items()],
    ) as response:  # fmt: skip
        content = b"" if largest is None else _content(response, largest, ends)
    return HttpResponse(response.status_code, response.reason_phrase, response.headers, content)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``; ``None`` without it, and for its other form, a date."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isdecimal() else None


def tls_context(ca_file: Path | str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the CA bundle, or else those of the system. Raises ``InputError``."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise InputError(f"holds no certificates: {error}", where=str(ca_file)) from error


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _content(response: httpx.Response, largest: int, ends: float) -> bytes:
    """Read and decompress a response. httpx would decompress each block without a limit."""
    packed = response.headers.get("Content-Encoding", "").lower() == "gzip"
    unpack = zlib.decompressobj(wbits=31) if packed else None
    content = bytearray()
    for block in response.iter_raw():
        if time.monotonic() > ends:
            raise HttpError("timeout", "timed out")
        content += unpack.decompress(block, largest + 1 - len(content)) if unpack else block
        if len(content) > largest:
            raise HttpError("size", f"more than {size(largest)}")
    return bytes(content)


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Translate the errors of httpx."""
    import httpx  # noqa: PLC0415 - as in fetch

    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        reason = _origin(error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise HttpError("certificate", reason.verify_message) from error
        raise HttpError("tls" if isinstance(reason, ssl.SSLError) else "connection", _message(reason)) from error
    except httpx.TimeoutException as error:
        raise HttpError("timeout", "timed out") from error
    except httpx.LocalProtocolError:  # quotes the header, which may hold a secret
        raise HttpError("request", "a header has characters that HTTP does not allow") from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ImportError, ValueError):  # an import for SOCKS
        raise HttpError("request", "the URL, or that of its proxy (http_proxy, https_proxy), cannot be used") from None
    except (httpx.RequestError, zlib.error) as error:
        raise HttpError("response", _message(_origin(error))) from error


def _origin(error: BaseException) -> BaseException:
    """Return the error of the socket behind an error of httpx, which hides it in its context; else ``error``."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _message(reason: BaseException) -> str:
    if isinstance(reason, TimeoutError):
        return "timed out"
    if isinstance(reason, OSError) and reason.strerror:
        return str(reason.strerror)
    return str(reason) or type(reason).__name__
