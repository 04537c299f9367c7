"""The page of an exported data set: the page of its jobs, with idle windows and the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, lines
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import job_page, trace_page
from slurm_affinode.traces.job_figures import JobLogSummary
from slurm_affinode.traces.site_trace import PRIORITY_CLASSES, IdleFigures, PriorityClass, SiteTrace
from slurm_affinode.traces.trace_page import TraceFinding, card

_POINTS = 300
RECIPES = (
    ("Idle", "All GPUs of the job were idle. A job without samples of all its GPUs is unknown, never idle."),
    (
        "Idle while waited for",
        "At each time of the queue the smaller of the GPUs that are idle in jobs and those that waiting jobs request.",
    ),
)


def html(trace: SiteTrace, jobs: JobLogSummary, idle: IdleFigures, classes: Mapping[str, PriorityClass] | None) -> str:
    """Return the self-contained page. ``classes``: by priority; ``None``: the data set has none."""
    kind = job_page.TRACES["site"]
    page = job_page.context(kind, jobs, ())
    measured = idle.idle_share is not None
    cards = (
        card(
            "Idle GPU-hours",
            fmt.percent(idle.idle_share, digits=1),
            "of those with samples",
            is_known=measured,
            kind="idle" if measured else "",
        ),
        card("Idle while waited for", quantity(idle.idle_while_waiting_gpu_hours, "GPU-h", 0), is_known=measured),
    )
    completed = replace(
        page,
        cards=(*page.cards[:2], *cards, *page.cards[2:]),
        findings=(
            _idle(idle),
            _queue(trace, idle),
            *(() if classes is None else (_priorities(classes),)),
            *page.findings,
        ),
        recipes=(*RECIPES, *page.recipes),
        absent=(*page.absent, *(("Priorities of the jobs.",) if classes is None else ())),
    )
    return trace_page.html(kind.title, completed)


def _idle(idle: IdleFigures) -> TraceFinding:
    text = (
        f"GPUs are idle for {fmt.percent(idle.idle_share, digits=1)} of the "
        f"{quantity(idle.measured_gpu_hours, 'GPU-hours', 0)} of jobs with samples: "
        f"{quantity(idle.idle_gpu_hours, 'GPU-hours', 0)}. "
        f"{quantity(idle.unknown_gpu_hours, 'GPU-hours', 0)} are unknown.",
    )
    return TraceFinding("idle", "Idle windows", text)


def _queue(trace: SiteTrace, idle: IdleFigures) -> TraceFinding:
    text = (
        f"Jobs wait for GPUs during {fmt.percent(idle.waiting_time_share, digits=1)} of the time, for "
        f"{fmt.number(idle.waiting_gpus_mean, digits=1)} GPUs on average. "
        f"{quantity(idle.idle_while_waiting_gpu_hours, 'GPU-hours', 0)} are idle in jobs while as many GPUs are "
        "waited for.",
    )
    means = over_time(trace)
    days = means["day"].to_list()
    series = [
        Series("waited for", means["waiting_gpus"].to_list(), "2"),
        Series("idle in jobs", means["idle_gpus"].to_list(), "3"),
        Series("in jobs", means["running_gpus"].to_list(), "1"),
    ]
    chart = lines(
        Words("queue", "GPUs in jobs, idle in jobs, and waited for", "Means over equal parts of the time."),
        days,
        series,
        unit="GPUs",
        x_label="Days since the first submission",
    )
    return TraceFinding("queue", "Queue", text, (chart,))


def _priorities(classes: Mapping[str, PriorityClass]) -> TraceFinding:
    text = (
        "Classes are quarters of the jobs by the priority that accounting has recorded last; "
        f"{PRIORITY_CLASSES} is the highest. Jobs with equal priorities are in the same class."
    )
    if "unknown" in classes:
        text += " The class of rare requests, and of jobs without a recorded priority, is unknown."
    head = ("Class", "Jobs", "of all", "GPU-hours", "of all", "Wait, mean", "median", "99 % at most")
    rows = {
        name: (
            fmt.count(figures.jobs), fmt.percent(figures.job_share, digits=1), fmt.count(figures.gpu_hours),
            fmt.percent(figures.hours_share, digits=1), fmt.duration(figures.wait_s.mean),
            fmt.duration(figures.wait_s.median), fmt.duration(figures.wait_s.p99),
        )
        for name, figures in classes.items()
    }  # fmt: skip
    table = trace_page.numbers("priority-table", "Jobs by priority class", head, rows)
    return TraceFinding("priorities", "Priorities", (text,), tables=(table,))


def over_time(trace: SiteTrace) -> pl.DataFrame:
    """Return ``day`` since the first submission, and the columns of the queue as means over equal parts of the time.

    Single times would miss short queues.
    """
    rows_per_part = max(1, -(-trace.queue.height // _POINTS))
    parts = trace.queue.with_row_index("row").with_columns(pl.col("row") // rows_per_part)
    means = parts.group_by("row").mean().sort("row")
    return means.with_columns(((pl.col("at_s") - trace.queue["at_s"].min()) / 86_400).alias("day"))
