"""``slurm-affinode job``: one job on one screen, for its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from slurm_affinode.base import extras
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import delivering
from slurm_affinode.base.text import figure, percent, printable, span
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import clock, config_options, echo, json_option, print_json, slurm_options, stages, zone
from slurm_affinode.cli.sparkline import BLOCKS, UNKNOWN, blocks, console
from slurm_affinode.core import admin_comment
from slurm_affinode.model.job_summary import USES, GpuUse, JobSummary, ResourceUse
from slurm_affinode.pipeline import job_files
from slurm_affinode.report import job_text
from slurm_affinode.slurm.accounting import sacct_command

_EPILOG = """\b
Examples:
  slurm-affinode job 123                   use of time, CPUs, memory and GPUs; idle windows; advice
  slurm-affinode job 123_4 --html job.html
  slurm-affinode job 123 --attempt 1       the first attempt of a requeued job
  slurm-affinode job 123 --json | jq .advice

\b
Exit status: 0 shown, 1 job unknown or not started, 2 unusable input, 3 a required service does not respond.
"""
_FULL, _EMPTY = "█", "░"
_BAR = 30
_LEAST_BAR = 10
_MOST_GPUS = 32
_WELL, _POORLY = 0.6, 0.25
"""Shares from which, and below which, a bar is green and red."""


@command(epilog=_EPILOG)
@config_options
@slurm_options
@click.argument("job_id", metavar="JOBID")
@click.option("--cluster", metavar="NAME", help="Select the cluster, if several have a job with this ID")
@click.option("--attempt", type=int, metavar="N", help="Show attempt N of a requeued job, -1 the last [default: -1]")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a page to FILE")
@json_option
def job(
    *, config: Config, job_id: str, cluster: str | None, attempt: int | None, html: Path | None, as_json: bool
) -> int:
    """Show how well a job used its time limit, CPUs, memory and GPUs, and what to change next time.

    JOBID is 123, 123_4 or 123+1. Data comes from the site's database and GPU metrics; for users who may not read these,
    from the summaries of their jobs that the nightly run publishes, while a job runs, from Slurm and its nodes, and of
    an ended job, from Slurm's accounting with the line of the agent in AdminComment.
    """
    if job_id == "":
        raise click.BadParameter("it is empty", param_hint="JOBID")
    if attempt == 0:
        raise click.BadParameter("attempts are numbered from 1", param_hint="--attempt")
    with stages(quiet=as_json) as step:
        summary = _summary(config, job_id, cluster, attempt, step)
    if job_id.isdecimal() and summary.job.id.startswith(f"{job_id}_"):
        # Slurm gives the ID of an array to one of its tasks as well.
        note = f"{job_id} is an array; its task {summary.job.id} has this ID. Name the others as {job_id}_N"
        summary = replace(summary, notes=(note, *summary.notes))
    _deliver(config, summary, html, as_json=as_json)
    return 0


def _summary(
    config: Config, job_id: str, cluster: str | None, attempt: int | None, step: Callable[[str], None]
) -> JobSummary:
    """Return the summary from the first source that has the job (``job_source``), without the extra a published one."""
    if not extras.missing():
        from slurm_affinode.cli import job_source  # noqa: PLC0415 - needs the extra

        return job_source.summary(config, job_id, cluster, attempt, step)
    directory = config.nightly.jobs.directory
    if directory is None:
        raise AffinodeError(
            "summaries of jobs are not published here (nightly.jobs.directory)",
            hint=f"to compute them: {extras.INSTALL}",
        )
    try:
        return job_files.read(directory, job_id, cluster=cluster, attempt=attempt)
    except job_files.NoSummaryError as error:
        if attempt in (None, -1) and (line := _line_in_accounting(job_id)) is not None:
            error.hint = f"accounting has a line of the agent about it: {line}"
        raise


def _line_in_accounting(job_id: str) -> str | None:
    """Return the agent's line about a job in AdminComment; ``None`` if there is none, or sacct does not respond."""
    try:
        return admin_comment.recognized(sacct_command.admin_comment(job_id))
    except AffinodeError:
        return None


def _deliver(config: Config, summary: JobSummary, html: Path | None, *, as_json: bool) -> None:
    if html is not None:
        from slurm_affinode.pipeline import report  # noqa: PLC0415 - both need the extra
        from slurm_affinode.report import job_page  # noqa: PLC0415

        text = job_page.render(summary, zone(), report.thresholds(config))
        with delivering(html) as target:
            target.write_text(text, encoding="utf-8")
    if as_json:
        print_json(summary.as_json())
    elif html is not None:
        echo(f"wrote {html!s}")
    else:
        print_summary(summary)


def print_summary(summary: JobSummary) -> None:
    """Print a summary, as wide as the terminal allows."""
    out = console()
    _head(out, summary)
    out.print()
    _bars(out, summary.uses)
    if summary.gpus:
        out.print()
        _gpus(out, summary)
    if summary.idle_windows:
        out.print()
        _windows(out, summary)
    if summary.suspensions:
        out.print()
        _suspensions(out, summary)
    out.print()
    _say(out, summary.verdict, style="bold")
    for advice in summary.advice:
        _say(out, f"- {job_text.advice(advice)}", indent=2)
    if line := job_text.admin_comment(summary):
        _say(out, line)
    for note in (*summary.notes, *job_text.origin(summary, clock)):
        _say(out, note, style="dim")


def _say(out: Console, text: str, *, style: str = "", indent: int = 0) -> None:
    """Print a paragraph; ``indent``: columns before each line but the first."""
    lines = Text(printable(text)).wrap(out, out.width - indent)
    for number, line in enumerate(lines):
        out.print(Text(" " * (indent if number else 0) + line.plain.rstrip(), style=style))


def _head(out: Console, summary: JobSummary) -> None:
    attempt = summary.job
    name = f" ({attempt.name})" if attempt.name else ""
    account = f", account {summary.account}" if summary.account else ""
    state = attempt.state or "in an unknown state"
    _say(out, f"Job {attempt.id}{name} of {summary.user or '?'}{account}: {state}", style="bold")
    if several := job_text.attempts(summary):
        _say(out, several, style="yellow")
    where = f"partition {summary.partition or '?'}" + (f", QOS {summary.qos}" if summary.qos else "")
    _say(out, f"{summary.cluster}, {where}; {job_text.nodes(summary.nodes)}")
    _say(out, job_text.allocation(summary))
    if attempt.start is not None:
        end = "still running" if attempt.end is None else f"ended {clock(attempt.end)}"
        _say(out, f"started {clock(attempt.start)}, {end} ({zone()})")


def _bars(out: Console, uses: Sequence[ResourceUse]) -> None:
    if not uses:  # in a file of another release
        return
    label = max(len(USES[use.key]) for use in uses)
    room = out.width - label - 2
    texts = [printable(job_text.amount(use)) for use in uses]
    width = max(_LEAST_BAR, min(_BAR, room - 9 - max(map(len, texts))))
    for use, text in zip(uses, texts, strict=True):
        line = Text(f"{USES[use.key]:<{label}}  ")
        if use.share is None:
            line.append(text, style="dim")
        else:
            filled = min(width, max(1 if use.share > 0 else 0, round(use.share * width)))
            line.append(_FULL * filled + _EMPTY * (width - filled), style=_color(use))
            line.append(f" {percent(use.share):>7} ")
            line.append(text, style="dim")
        out.print(line, no_wrap=True, overflow="ellipsis")


def _color(use: ResourceUse) -> str:
    if use.key == "time_limit" or use.share is None:
        return ""
    return "green" if use.share >= _WELL else "red" if use.share < _POORLY else "yellow"


def _gpus(out: Console, summary: JobSummary) -> None:
    shown = summary.gpus[:_MOST_GPUS]
    names = [printable(gpu.name) for gpu in shown]
    # The first of these columns are left out on a narrow terminal.
    columns = {"memory": [_memory(gpu) for gpu in shown], "idle": [_idle(gpu) for gpu in shown],
               "use": [_utilization(gpu) for gpu in shown]}  # fmt: skip
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    label = max(3, *map(cell_len, names))
    for name in ("memory", "idle"):
        if out.width - label - sum(width + 2 for width in widths.values()) >= 40:
            break
        widths.pop(name)
    width = max(_LEAST_BAR, out.width - label - 2 - sum(each + 2 for each in widths.values()))
    width = min(width, max(len(gpu.activity_pct) for gpu in shown))
    step = span(summary.slot_s * max(len(gpu.activity_pct) for gpu in shown) / width)
    title = f"activity, {step} a column"
    heads = "".join(f"  {name:>{each}}" for name, each in widths.items())
    out.print(Text(f"{'GPU':<{label}}  {title[:width]:<{width}}{heads}", style="bold"), no_wrap=True)
    for position, (name, gpu) in enumerate(zip(names, shown, strict=True)):
        line = Text(name + " " * (label - cell_len(name) + 2))
        line.append(blocks(gpu.activity_pct, 100.0, width).ljust(width), style="dim" if gpu.measured_s <= 0 else "")
        line.append("".join(f"  {columns[column][position]:>{each}}" for column, each in widths.items()))
        out.print(line, no_wrap=True, overflow="ellipsis")
    if len(summary.gpus) > len(shown):
        _say(out, f"{len(summary.gpus) - len(shown)} more GPUs: --json, --html", style="dim")
    _say(out, f"{BLOCKS[0]} is 0 %, {BLOCKS[-1]} is 100 %, {UNKNOWN} is not measured", style="dim")


def _utilization(gpu: GpuUse) -> str:
    return "unknown" if gpu.utilization_pct is None else percent(gpu.utilization_pct / 100)


def _idle(gpu: GpuUse) -> str:
    return "unknown" if gpu.measured_s <= 0 else span(gpu.idle_s)


def _memory(gpu: GpuUse) -> str:
    if gpu.memory_peak_gib is None or gpu.shared:
        return "unknown"
    total = "" if gpu.memory_total_gib is None else f"/{figure(gpu.memory_total_gib)}"
    return f"{figure(gpu.memory_peak_gib)}{total} GiB"


_SHOWN_WINDOWS = 5


def _windows(out: Console, summary: JobSummary) -> None:
    shown = summary.idle_windows[:_SHOWN_WINDOWS]
    out.print(Text("Longest idle windows", style="bold"))
    longest = max(len(span(window.length_s)) for window in shown)
    for window in shown:
        times = f"{clock(window.start)} to {clock(window.end)}"
        line = f"{span(window.length_s):>{longest}}  {times}  {job_text.idle_gpus(window, summary)}"
        _say(out, line, indent=longest + 2)


def _suspensions(out: Console, summary: JobSummary) -> None:
    out.print(Text("Suspensions", style="bold"))
    for suspension in summary.suspensions:
        asleep = "" if suspension.asleep_s is None else f", {span(suspension.asleep_s)} asleep"
        freed = "" if not suspension.gpu_hours else f", {figure(suspension.gpu_hours)} GPU-hours freed"
        to = f" to {suspension.restored_node}" if suspension.restored_node else ""
        failure = f": {suspension.failure}" if suspension.failure else ""
        _say(
            out,
            f"{clock(suspension.began)}  {suspension.outcome}{asleep}{freed}; {suspension.node or '?'}{to}{failure}",
            indent=2,
        )
