"""``slurm-affinode ingest serving``."""

from __future__ import annotations

from typing import Any

import click

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_samples import SampleInput, as_json, continuation, figures, sample_options
from slurm_affinode.engines import reader as serving
from slurm_affinode.engines.ingest import EngineTotals
from slurm_affinode.metrics.ingest import IngestSummary
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
@sample_options(
    format_option=click.option(
        "--format", "format_", type=click.Choice(serving.FORMATS),
        help="Set the format of every file [default: by content]",
    ),
    node_help="Set the node of every sample [default: from the labels]",
    sample="scrape",
    interval="scrape interval",
    example="15s",
    before=(
        click.option(
            "--scrape", "urls", multiple=True, metavar="URL", help="Scrape this endpoint once; may be repeated"
        ),
    ),
    after_node=(
        click.option(
            "--address", metavar="HOST:PORT", help="Set the address of series without one [default: name of the file]"
        ),
    ),
)  # fmt: skip
def ingest_serving(*, urls: tuple[str, ...], address: str | None, source: SampleInput) -> int:
    """Ingest metrics of inference engines from files, standard input (-), Prometheus or by a scrape.

    Ingesting the same input twice is a no-op. What an engine does not export is unknown. Of a file that is cut off,
    the lines before are ingested. An unusable file or endpoint is reported in one line; the others are ingested, and
    the exit status is 2. Exit status 3: Prometheus does not respond or failed midway.
    """
    run, paths = source.run, source.paths
    if bool(paths) + bool(urls) + (source.with_prometheus or source.since is not None) > 1:
        raise click.UsageError("give PATH..., --scrape URL or --prometheus URL, one after the other")
    if not paths and not urls and run.config.prometheus.url is None:
        raise click.UsageError("nothing to read: give PATH..., --scrape URL or --prometheus URL")
    if not paths and (source.format or address or source.start or source.interval_s or source.again):
        raise click.UsageError("--format, --address, --start, --interval and --again are for files")
    options = source.options()
    if not paths and not urls:
        return _from_prometheus(source, options)
    with source.files() as (repository, input_paths, advance):
        summary, totals = ingest.ingest_engine_samples(
            run.config, repository, options, paths=input_paths, urls=urls, format=source.format, address=address,
            again=source.again, dry_run=run.dry_run, advance=advance,
        )  # fmt: skip
    _report(source, summary, totals)
    return 2 if summary.failed else 0


def _from_prometheus(source: SampleInput, options: ReadOptions) -> int:
    with source.prometheus(options, "serving") as (repository, begin, client, advance):
        outcome, totals = ingest.ingest_engines_of_prometheus(
            source.run.config, repository, begin, source.until, options, dry_run=source.run.dry_run, advance=advance,
            client=client,
        )  # fmt: skip
    _report(source, outcome.summary, totals, outcome.failure)
    return continuation(outcome)


def _report(
    source: SampleInput, summary: IngestSummary, totals: EngineTotals, failure: AffinodeError | None = None
) -> None:  # fmt: skip
    engines = dict(sorted(totals.engines.items()))

    def json() -> dict[str, Any]:
        row = as_json(summary)
        row["engines"] = row.pop("devices")
        row["steps_s"] = [{"step_s": step, "engines": count} for step, count in summary.steps_s]
        return {**row, "by_engine": engines, "failed_scrapes": totals.failed_scrapes}

    def rows() -> list[tuple[str, str]]:
        rows = dict(figures(summary, unit="engine"))
        rows["engines"] = ", ".join(f"{count:,} {engine}" for engine, count in engines.items())
        if totals.failed_scrapes:
            rows["failed"] = counted(totals.failed_scrapes, "scrape")
        rows.pop("not used", None)  # engines export hundreds of metrics that no column needs
        return list(rows.items())

    source.report(summary, failure, json=json, rows=rows)
