"""The page of the ASI trace: executions by type of job, requested and idle GPU-hours, coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from slurm_affinode.base.text import counted
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, histogram
from slurm_affinode.report.context import Card, Table
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import trace_page
from slurm_affinode.traces.asi2026 import COMPLETE_FROM_DAY, AsiSummary, ExecutionGroup, PodHours
from slurm_affinode.traces.claims import Claim
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

_share = partial(fmt.percent, digits=1)
TITLE = "ASI: GPUs of training and inference"
RECIPES = (
    (
        "Requested GPU-hours",
        "gpu_request of each row of a pod and hour; of an execution, gpu_request x duration_hours.",
    ),
    (
        "Idle",
        "Hours with an average utilization of exactly 0. An hour with a larger average may have been idle in part: a "
        "lower bound. Hours without a utilization are unknown.",
    ),
    (
        "Covered",
        "Pods of a day that the summary of executions has, of all pods of the day with a GPU; mean over days.",
    ),
)


def html(summary: AsiSummary, claims: Sequence[Claim], missing: Sequence[str]) -> str:
    """Return the self-contained page. ``missing``: the missing tables."""
    return trace_page.html(TITLE, context(summary, claims, missing))


def context(s: AsiSummary, claims: Sequence[Claim], missing: Sequence[str]) -> TracePage:
    """Return the context of the template, with all texts formatted."""
    return TracePage(
        answer=_answer(s),
        lead="Alibaba's trace of pods with GPUs, published in 2026: one row per pod and hour, days without dates.",
        cards=_cards(s),
        findings=(*_findings(s), *trace_page.claims_finding(claims)),
        verdict_counts=trace_page.verdict_counts(claims),
        notes=notes(missing),
        recipes=(*RECIPES, *trace_page.recipes(claims)),
        sources=trace_page.sources(claims),
        absent=("Submission times.", "Users.", f"Most executions before day {COMPLETE_FROM_DAY}."),
    )


def notes(missing: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences about missing tables."""
    return tuple(f"{name} is missing: the figures that need it are unknown" for name in missing)


def _answer(s: AsiSummary) -> str:
    if s.pods is not None and s.pods.idle_share is not None:
        hours = quantity(s.pods.requested_gpu_hours - s.pods.unknown_gpu_hours, "requested GPU-hours", 0)
        return f"At least {_share(s.pods.idle_share)} of the {hours} with a known utilization are idle."
    if s.total is not None:
        return f"{counted(s.total.executions, 'execution')} request {quantity(s.total.gpu_hours, 'GPU-hours', 0)}."
    return "Neither executions nor hours of pods are in the data."


def _cards(s: AsiSummary) -> tuple[Card, ...]:
    delay = s.total.schedule_delay_s if s.total else None
    return (
        card("Executions", fmt.count(s.executions), is_known=s.executions is not None),
        card(
            "GPU-hours of pods",
            fmt.count(s.pods.requested_gpu_hours if s.pods else None),
            "requested",
            is_known=s.pods is not None,
        ),
        card(
            "Idle, at least",
            _share(s.pods.idle_share if s.pods else None),
            "of those with a utilization",
            is_known=s.pods is not None and s.pods.idle_share is not None,
        ),
        card("Scheduling delay, median", fmt.duration(delay.median if delay else None), is_known=delay is not None),
        card("GPUs", fmt.count(s.capacity_gpus), "mean over the hours", is_known=s.capacity_gpus is not None),
    )


def _findings(s: AsiSummary) -> list[TraceFinding]:
    findings = []
    if s.pods_by_type is not None and s.pods is not None:
        labels = [name.replace("_", " ") for name in s.pods_by_type]
        shares = [None if part.idle_share is None else 100 * part.idle_share for part in s.pods_by_type.values()]
        text = "; ".join(
            f"{name}: {_share(p.idle_share)}" for name, p in zip(labels, s.pods_by_type.values(), strict=True)
        )
        chart = histogram(
            Words("idle", "Idle GPU-hours by type of job, at least", f"{text}."),
            labels,
            [Series("Idle", shares, "1")],
            unit="%",
            x_label="Type of job",
            value=lambda value: quantity(value, "%", 1),
        )
        table = _pods({**s.pods_by_type, "all": s.pods})
        findings.append(TraceFinding("pods", "Requested and idle GPU-hours", _coverage(s), (chart,), tables=(table,)))
    if s.job_types is not None and s.total is not None and s.priorities is not None:
        tables = (
            _executions("types", "Executions by type of job", {**s.job_types, "all": s.total}),
            _executions("priorities", "Executions by priority", s.priorities),
        )
        findings.append(TraceFinding("executions", "Executions", (), tables=tables))
    if s.capacity is not None:
        rows = {name: (fmt.count(gpus),) for name, gpus in s.capacity.items()}
        table = trace_page.numbers("capacity", "GPUs by model, mean over the hours", ("Model", "GPUs"), rows)
        findings.append(TraceFinding("gpus", "GPUs of the servers", (), tables=(table,)))
    return findings


def _coverage(s: AsiSummary) -> tuple[str, ...]:
    states = counted(s.days_with_states or 0, "day")
    return (
        f"{counted(s.days or 0, 'day')} with pods; most pods have a state on {states}. The summary of executions has "
        f"{_share(s.covered_before)} of the pods of a day before day {COMPLETE_FROM_DAY}, and {_share(s.covered_from)} "
        "from then on.",
    )


def _pods(rows: Mapping[str, PodHours]) -> Table:
    head = ("Type of job", "Requested GPU-h", "used", "idle, at least", "of known", "unknown")
    cells = {
        name.replace("_", " "): (
            fmt.count(p.requested_gpu_hours),
            fmt.count(p.used_gpu_hours),
            fmt.count(p.idle_gpu_hours),
            _share(p.idle_share),
            fmt.count(p.unknown_gpu_hours),
        )
        for name, p in rows.items()
    }
    return trace_page.numbers("pods-table", "GPU-hours of pods", head, cells)


def _executions(key: str, caption: str, rows: Mapping[str, ExecutionGroup]) -> Table:
    head = ("Group", "Executions", "GPU-hours", "of all", "Duration, median h", "Delay, median s", "Delay, p99 s")
    cells = {
        name.replace("_", " "): (
            fmt.count(g.executions),
            fmt.count(g.gpu_hours),
            _share(g.hours_share),
            fmt.number(g.duration_h.median if g.duration_h else None),
            fmt.number(g.schedule_delay_s.median if g.schedule_delay_s else None),
            fmt.number(g.schedule_delay_s.p99 if g.schedule_delay_s else None),
        )
        for name, g in rows.items()
    }
    return trace_page.numbers(f"{key}-table", caption, head, cells)
