"""Client of the HTTP API of Prometheus and compatible servers (Thanos, Mimir, VictoriaMetrics).

Redirects are not followed, so that credentials are not sent to another server.
Source of paths, responses and status codes: prometheus.io, "HTTP API".
"""

from __future__ import annotations

import json
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.http import Fault, HttpError, HttpResponse, fetch, retry_after_s
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers.prometheus_json import warnings_of

ATTEMPTS = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
LARGEST_ANSWER = 64 * 2**20
"""Maximum size of a response, decompressed, in bytes. Larger ones are requested in smaller pieces."""
_LONGEST_URL = 4000
_SHOWN = 200
_UNAVAILABLE = (404, 405, 410, 501)
_AGAIN = (408, 425, 429, 500, 502, 503)


class TooMuchError(UnreachableError):
    """The response is too large or takes too long; a smaller request may succeed."""


class RefusedError(AffinodeError):
    """The server rejects the request: no such path, or an invalid query."""


class _TransientError(UnreachableError):
    """An error that may be temporary."""

    def __init__(self, message: str, *, hint: str | None = None, wait_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.wait_s = wait_s
        """The delay requested in ``Retry-After``."""


@dataclass(slots=True)
class Client:
    """A client of one server. ``sleep`` is replaced in tests; ``attempts`` limits the tries of a request."""

    server: Server
    sleep: Callable[[float], None] = time.sleep
    attempts: int = ATTEMPTS
    largest: int = LARGEST_ANSWER
    warnings: dict[str, int] = field(default_factory=dict)
    """Warnings of the server, e.g. about a partial response, and their counts."""
    _tls: ssl.SSLContext | None = None

    def instant(self, query: str, at_ms: int) -> list[dict[str, Any]]:
        """Return the result of ``/api/v1/query``: series with one ``value``."""
        return self._series("query", {"query": query, "time": _seconds(at_ms)}, "vector")

    def raw(self, query: str, at_ms: int) -> list[dict[str, Any]]:
        """Return the result of ``/api/v1/query`` for a range selector: series with the ``values`` as scraped."""
        return self._series("query", {"query": query, "time": _seconds(at_ms)}, "matrix")

    def query_range(self, query: str, since_ms: int, until_ms: int, step_ms: int) -> list[dict[str, Any]]:
        """Return the result of ``/api/v1/query_range``; both ends are included."""
        params = {"query": query, "start": _seconds(since_ms), "end": _seconds(until_ms), "step": _seconds(step_ms)}
        return self._series("query_range", params, "matrix")

    def names(self, selectors: Sequence[str], since_ms: int, until_ms: int) -> list[str]:
        """Return the names of metrics with series that match any of ``selectors`` (none: of all metrics)."""
        return self.label_values("__name__", selectors, since_ms, until_ms)

    def label_values(self, label: str, selectors: Sequence[str], since_ms: int, until_ms: int) -> list[str]:
        """Return the values of a label of series that match any of ``selectors`` (none: of all series)."""
        params = [
            ("start", _seconds(since_ms)),
            ("end", _seconds(until_ms)),
            *(("match[]", selector) for selector in selectors),
        ]
        data = self._ask(f"label/{label}/values", params)
        if not isinstance(data, list):
            raise self._strange()
        return [str(value) for value in data]

    def _series(self, path: str, params: Mapping[str, str], kind: str) -> list[dict[str, Any]]:
        data = self._ask(path, list(params.items()))
        if not isinstance(data, dict) or data.get("resultType") != kind:
            raise self._strange()
        result = data.get("result")
        if not isinstance(result, list) or not all(_is_series(series) for series in result):
            raise self._strange()
        return result

    def _strange(self) -> RefusedError:
        return RefusedError(
            f"{self.server.url}: responds with JSON that is not from Prometheus",
            hint="the URL of the server is needed, without /api/v1, for example http://prometheus:9090",
        )

    def _ask(self, path: str, params: Sequence[tuple[str, str]]) -> Any:
        wait_s = FIRST_WAIT_S
        for attempts_left in reversed(range(self.attempts)):
            try:
                return self._request_once(path, params)
            except _TransientError as error:
                if attempts_left == 0:
                    raise UnreachableError(str(error), hint=error.hint) from error
                # Jitter: other clients may have been rejected at the same moment.
                requested_s = error.wait_s if error.wait_s is not None else wait_s * random.uniform(0.75, 1.25)  # noqa: S311
                self.sleep(min(requested_s, LONGEST_WAIT_S))
                wait_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _request_once(self, path: str, params: Sequence[tuple[str, str]]) -> Any:
        self._tls = self._tls or self.server.tls()
        url, form = f"{self.server.url}/api/v1/{path}", urlencode(params)
        headers = {"Accept": "application/json", **self.server.headers()}
        body = None
        if len(url) + len(form) > _LONGEST_URL:
            headers["Content-Type"], body = "application/x-www-form-urlencoded", form.encode()
        else:
            url = f"{url}?{form}"
        try:
            response = fetch(
                url, headers=headers, body=body, timeout_s=self.server.timeout_s, largest=self.largest, tls=self._tls
            )
        except HttpError as error:
            raise self._unanswered(error) from error
        document = _document(response.body)
        if response.status == 200 and isinstance(document, dict) and document.get("status") == "success":
            for warning in warnings_of(document):
                self.warnings[warning] = self.warnings.get(warning, 0) + 1
            return document.get("data")
        raise self._failure(response, document)

    def _unanswered(self, error: HttpError) -> AffinodeError:
        """Return the error for a request without a complete response."""
        name, hint = self.server.url, _HINTS.get(error.fault)
        match error.fault:
            case "request":
                return AffinodeError(f"{name}: {error}")
            case "certificate":
                return UnreachableError(f"{name}: its certificate cannot be verified: {error}", hint=hint)
            case "tls":
                return UnreachableError(f"{name}: TLS failed: {error}", hint=hint)
            case "connection":
                return _TransientError(f"{name}: cannot be reached: {error}", hint=hint)
            case "timeout":
                return TooMuchError(f"{name}: timed out after {self.server.timeout_s:g} s", hint=hint)
            case "size":
                return TooMuchError(f"{name}: an answer of {error}", hint=hint)
            case "response":
                return _TransientError(f"{name}: the answer broke off: {error}")

    def _failure(self, response: HttpResponse, document: object) -> AffinodeError:
        """Return the error for an unsuccessful response."""
        name, status, headers, body = self.server.url, response.status, response.headers, response.body
        fields = document if isinstance(document, dict) else {}
        error = str(fields.get("error", ""))[:_SHOWN]
        detail = f": {error}" if error else ""
        if 300 <= status < 400:
            target = headers.get("Location", "")[:_SHOWN]
            return AffinodeError(
                f"{name}: redirects to {target or 'elsewhere'}",
                hint="give the URL that it redirects to, if that is your Prometheus and no login page",
            )
        if status in (401, 403, 407):
            return AffinodeError(f"{name}: {_WORDS[status]} (HTTP {status}){detail}", hint=_AUTHENTICATE)
        if _is_html(headers, body) and status in (200, *_UNAVAILABLE):
            return RefusedError(
                f"{name}: answers a web page and no JSON (HTTP {status})",
                hint="is it a login page? then give credentials; else give the URL of Prometheus itself",
            )
        if status in (413, 422, 504) or fields.get("errorType") == "timeout" or "maximum resolution" in error:
            return TooMuchError(
                f"{name}: HTTP {status}{detail or ': the query is too large'}", hint="restrict it with --match"
            )
        if status in _AGAIN:
            return _TransientError(f"{name}: HTTP {status}{detail}", wait_s=retry_after_s(headers))
        if status in _UNAVAILABLE:
            return RefusedError(
                f"{name}: has no Prometheus API (HTTP {status})",
                hint="the URL of the server is needed, without /api/v1, for example http://prometheus:9090",
            )
        if document is None and status == 200:
            shown = body[:60].decode("utf-8", "replace").strip()
            return _TransientError(
                f"{name}: the answer is no whole JSON; it begins with {shown!r}",
                hint="is the URL that of a Prometheus server, and does a proxy cut its answers off?",
            )
        if status == 200 and not error:
            return self._strange()
        if status < 500:
            return RefusedError(f"{name}: HTTP {status}{detail or _first_line(body)}")
        return _TransientError(f"{name}: HTTP {status}{detail}")


_HINTS: Mapping[Fault, str] = {
    "certificate": "give --ca-file FILE (or prometheus.ca_file) with the certificate of the authority that signed it",
    "tls": "does it use TLS (https), and does it require a client certificate (--cert-file, --key-file)?",
    "connection": "does Prometheus run there, and is there a firewall or a proxy (http_proxy, no_proxy) in between?",
    "timeout": "prometheus.timeout allows more time",
    "size": "restrict it with --match",
}
_WORDS = {
    401: "requires credentials, or rejects those given",
    403: "does not allow it",
    407: "the proxy requires credentials",
}
_AUTHENTICATE = (
    "give --token-file FILE (or prometheus.token_file, or SLURM_AFFINODE_PROMETHEUS_TOKEN), "
    "or --prometheus-user with --password-file"
)


def _is_series(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("metric", {}), dict) and isinstance(value.get("values", []), list)


def _document(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _is_html(headers: Mapping[str, str], body: bytes) -> bool:
    return headers.get("Content-Type", "").lower().startswith("text/html") or body.lstrip()[:1] == b"<"


def _first_line(body: bytes) -> str:
    text = body.decode("utf-8", "replace").strip().split("\n")[0][:_SHOWN]
    return f": {text}" if text else ""


def _seconds(milliseconds: int) -> str:
    """Format exact seconds, without decimals where possible."""
    whole, rest = divmod(milliseconds, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)
