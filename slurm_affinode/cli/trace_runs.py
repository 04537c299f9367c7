"""``trace clustercockpit`` and ``trace jobstats``: averages per run, through the analysis and report of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import polars as pl

from slurm_affinode import config
from slurm_affinode.analysis import prices
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.cli.options import json_option, print_json, print_table, warn
from slurm_affinode.cli.trace import out_option
from slurm_affinode.cli.trace_files import write_outputs
from slurm_affinode.errors import InputError
from slurm_affinode.history import jobstats as summaries
from slurm_affinode.history.averages import NOTE
from slurm_affinode.history.traces import clustercockpit as cockpit
from slurm_affinode.report.assemble import render_report
from slurm_affinode.report.build import DEFAULT_TOP
from slurm_affinode.report.summary import build_summary, headline_rows
from slurm_affinode.slurm import sacct, times
from slurm_affinode.slurm.sacct import Reading
from slurm_affinode.slurm.schema import JOBS, conform
from slurm_affinode.workflow import averages, pipeline

config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE",
    help=f"Configuration file: thresholds, prices, time zone. [default: {config.DEFAULT_PATH}]",
)  # fmt: skip


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@out_option
@json_option
@config_option
def clustercockpit(path: Path, out: Path | None, config_path: Path | None, as_json: bool) -> None:
    """Analyse the job database of ClusterCockpit (cc-backend, SQLite).

    FILE is the database, or the directory that has it. A cluster.json beside it names the GPU models. The database is
    opened read-only. It has one average per job: idle is known only where the average is exactly 0.

    \b
    Example:
      slurm-affinode trace clustercockpit /var/lib/cc-backend/job.db --out out/cc
    """
    found = cockpit.read(path)
    jobs = conform(pl.DataFrame(found.jobs, schema_overrides=_overrides(), infer_schema_length=None), JOBS)
    counts = {
        "trace": "clustercockpit",
        "jobs": jobs.height,
        "gpu_jobs": int((jobs["gpus"] > 0).sum()),
        "zero_utilization_gpu_jobs": found.zero_utilization_jobs,
    }
    settings = config.load(config_path)
    result = _analyse(jobs, found.averages, settings, notes=found.notes, problems=found.problems)
    _show(
        result,
        counts,
        title="ClusterCockpit: averages per job (idle: the whole job averaged 0)",
        out=out,
        as_json=as_json,
    )


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@out_option
@json_option
@click.option("--cluster", metavar="NAME", help="Cluster of records that do not name one.")
@click.option(
    "--timezone", metavar="ZONE", help="IANA zone of times without an offset. [default: configuration, local]"
)
@config_option
def jobstats(
    *,
    file: Path,
    out: Path | None,
    cluster: str | None,
    timezone: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Analyse the summaries that jobstats keeps in AdminComment.

    FILE is the output of sacct -P (or --json) with AdminComment, Start, End and NodeList among its fields; "-" is
    standard input. Utilization is the average of a run, memory its maximum.

    \b
    Example:
      sacct -aXP -S now-7days -o Cluster,JobIDRaw,User,Account,Partition,State,Submit,Start,End,\\
          Elapsed,NNodes,NodeList,AllocTRES,AdminComment,JobName | slurm-affinode trace jobstats - --out out/js
    """
    settings = config.load(config_path)
    how = Reading(
        cluster=cluster or settings.cluster.name_or_default,
        zone=times.zone_name(timezone or settings.cluster.timezone),
    )
    content = sys.stdin.buffer.read() if str(file) == "-" else file
    accounting = sacct.read(content, where=str(file), how=how)
    found = summaries.find(accounting.jobs)
    if not found.summaries and not found.without:
        raise InputError(
            f"no jobstats summary (JS1:...) in the AdminComment of {accounting.jobs.height} runs",
            where=str(file),
            hint=found.problems[0] if found.problems else "add AdminComment, Start and End to the fields of sacct",
        )
    counts = {
        "trace": "jobstats",
        "jobs": accounting.jobs.height,
        "summaries": found.summaries,
        "without_summary": found.without,
    }
    problems = (*map(str, accounting.problems), *found.problems)
    result = _analyse(accounting.jobs, found.averages, settings, notes=(summaries.NOTE,), problems=problems)
    _show(result, counts, title="jobstats: averages per run (idle: the whole run averaged 0)", out=out, as_json=as_json)


def _overrides() -> dict[str, pl.DataType]:
    return {name: dtype for name, dtype in JOBS.items() if name not in ("submit", "start", "end")}


def _analyse(
    jobs: pl.DataFrame,
    per_run: pl.DataFrame,
    settings: config.Config,
    *,
    notes: tuple[str, ...],
    problems: tuple[str, ...],
) -> WasteResult:
    return averages.analyse_averages(
        jobs,
        per_run,
        prices=prices.load(settings.price.table, currency=settings.price.currency),
        thresholds=pipeline.thresholds(settings),
        notes=notes,
        problems=problems,
        zone=times.site_zone(settings.cluster.timezone),
    )


def _show(result: WasteResult, counts: Mapping[str, Any], *, title: str, out: Path | None, as_json: bool) -> None:
    summary = {**build_summary(result, title=title), "source": dict(counts)}
    if out is not None:
        write_outputs(out, render_report(result, title=title, top=DEFAULT_TOP), summary)
    if as_json:
        print_json(summary)
        return
    print_table(("", ""), [(key.replace("_", " "), value) for key, value in counts.items()], right=("",))
    click.echo()
    print_table(("", "GPU-hours", "of allocated"), headline_rows(result), right=("GPU-hours", "of allocated"))
    warn(f"note: {NOTE}")
    for issue in result.quality.issues:
        if issue.code == "bad-records":
            for example in issue.examples:
                warn(f"note: {example}")
    if out is not None:
        click.echo(f"\nreport   {out / 'report.html'}\nsummary  {out / 'summary.json'}")
