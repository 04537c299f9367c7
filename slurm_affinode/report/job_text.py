"""Texts about one job that its page and the terminal share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from slurm_affinode.base.text import counted, figure, span
from slurm_affinode.model.job_summary import REASONS, Advice, IdleWindow, JobSummary, ResourceUse

_MOST_NAMES = 4
_ORIGINS = {
    "live": ("live: accounting and stored GPU metrics were not read",),
    "accounting": ("from Slurm's accounting alone: stored GPU metrics were not read",),
}


def amount(use: ResourceUse) -> str:
    """Return the amounts of a use, such as ``6.1 of 80 GiB``, or why they are unknown."""
    if use.share is None:
        return f"unknown: {REASONS.get(use.reason or 'not-recorded', 'for a reason of a later release')}"
    if use.unit == "s":
        text = f"{span(use.used or 0.0)} of {span(use.total or 0.0)}"
    elif use.unit == "%":
        text = "mean"
    else:
        text = f"{figure(use.used or 0.0)} of {figure(use.total or 0.0)} {use.unit}"
    return f"{use.note} {text}" if use.note == "at most" else f"{text}, {use.note}" if use.note else text


def advice(suggestion: Advice) -> str:
    """Return an advice with the GPU-hours that following it would have saved."""
    return (
        suggestion.text
        if not suggestion.gpu_hours
        else f"{suggestion.text} It would have saved {figure(suggestion.gpu_hours)} GPU-hours."
    )


def allocation(summary: JobSummary) -> str:
    """Return the allocated cores, memory and GPUs."""
    cores = "cores not known" if summary.cpus is None else counted(summary.cpus, "core")
    memory = "memory not known" if summary.memory_gib is None else f"{figure(summary.memory_gib)} GiB"
    if summary.gpu_count is None:
        gpus = f"{counted(len(summary.gpus), 'GPU')} by the metrics" if summary.gpus else "GPUs not counted"
    else:
        gpus = counted(summary.gpu_count, "GPU") if summary.gpu_count else "no GPUs"
    models = f" ({', '.join(summary.gpu_models)})" if summary.gpu_models else ""
    return f"{cores}, {memory}, {gpus}{models}"


def nodes(names: Sequence[str]) -> str:
    """Return the number of nodes and the first names."""
    if not names:
        return "nodes not known"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{counted(len(names), 'node')}: {', '.join(names[:_MOST_NAMES])}{more}"


def idle_gpus(window: IdleWindow, summary: JobSummary) -> str:
    """Return which GPUs of the job were idle in a window: ``all GPUs``, ``a100-02:1, a100-02:2``."""
    count = len(summary.gpus)
    if len(window.gpus) == count and count > 1:
        return "all GPUs"
    if len(window.gpus) > _MOST_NAMES:
        return f"{len(window.gpus)} of {count} GPUs"
    return ", ".join(window.gpus)


def attempts(summary: JobSummary) -> str:
    """Return that the ID has several attempts; empty if it has one."""
    if summary.attempts == 1:
        return ""
    return f"Attempt {summary.attempt} of {summary.attempts} with this ID; --attempt shows the others."


def admin_comment(summary: JobSummary) -> str:
    """Return the agent's line about the GPUs; empty if accounting has none."""
    return "" if summary.admin_comment is None else f"AdminComment, by the agent: {summary.admin_comment}"


def origin(summary: JobSummary, clock: Callable[[datetime], str]) -> tuple[str, ...]:
    """Return a note on a summary that is not from the database. ``clock``: formats a time."""
    if summary.source == "published":
        running = "; the job was running then" if summary.job.end is None else ""
        return (f"summary of {clock(summary.generated)}, by the nightly run{running}",)
    return _ORIGINS.get(summary.source, ())
