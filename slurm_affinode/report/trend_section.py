"""The section on the trend: this period, the one before it, and up to ten earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from slurm_affinode.analysis.result import PeriodHours, WasteResult
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words
from slurm_affinode.report.context import Cell, Column, Table, TrendSection
from slurm_affinode.report.measures import STATES, cell, known_value

_SHARES = (("gpu_hours_allocated", "Allocated"), ("gpu_hours_busy", "Busy"), ("gpu_hours_idle", "Idle"),
           ("gpu_hours_unknown", "Unknown"))  # fmt: skip


def section(result: WasteResult) -> TrendSection | None:
    """Return the section; ``None`` if no earlier period is known.

    All percentages refer to the capacity if it is known for each period, otherwise to the allocated GPU-hours.
    """
    if result.trend is None:
        return None
    query = result.query
    periods = [*result.trend.periods, PeriodHours(f"this {result.trend.kind}", query.since, query.until, result.total)]
    capacities = [known_value(period.total, "gpu_hours_capacity") for period in periods]
    base = "capacity" if all(capacities) else "allocated"
    with_capacity = any(capacity is not None for capacity in capacities)
    before = periods[-2].until == query.since
    return TrendSection(
        _lead(periods, base, result.trend.kind, before=before),
        _chart(result, periods, with_capacity=with_capacity),
        _table(periods, base, with_capacity=with_capacity),
    )


def share(period: PeriodHours, key: str, base: str) -> float | None:
    """Return GPU-hours as a fraction of the capacity or the allocated GPU-hours; ``None`` if one is unknown."""
    hours, whole = known_value(period.total, key), known_value(period.total, f"gpu_hours_{base}")
    return None if hours is None or not whole else hours / whole


def _lead(periods: Sequence[PeriodHours], base: str, kind: str, *, before: bool) -> str:
    of = "the capacity" if base == "capacity" else "the allocated GPU-hours"
    busy = [share(period, "gpu_hours_busy", base) for period in periods]
    if busy[-1] is None:
        return f"How busy the GPUs were in this {kind} is unknown."
    text = f"GPUs were busy for {fmt.percent(busy[-1])} of {of}"
    last = f"the {kind} before" if before else f"the last one with a report, {periods[-2].label},"
    text += f"; in {last} {'for ' + fmt.percent(busy[-2]) if busy[-2] is not None else 'that is unknown'}."
    measured = [value for value in busy if value is not None]
    if len(measured) > 2:
        text += f" The median of the last {len(measured)}: {fmt.percent(median(measured))}."
    return text


def _chart(result: WasteResult, periods: Sequence[PeriodHours], *, with_capacity: bool) -> Markup:
    lengths = [(period.until - period.since).total_seconds() for period in periods]

    def gpus(key: str) -> list[float | None]:
        hours = [known_value(period.total, key) for period in periods]
        return [None if h is None else h * 3600 / s for h, s in zip(hours, lengths, strict=True)]

    series = [Series(label, gpus(f"gpu_hours_{state}"), state) for state, label in STATES]
    kind = "" if result.trend is None else result.trend.kind
    if not with_capacity:
        summary = f"Mean number of allocated GPUs in each {kind}: busy, low, idle, and unknown."
        help_text = (
            f"Each bar is the mean number of allocated GPUs in a {kind}. A missing bar has no report, or no job."
        )
        return charts.stacked_time(
            Words("trend", "Allocated GPUs and their use", summary, help_text), [period.since for period in periods],
            lengths, series, unit="GPUs", zone=result.query.zone,
        )  # fmt: skip
    series.append(Series("Not allocated", gpus("unallocated_gpu_hours"), "free"))
    summary = f"Mean number of GPUs in each {kind}: busy, low, idle, unknown, and not allocated."
    help_text = (
        f"Each bar is the mean number of GPUs in a {kind}: its height is the capacity, the parts below the lightest "
        "were allocated. A missing bar has no report; if the capacity is unknown, only allocated GPUs are shown."
    )
    return charts.stacked_time(
        Words("trend", "Capacity and its use", summary, help_text), [period.since for period in periods], lengths,
        series, unit="GPUs", zone=result.query.zone,
    )  # fmt: skip


def _table(periods: Sequence[PeriodHours], base: str, *, with_capacity: bool) -> Table:
    unit = "of capacity" if base == "capacity" else "of allocated"
    rows = tuple(
        (
            Cell(period.label, "short", sort=str(round(period.since.timestamp()))),
            cell(period.total, "gpu_hours_capacity" if with_capacity else "gpu_hours_allocated"),
            *(_share_cell(share(period, key, base)) for key, _ in _SHARES[not with_capacity :]),
        )
        for period in reversed(periods)
    )
    columns = (
        Column("Period"), Column("Capacity" if with_capacity else "Allocated", "number", "GPU-h"),
        *(Column(label, "number", unit) for _, label in _SHARES[not with_capacity :]),
    )  # fmt: skip
    return Table("trend-table", "This period and earlier ones", columns, rows)


def _share_cell(value: float | None) -> Cell:
    if value is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(fmt.percent(value), "number", sort=f"{value:.6g}")
