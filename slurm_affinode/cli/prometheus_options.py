"""The options that name a Prometheus server, shared by the commands that read from one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_affinode.config import Config, PrometheusConfig
from slurm_affinode.history.promserver import ENV_PASSWORD, ENV_TOKEN, checked_url

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)


def prometheus_options(function: F) -> F:
    """Add ``--prometheus`` and what goes with it, below ``config_options``.

    The command gets ``config`` with the server in ``config.prometheus``, and ``asked``: whether ``--prometheus`` was
    given. Credentials of the configuration go to no server but the one that they are configured for.
    """

    @click.option(
        "--prometheus", "url", metavar="URL",
        help="Read GPU history from this server: http://prometheus:9090 (or Thanos, Mimir, VictoriaMetrics).",
    )  # fmt: skip
    @click.option(
        "--match", multiple=True, metavar="MATCHER",
        help="Only series with this label, of Prometheus: 'cluster=\"alpha\"', 'instance=~\"gpu.*\"'. Repeatable.",
    )  # fmt: skip
    @click.option(
        "--step", metavar="SPAN",
        help="Ask Prometheus for a point every SPAN: 30s. [default: the samples as they were scraped]",
    )  # fmt: skip
    @click.option("--token-file", type=_FILE, metavar="FILE", help=f"Bearer token for Prometheus. [env {ENV_TOKEN}]")
    @click.option("--prometheus-user", "username", metavar="NAME", help="User of Prometheus, for basic authentication.")
    @click.option("--password-file", type=_FILE, metavar="FILE", help=f"The password. [env {ENV_PASSWORD}]")
    @click.option("--ca-file", type=_FILE, metavar="FILE", help="Authorities (PEM) that certify Prometheus.")
    @click.option("--cert-file", type=_FILE, metavar="FILE", help="Client certificate (PEM) for Prometheus.")
    @click.option("--key-file", type=_FILE, metavar="FILE", help="Its key, where the certificate's file has none.")
    @click.option("--insecure", is_flag=True, help="Believe any certificate that Prometheus shows.")
    @functools.wraps(function)
    def wrapper(*args: Any, config: Config, url: str | None, insecure: bool, **kwargs: Any) -> Any:
        given = {name: value for name in _SETTINGS if (value := kwargs.pop(name))}
        if insecure:
            given["insecure"] = True
        settings = _settings(config.prometheus, url, given)
        return function(*args, config=replace(config, prometheus=settings), asked=url is not None, **kwargs)

    return wrapper  # type: ignore[return-value]


_SETTINGS = ("match", "step", "token_file", "username", "password_file", "ca_file", "cert_file", "key_file")


def _settings(configured: PrometheusConfig, url: str | None, given: dict[str, Any]) -> PrometheusConfig:
    if url is None:
        if given and configured.url is None:
            option = f"--{next(iter(given)).replace('_', '-').replace('username', 'prometheus-user')}"
            raise click.UsageError(f"{option} is for a Prometheus server: give --prometheus URL, or set prometheus.url")
        return replace(configured, **given)
    checked = checked_url(url)
    if configured.url is not None and checked_url(configured.url) == checked:
        return replace(configured, **given)
    return PrometheusConfig(url=checked, timeout=configured.timeout, overlap=configured.overlap, **given)
