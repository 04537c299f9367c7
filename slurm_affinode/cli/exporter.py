"""``slurm-affinode exporter``: metrics of this node's GPUs over HTTP, and samples in files."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import click

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import Span, warn

_EPILOG = """\b
Examples:
  slurm-affinode exporter                                            metrics on port 9402 of every address
  slurm-affinode exporter --listen 10.0.0.7:9402 --period 10s
  slurm-affinode exporter --job-map /run/slurm-affinode/jobs         job labels recorded by prolog and epilog
  slurm-affinode exporter --spool /var/spool/slurm-affinode          also files: slurm-affinode ingest gpu DIR
  slurm-affinode exporter --tls-cert node.pem --tls-key node.key --token-file /etc/slurm-affinode/token
  slurm-affinode exporter --serving                                  also vLLM, SGLang, TGI, ... in jobs

\b
Signals: TERM and INT stop it cleanly; HUP closes the open spool file, so that it can be ingested.
"""
DEFAULT_LISTEN = "0.0.0.0:9402"
_FILE = click.Path(path_type=Path, dir_okay=False)
_DIR = click.Path(path_type=Path, file_okay=False)


@command(epilog=_EPILOG)
@click.option(
    "--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT", help="Serve /metrics at this address"
)
@click.option(
    "--period", type=Span(0.1), default="5s", show_default=True, metavar="SPAN", help="Set the sampling interval"
)
@click.option(
    "--job-map", type=_DIR, metavar="DIR", help="Read the job mapping directory DIR [default: jobs of the processes]"
)
@click.option(
    "--spool", type=_DIR, metavar="DIR", help="Store samples in DIR, as Parquet if the extra analysis is installed"
)
@click.option(
    "--spool-file",
    type=Span(),
    default="10m",
    show_default=True,
    metavar="SPAN",
    help="Set the time covered by one file",
)
@click.option("--spool-keep", type=Span(), default="14d", show_default=True, metavar="SPAN", help="Delete older files")
@click.option("--serving", is_flag=True, help="Find inference engines in jobs and export their metrics (needs root)")
@click.option(
    "--serving-period", type=Span(1), default="15s", show_default=True, metavar="SPAN",
    help="Set the scrape interval of engines",
)  # fmt: skip
@click.option("--node", metavar="NAME", help="Set the name of this node [default: its short host name]")
@click.option("--cluster", metavar="NAME", help="Set the cluster label [default: configuration]")
@click.option("--tls-cert", type=_FILE, metavar="FILE", help="Serve HTTPS with this certificate chain (PEM)")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="Read its private key from FILE [default: same file]")
@click.option("--tls-client-ca", type=_FILE, metavar="FILE", help="Require client certificates signed by this CA")
@click.option("--token-file", type=_FILE, metavar="FILE", help="Require the bearer token in FILE")
@click.option("--config", "config_path", type=_FILE, metavar="FILE", help="Read this configuration file")
def exporter(
    *,
    listen: str,
    period: float,
    job_map: Path | None,
    spool: Path | None,
    spool_file: float,
    spool_keep: float,
    serving: bool,
    serving_period: float,
    node: str | None,
    cluster: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    token_file: Path | None,
    config_path: Path | None,
) -> None:
    """Sample the GPUs of this node through NVML and export them under dcgm-exporter's names and labels.

    For nodes without dcgm-exporter, or beside it. Runs in the foreground until stopped. A value that a GPU does not
    provide is absent, never 0. The job of a GPU comes from --job-map, or from the processes on it; for the latter
    it must see other users' processes in /proc (hidepid), but need not be root.
    """
    # Imported here because machines without GPUs have no driver.
    from slurm_affinode.agent.client import ask_local  # noqa: PLC0415
    from slurm_affinode.gpu.exporter import Access  # noqa: PLC0415
    from slurm_affinode.gpu.nvml import NvmlDriver  # noqa: PLC0415
    from slurm_affinode.pipeline.exporter import AGENT_TIMEOUT_S, AgentMetrics, ExporterOptions, Signals, run  # noqa: PLC0415

    host, port = _address(listen)
    if tls_cert is None and (tls_key is not None or tls_client_ca is not None):
        raise AffinodeError("--tls-key and --tls-client-ca need --tls-cert")
    config = configuration.load(config_path)
    node, cluster = node or socket.gethostname().partition(".")[0], cluster or config.cluster.name
    run_dir = config.agent.run_dir
    options = ExporterOptions(
        node=node, cluster=cluster,
        host=host, port=port, period_s=period, job_map=job_map, spool=spool,
        spool_file_s=spool_file, spool_keep_s=spool_keep, serving_s=serving_period if serving else None,
        server_programs=config.agent.server_programs, journal=config.suspend.journal,
        agent=AgentMetrics(
            run_dir, lambda: ask_local(run_dir, {"verb": "metrics"}, timeout_s=AGENT_TIMEOUT_S),
            node=node, cluster=cluster,
        ),
        access=Access(tls_cert, tls_key, tls_client_ca, _token(token_file)),
    )  # fmt: skip
    signals = Signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: signals.stop.set())
    signal.signal(signal.SIGHUP, lambda *_: signals.close_file.set())
    run(options, NvmlDriver(), signals, say=lambda message: warn(f"slurm-affinode exporter: {message}"))


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) is not None and int(port) <= 65535
    if not colon or not is_port or (":" in host and not host.startswith("[")):
        raise AffinodeError(
            f"--listen {text}: is not HOST:PORT", hint="for example 0.0.0.0:9402, 127.0.0.1:9402, [::]:9402"
        )
    return host.strip("[]"), int(port)


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the token cannot be read: {error}", where=str(path)) from error
    if not token.isprintable() or not token.isascii() or " " in token or not token:
        raise InputError("holds no token: one line of printable characters is needed", where=str(path))
    return token
