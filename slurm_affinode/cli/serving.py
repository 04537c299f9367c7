"""``slurm-affinode serving``: model servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import click

from slurm_affinode.analysis.serving.crash_log import MEMORIES
from slurm_affinode.analysis.serving.triage import CrashTriage
from slurm_affinode.base import process
from slurm_affinode.base.text import printable, size
from slurm_affinode.cli.command import LazyGroup, command
from slurm_affinode.cli.options import clock, json_option, print_json, print_table, progress, warn
from slurm_affinode.pipeline import triage as pipeline

_COMMANDS = {
    "triage": ("slurm_affinode.cli.serving:triage", "Find out why a job failed, from its logs and accounting"),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def serving() -> None:
    """Diagnose model servers: inference engines in Slurm jobs."""


_TRIAGE_EPILOG = """\b
Examples:
  slurm-affinode serving triage 4711
  slurm-affinode serving triage slurm-4711.out /var/log/slurm/slurmd.log.gz
  dmesg | slurm-affinode serving triage 4711 - --json

\b
Exit status: 0 a cause was found, 1 none was found, 2 invalid input, 3 accounting does not respond.
"""


@command(epilog=_TRIAGE_EPILOG)
@click.argument("targets", nargs=-1, required=True, metavar="JOBID|LOG...")
@click.option("--all", "all_lines", is_flag=True, help="Show all failures in the logs, not only the first ones")
@json_option
def triage(*, targets: tuple[str, ...], all_lines: bool, as_json: bool) -> int:
    """Find out which memory ran out, or what else ended a job.

    Reads the job's output files and accounting (sacct), and the LOGs given: output of jobs, slurmd's log, the kernel's
    log; compressed or not. Recognizes messages of PyTorch, CUDA, JAX, NCCL, vLLM, SGLang, llama.cpp, Python, the kernel
    and Slurm, and says how much memory was requested and free, who held it, and what to change. - is standard input;
    a log whose name is a number is written as ./123.
    """
    with progress("log", total=None, quiet=as_json, of_bytes=True) as advance:
        found = pipeline.examine(targets, run=process.run, advance=advance)
    for problem in found.problems:
        warn(f"slurm-affinode: {problem}")
    result = found.result
    if as_json:
        print_json({**result.as_json(), "problems": list(found.problems)})
    else:
        _show(result, all_lines=all_lines)
    return 1 if result.kind is None else 0


def _show(result: CrashTriage, *, all_lines: bool) -> None:
    what = "no cause" if result.kind is None else result.kind
    click.echo(f"{what}: {printable(result.summary)}")
    rows: list[tuple[str, str]] = []
    if result.kind is not None:
        ran_out = "none" if result.memory is None else MEMORIES[result.memory]
        rows.append(("memory that ran out", ran_out))
        if result.memory is not None:
            rows += [
                ("requested", _size(result.requested)),
                ("free", _size(result.free)),
                ("in total", _size(result.total)),
            ]
        if result.cause is not None and result.cause.max_length is not None:
            rows.append(("longest request that fits", f"{result.cause.max_length:,} tokens"))
        rows += [(f"held by {name}", size(round(held))) for name, held in result.holders]
        rows.append(("confidence", f"{result.confidence:.0%}"))
    job = result.job
    if job is not None:
        end = "" if job.end is None else f", ended {clock(job.end)}"
        signal = f", signal {job.exit_signal}" if job.exit_signal else ""
        code = "" if job.exit_code is None else f", exit status {job.exit_code}{signal}"
        rows.append((f"job {job.job_id}", f"{job.state or 'unknown'}{code}{end}"))
        rss = "unknown" if job.max_rss_bytes is None else size(job.max_rss_bytes)
        limit = "unknown" if job.memory_bytes is None else size(job.memory_bytes)
        rows.append(("MaxRSS of allocated memory", f"{rss} of {limit}"))
        rows += [(f"step {step}", state) for step, state in job.steps]
    if result.startup.kv_tokens is not None:
        rows.append(("KV cache at startup", f"{result.startup.kv_tokens:,} tokens"))
    for last in result.metrics:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in last.figures)
        rows.append((f"{last.source} at {clock(last.time, seconds=True)}", figures))
    if rows:
        click.echo()
        print_table(("figure", "value"), rows)
    shown = result.failures if all_lines else result.failures[:_SHOWN]
    if shown:
        click.echo()
        cause = result.cause
        names = _short_names([name for name, _ in result.logs])
        lines = [
            (
                "cause" if one is cause else "",
                f"{names[one.log]}:{one.line}",
                one.kind,
                one.text if one.times == 1 else f"{one.text} ({one.times} times)",
            )
            for one in shown
        ]
        print_table(("", "log", "failure", "message"), lines)
        if len(shown) < len(result.failures):
            click.echo(f"{len(result.failures) - len(shown)} more: --all")
    for title, texts in (("Advice", result.advice), ("Doubts", result.doubts)):
        if texts:
            click.echo(f"\n{title}:")
            for text in texts:
                click.echo(f"  - {printable(text)}")


_SHOWN = 12
"""Failures shown without --all."""


def _short_names(logs: Sequence[str]) -> dict[str, str]:
    """Return log -> its file name, or its path where two logs have the same name."""
    names = [PurePath(log).name or log for log in logs]
    return {log: name if names.count(name) == 1 else log for log, name in zip(logs, names, strict=True)}


def _size(value: float | None) -> str:
    return "unknown" if value is None else size(round(value))
