"""``slurm-affinode export``: GPU samples in formats of other programs, and the site's history as a data set."""

from __future__ import annotations

import re
import secrets
import sys
from datetime import datetime
from pathlib import Path

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted, percent
from slurm_affinode.cli.command import group
from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    progress,
    stages,
    warn,
    zone,
)
from slurm_affinode.cli.output import reader_gone
from slurm_affinode.metrics.openmetrics import as_openmetrics

_EPILOG = """\b
Examples:
  slurm-affinode export openmetrics --since 30d --until 4h --out gpu.om
  promtool tsdb create-blocks-from openmetrics gpu.om blocks/
  slurm-affinode export openmetrics --since 2026-11-01 --until 2026-11-02 --label job=dcgm --out - | head
"""
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)=(.*)", re.DOTALL)


@group()
def export() -> None:
    """Write stored data in formats of other programs, or as an anonymized data set."""


@export.command(epilog=_EPILOG)
@click.option("--since", type=When(), default="7d", show_default=True, metavar="TIME", help="Begin at TIME")
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End before TIME")
@click.option("--out", type=click.Path(), required=True, metavar="FILE", help="Write to FILE, or - for standard output")
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="Add a label to every series; may be repeated"
)
@json_option
@config_options
def openmetrics(
    *, config: Config, since: datetime, until: datetime, out: str, labels: tuple[str, ...], as_json: bool
) -> None:
    """Write samples as OpenMetrics text with timestamps, to backfill Prometheus with promtool.

    Names are those of dcgm-exporter, with one line per value and job on the GPU. Leave the last hours to Prometheus
    itself (--until 4h): blocks must not overlap the data that it still has in memory.
    """
    if out == "-" and as_json:
        raise click.UsageError("--json needs --out FILE: standard output is taken")
    target = sys.stdout.buffer if out == "-" else Path(out)
    label_map = dict(_label(text) for text in labels)
    with progress("writing", total=None, quiet=as_json) as advance:

        def went_on(values: int) -> None:
            if out == "-" and reader_gone():
                raise click.exceptions.Exit(0)  # without a reader there is nothing left to do
            advance(values)

        written = as_openmetrics(config, since, until, target, labels=label_map, advance=went_on)
    if as_json:
        print_json({"out": out, **{name: getattr(written, name) for name in written.__dataclass_fields__}})
    elif out != "-":
        echo(f"{out}: {written.samples:,} samples of {written.series:,} series, {written.devices:,} devices")
        if written.first and written.last:
            first, last = clock(written.first, seconds=True), clock(written.last, seconds=True)
            echo(f"from {first} to {last} ({zone()})")


_TRACE_EPILOG = """\b
Examples:
  slurm-affinode export trace --since 90d --out dataset/
  slurm-affinode export trace --since 90d --round 5m --least-users 10 --key-file trace.key --out dataset/
  slurm-affinode trace site dataset/ --out out/site
"""


@export.command("trace", epilog=_TRACE_EPILOG)
@click.option("--since", type=When(), default="30d", show_default=True, metavar="TIME", help="Begin at TIME")
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End before TIME")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR", help="Write to DIR"
)
@click.option("--cluster", metavar="NAME", help="Export this cluster [default: the only one with GPU jobs]")
@click.option(
    "--round", "round_s", type=Span(), default="1m", show_default=True, metavar="SPAN", help="Round times to SPAN"
)
@click.option(
    "--least-users",
    type=click.IntRange(2, 1000),
    default=5,
    show_default=True,
    metavar="K",
    help="Generalize or leave out requests that fewer than K users have made",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Key of the pseudonyms, at least 16 bytes [default: a random one that is not kept]",
)
@json_option
@config_options
def export_trace(
    *,
    config: Config,
    since: datetime,
    until: datetime,
    out: Path,
    cluster: str | None,
    round_s: float,
    least_users: int,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Write the GPU jobs, idle windows and queue of a cluster as an anonymized, documented data set.

    Names become keyed pseudonyms, times are rounded and shifted by whole weeks, and requests that few users have made
    are generalized or left out. DIR gets README.md, which says so with figures, jobs.csv, jobs.swf, idle_windows.csv,
    queue.csv and manifest.json. Read README.md before you publish it: it names what remains visible.
    """
    from slurm_affinode.analysis.result import WasteQuery  # noqa: PLC0415 - --help stays quick
    from slurm_affinode.pipeline import anonymity, report, trace_export  # noqa: PLC0415
    from slurm_affinode.report.output import write_files  # noqa: PLC0415
    from slurm_affinode.traces import job_figures, site_readme, site_trace  # noqa: PLC0415

    if until <= since:
        raise click.UsageError("the interval ends before it begins: choose --since before --until")
    if not 1 <= round_s <= _LONGEST_ROUND_S or round_s != int(round_s):
        raise click.UsageError("--round is a whole number of seconds, at most 1h")
    key = secrets.token_bytes(32) if key_file is None else anonymity.read_key(key_file)
    query = WasteQuery(since, until, thresholds=report.thresholds(config), zone=zone())
    with stages(quiet=as_json) as step:
        history = trace_export.collect(config, query, cluster, step=step)
        step("removing names")
        options = site_trace.ExportOptions(key, int(round_s), least_users)
        data = site_trace.anonymized(history.jobs, history.idle, history.capacity_gpus, options)
        jobs, idle = job_figures.analyse(site_trace.job_log(data)), site_trace.idle_figures(data)
        exact = float((history.jobs["gpus"] * (history.jobs["end_s"] - history.jobs["start_s"])).sum()) / 3600
        text = site_readme.readme(data, jobs, idle, history.left_out, exact)
        write_files(out, site_trace.files(data, text))
    lost = data.suppression
    assert lost is not None  # noqa: S101 - it was just made
    if as_json:
        print_json(
            {
                "out": str(out),
                "cluster": history.cluster,
                "jobs": jobs.jobs,
                "gpu_hours": jobs.unit_hours,
                "exact_gpu_hours": exact,
                "left_out": history.left_out,
                "generalized": dict(lost.generalized),
                "suppressed_jobs": lost.jobs,
                "suppressed_gpu_hours_share": lost.gpu_hours_share,
                "idle_gpu_hours": idle.idle_gpu_hours,
                "least_users": least_users,
                "round_s": int(round_s),
            }
        )
        return
    echo(f"{out}: {counted(jobs.jobs, 'job')} of {counted(jobs.users or 0, 'user')}, {jobs.unit_hours:,.1f} GPU-hours")
    for reason, count in history.left_out.items():
        warn(f"left out: {counted(count, 'job')} {reason}")
    if lost.jobs:
        share = percent(lost.gpu_hours_share)
        warn(f"left out: {counted(lost.jobs, 'job')} with rare requests, {share} of the GPU-hours")
    echo(f"read {out / 'README.md'} before you publish it")


_LONGEST_ROUND_S = 3600


def _label(text: str) -> tuple[str, str]:
    match = _LABEL.fullmatch(text)
    if match is None or match.group(1).startswith("__"):
        raise AffinodeError(f"{text!r} is not a label", hint="write for example --label job=dcgm")
    return match.group(1), match.group(2)
