"""``slurm-affinode report``: report where GPU-hours went."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config
from slurm_affinode.cli.anonymous import anonymous_options, pseudonyms
from slurm_affinode.cli.command import LazyGroup, command
from slurm_affinode.cli.folding import folding
from slurm_affinode.cli.options import (
    NumberInRange,
    When,
    config_options,
    dask_option,
    echo,
    json_option,
    print_json,
    print_table,
    prometheus_options,
    stages,
    warn,
    zone,
)
from slurm_affinode.pipeline import report as report_pipeline
from slurm_affinode.report.output import DEFAULT_TITLE, DEFAULT_TOP, WrittenReport

_EPILOG = """\b
Examples:
  slurm-affinode report --since 7d --out out             the last week, into out/report.html
  slurm-affinode report --since 2026-11-01 --until 2026-12-01 --out nov --csv
  slurm-affinode report --partition gpu --account physics --out physics
  slurm-affinode report --since 1d --out out --json | jq .total.gpu_hours_idle
  slurm-affinode report --since 30d --anonymous --out shared   pseudonyms in place of names
  slurm-affinode report users --since 7d                 usage by user
  slurm-affinode report queue --live                     pending jobs, longest wait first
  slurm-affinode report --since 1d --prometheus http://prometheus:9090 --match 'cluster="alpha"'
"""


@command(epilog=_EPILOG)
@click.option(
    "--since", type=When(), default="7d", show_default=True, metavar="TIME",
    help="Begin at TIME: 7d (ago), today, 2026-11-01, 2026-11-01T08:00+01:00; without a zone in the " "site's",
)  # fmt: skip
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End before TIME")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("report"), show_default=True, metavar="DIR",
    help="Write report.html, summary.json and CSV files to DIR",
)  # fmt: skip
@click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Select a cluster; may be repeated")
@click.option("--partition", "partitions", multiple=True, metavar="NAME", help="Select a partition; may be repeated")
@click.option("--account", "accounts", multiple=True, metavar="NAME", help="Select an account; may be repeated")
@click.option("--user", "users", multiple=True, metavar="NAME", help="Select a user; may be repeated")
@click.option("--title", default=DEFAULT_TITLE, show_default=True, help="Set the title of the page")
@click.option(
    "--top", type=click.IntRange(1, 200), default=DEFAULT_TOP, show_default=True,
    help="Limit the tables of users, accounts, ... and jobs to N rows",
)  # fmt: skip
@click.option("--idle-pct", type=NumberInRange(0, 100), help="Set the activity up to which a GPU is idle, in percent")
@click.option("--low-pct", type=NumberInRange(0, 100), help="Set the activity up to which use is low, in percent")
@click.option("--csv", "as_csv", is_flag=True, help="Also write jobs.csv, users.csv, accounts.csv, ... with all rows")
@click.option(
    "--trend", type=click.IntRange(0, 11), default=1, show_default=True,
    help="Compute up to N earlier periods if there are no stored reports of them",
)  # fmt: skip
@anonymous_options
@dask_option
@json_option
@config_options
@prometheus_options
def page(
    *,
    config: Config,
    since: datetime,
    until: datetime,
    out: Path,
    clusters: tuple[str, ...],
    partitions: tuple[str, ...],
    accounts: tuple[str, ...],
    users: tuple[str, ...],
    title: str,
    top: int,
    idle_pct: float | None,
    low_pct: float | None,
    as_csv: bool,
    as_json: bool,
    with_prometheus: bool,
    dask: str | None,
    trend: int,
    anonymous: bool,
    anonymous_nodes: bool,
    pseudonym_key: Path | None,
) -> None:
    """Report where GPU-hours went: one HTML page, a summary in JSON, tables in CSV.

    Analyzes ingested accounting, GPU and engine metrics, and writes DIR/report.html (one file, no network),
    DIR/summary.json and a page for each model server. Prints the headline, or the whole summary with --json.

    With --prometheus, GPU metrics are read from that server for this report only, instead of the stored ones.

    With --dask, the workers of a Dask cluster read the stored GPU metrics, which they need at the same path. The report
    is the same to the last digit.

    With --anonymous, page, JSON and CSV have pseudonyms, the same for the same key; model servers are left out. Job
    IDs, times, partitions and clusters stay.
    """
    if dask and with_prometheus:
        raise click.UsageError("--dask is for stored GPU metrics, and --prometheus replaces them")
    thresholds = report_pipeline.thresholds(config, idle_pct=idle_pct, low_pct=low_pct)
    working = report_pipeline.working_time(config)
    query = WasteQuery(since, until, clusters, partitions, accounts, users, thresholds, zone(), working=working)
    options = report_pipeline.ReportOptions(title=title, top=top, csv=as_csv, computed_periods=trend)
    names = pseudonyms(config, anonymous=anonymous, anonymous_nodes=anonymous_nodes, pseudonym_key=pseudonym_key)
    with stages() as step, folding(dask, config) as fold:
        history = _history(config, query, step) if with_prometheus else None
        written = report_pipeline.build_report(
            config,
            query,
            out,
            options=options,
            step=step,
            history=history,
            warned=warn,
            fold=fold,
            anonymize=None if names is None else names.apply,
        )
    if written.result.accounting_note:
        warn(written.result.accounting_note)
    if as_json:
        print_json(written.summary)
        return
    _print_headline(written)


def _history(config: Config, query: WasteQuery, step: report_pipeline.Step) -> report_pipeline.History:
    """Return a function that reads the samples of the requested Prometheus server."""
    from slurm_affinode.pipeline import ingest  # noqa: PLC0415 - a report from stored samples starts sooner

    whole = (query.until - query.since + 2 * ingest.MARGIN).total_seconds() * 1000
    finished = 0

    def advance(milliseconds: int) -> None:
        nonlocal finished
        finished += milliseconds
        step(f"reading {config.prometheus.url}: {finished / whole:.0%}")

    options = ingest.read_options(config)
    return lambda: ingest.borrowed(config.prometheus, query.since, query.until, options, advance=advance, warned=warn)


def _print_headline(written: WrittenReport) -> None:
    print_table(("", "GPU-hours", "of allocated"), written.headline, right=("GPU-hours", "of allocated"))
    if not written.result.total.get("gpu_hours_allocated"):
        warn("No GPU job ran in this interval")
    elif not written.result.total.get("gpu_hours_measured"):
        why = "there are no GPU metrics of these jobs; import them with slurm-affinode ingest gpu PATH"
        if written.result.quality.samples:
            why = "the GPU metrics match none of these jobs; see the section on data quality in the report"
        warn(f"Nothing was measured: {why}")
    rows = [("report", str(written.report)), ("summary", str(written.summary_path))]
    if written.csv:
        rows.append(("tables", f"{written.csv[0].parent}/*.csv ({len(written.csv)} files)"))
    echo()
    for name, path in rows:
        echo(f"{name:<8} {path}")


_REPORTS = {
    "users": ("slurm_affinode.cli.usage:users", "Report usage by user, account or job"),
    "queue": ("slurm_affinode.cli.usage:queue", "Report pending jobs, longest wait first"),
}


def _page_or_command(**values: Any) -> Any:
    """Make the page, unless a command follows: then options of the page are an error, not silently ignored."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        return context.invoke(page, **values)
    options = [
        parameter.opts[-1]
        for parameter in page.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if options:
        raise click.UsageError(f"{options[0]} belongs after {context.invoked_subcommand!r}, if that has such an option")
    return None


report = LazyGroup(
    "report",
    lazy=_REPORTS,
    params=page.params,
    callback=_page_or_command,
    invoke_without_command=True,
    help=page.help,
    epilog=page.epilog,
)
"""``report`` makes the page; ``report users`` and ``report queue`` print tables."""
