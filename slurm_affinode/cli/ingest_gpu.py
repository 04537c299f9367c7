"""``slurm-affinode ingest gpu``."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_run import (
    AGAIN,
    PROMETHEUS_PERIOD,
    IngestRun,
    cluster_option,
    ingest_options,
    strict_option,
    timezone_option,
)
from slurm_affinode.cli.ingest_samples import (
    as_json,
    continuation,
    figures,
    print_problems,
    progress_of_time,
    prometheus_server,
    say_unchanged,
    with_stdin,
)
from slurm_affinode.cli.options import (
    Span,
    echo,
    print_json,
    progress,
    prometheus_options,
)
from slurm_affinode.metrics.ingest import IngestSummary
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.metrics.readers.inputs import FORMATS
from slurm_affinode.pipeline import ingest

_GPU_EPILOG = """\b
Examples:
  slurm-affinode ingest gpu history/                        everything below a directory
  slurm-affinode ingest gpu '/var/log/gpu/*/2026-11-*.csv.gz'
  slurm-affinode ingest gpu --cluster alpha metrics.prom    exposition text of dcgm-exporter, federated or saved
  slurm-affinode ingest gpu range.json                      a response of Prometheus' /api/v1/query_range
  slurm-affinode ingest gpu --node gpu01 --start 2026-11-01T08:00 --interval 30s dmon.txt
  slurm-affinode ingest gpu --timezone Europe/Oslo gpu01/nvidia-smi.csv
  ssh gpu01 'date -Is; nvidia-smi' | slurm-affinode ingest gpu --node gpu01 -
  curl -s http://gpu01:9400/metrics | slurm-affinode ingest gpu --start now -
  slurm-affinode ingest gpu --prometheus http://prometheus:9090 --since 7d --match 'cluster="alpha"'
  slurm-affinode ingest gpu --prometheus https://metrics.example.org --token-file token --ca-file ca.pem

\b
Formats:
  prometheus        exposition text with timestamps, mostly ms (many scrapes in a file are fine)
  openmetrics       likewise with '# EOF' at the end, timestamps mostly in seconds
  prometheus-json   responses of the Prometheus API, query_range or query
  csv               with a header; name unknown columns in gpu_history.columns of the configuration
  nvidia-smi        nvidia-smi --query-gpu=... --format=csv; without a header give --fields
  nvidia-smi-table  the table of nvidia-smi, once or many times, with lines of date
  nvidia-smi-q      nvidia-smi -q, once or many times
  nvidia-smi-xml    nvidia-smi -q -x, once or many times
  dmon              dcgmi dmon; needs --start and --interval
  parquet           columns as in csv
Compressed text (gzip, zstd, bzip2, xz) is read as it is.
"""


@command(epilog=_GPU_EPILOG)
@click.argument("paths", nargs=-1, type=click.Path(readable=False), metavar="[PATH...]")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
    help="Set the format of every file, one of those below [default: by content]",
)
@cluster_option("Set the cluster of every sample [default: from the file, else configuration]")
@click.option("--node", metavar="NAME", help="Set the node of samples without one [default: file or directory name]")
@timezone_option("without one")
@click.option("--start", metavar="TIME", help="Set the time of the first sample in files without times")
@click.option(
    "--interval", type=Span(), metavar="SPAN", help="Set the sampling interval in files without times, such as 30s"
)
@click.option("--fields", metavar="LIST", help="Set the columns of a table without a header (list of --query-gpu)")
@strict_option("a file at its first bad line")
@AGAIN
@ingest_options(*PROMETHEUS_PERIOD, connection=(prometheus_options,))
def ingest_gpu(
    *,
    paths: tuple[str, ...],
    format_: str | None,
    cluster: str | None,
    node: str | None,
    timezone: str | None,
    start: str | None,
    interval: float | None,
    fields: str | None,
    strict: bool,
    again: bool,
    since: datetime | None,
    until: datetime,
    with_prometheus: bool,
    run: IngestRun,
) -> int:
    """Ingest GPU metrics from files, directories, globs, standard input (-) or a Prometheus server.

    Ingesting the same input twice is a no-op; files may overlap and come in any order. An unusable file is reported
    in one line and not stored; the others are ingested, and the exit status is 2. Exit status 3: Prometheus does
    not respond or failed midway; everything read before is stored.
    """
    if paths and (with_prometheus or since is not None):
        raise click.UsageError("files and Prometheus are read one after the other: give PATH... or --prometheus URL")
    if not paths and run.config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH... or --prometheus URL")
    if not paths:
        of_files = {"--format": format_, "--timezone": timezone, "--start": start, "--interval": interval,
                    "--fields": fields, "--again": again}  # fmt: skip
        for name, value in of_files.items():
            if value:
                raise click.UsageError(f"{name} is for files, not for Prometheus")
    options = ingest.read_options(
        run.config, cluster=cluster, node=node, zone=timezone, start=start, interval_s=interval,
        fields=[name for name in (fields or "").split(",") if name.strip()], strict=strict,
    )  # fmt: skip
    if not paths:
        return _from_prometheus(run, options, since, until)
    with run.store() as repository, with_stdin(paths) as given:
        total = sum(inputs.size(path) for path in inputs.expand(given)[0])
        with progress("reading", total=total, quiet=run.as_json, of_bytes=True) as advance:
            summary = ingest.ingest_gpu_samples(
                run.config, repository, given, options, format=format_, again=again, dry_run=run.dry_run,
                advance=advance,
            )  # fmt: skip
    _report_gpu(summary, run)
    return 2 if summary.failed else 0


def _from_prometheus(run: IngestRun, options: ReadOptions, since: datetime | None, until: datetime) -> int:
    server = prometheus_server(run)
    with run.store() as repository:
        begin = since or ingest.next_since(repository, run.config.prometheus, options, datetime.now(UTC))
        with progress_of_time(run, begin, until) as advance:
            outcome = ingest.ingest_prometheus(
                run.config, repository, begin, until, options, dry_run=run.dry_run, advance=advance,
                client=Client(server),
            )  # fmt: skip
    _report_gpu(outcome.summary, run, failure=outcome.failure)
    return continuation(outcome)


def _report_gpu(summary: IngestSummary, run: IngestRun, *, failure: AffinodeError | None = None) -> None:
    if run.as_json:
        print_json({**as_json(summary), "error": None if failure is None else str(failure)})
        return
    for one in summary.files:
        print_problems(one, run)
    if summary.first is not None:
        for name, text in figures(summary):
            echo(f"{name:<11} {text}")
    elif not summary.failed:
        say_unchanged(summary)
    run.say_dry()
