"""``slurm-affinode ingest gpu``."""

from __future__ import annotations

import click

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_run import timezone_option
from slurm_affinode.cli.ingest_samples import SampleInput, as_json, continuation, figures, sample_options
from slurm_affinode.metrics.ingest import IngestSummary
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
@sample_options(
    format_option=click.option(
        "--format", "format_", type=click.Choice(FORMATS), metavar="FORMAT",
        help="Set the format of every file, one of those below [default: by content]",
    ),
    node_help="Set the node of samples without one [default: file or directory name]",
    sample="sample",
    interval="sampling interval",
    example="30s",
    after_node=(timezone_option("without one"),),
    after_interval=(
        click.option(
            "--fields", metavar="LIST", help="Set the columns of a table without a header (list of --query-gpu)"
        ),
    ),
)  # fmt: skip
def ingest_gpu(*, timezone: str | None, fields: str | None, source: SampleInput) -> int:
    """Ingest GPU metrics from files, directories, globs, standard input (-) or a Prometheus server.

    Ingesting the same input twice is a no-op; files may overlap and come in any order. An unusable file is reported
    in one line and not stored; the others are ingested, and the exit status is 2. Exit status 3: Prometheus does
    not respond or failed midway; everything read before is stored.
    """
    run, paths = source.run, source.paths
    if paths and (source.with_prometheus or source.since is not None):
        raise click.UsageError("files and Prometheus are read one after the other: give PATH... or --prometheus URL")
    if not paths and run.config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH... or --prometheus URL")
    if not paths:
        of_files = {"--format": source.format, "--timezone": timezone, "--start": source.start,
                    "--interval": source.interval_s, "--fields": fields, "--again": source.again}  # fmt: skip
        for name, value in of_files.items():
            if value:
                raise click.UsageError(f"{name} is for files, not for Prometheus")
    options = source.options(zone=timezone, fields=[name for name in (fields or "").split(",") if name.strip()])
    if not paths:
        return _from_prometheus(source, options)
    with source.files() as (repository, input_paths, advance):
        summary = ingest.ingest_gpu_samples(
            run.config, repository, input_paths, options, format=source.format, again=source.again, dry_run=run.dry_run,
            advance=advance,
        )  # fmt: skip
    _report(source, summary)
    return 2 if summary.failed else 0


def _from_prometheus(source: SampleInput, options: ReadOptions) -> int:
    with source.prometheus(options, "gpu") as (repository, begin, client, advance):
        outcome = ingest.ingest_prometheus(
            source.run.config, repository, begin, source.until, options, dry_run=source.run.dry_run, advance=advance,
            client=client,
        )  # fmt: skip
    _report(source, outcome.summary, outcome.failure)
    return continuation(outcome)


def _report(source: SampleInput, summary: IngestSummary, failure: AffinodeError | None = None) -> None:
    source.report(summary, failure, json=lambda: as_json(summary), rows=lambda: figures(summary))
