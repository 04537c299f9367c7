"""Charts of the report, from a ``WasteResult``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo

import polars as pl
from markupsafe import Markup

from slurm_affinode.analysis import over_time
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base import times
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Bar, Series, Words
from slurm_affinode.report.measures import STATES, idle_share, known_value, total

_IDLE_SHARE = pl.col("gpu_hours_idle") / pl.col("gpu_hours_allocated")
_MAX_BARS = 10
_MAX_TIME_BARS = 106
"""Two years of weeks; more bars would be too narrow to see."""
_DAY_S = 86400
_HALF = 0.5
_MEASURED = 0.01
"""Unknown shares of the hours up to this size are not shown beside a bar."""


def hours_over_time(result: WasteResult) -> Markup:
    """Draw the mean number of allocated GPUs in each bucket, by state."""
    frame, zone = result.over_time, result.query.zone
    step = "day" if result.bucket_s == _DAY_S else fmt.duration(result.bucket_s)
    help_text = (
        "Each bar is the mean number of allocated GPUs in that period, by activity. Idle: every activity signal at "
        "or below the idle threshold. Unknown: no data. GPUs that no job held are not shown."
    )
    words = Words("over-time", "Allocated GPUs over time", "", help_text)
    if frame.height == 0 or not frame["gpu_hours_allocated"].sum():
        return charts.empty(words, "No GPU was allocated in this interval.")
    if frame.height > _MAX_TIME_BARS and result.bucket_s == _DAY_S:
        frame, step = _in_larger_units(frame, zone)
    starts = frame["bucket"].to_list()
    after = _period_end(starts[-1], zone, step) if step in _WIDER else _next(starts[-1], result.bucket_s, zone)
    ends = [*starts[1:], after]
    spans = [_span_h(result, start, end) for start, end in zip(starts, ends, strict=True)]
    series = [
        Series(
            label,
            [None if h is None else h / s for h, s in zip(frame[f"gpu_hours_{state}"], spans, strict=True)],
            state,
        )
        for state, label in STATES
    ]
    idle = series[2].values
    peak = max(range(len(starts)), key=lambda i: idle[i] or 0.0)
    most = "None that was measured was idle."
    if known_value(result.total, "gpu_hours_idle") is None:
        most = "How many of them were idle is unknown."
    elif idle[peak]:
        whole = fmt.number(sum(s.values[peak] or 0.0 for s in series))
        most = f"Most were idle from {fmt.moment(starts[peak], zone)}: {fmt.number(idle[peak])} of {whole}."
    summary = f"Mean number of allocated GPUs per {step}. {most}"
    words = Words("over-time", "Allocated GPUs over time", summary, help_text)
    note = f"One bar is {step}." if step[0].isdigit() else f"One bar is a {step}."
    lengths = [(end - start).total_seconds() for start, end in zip(starts, ends, strict=True)]
    return charts.stacked_time(words, starts, lengths, series, unit="GPUs", zone=zone, note=note)


_WIDER = ("week", "month", "year")


def _begin(moment: datetime, zone: tzinfo, name: str) -> datetime:
    """Return the start of the local week (from Monday), month or year that contains ``moment``, in UTC."""
    day = moment.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    match name:
        case "week":
            day -= timedelta(days=day.weekday())
        case "month":
            day = day.replace(day=1)
        case _:
            day = day.replace(month=1, day=1)
    return day.astimezone(UTC)


def _period_end(start: datetime, zone: tzinfo, name: str) -> datetime:
    """Return the end of the week, month or year that begins at ``start``."""
    return _begin(start + timedelta(days={"week": 10, "month": 40, "year": 400}[name]), zone, name)


def _next(start: datetime, width_s: int, zone: tzinfo) -> datetime:
    """Return the end of the bucket that begins at ``start``."""
    return times.edges(start, start + timedelta(seconds=1), width_s, zone)[1]


def _in_larger_units(days: pl.DataFrame, zone: tzinfo) -> tuple[pl.DataFrame, str]:
    """Aggregate days to weeks, months or years; also return the name of the unit."""
    bucket_starts = days["bucket"].to_list()
    name = next(
        (name for name in _WIDER if len({_begin(start, zone, name) for start in bucket_starts}) <= _MAX_TIME_BARS),
        "year",
    )
    starts = pl.Series("bucket", [_begin(start, zone, name) for start in bucket_starts]).cast(days["bucket"].dtype)
    buckets = days.with_columns(starts).group_by("bucket", maintain_order=True).agg(pl.col("^gpu_hours_.*$").sum())
    # A sum of unknown hours only is unknown.
    allocated, unknown = pl.col("gpu_hours_allocated"), pl.col("gpu_hours_unknown")
    buckets = buckets.with_columns(
        pl.when((allocated > unknown) | (allocated == 0)).then(pl.col(f"gpu_hours_{state}")).alias(f"gpu_hours_{state}")
        for state in ("idle", "low", "busy")
    )
    return buckets, name


def _span_h(result: WasteResult, start: datetime, end: datetime) -> float:
    """Return the length of the bucket within the interval of the query, in hours."""
    inside = min(end, result.query.until) - max(start, result.query.since)
    return max(inside.total_seconds(), 1.0) / 3600


def group_bars(result: WasteResult, group: str, title: str, thing: str) -> Markup:
    """Draw the allocated GPU-hours of the largest members of a grouping, by state."""
    help_text = (
        f"The length of a bar is the allocated GPU-hours of the {thing}, divided by activity of the GPUs. "
        "The percentage is the idle share of the allocated GPU-hours."
    )
    frame = result.groups.get(group, pl.DataFrame())
    if frame.height == 0:
        return charts.empty(Words(f"by-{group}", title, "", help_text), f"No {thing} had a GPU allocated.")
    shown = frame.sort("gpu_hours_allocated", descending=True, nulls_last=True).head(_MAX_BARS)
    bars = [
        Bar(
            fmt.name(row["name"]),
            f"{fmt.hours(known_value(row, 'gpu_hours_allocated'))}, {_share(row)}",
            [known_value(row, f"gpu_hours_{state}") for state, _ in STATES],
        )
        for row in shown.iter_rows(named=True)
    ]
    summary = "Allocated GPU-hours. " + "; ".join(f"{bar.label}: {bar.note}" for bar in bars[:5]) + "."
    left_out = frame.height - shown.height
    note = f"The {_MAX_BARS} largest of {fmt.count(frame.height)}." if left_out else None
    words = Words(f"by-{group}", title, summary, help_text)
    return charts.stacked_bars(words, bars, [Series(label, [], s) for s, label in STATES], unit="GPU-hours", note=note)


def _share(row: dict[str, object]) -> str:
    """Return the idle share of the allocated hours, and the unknown share if it is not negligible."""
    fraction, allocated = idle_share(row), known_value(row, "gpu_hours_allocated")
    if fraction is None or not allocated:
        return "idle unknown"
    unknown = (known_value(row, "gpu_hours_unknown") or 0.0) / allocated
    return f"{fmt.percent(fraction)} idle" + (f", {fmt.percent(unknown)} unknown" if unknown > _MEASURED else "")


def scatter(result: WasteResult) -> Markup:
    """Draw memory held against compute used, one mark per job run."""
    help_text = (
        "Each mark is a job run: to the right, the more its GPUs computed; up, the more memory each GPU held. "
        "Top left are jobs that hold memory and compute little. Area grows with the allocated GPU-hours."
    )
    title = "Memory held against compute"
    frame = result.jobs.filter(pl.col("util_mean_pct").is_not_null() & pl.col("fb_mean_gib").is_not_null())
    words = Words("memory-compute", title, "", help_text)
    if frame.height == 0:
        return charts.empty(words, "No job has both a utilization and a memory measurement.")
    squatting = frame.filter((pl.col("util_mean_pct") < 5) & (pl.col("fb_mean_gib") > 1))
    summary = (
        f"{fmt.count(frame.height)} job runs. {fmt.count(squatting.height)} of them held more than 1 GiB on each GPU "
        f"at a mean utilization below 5 %, for {fmt.number(total(squatting['gpu_hours_allocated']))} GPU-hours."
    )
    left_out = result.jobs.height - frame.height
    note = summary + (f" {fmt.count(left_out)} job runs without both figures are not shown." if left_out else "")
    return charts.scatter(
        Words("memory-compute", title, summary, help_text),
        _points(frame),
        x_label="Mean utilization, %",
        y_label="Mean memory held per GPU, GiB",
        x_max=100,
        legend=[
            Series("at least half of the allocated time idle", [], "idle"),
            Series("less than half idle", [], "busy"),
        ],
        thing="job runs",
        note=note,
    )


def _points(frame: pl.DataFrame) -> pl.DataFrame:
    largest = max(frame["gpu_hours_allocated"].drop_nulls().to_list(), default=0.0) or 1.0
    fill = pl.when(_IDLE_SHARE.fill_null(0.0) >= _HALF).then(pl.lit("idle")).otherwise(pl.lit("busy"))
    points = frame.select(
        pl.col("util_mean_pct").alias("x"),
        pl.col("fb_mean_gib").alias("y"),
        fill.alias("fill"),
        (pl.col("gpu_hours_allocated").fill_null(0.0) / largest).alias("size"),
    )
    if frame.height > charts.MAX_POINTS:
        return points.with_columns(pl.lit("").alias("label"))
    columns = ("job_id", "user", "util_mean_pct", "fb_mean_gib", "gpu_hours_allocated")
    labels = [
        f"job {job}, {fmt.name(user)}: {fmt.pct(util)} utilization, {fmt.number(held_gib)} GiB, {fmt.hours(hours)}"
        for job, user, util, held_gib, hours in frame.select(columns).iter_rows()
    ]
    return points.with_columns(pl.Series("label", labels, pl.String))


def idle_shares(result: WasteResult) -> Markup:
    """Draw the distribution of jobs and their GPU-hours over the idle share of the allocated hours."""
    held_runs = result.jobs.filter(pl.col("gpu_hours_allocated") > 0)
    frame = over_time.idle_fraction_histogram(held_runs.with_columns(_IDLE_SHARE.alias("idle_fraction")))
    jobs, hours = _shares(frame, "jobs"), _shares(frame, "gpu_hours_allocated")
    bins = [f"{100 * row[0]:.0f}–{100 * row[1]:.0f}" for row in frame.select("lower", "upper").iter_rows()]
    never = hours[-1] if hours else None
    summary = (
        f"{fmt.pct(never)} of the GPU-hours are in jobs that were idle for {bins[-1] if bins else ''} % of their time."
    )
    words = Words(
        "idle-share",
        "How idle are the jobs?",
        summary,
        "Jobs by the idle share of their allocated GPU-hours: at the left jobs that compute all the time, at the right "
        "jobs whose GPUs never do. Jobs without measurement are not counted.",
    )
    series = [Series("share of job runs", jobs, "1"), Series("share of GPU-hours", hours, "2")]
    x_label = "Idle share of the allocated GPU-hours, %"
    return charts.histogram(words, bins, series, unit="%", x_label=x_label, value=fmt.pct, note=summary)


def windows(result: WasteResult) -> Markup:
    """Draw the distribution of the lengths of idle windows."""
    frame = result.window_histogram
    count, hours = _shares(frame, "windows"), _shares(frame, "gpu_hours")
    words = Words(
        "idle-windows",
        "How long do GPUs stay idle?",
        f"{fmt.count(total(frame['windows']))} idle windows, {fmt.hours(total(frame['gpu_hours']), 'GPU-h')} in all.",
        "An idle window is an unbroken idle time of one GPU within one job. Long windows can be "
        "reclaimed; many short ones are pauses of a working job.",
    )
    bins = [_window(lower, upper) for lower, upper in frame.select("lower_s", "upper_s").iter_rows()]
    series = [Series("share of idle windows", count, "1"), Series("share of idle GPU-hours", hours, "2")]
    return charts.histogram(
        words, bins, series, unit="%", x_label="Length of the idle window", value=fmt.pct, note=words.summary
    )


def _window(lower_s: float, upper_s: float | None) -> str:
    """Return a short label: ``<5 min``, ``5–15 min``, ``1–4 h``, ``≥24 h``."""
    edge = upper_s if upper_s is not None else lower_s
    divisor, unit = next(((d, u) for d, u in ((3600, "h"), (60, "min")) if edge >= d and edge % d == 0), (1, "s"))
    if unit == "h" and 0 < lower_s < 3600:
        divisor, unit = 60, "min"
    low, high = fmt.number(lower_s / divisor), fmt.number(edge / divisor)
    if upper_s is None:
        return f"≥{low}{fmt.NBSP}{unit}"
    return f"<{high}{fmt.NBSP}{unit}" if lower_s == 0 else f"{low}–{high}{fmt.NBSP}{unit}"


def _shares(frame: pl.DataFrame, column: str) -> list[float | None]:
    whole = total(frame[column])
    return [None if not whole or v is None else 100 * v / whole for v in frame[column]]
