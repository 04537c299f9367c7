"""The page of a log of jobs: sizes, run times, waits, requested times, arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from slurm_affinode.base.text import counted, percent
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, histogram
from slurm_affinode.report.context import Card, Table
from slurm_affinode.report.format import quantity
from slurm_affinode.traces import trace_page
from slurm_affinode.traces.claims import Claim
from slurm_affinode.traces.job_figures import JobLogSummary, SizeClass, Spread, TimeBin
from slurm_affinode.traces.job_log import LeftOut
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

_share = partial(fmt.percent, digits=1)
_SPREAD_HEAD = ("Mean", "Median", "p90", "p99", "Maximum")


@dataclass(frozen=True, slots=True)
class JobTrace:
    """The page's names of a log and its users."""

    title: str
    lead: str
    user: str
    """In the singular."""
    absent: tuple[str, ...] = ()


TRACES = {
    "swf": JobTrace(
        "Jobs of a workload log", "A log in the Standard Workload Format of the Parallel Workloads Archive.", "user",
        ("How much of their processors the jobs used.",),
    ),
    "philly": JobTrace(
        "Philly: jobs that train neural networks",
        "Jobs of Microsoft's Philly cluster, as the artifact of Pollux (OSDI 2021) has them.", "virtual cluster",
        ("GPU utilization.", "Users and final states."),
    ),
    "philly-log": JobTrace(
        "Philly: jobs that train neural networks",
        "Jobs of Microsoft's Philly cluster, by the published log of their attempts.", "user",
        ("GPU utilization: it is published separately, per server and not per job.",),
    ),
    "site": JobTrace(
        "GPU jobs of a site", "GPU jobs of a Slurm cluster, as slurm-affinode has exported them without names.", "user",
        ("GPU utilization beyond idle or not.", "Jobs that never started.", "The real dates."),
    ),
    "helios": JobTrace(
        "Helios: jobs of a GPU cluster under Slurm",
        "Jobs of a cluster of SenseTime's Helios datacenter, April to September 2020 (SC 2021).", "user",
        ("GPU utilization.", "The virtual clusters in which jobs waited: waits are those of the whole cluster."),
    ),
    "acme": JobTrace(
        "Acme: jobs that develop language models",
        "Jobs of a cluster of the Shanghai AI Laboratory, March to August 2023 (NSDI 2024).", "user",
        ("GPU utilization: it is published separately, per server and not per job.",),
    ),
}  # fmt: skip


def html(trace: JobTrace, summary: JobLogSummary, claims: Sequence[Claim]) -> str:
    """Return the self-contained page."""
    return trace_page.html(trace.title, context(trace, summary, claims))


def context(trace: JobTrace, s: JobLogSummary, claims: Sequence[Claim]) -> TracePage:
    """Return the context of the template, with all texts formatted."""
    return TracePage(
        answer=_answer(s), lead=_lead(trace, s), cards=_cards(trace, s),
        findings=(*_findings(s), *trace_page.claims_finding(claims)), verdict_counts=trace_page.verdict_counts(claims),
        notes=notes(s), recipes=(*_recipes(s), *trace_page.recipes(claims)),
        sources=trace_page.sources(claims),
        absent=(*_absent(s), *trace.absent),
    )  # fmt: skip


def note(unit: str, part: LeftOut) -> str:
    """Return the sentence about jobs that were left out."""
    places = f": {', '.join(part.examples)}" if part.examples else ""
    share = f"{percent(part.share)} of the {unit}-hours"
    return f"{counted(part.jobs, 'job')} {part.reason}, with {share}, left out{places}"


def notes(s: JobLogSummary) -> tuple[str, ...]:
    """Return the sentences about jobs that were left out, and about a column that contradicts others."""
    other_cards = []
    if s.recorded_runs_differ:
        other_cards.append(
            f"the column of run times differs from end minus start for {counted(s.recorded_runs_differ, 'job')} (mean "
            f"{fmt.number(s.recorded_run_mean_s)} s): run times are end minus start"
        )
    return (*(note(s.unit, part) for part in s.left_out), *other_cards)


def _answer(s: JobLogSummary) -> str:
    (small, few), (label, most) = next(iter(s.size_classes.items())), _largest(s)
    return (
        f"Jobs with {sizes(small, s.unit)} are {_share(few.job_share)} of all jobs and {_share(few.hours_share)} of "
        f"the {s.unit}-hours; the largest part, {_share(most.hours_share)}, is in jobs with {sizes(label, s.unit)}."
    )


def _largest(s: JobLogSummary) -> tuple[str, SizeClass]:
    return max(s.size_classes.items(), key=lambda item: item[1].hours_share)


def sizes(label: str, unit: str) -> str:
    """Return a size class in words: ``2–4 GPUs``, ``more than 8 GPUs``."""
    words = label.replace("above-", "more than ").replace("-", "–")
    return f"{words} {unit}" if label == "1" else f"{words} {unit}s"


def _lead(trace: JobTrace, s: JobLogSummary) -> str:
    since = "" if s.since is None else f", the first at {fmt.moment(s.since, s.since.tzinfo)}"  # type: ignore[arg-type]
    machine = "" if s.capacity is None else f" The machine has {counted(s.capacity, s.unit)}."
    if s.jobs_without_units:
        machine += f" {counted(s.jobs_without_units, 'job')} without {s.unit}s are not part of it."
    cluster = "" if s.cluster is None else f" Cluster {s.cluster}:"
    return f"{trace.lead}{cluster} {counted(s.jobs, 'job')} submitted within {fmt.duration(s.span_s)}{since}.{machine}"


def _cards(trace: JobTrace, s: JobLogSummary) -> tuple[Card, ...]:
    wait, requested = s.wait_s, s.requested
    users = f"of {counted(s.users, trace.user)}" if s.users is not None else ""
    return (
        card("Jobs", fmt.count(s.jobs), users, is_known=True),
        card(f"{s.unit[0].upper()}{s.unit[1:]}-hours", fmt.count(s.unit_hours), is_known=True,
             more="Size of each job x its run time, summed."),
        card("Run time, mean", fmt.duration(s.run_s.mean), f"median {fmt.duration(s.run_s.median)}", is_known=True),
        card("Wait, mean", fmt.duration(wait.mean if wait else None),
             f"median {fmt.duration(wait.median)}" if wait else "", is_known=wait is not None),
        card("Requested time", f"{fmt.number(requested.over_request, digits=2)}x" if requested else fmt.UNKNOWN,
             "of the used time", is_known=requested is not None,
             more=f"Requested {s.unit}-hours by used ones, of the jobs with a requested time."),
    )  # fmt: skip


def _findings(s: JobLogSummary) -> list[TraceFinding]:
    run = (
        f"Half of the jobs run for at most {fmt.duration(s.run_s.median)}, 99 % for at most {fmt.duration(s.run_s.p99)}"
        f"; the mean is {fmt.duration(s.run_s.mean)}.",
    )
    findings = [
        TraceFinding("sizes", "Sizes of jobs", (), (_size_chart(s),), tables=(_size_table(s),)),
        TraceFinding("run-times", "Run times", run, (bins_chart("run-times", "Jobs by run time", s.run_bins, s.unit),)),
    ]
    if s.wait_s is not None:
        wait = (
            f"The log records the wait of {counted(s.waits_known, 'job')}: {fmt.duration(s.wait_s.mean)} on average, "
            f"half of them at most {fmt.duration(s.wait_s.median)}, 99 % at most {fmt.duration(s.wait_s.p99)}.",
        )
        chart = bins_chart("waits", "Jobs by recorded wait", s.wait_bins, s.unit)
        findings.append(TraceFinding("wait", "Recorded waits", wait, (chart,)))
    if s.final_states is not None:
        findings.append(_final_states(s))
    if s.requested is not None:
        r = s.requested
        text = (
            f"{counted(r.jobs, 'job')} requested {quantity(r.requested_unit_hours, f'{s.unit}-hours', 0)} and used "
            f"{fmt.count(r.used_unit_hours)}: {fmt.number(r.over_request, digits=2)} times as "
            f"much as they used. Half of them used at most {_share(r.used_share_median)} of their time. "
            f"{counted(r.jobs_beyond, 'job')} ran longer than requested.",
        )
        findings.append(TraceFinding("requested", "Requested and used time", text))
    if s.arrivals is not None:
        findings.append(_arrivals(s))
    rows = {"Run time, s": s.run_s, "Wait, s": s.wait_s, f"{s.unit[0].upper()}{s.unit[1:]}s": s.size}
    findings.append(TraceFinding("numbers", "Distributions", (), tables=(spreads("spreads", "Per job", rows),)))
    return findings


def _final_states(s: JobLogSummary) -> TraceFinding:
    states = s.final_states or {}
    unsuccessful = sum(state.hours_share for name, state in states.items() if name != "completed")
    text = f"Jobs that did not complete have {_share(unsuccessful)} of the {s.unit}-hours."
    head = ("Final state", "Jobs", "of all", f"{s.unit}-hours", "of all")
    rows = {
        name: (fmt.count(state.jobs), _share(state.job_share), fmt.count(state.unit_hours), _share(state.hours_share))
        for name, state in states.items()
    }
    table = trace_page.numbers("final-states", "Jobs by final state", head, rows)
    return TraceFinding("states", "Final states", (text,), tables=(table,))


def spreads(key: str, caption: str, rows: Mapping[str, Spread | None]) -> Table:
    """Return the table of distributions."""
    cells = {
        name: [fmt.number(v) for v in ((s.mean, s.median, s.p90, s.p99, s.max) if s is not None else (None,) * 5)]
        for name, s in rows.items()
    }
    return trace_page.numbers(key, caption, ("Figure", *_SPREAD_HEAD), cells)


def _size_chart(s: JobLogSummary) -> Markup:
    jobs = [100 * size_class.job_share for size_class in s.size_classes.values()]
    hours = [100 * size_class.hours_share for size_class in s.size_classes.values()]
    summary = "; ".join(
        f"{sizes(label, s.unit)}: {_share(size_class.job_share)} of the jobs, "
        f"{_share(size_class.hours_share)} of the {s.unit}-hours"
        for label, size_class in s.size_classes.items()
    )
    labels = [label.replace("above-", "> ").replace("-", "–") for label in s.size_classes]
    return histogram(
        Words("size-classes", f"Jobs and {s.unit}-hours by size", f"{summary}."), labels,
        [Series("Jobs", jobs, "1"), Series(f"{s.unit[0].upper()}{s.unit[1:]}-hours", hours, "2")],
        unit="%", x_label=f"{s.unit[0].upper()}{s.unit[1:]}s of a job", value=_percent,
    )  # fmt: skip


def _size_table(s: JobLogSummary) -> Table:
    head = (f"{s.unit[0].upper()}{s.unit[1:]}s", "Jobs", "of all", f"{s.unit}-hours", "of all", "Run time, median")
    waits = () if s.wait_s is None else ("Wait, mean", "Wait, median")
    rows = {
        label.replace("above-", "more than ").replace("-", "–"): (
            fmt.count(size_class.jobs), _share(size_class.job_share),
            fmt.count(size_class.unit_hours), _share(size_class.hours_share), fmt.duration(size_class.run_median_s),
            *(fmt.duration(wait) for wait in (size_class.wait_mean_s, size_class.wait_median_s)[: len(waits)]),
        )
        for label, size_class in s.size_classes.items()
    }  # fmt: skip
    return trace_page.numbers("size-table", "Size classes", (*head, *waits), rows)


def _percent(value: float | None) -> str:
    return quantity(value, "%", 1)


def bins_chart(key: str, title: str, bins: Sequence[TimeBin], unit: str, thing: str = "Jobs") -> Markup:
    """Draw the shares of jobs, and of unit-hours if they are known, by ranges of a time."""
    labels = [time_bin.label.replace("-", "–") for time_bin in bins]
    series = [Series(thing, [100 * time_bin.share for time_bin in bins], "1")]
    if any(time_bin.hours_share is not None for time_bin in bins):
        hours = [None if time_bin.hours_share is None else 100 * time_bin.hours_share for time_bin in bins]
        series.append(Series(f"{unit[0].upper()}{unit[1:]}-hours", hours, "2"))
    summary = "; ".join(f"{time_bin.label}: {_share(time_bin.share)}" for time_bin in bins)
    return histogram(Words(key, title, f"{summary}."), labels, series, unit="%", x_label="Time", value=_percent)


def _arrivals(s: JobLogSummary) -> TraceFinding:
    a = s.arrivals
    assert a is not None  # noqa: S101 - the caller has looked
    hour = max(a.hour, key=lambda name: a.hour[name])
    day = max(a.weekday, key=lambda name: a.weekday[name])
    text = (
        f"Most jobs are submitted on {day} and between {hour}:00 and {hour}:59, which has "
        f"{_share(a.busiest_hour_share)} of them; an even hour would have {_share(1 / 24)}. "
        + (f"Times are in {a.zone}." if a.zone else "The log names no time zone: its times are taken as they are."),
    )
    return TraceFinding(
        "arrivals", "Arrivals", text,
        tuple(
            histogram(
                Words(key, title, f"{most} has the most submissions."), list(counts),
                [Series("Jobs", list(counts.values()), "1")], unit="jobs", x_label=axis, value=fmt.count,
            )
            for key, title, axis, counts, most in (
                ("weekdays", "Submissions by weekday", "Weekday", a.weekday, day),
                ("hours", "Submissions by hour", "Hour of the day", a.hour, f"Hour {hour}"),
            )
        ),
    )  # fmt: skip


def _absent(s: JobLogSummary) -> list[str]:
    texts = {
        "How long jobs waited.": s.wait_s,
        "Requested times.": s.requested,
        f"The number of {s.unit}s of the machine: no share of a capacity is given.": s.capacity,
        "The date of the first submission: weekdays and hours are unknown.": s.arrivals,
    }
    return [text for text, figure in texts.items() if figure is None]


def _recipes(s: JobLogSummary) -> tuple[tuple[str, str], ...]:
    return (
        (f"{s.unit[0].upper()}{s.unit[1:]}-hours", "Size of a job x its run time, summed; waits are not in it."),
        ("Percentiles", "Linear interpolation between neighbors, each job counted once."),
        ("Requested time", "Size x requested time by size x run time, of the jobs that have both."),
        ("Unknown", "A figure that the log does not record is left out of a mean and counted; it is never 0."),
    )
