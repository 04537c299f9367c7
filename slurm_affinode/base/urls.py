"""URLs of servers, as typed by users."""

from __future__ import annotations

from urllib.parse import urlsplit

from slurm_affinode.base.errors import AffinodeError

_EXAMPLE = "write for example http://prometheus.example.org:9090 or https://metrics.example.org/prometheus"
_PAGES = ("/api/v1/query_range", "/api/v1/query", "/api/v1", "/api", "/graph", "/query")


def checked_url(text: str) -> str:
    """Return ``text`` as the root URL of a server. Raises ``AffinodeError`` with the reason."""
    clean = text.strip()
    try:
        parts = urlsplit(clean)
        _ = parts.port
    except ValueError as error:
        raise AffinodeError(f"{text!r} is not a URL: {error}", hint=_EXAMPLE) from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname or not clean.isprintable() or " " in clean:
        raise AffinodeError(f"{text!r} is not the URL of a Prometheus server", hint=_EXAMPLE)
    if parts.username is not None or parts.password is not None:
        raise AffinodeError(
            f"credentials in the URL of {parts.hostname}: every user of this machine could read them",
            hint="give --prometheus-user NAME with --password-file FILE, or --token-file FILE",
        )
    path = parts.path.rstrip("/")
    for page in _PAGES:
        if path.endswith(page):
            path = path.removesuffix(page)
            break
    return f"{parts.scheme.lower()}://{parts.netloc}{path.rstrip('/')}"
