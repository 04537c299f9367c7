"""Address of and credentials for a Prometheus server: URL, token, password, TLS."""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slurm_affinode.base.config import PrometheusConfig
from slurm_affinode.base.errors import AffinodeError, ConfigError
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.urls import checked_url

ENV_TOKEN = "SLURM_AFFINODE_PROMETHEUS_TOKEN"  # noqa: S105 - the name of a variable
ENV_PASSWORD = "SLURM_AFFINODE_PROMETHEUS_PASSWORD"  # noqa: S105


@dataclass(frozen=True, slots=True)
class Server:
    """A server and the credentials for it. Its ``repr`` shows neither token nor password."""

    url: str
    """Without a trailing slash and without ``/api/v1``."""
    token: str | None = field(default=None, repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    insecure: bool = False
    """Skip verification of TLS certificates."""
    timeout_s: float = 60.0
    """Timeout of a whole response."""
    extra: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional request headers."""

    @classmethod
    def of(cls, config: PrometheusConfig, *, env: Mapping[str, str] | None = None) -> Server:
        """Return the configured server; token and password come from files, else from the environment.

        Raises ``AffinodeError`` for a missing or invalid URL and ``ConfigError`` for unusable files.
        """
        environ = os.environ if env is None else env
        if config.url is None:
            raise AffinodeError("no Prometheus server is named", hint="give --prometheus URL, or set prometheus.url")
        token = _secret(config.token_file) if config.token_file else environ.get(ENV_TOKEN) or None
        password = _secret(config.password_file) if config.password_file else environ.get(ENV_PASSWORD) or None
        if token is not None and config.username is None:
            password = None
        if config.username is not None and config.token_file is None:
            token = None
        if token is not None and password is not None:
            raise ConfigError("both a token and a user are given for Prometheus", hint="leave one of them out")
        for name, text in (("the token", token), *config.headers.items()):
            if text is not None and not (text.isprintable() and text.isascii()):
                raise ConfigError(f"{name} of Prometheus has characters that no HTTP header can have")
        return cls(
            url=checked_url(config.url), token=token, username=config.username, password=password,
            ca_file=config.ca_file, cert_file=config.cert_file, key_file=config.key_file, insecure=config.insecure,
            timeout_s=parse_span_s(config.timeout), extra=config.headers,
        )  # fmt: skip

    def headers(self) -> dict[str, str]:
        """Return the request headers, with credentials."""
        headers = dict(self.extra)
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        elif self.username is not None:
            pair = f"{self.username}:{self.password or ''}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return headers

    @property
    def exposed(self) -> bool:
        """Whether credentials are sent over the network as plain text."""
        parts = urlsplit(self.url)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        return parts.scheme == "http" and not local and "Authorization" in self.headers()

    def tls(self) -> ssl.SSLContext:
        """Return the TLS settings: CA bundle, client certificate. Raises ``ConfigError`` for unusable files."""
        context = ssl.create_default_context()
        if self.ca_file is not None:
            try:
                context = ssl.create_default_context(cafile=self.ca_file)
            except (OSError, ValueError) as error:
                raise _unusable(self.ca_file, "certificate of an authority", error) from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: "")
            except (OSError, ValueError) as error:
                raise _unusable(self.cert_file, "client certificate with its key", error) from error
        elif self.key_file is not None:
            raise ConfigError("a key is given for Prometheus and no certificate", hint="give --cert-file, too")
        return context


def _secret(path: Path) -> str:
    try:
        text = path.expanduser().read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text", hint="the file has to hold the secret alone") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint="see prometheus.token_file") from error
    if not text or "\n" in text:
        raise ConfigError(f"{path}: has to hold one line, the secret alone")
    return text


def _unusable(path: Path, what: str, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else error
    return ConfigError(f"{path}: cannot be used as {what}: {reason}", hint="a PEM file is needed")
