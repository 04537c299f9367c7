"""The page of a what-if for a decision: what a change would have returned and saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo

from markupsafe import Markup

from slurm_affinode.analysis.bootstrap import LEVEL, RESAMPLES
from slurm_affinode.base.text import counted, span
from slurm_affinode.pipeline.whatif import Change, ClusterReplay, SuspensionGain
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, histogram, lines
from slurm_affinode.report.context import Card, Cell, Column, Table
from slurm_affinode.traces import trace_page
from slurm_affinode.traces.trace_page import TraceFinding, TracePage, card

Bounds = tuple[float, float] | None
Formatter = Callable[[float], str]

_FAR = (0.5, 2.0)
"""Replayed by recorded wait outside of which the replay explains little of the waits."""


def html(replays: Sequence[ClusterReplay], change: Change, since: datetime, until: datetime, zone: tzinfo) -> str:
    """Return the self-contained page; ``replays`` has at least one cluster."""
    first = max(replays, key=lambda replay: replay.gpu_hours_returned)
    page = TracePage(
        answer=answer(first, change, since, until).replace(" %", "\N{NO-BREAK SPACE}%"),
        lead=f"GPU jobs from {fmt.period(since, until, zone)}, replayed as they were and with the change.",
        cards=_cards(first),
        findings=tuple(
            finding for number, replay in enumerate(replays, 1)
            for finding in _findings(replay, str(number), several=len(replays) > 1)
        ),
        verdict_counts=_caution(first),
        notes=tuple(
            f"{replay.cluster}: {counted(number, 'job')} {reason}"
            for replay in replays for reason, number in replay.left_out.items()
        ),
        recipes=_recipes(first),
        sources=(),
        absent=("Fragmentation: a job fits if its pool has as many free GPUs, on any nodes.",
                "Priorities, limits, reservations and dependencies of jobs."),
    )  # fmt: skip
    return trace_page.html("What if: GPUs of idle jobs", page, zone)


def answer(replay: ClusterReplay, change: Change, since: datetime, until: datetime) -> str:
    """Return the result as a sentence, with its intervals."""
    days = counted(max(1, round((until - since).total_seconds() / 86_400)), "day")
    saved = f"the mean wait would have been {_wait(replay.saved_wait_mean_s, replay.saved_wait_interval_s)}"
    if change.suspend_idle_s is None:
        return f"On {replay.cluster}, {_changes(change)}, {saved} in {days}."
    returned = _hours(replay.gpu_hours_returned, replay.gpu_hours_returned_interval)
    also = f", {_changes(change)}," if change.more_gpus or change.limit_interactive_s else ""
    return (
        f"Suspending jobs on {replay.cluster} that are idle for {span(change.suspend_idle_s)}{also} would have "
        f"returned {returned} in {days}. Other jobs would have used {_gpu_hours(replay.gpu_hours_used)} of them, and "
        f"{saved}."
    )


def assumption(replay: ClusterReplay) -> str:
    """Return what the answer assumes, and how far that explains the recorded waits."""
    return (
        "Assumed: users submit the same jobs, which start in the order of submission once their pool has enough free "
        f"GPUs; a suspension takes {span(replay.dump_s)}, a restore {span(replay.restore_s)}. {_caution(replay)}"
    )


def _changes(change: Change) -> str:
    texts = []
    if change.more_gpus:
        texts.append(f"with {counted(change.more_gpus, 'more GPU')}")
    if change.limit_interactive_s is not None:
        texts.append(f"with interactive jobs ended after {span(change.limit_interactive_s)}")
    return " and ".join(texts) or "without a change"


def _hours(value: float, bounds: Bounds) -> str:
    return _gpu_hours(value) + _bounds(bounds, fmt.number)


def _gpu_hours(value: float) -> str:
    text = fmt.number(value)
    return f"{text} GPU-hour" + ("" if text == "1" else "s")


def _wait(value: float, bounds: Bounds) -> str:
    if round(value) == 0:
        return "the same"
    return f"{fmt.duration(abs(value))} {'shorter' if value > 0 else 'longer'}" + _bounds(bounds, _seconds)


def _seconds(value: float) -> str:
    return ("−" if round(value) < 0 else "") + fmt.duration(abs(value))


def _bounds(bounds: Bounds, shown: Formatter) -> str:
    if bounds is None:
        return ""
    low, high = bounds
    return f" (95 % interval: {shown(low)} to {shown(high)})"


def _caution(replay: ClusterReplay) -> str:
    """Return how far the replay explains the recorded waits."""
    ratio = replay.replayed_to_recorded
    if ratio is None:
        return "No job waited in accounting, so the replayed waits cannot be compared with recorded ones."
    text = f"The replayed mean wait is {fmt.number(ratio, digits=2)} of the recorded one."
    if not _FAR[0] <= ratio <= _FAR[1]:
        text += (
            " Priorities, limits and fragmentation, which the replay does not have, dominate: saved waits say little."
        )
    return text


def _cards(replay: ClusterReplay) -> tuple[Card, ...]:
    return (
        card("Returned", fmt.hours(replay.gpu_hours_returned), "GPU-hours", is_known=True, kind="idle",
             more="Time for which GPUs of suspended jobs were free: an upper bound of the gain."),
        card("Used by other jobs", fmt.hours(replay.gpu_hours_used), "GPU-hours", is_known=True, kind="busy"),
        card("Mean wait saved", _seconds(replay.saved_wait_mean_s),
             f"{replay.earlier:,} jobs earlier, {replay.later:,} later", is_known=True),
        card("Suspended jobs", fmt.count(replay.suspended_jobs), f"of {counted(replay.jobs, 'job')}", is_known=True),
        card("Wakes a day", fmt.number(replay.wakes_per_day, digits=1),
             "" if replay.wake_wait_mean_s is None else f"mean wait for GPUs {fmt.duration(replay.wake_wait_mean_s)}",
             is_known=True),
    )  # fmt: skip


def _findings(replay: ClusterReplay, key: str, *, several: bool) -> list[TraceFinding]:
    """``key``: letters and digits for the names of charts, unlike the name of a cluster."""
    suffix = f": {replay.cluster}" if several else ""
    findings = []
    if replay.sweep:
        charts = (_by_window(replay, key), _by_wakes(replay, key))
        findings.append(TraceFinding(
            f"sweep-{key}", f"Idle time before a suspension{suffix}", (_sweep_text(replay),), charts,
            tables=(_sweep_table(replay, key),), paired=True,
        ))  # fmt: skip
    text = (
        f"Recorded means, and the replays without and with the change on {replay.gpus:,} GPUs ({replay.policy}). "
        f"{fmt.number(replay.throughput_before_per_day, digits=1)} jobs end per day, with the change "
        f"{fmt.number(replay.throughput_after_per_day, digits=1)}."
    )
    tables = (_wait_table(replay, key),)
    findings.append(TraceFinding(f"waits-{key}", f"Waits by partition{suffix}", (text,), tables=tables))
    return findings


def _sweep_text(replay: ClusterReplay) -> str:
    short, long = (
        f"{_window(gain)} returns {_hours(gain.gpu_hours_returned, gain.gpu_hours_returned_interval)} with "
        f"{fmt.number(gain.wakes_per_day, digits=1)} wakes a day"
        for gain in (replay.sweep[0], replay.sweep[-1])
    )
    return f"A window of {short}, one of {long}."


def _window(gain: SuspensionGain) -> str:
    return span(gain.suspend_idle_s or 0.0)


def _series(sweep: Sequence[SuspensionGain]) -> list[Series]:
    return [
        Series("Returned", [gain.gpu_hours_returned for gain in sweep], "idle"),
        Series("Used by other jobs", [gain.gpu_hours_used for gain in sweep], "busy"),
    ]


def _by_window(replay: ClusterReplay, key: str) -> Markup:
    words = Words(f"window-{key}", "GPU-hours by idle time before a suspension", _sweep_text(replay))
    return histogram(words, [_window(gain) for gain in replay.sweep], _series(replay.sweep), unit="GPU-hours",
                     x_label="Idle time before a suspension")  # fmt: skip


def _by_wakes(replay: ClusterReplay, key: str) -> Markup:
    """Draw the hours against the wakes; of windows with as many wakes the one with the most hours."""
    points: dict[float, SuspensionGain] = {}
    for gain in sorted(replay.sweep, key=lambda gain: gain.gpu_hours_returned):
        points[gain.wakes_per_day] = gain
    wakes = sorted(points)
    return lines(
        Words(f"wakes-{key}", "GPU-hours against wakes a day", _sweep_text(replay)), wakes,
        _series([points[index] for index in wakes]), unit="GPU-hours", x_label="Wakes a day",
    )  # fmt: skip


def _sweep_table(replay: ClusterReplay, key: str) -> Table:
    head = ("Idle time", "Returned, h", "95 % interval", "Used, h", "Wakes a day", "Suspended jobs", "Mean wait saved",
            "95 % interval")  # fmt: skip
    rows = {
        _window(gain): (
            fmt.number(gain.gpu_hours_returned, digits=1), _range(gain.gpu_hours_returned_interval, fmt.number),
            fmt.number(gain.gpu_hours_used, digits=1), fmt.number(gain.wakes_per_day, digits=1),
            fmt.count(gain.suspended_jobs), _seconds(gain.saved_wait_mean_s),
            _range(gain.saved_wait_interval_s, _seconds),
        )
        for gain in replay.sweep
    }  # fmt: skip
    return trace_page.numbers(f"sweep-table-{key}", "Replays by idle time before a suspension", head, rows)


def _range(bounds: Bounds, shown: Formatter) -> str:
    if bounds is None:
        return fmt.UNKNOWN
    return f"{shown(bounds[0])} to {shown(bounds[1])}"


def _wait_table(replay: ClusterReplay, key: str) -> Table:
    columns = (
        Column("Partition"), Column("Jobs", "number"), Column("Mean", "number", "recorded"),
        *(Column(name, "number", unit) for unit in ("replayed", "with the change")
          for name in ("Mean", "Median", "p95")),
    )  # fmt: skip
    rows = tuple(
        (Cell("all" if row.partition is None else row.partition or fmt.UNKNOWN, name=True),
         Cell(fmt.count(row.jobs), "number"),
         *(Cell(fmt.duration(value), "number") for value in (
             row.recorded_mean_s, row.before_mean_s, row.before_median_s, row.before_p95_s, row.after_mean_s,
             row.after_median_s, row.after_p95_s)))
        for row in replay.waits
    )  # fmt: skip
    return Table(f"waits-table-{key}", "Waits: recorded, replayed, with the change", columns, rows, sortable=False)


def _recipes(replay: ClusterReplay) -> tuple[tuple[str, str], ...]:
    costs = f"A suspension holds the GPUs for {span(replay.dump_s)}, a restore for {span(replay.restore_s)}"
    level = f"{100 * LEVEL:.0f} % intervals by a bootstrap of whole days ({RESAMPLES:,} resamples)"
    return (
        ("Replay", "The GPU jobs of accounting start again in the order of submission: as they were, and with the "
         "change. A job can use the GPUs of its pool: nodes of its partition with the same GPU model."),
        ("Returned", "GPU-hours for which GPUs of suspended jobs were free."),
        ("Used by other jobs", "GPU-hours in use beyond what would have been free had the suspended jobs kept their "
         "GPUs."),
        *((("In place", "Suspended jobs keep their allocation: other jobs of the queue do not start earlier."),)
          if replay.mode == "inplace" else ()),
        ("Costs", f"{costs} ({replay.costs_from})."),
        ("Intervals", f"{level}; none for one day."),
    )  # fmt: skip
