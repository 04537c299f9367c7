"""``slurm-affinode ingest serving``."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_run import (
    AGAIN,
    PROMETHEUS_PERIOD,
    IngestRun,
    cluster_option,
    ingest_options,
    strict_option,
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
from slurm_affinode.engines import reader as serving
from slurm_affinode.engines.ingest import EngineTotals
from slurm_affinode.metrics.ingest import IngestSummary
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.pipeline import ingest

_SERVING_EPILOG = """\b
Examples:
  slurm-affinode ingest serving recordings/                 everything below a directory
  slurm-affinode ingest serving --node gpu01 --address gpu01:8000 vllm.prom.gz
  slurm-affinode ingest serving --scrape http://gpu01:8000/metrics --scrape gpu02:30000
  curl -s http://gpu01:8000/metrics | slurm-affinode ingest serving --start now --address gpu01:8000 -
  slurm-affinode ingest serving --prometheus http://prometheus:9090 --since 7d
  slurm-affinode ingest serving range.json                  a response of Prometheus' /api/v1/query_range

\b
Formats:
  prometheus       exposition text of vLLM, SGLang, TGI, Triton (TensorRT-LLM) and llama.cpp, one or more scrapes;
                   recordings with '# scrape MS took 0.012s' and '# scrape MS failed after 0.000s: WHY' lines
  openmetrics      likewise with '# EOF' at the end
  prometheus-json  responses of the Prometheus API
  parquet          columns of the sample schema (docs/engine-metrics.md)
Compressed text (gzip, zstd, bzip2, xz) is read as it is.
"""


@command(epilog=_SERVING_EPILOG)
@click.argument("paths", nargs=-1, type=click.Path(readable=False), metavar="[PATH...]")
@click.option(
    "--scrape", "urls", multiple=True, metavar="URL", help="Scrape this endpoint once; may be repeated"
)  # fmt: skip
@click.option(
    "--format", "format_", type=click.Choice(serving.FORMATS), help="Set the format of every file [default: by content]"
)
@cluster_option("Set the cluster of every sample [default: from the file, else configuration]")
@click.option("--node", metavar="NAME", help="Set the node of every sample [default: from the labels]")
@click.option(
    "--address", metavar="HOST:PORT", help="Set the address of series without one [default: name of the file]"
)
@click.option("--start", metavar="TIME", help="Set the time of the first scrape in files without times")
@click.option(
    "--interval", type=Span(), metavar="SPAN", help="Set the scrape interval in files without times, such as 15s"
)
@strict_option("a file at its first bad line")
@AGAIN
@ingest_options(*PROMETHEUS_PERIOD, connection=(prometheus_options,))
def ingest_serving(
    *,
    paths: tuple[str, ...],
    urls: tuple[str, ...],
    format_: str | None,
    cluster: str | None,
    node: str | None,
    address: str | None,
    start: str | None,
    interval: float | None,
    strict: bool,
    again: bool,
    since: datetime | None,
    until: datetime,
    with_prometheus: bool,
    run: IngestRun,
) -> int:
    """Ingest metrics of inference engines from files, standard input (-), Prometheus or by a scrape.

    Ingesting the same input twice is a no-op. What an engine does not export is unknown. Of a file that is cut off,
    the lines before are ingested. An unusable file or endpoint is reported in one line; the others are ingested, and
    the exit status is 2. Exit status 3: Prometheus does not respond or failed midway.
    """
    if bool(paths) + bool(urls) + (with_prometheus or since is not None) > 1:
        raise click.UsageError("give PATH..., --scrape URL or --prometheus URL, one after the other")
    if not paths and not urls and run.config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH..., --scrape URL or --prometheus URL")
    if not paths and (format_ or address or start or interval or again):
        raise click.UsageError("--format, --address, --start, --interval and --again are for files")
    options = ingest.read_options(
        run.config, cluster=cluster, node=node, start=start, interval_s=interval, strict=strict
    )  # fmt: skip
    if not paths and not urls:
        return _engines_from_prometheus(run, options, since, until)
    with run.store() as repository, with_stdin(paths) as given:
        total = sum(inputs.size(path) for path in inputs.expand(given)[0])
        with progress("reading", total=total, quiet=run.as_json or bool(urls), of_bytes=True) as advance:
            summary, totals = ingest.ingest_engine_samples(
                run.config, repository, options, paths=given, urls=urls, format=format_, address=address, again=again,
                dry_run=run.dry_run, advance=advance,
            )  # fmt: skip
    _report_serving(summary, totals, run)
    return 2 if summary.failed else 0


def _engines_from_prometheus(run: IngestRun, options: ReadOptions, since: datetime | None, until: datetime) -> int:
    server = prometheus_server(run)
    with run.store() as repository:
        now = datetime.now(UTC)
        begin = since or ingest.next_since(repository, run.config.prometheus, options, now, kind="serving")
        with progress_of_time(run, begin, until) as advance:
            outcome, totals = ingest.ingest_engines_of_prometheus(
                run.config, repository, begin, until, options, dry_run=run.dry_run, advance=advance,
                client=Client(server),
            )  # fmt: skip
    _report_serving(outcome.summary, totals, run, failure=outcome.failure)
    return continuation(outcome)


def _report_serving(
    summary: IngestSummary, totals: EngineTotals, run: IngestRun, *, failure: AffinodeError | None = None
) -> None:  # fmt: skip
    engines = dict(sorted(totals.engines.items()))
    if run.as_json:
        found = as_json(summary)
        found["engines"] = found.pop("devices")
        found["steps_s"] = [{"step_s": step, "engines": count} for step, count in summary.steps_s]
        error = None if failure is None else str(failure)
        print_json({**found, "by_engine": engines, "failed_scrapes": totals.failed_scrapes, "error": error})
        return
    for one in summary.files:
        print_problems(one, run)
    if summary.first is not None:
        rows = dict(figures(summary, unit="engine"))
        rows["engines"] = ", ".join(f"{count:,} {engine}" for engine, count in engines.items())
        if totals.failed_scrapes:
            rows["failed"] = counted(totals.failed_scrapes, "scrape")
        rows.pop("not used", None)  # engines export hundreds of metrics that no column needs
        for name, text in rows.items():
            echo(f"{name:<11} {text}")
    elif not summary.failed:
        say_unchanged(summary)
    run.say_dry()
