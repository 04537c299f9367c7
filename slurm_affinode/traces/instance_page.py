"""The page of a trace of instances: states, waits, lives, requests, GPUs over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from slurm_affinode.base.text import counted
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, lines
from slurm_affinode.report.context import Card, Table
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import trace_page
from slurm_affinode.traces.claims import Claim
from slurm_affinode.traces.instances import InstanceGroup, InstanceResult, InstanceSummary
from slurm_affinode.traces.job_page import bins_chart, spreads
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

_share = partial(fmt.percent, digits=1)


@dataclass(frozen=True, slots=True)
class InstanceTrace:
    """The page's names of a trace and its instances."""

    title: str
    lead: str
    instance: str
    """In the singular."""
    groups: str
    """Heading of the groups."""
    names: dict[str, str]
    """Group -> its name on the page."""
    absent: tuple[str, ...]


TRACES = {
    "dlrm2025": InstanceTrace(
        "DLRM 2025: disaggregated serving of recommendation models",
        "Alibaba's trace of inference services whose instances run on CPU nodes and on nodes with GPUs.",
        "instance", "Role", {"CN": "CPU nodes (CN)", "HN": "GPU nodes (HN)"},
        ("CPU and GPU utilization: requests alone are recorded.", "Nodes, and on which one an instance ran.",
         "Waits of the instances that were created before the trace."),
    ),
    "pai2023": InstanceTrace(
        "PAI 2023: pods that share GPUs",
        "Alibaba's trace of pods that request whole GPUs or thousandths of one.",
        "pod", "Request",
        {"no-gpu": "No GPU", "part-of-a-gpu": "Part of a GPU", "one-gpu": "One GPU", "several-gpus": "Several GPUs"},
        ("GPU utilization: requests alone are recorded.", "On which node a pod ran.", "Users.",
         "When the pods that were Running ended: a pod counts until it was last seen, so the GPUs at once are a lower "
         "bound."),
    ),
}  # fmt: skip
RECIPES = (
    ("Wait", "Scheduling minus creation, of the instances that have both times in the trace."),
    ("Life", "End minus scheduling, of the instances whose beginning and end are both in the trace."),
    (
        "Cut off",
        "An instance that began before the trace, waits, or continues has a wait or life longer than known: it is "
        "counted, and left out of the distributions. These therefore favor short lives. It is never taken as 0.",
    ),
    ("GPUs at once", "Requested GPUs of the scheduled instances, each until its end or until it was last seen."),
    ("Percentiles", "Linear interpolation between neighbors, each instance counted once."),
)


def html(trace: InstanceTrace, result: InstanceResult, claims: Sequence[Claim]) -> str:
    """Return the self-contained page."""
    return trace_page.html(trace.title, context(trace, result, claims))


def context(trace: InstanceTrace, result: InstanceResult, claims: Sequence[Claim]) -> TracePage:
    """Return the context of the template, with all texts formatted."""
    s = result.summary
    absent = () if s.capacity_gpus is not None else ("The GPUs of the cluster: no share of a capacity is given.",)
    return TracePage(
        answer=_answer(trace, s), lead=_lead(trace, s), cards=_cards(trace, s),
        findings=(*_findings(trace, result), *trace_page.claims_finding(claims)),
        verdict_counts=trace_page.verdict_counts(claims), notes=(), recipes=(*RECIPES, *trace_page.recipes(claims)),
        sources=trace_page.sources(claims), absent=(*absent, *trace.absent),
    )  # fmt: skip


def _answer(trace: InstanceTrace, s: InstanceSummary) -> str:
    wait = s.total.wait_s
    if wait is None:
        return f"No {trace.instance} has both a time of creation and of scheduling."
    return (
        f"Half of the {trace.instance}s wait at most {fmt.duration(wait.median)} until they are scheduled, 99 % at "
        f"most {fmt.duration(wait.p99)}; the mean is {fmt.duration(wait.mean)}."
    )


def _lead(trace: InstanceTrace, s: InstanceSummary) -> str:
    services = "" if s.services is None else f" of {counted(s.services, 'service')}"
    gpus = "" if s.capacity_gpus is None else f" The cluster has {counted(s.capacity_gpus, 'GPU')}."
    return f"{trace.lead} {counted(s.total.instances, trace.instance)}{services} within {fmt.duration(s.span_s)}.{gpus}"


def _cards(trace: InstanceTrace, s: InstanceSummary) -> tuple[Card, ...]:
    t = s.total
    bound = "at least" if s.peak_is_lower_bound else "at most"
    share = "" if s.peak_share is None else f", {_share(s.peak_share)} of the cluster"
    return (
        card(f"{trace.instance.capitalize()}s", fmt.count(t.instances),
             f"{fmt.count(t.created_inside)} created within the trace", is_known=True),
        card("Wait, mean", fmt.duration(t.wait_s.mean if t.wait_s else None),
             f"of {fmt.count(t.waits_known)}", is_known=t.wait_s is not None),
        card("Life, median", fmt.duration(t.life_s.median if t.life_s else None),
             f"of {fmt.count(t.lives_known)} known", is_known=t.life_s is not None),
        card("Cut off", fmt.count(t.began_before + t.still_waiting + t.still_running),
             "times unknown", is_known=True,
             more="Began before the trace, waiting, or still running; one that did two of these counts twice."),
        card("GPUs at once", fmt.number(s.peak_gpus), f"{bound}{share}", is_known=True,
             more="Largest sum of the GPUs requested by scheduled instances at one time."),
    )  # fmt: skip


def _findings(trace: InstanceTrace, result: InstanceResult) -> list[TraceFinding]:
    s = result.summary
    t = s.total
    title = trace.instance.capitalize()
    waits = (
        f"Known waits: {fmt.count(t.waits_known)}. {title}s created before the trace: {fmt.count(t.began_before)}; "
        f"never seen scheduled: {fmt.count(t.still_waiting)}.",
    )
    lives = (
        f"Lives known from beginning to end: {fmt.count(t.lives_known)}. {title}s that were still running when they "
        f"were last seen: {fmt.count(t.still_running)}.",
    )
    return [
        TraceFinding(
            "groups", f"{title}s by {trace.groups.lower()}", (), tables=(_groups(trace, s), _states(trace, s))
        ),
        TraceFinding(
            "wait", "Waits", waits, (bins_chart("waits", f"{title}s by wait", s.wait_bins, "GPU", f"{title}s"),),
            tables=(spreads("wait-table", "Wait, s", {_name(trace, k): g.wait_s for k, g in s.groups.items()}),),
        ),
        TraceFinding(
            "life", "Lives", lives, (bins_chart("lives", f"{title}s by life", s.life_bins, "GPU", f"{title}s"),),
            tables=(spreads("life-table", "Life, s", {_name(trace, k): g.life_s for k, g in s.groups.items()}),),
        ),
        TraceFinding("gpus", "Requested GPUs over time", _gpus(trace, s), (_over_time(trace, result),),
                     tables=(_capacity(s),) if s.capacity else ()),
    ]  # fmt: skip


def _name(trace: InstanceTrace, group: str) -> str:
    return trace.names.get(group, group)


def _groups(trace: InstanceTrace, s: InstanceSummary) -> Table:
    head = (trace.groups, f"{trace.instance.capitalize()}s", "created within", "began before", "waiting", "running",
            "CPUs, median", "memory, median GiB", "GPUs, sum")  # fmt: skip
    rows = {_name(trace, key): _cells(group) for key, group in s.groups.items()}
    return trace_page.numbers("group-table", "Counts and requests", head, {**rows, "All": _cells(s.total)})


def _cells(g: InstanceGroup) -> tuple[str, ...]:
    return (
        fmt.count(g.instances), fmt.count(g.created_inside), fmt.count(g.began_before), fmt.count(g.still_waiting),
        fmt.count(g.still_running), fmt.number(g.cpus.median if g.cpus else None),
        fmt.number(g.memory_gib.median if g.memory_gib else None), fmt.number(g.gpus_sum),
    )  # fmt: skip


def _states(trace: InstanceTrace, s: InstanceSummary) -> Table:
    rows = {name: (fmt.count(n), _share(n / s.total.instances)) for name, n in s.states.items()}
    return trace_page.numbers("states", "States", ("State", f"{trace.instance.capitalize()}s", "of all"), rows)


def _gpus(trace: InstanceTrace, s: InstanceSummary) -> tuple[str, ...]:
    bound = "at least" if s.peak_is_lower_bound else "at most"
    text = f"{bound.capitalize()} {quantity(s.peak_gpus, 'GPUs')} are requested at the same time"
    if s.capacity_gpus is None:
        return (f"{text}.",)
    return (
        f"{text}, {_share(s.peak_share)} of the {counted(s.capacity_gpus, 'GPU')}. All {trace.instance}s together, "
        f"as if none had ended, would request {quantity(s.total.gpus_sum, 'GPUs')}, "
        f"{_share(s.total.gpus_sum / s.capacity_gpus)}.",
    )


def _over_time(trace: InstanceTrace, result: InstanceResult) -> Markup:
    frame = result.over_time
    group_names = [name for name, group in result.summary.groups.items() if group.gpus_sum > 0]
    series = [
        Series(_name(trace, name), frame[name].to_list(), f"{number % 6 + 1}")
        for number, name in enumerate(group_names)
    ]
    words = Words(
        "gpus-over-time", "GPUs requested by scheduled " + trace.instance + "s",
        f"The largest number at the same time is {fmt.number(result.summary.peak_gpus)}.",
    )  # fmt: skip
    return lines(words, frame["day"].to_list(), series, unit="GPUs", x_label="Days since the start of the trace")


def _capacity(s: InstanceSummary) -> Table:
    whole = s.capacity_gpus or 1
    rows = {model: (fmt.count(n), _share(n / whole)) for model, n in (s.capacity or {}).items()}
    return trace_page.numbers("capacity", "GPUs of the cluster", ("Model", "GPUs", "of all"), rows)
