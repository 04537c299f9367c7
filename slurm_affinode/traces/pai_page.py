"""The page of the PAI trace of 2020: planned against used GPUs, idle time, waits, and the GPUs of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from markupsafe import Markup

from slurm_affinode.base.text import counted
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, histogram
from slurm_affinode.report.context import Card, Table
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import trace_page
from slurm_affinode.traces.claims import Claim
from slurm_affinode.traces.job_page import spreads
from slurm_affinode.traces.pai2020 import PaiSummary
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

_share = partial(fmt.percent, digits=1)
TITLE = "PAI: planned and used GPUs"
RECIPES = (
    ("Planned GPU-hours", "plan_gpu / 100 of the task x its run time, for each sensor record of an instance."),
    ("Used GPU-hours", "gpu_wrk_util / 100, the average over the life of the instance, x the run time of its task."),
    (
        "Idle",
        "A record with an average of exactly 0 was at 0 at every moment. A record with a larger average may have been "
        "idle for most of its life: idle GPU-hours and idle memory are lower bounds.",
    ),
    (
        "Run time",
        "End minus start of the task. Tasks without both, which wait, run or were not recorded, are left out.",
    ),
    ("Wait", "First start of any task of the job minus its submission, of the jobs with a GPU."),
)


def html(summary: PaiSummary, claims: Sequence[Claim], missing: Sequence[str]) -> str:
    """Return the self-contained page. ``missing``: the missing tables."""
    return trace_page.html(TITLE, context(summary, claims, missing))


def context(s: PaiSummary, claims: Sequence[Claim], missing: Sequence[str]) -> TracePage:
    """Return the context of the template, with all texts formatted."""
    return TracePage(
        answer=_answer(s),
        lead=_lead(s),
        cards=_cards(s),
        findings=(*_findings(s), *trace_page.claims_finding(claims)),
        verdict_counts=trace_page.verdict_counts(claims),
        notes=notes(missing),
        recipes=(*RECIPES, *trace_page.recipes(claims)),
        sources=trace_page.sources(claims),
        absent=("GPU utilization over time: a record has one average.", "Time limits.", "The real dates."),
    )


def notes(missing: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences about missing tables."""
    return tuple(f"{name} is missing: the figures that need it are unknown" for name in missing)


def _answer(s: PaiSummary) -> str:
    if s.plan_use is None:
        gpus = "unknown" if s.capacity_gpus is None else fmt.count(s.capacity_gpus)
        return f"GPUs of the cluster: {gpus}. What tasks plan and use is not in the data."
    ratio = fmt.number(s.plan_use.over_request, digits=1)
    return (
        f"Tasks plan {ratio} times the GPUs that they use; at least {_share(s.plan_use.idle_share)} of the planned "
        "GPU-hours are at 0 % for the whole life of an instance."
    )


def _lead(s: PaiSummary) -> str:
    parts = []
    if s.jobs is not None:
        parts.append(f"{counted(s.jobs, 'job')}")
    if s.capacity_gpus is not None and s.machines is not None:
        parts.append(f"{counted(s.machines, 'machine')} with {counted(s.capacity_gpus, 'GPU')}")
    return f"Alibaba's PAI trace, July and August 2020 (NSDI 2022). {'; '.join(parts)}{'.' if parts else ''}"


def _cards(s: PaiSummary) -> tuple[Card, ...]:
    use = s.plan_use
    return (
        card("GPUs", fmt.count(s.capacity_gpus), is_known=s.capacity_gpus is not None),
        card(
            "Planned by used",
            f"{fmt.number(use.over_request, digits=1)}x" if use else fmt.UNKNOWN,
            "GPU-hours",
            is_known=use is not None,
        ),
        card(
            "Idle, at least",
            _share(use.idle_share if use else None),
            "of the planned GPU-hours",
            is_known=use is not None,
        ),
        card(
            "Idle memory, at least",
            _share(use.idle_memory_share if use else None),
            "of the memory-time",
            is_known=use is not None,
        ),
        card(
            "Mean utilization",
            quantity(s.util_mean_pct, "%", 1),
            f"median {quantity(s.util_median_pct, '%', 1)}",
            is_known=s.util_mean_pct is not None,
        ),
        card(
            "Wait, mean",
            fmt.duration(s.wait_s.mean if s.wait_s else None),
            f"median {fmt.duration(s.wait_s.median)}" if s.wait_s else "",
            is_known=s.wait_s is not None,
        ),
    )


def _findings(s: PaiSummary) -> list[TraceFinding]:
    findings = []
    if s.sensor_records is not None:
        text = (
            f"{counted(s.sensor_records, 'record')}: {_share(s.util_zero_share)} at exactly 0 %, "
            f"{_share(s.util_below_10_share)} below 10 %, {_share(s.util_from_50_share)} at 50 % or more.",
        )
        findings.append(
            TraceFinding("utilization", "Average utilization of instances", text, (_chart(s),), tables=(_buckets(s),))
        )
    if s.plan_use is not None:
        use = s.plan_use
        text = (
            f"{counted(use.records, 'record')} have a task with a plan and a run time: "
            f"{quantity(use.planned_gpu_hours, 'GPU-hours', 0)} planned, {fmt.count(use.used_gpu_hours)} used. "
            f"{_share(use.below_plan_share)} of them use less than planned.",
        )
        findings.append(TraceFinding("plan", "Planned and used GPUs", text))
    if s.tasks is not None:
        rows = {"Wait, s": s.wait_s, "Run time, s": s.run_s, "GPUs": s.size}
        text = (
            f"{counted(s.gpu_jobs or 0, 'job')} plan a GPU. {fmt.count(s.tasks_without_times)} of "
            f"{counted(s.gpu_tasks or 0, 'GPU task')} have no start or no end.",
        )
        findings.append(TraceFinding("jobs", "Jobs with GPUs", text, tables=(spreads("jobs-table", "Per job", rows),)))
    if s.capacity is not None:
        whole = s.capacity_gpus or 1
        rows_ = {name: (fmt.count(gpus), _share(gpus / whole)) for name, gpus in s.capacity.items()}
        table = trace_page.numbers("capacity", "GPUs of the cluster", ("Type", "GPUs", "of all"), rows_)
        findings.append(TraceFinding("gpus", "GPUs of the cluster", (), tables=(table,)))
    return findings


def _chart(s: PaiSummary) -> Markup:
    labels = [bucket.label.replace("-", "–") for bucket in s.buckets]
    series = [Series("Records", [100 * bucket.share for bucket in s.buckets], "1")]
    whole = sum(bucket.memory_gb_h or 0.0 for bucket in s.buckets)
    if whole:
        memory = [None if b.memory_gb_h is None else 100 * b.memory_gb_h / whole for b in s.buckets]
        series.append(Series("GPU memory-time", memory, "2"))
    text = "; ".join(f"{bucket.label}: {_share(bucket.share)}" for bucket in s.buckets)
    return histogram(
        Words("buckets", "Sensor records by average utilization", f"{text}."),
        labels,
        series,
        unit="%",
        x_label="Average utilization",
        value=lambda value: quantity(value, "%", 1),
    )


def _buckets(s: PaiSummary) -> Table:
    rows = {b.label: (fmt.count(b.records), _share(b.share), fmt.count(b.memory_gb_h)) for b in s.buckets}
    head = ("Average utilization", "Records", "of all", "GPU memory, GB-hours")
    return trace_page.numbers("buckets-table", "Sensor records", head, rows)
