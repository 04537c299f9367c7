"""The page of the spot GPU trace: the GPUs there are, and the demand for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from markupsafe import Markup

from slurm_affinode.base.text import counted
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, histogram, lines
from slurm_affinode.report.context import Card, Table
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import trace_page
from slurm_affinode.traces.claims import Claim
from slurm_affinode.traces.spot2026 import JOBS_FILE, ModelDemand, SpotResult, SpotSummary
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

_share = partial(fmt.percent, digits=1)
TITLE = "Spot GPUs: demand and capacity"
NO_JOBS = f"{JOBS_FILE} is not beside the list of nodes: the demand is unknown"
RECIPES = (
    (
        "Demand",
        "GPUs of a worker x workers, from the submission of a job for its duration, as if it had started at once.",
    ),
    ("Mean demand", "Mean over the time between the first and the last submission."),
    ("Capacity", "GPUs of all nodes of the list. The trace does not say whether nodes were added or out of service."),
    (
        "Above capacity",
        "A demand above 100 % cannot be served: jobs waited, were preempted, or ran shorter than recorded. The trace "
        "has neither waits nor preemptions, so it cannot say which.",
    ),
)


def html(result: SpotResult, claims: Sequence[Claim]) -> str:
    """Return the self-contained page."""
    return trace_page.html(TITLE, context(result, claims))


def context(result: SpotResult, claims: Sequence[Claim]) -> TracePage:
    """Return the context of the template, with all texts formatted."""
    s = result.summary
    return TracePage(
        answer=_answer(s),
        lead=_lead(s),
        cards=_cards(s),
        findings=(*_findings(result), *trace_page.claims_finding(claims)),
        verdict_counts=trace_page.verdict_counts(claims),
        notes=notes(s),
        recipes=(*RECIPES, *trace_page.recipes(claims)),
        sources=trace_page.sources(claims),
        absent=("GPU utilization.", "Waits, preemptions and failures.", "On which node a job ran."),
    )


def notes(s: SpotSummary) -> tuple[str, ...]:
    """Return the sentences about missing data."""
    if s.jobs is None:
        return (NO_JOBS,)
    if s.jobs_without_nodes:
        return (f"{counted(s.jobs_without_nodes, 'job')} for a GPU model of which the list has no node",)
    return ()


def _answer(s: SpotSummary) -> str:
    if s.jobs is None:
        return f"The cluster has {counted(s.gpus, 'GPU')} of {s.gpu_models} models. The demand is not in the data."
    over = [name for name, model in s.models.items() if (model.demand_share or 0) > 1]
    mean = f"On average, jobs request {_share(s.total.demand_share)} of the {counted(s.gpus, 'GPU')}"
    return (
        f"{mean}; more than there are of {', '.join(over)}."
        if over
        else f"{mean}, and of no model more than there are."
    )


def _lead(s: SpotSummary) -> str:
    trace = "Alibaba's trace of jobs with high priority and of spot jobs, published in 2026."
    nodes = f"{counted(s.nodes, 'node')} with {counted(s.gpus, 'GPU')}"
    if s.jobs is None:
        return f"{trace} {nodes}."
    return f"{trace} {counted(s.jobs, 'job')} submitted within {fmt.duration(s.span_s)}; {nodes}."


def _cards(s: SpotSummary) -> tuple[Card, ...]:
    jobs_known = s.jobs is not None
    return (
        card("GPUs", fmt.count(s.gpus), f"on {counted(s.nodes, 'node')}", is_known=True),
        card("Jobs", fmt.count(s.jobs), f"{fmt.count(s.spot_jobs)} spot", is_known=jobs_known),
        card(
            "GPU-hours requested", fmt.count(s.gpu_hours), f"{_share(s.spot_gpu_hours_share)} spot", is_known=jobs_known
        ),
        card("Mean demand", _share(s.total.demand_share), "of the GPUs", is_known=jobs_known),
        card("High priority alone", _share(s.total.high_priority_share), "of the GPUs", is_known=jobs_known),
    )


def _findings(result: SpotResult) -> list[TraceFinding]:
    s = result.summary
    findings = [
        TraceFinding(
            "models",
            "GPUs and demand by model",
            _sentences(s),
            (_demand_chart(s),) if s.jobs is not None else (),
            tables=(_models(s),),
        )
    ]
    if s.jobs is not None:
        findings.append(TraceFinding("time", "Demand over time", (), (_over_time(result),)))
    return findings


def _sentences(s: SpotSummary) -> tuple[str, ...]:
    over = [
        f"{name}: {_share(model.demand_share)} on average, more than the GPUs for "
        f"{_share(model.above_capacity_time_share)} of the time."
        for name, model in s.models.items()
        if (model.demand_share or 0) > 1
    ]
    return tuple(over)


def _models(s: SpotSummary) -> Table:
    head = ("Model", "Nodes", "GPUs", "Jobs", "Mean demand", "of GPUs", "High priority", "Peak demand", "Time above")
    shown = len(head) if s.jobs is not None else 3
    rows = {name: _cells(model)[: shown - 1] for name, model in {**s.models, "All": s.total}.items()}
    return trace_page.numbers("models-table", "GPUs, and GPUs requested", head[:shown], rows)


def _cells(m: ModelDemand) -> tuple[str, ...]:
    return (
        fmt.count(m.nodes),
        fmt.count(m.gpus),
        fmt.count(m.jobs),
        fmt.count(m.demand_mean_gpus),
        _share(m.demand_share),
        _share(m.high_priority_share),
        fmt.count(m.demand_peak_gpus),
        _share(m.above_capacity_time_share),
    )


def _demand_chart(s: SpotSummary) -> Markup:
    all_jobs = [None if m.demand_share is None else 100 * m.demand_share for m in s.models.values()]
    high = [None if m.high_priority_share is None else 100 * m.high_priority_share for m in s.models.values()]
    text = "; ".join(f"{name}: {_share(m.demand_share)}" for name, m in s.models.items())
    return histogram(
        Words("demand", "Mean demand of the GPUs of each model", f"{text}."),
        list(s.models),
        [Series("All jobs", all_jobs, "1"), Series("High priority", high, "2")],
        unit="%",
        x_label="GPU model",
        value=lambda value: quantity(value, "%", 1),
    )


def _over_time(result: SpotResult) -> Markup:
    frame = result.over_time
    series = [
        Series(name, [100 * value for value in frame[name].to_list()], f"{number % 6 + 1}")
        for number, name in enumerate(result.summary.models)
    ]
    words = Words("demand-over-time", "Demand by GPU model", "100 % are the GPUs of the model.")
    return lines(words, frame["day"].to_list(), series, unit="%", x_label="Days since the first submission")
