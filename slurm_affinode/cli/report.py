"""``slurm-affinode report``: where the GPU-hours went."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.cli.options import (
    Number,
    When,
    config_options,
    json_option,
    print_json,
    print_table,
    stages,
    warn,
    zone,
)
from slurm_affinode.cli.prometheus_options import prometheus_options
from slurm_affinode.config import Config
from slurm_affinode.report.build import DEFAULT_TITLE, DEFAULT_TOP, WrittenReport
from slurm_affinode.workflow import gpu_intake, pipeline, prometheus_intake

_EPILOG = """\b
Examples:
  slurm-affinode report --since 7d --out out             the last week, into out/report.html
  slurm-affinode report --since 2026-11-01 --until 2026-12-01 --out nov --csv
  slurm-affinode report --partition gpu --account physics --out physics
  slurm-affinode report --since 1d --out out --json | jq .total.gpu_hours_idle
  slurm-affinode report --since 1d --prometheus http://prometheus:9090 --match 'cluster="alpha"'
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--since", type=When(), default="7d", show_default=True, metavar="TIME",
    help="Begin: 7d (ago), today, 2026-11-01, 2026-11-01T08:00+01:00. Without a zone: that of the site.",
)  # fmt: skip
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End, not included.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("report"), show_default=True, metavar="DIR",
    help="Where report.html and summary.json (and CSV files) go; made if need be.",
)  # fmt: skip
@click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Only this cluster. Repeatable.")
@click.option("--partition", "partitions", multiple=True, metavar="NAME", help="Only this partition. Repeatable.")
@click.option("--account", "accounts", multiple=True, metavar="NAME", help="Only this account. Repeatable.")
@click.option("--user", "users", multiple=True, metavar="NAME", help="Only this user. Repeatable.")
@click.option("--title", default=DEFAULT_TITLE, show_default=True, help="Title of the page.")
@click.option(
    "--top", type=click.IntRange(1, 200), default=DEFAULT_TOP, show_default=True,
    help="Rows of the tables of users, accounts, ... and of the most wasteful jobs.",
)  # fmt: skip
@click.option("--idle-pct", type=Number(0, 100), help="Activity, percent, up to which a GPU is idle.")
@click.option("--low-pct", type=Number(0, 100), help="Activity, percent, up to which a GPU has low use.")
@click.option("--csv", "as_csv", is_flag=True, help="Also write jobs.csv, users.csv, accounts.csv, ... with all rows.")
@json_option
@config_options
@prometheus_options
def report(
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
    asked: bool,
) -> None:
    """Say where the GPU-hours went: one HTML page, a summary in JSON, tables in CSV.

    Analyses the accounting and the GPU history that "ingest" has taken in, and writes DIR/report.html (one file, no
    network) and DIR/summary.json. The headline is printed; with --json, the whole summary.

    With --prometheus the GPU history is read from that server, for this report alone, in place of the stored one.
    """
    thresholds = pipeline.thresholds(config, idle_pct=idle_pct, low_pct=low_pct)
    query = WasteQuery(since, until, clusters, partitions, accounts, users, thresholds, zone())
    options = pipeline.ReportOptions(title=title, top=top, csv=as_csv)
    with stages() as step:
        history = _history(config, query, step) if asked else None
        written = pipeline.build_report(config, query, out, options=options, step=step, history=history, warned=warn)
    if written.result.accounting_note:
        warn(written.result.accounting_note)
    if as_json:
        print_json(written.summary)
        return
    _print_headline(written)


def _history(config: Config, query: WasteQuery, step: pipeline.Step) -> pipeline.History:
    """The history of the server that was asked for."""
    whole = (query.until - query.since + 2 * prometheus_intake.MARGIN).total_seconds() * 1000
    done = 0

    def advance(milliseconds: int) -> None:
        nonlocal done
        done += milliseconds
        step(f"reading {config.prometheus.url}: {done / whole:.0%}")

    options = gpu_intake.read_options(config)
    return lambda: prometheus_intake.borrowed(
        config.prometheus, query.since, query.until, options, advance=advance, warned=warn
    )


def _print_headline(written: WrittenReport) -> None:
    print_table(("", "GPU-hours", "of allocated"), written.headline, right=("GPU-hours", "of allocated"))
    if not written.result.total.get("gpu_hours_measured"):
        why = "no GPU history covers these jobs. To take some in: slurm-affinode ingest gpu PATH"
        if written.result.quality.samples:
            why = "the GPU history fits none of these jobs. The report says why, under data quality"
        warn(f"Nothing was measured: {why}")
    rows = [("report", str(written.report)), ("summary", str(written.summary_path))]
    if written.csv:
        rows.append(("tables", f"{written.csv[0].parent}/*.csv ({len(written.csv)} files)"))
    click.echo("")
    for name, path in rows:
        click.echo(f"{name:<8} {path}")
