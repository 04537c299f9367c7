"""The working hours of a site: how much of an interval, and of its GPU-hours, is inside and outside of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

import numpy as np
import polars as pl

from slurm_affinode.analysis.segments import Ints
from slurm_affinode.base.times import epoch_ms

SHORTEST = timedelta(days=1)
LONGEST = timedelta(days=100)
"""Intervals that are divided by working hours: in longer ones, each GPU would be cut into hundreds of parts."""
WHEN = ("working", "other")
HOURS: dict[str, pl.DataType] = {
    "when": pl.String(),
    "hours": pl.Float64(),
    "gpu_hours_allocated": pl.Float64(),
    "gpu_hours_idle": pl.Float64(),
    "gpu_hours_low": pl.Float64(),
    "gpu_hours_busy": pl.Float64(),
    "gpu_hours_unknown": pl.Float64(),
}
"""Columns of ``WasteResult.working_hours``: ``when`` is one of ``WHEN``; ``hours``: the time of that kind in the
interval. Hours by state are None if nothing was measured."""


@dataclass(frozen=True, slots=True)
class WorkingTime:
    """The days and hours of work, by the local clock."""

    days: tuple[int, ...]
    """0: Monday. Not empty."""
    begin_min: int
    """Minutes after midnight."""
    end_min: int
    """Minutes after midnight, larger than ``begin_min``; 1440: midnight."""

    @property
    def clock(self) -> tuple[str, str]:
        """Begin and end as ``08:00``."""
        begin, end = (f"{minutes // 60:02d}:{minutes % 60:02d}" for minutes in (self.begin_min, self.end_min))
        return begin, end

    def spans(self, since: datetime, until: datetime, zone: tzinfo) -> list[tuple[datetime, datetime]]:
        """Return the working hours that overlap the interval, in order; they may extend beyond it."""
        day = since.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None) - timedelta(days=1)
        last = until.astimezone(zone).replace(tzinfo=None)
        spans = []
        while day <= last:
            if day.weekday() in self.days:
                begin, end = (
                    (day + timedelta(minutes=minutes)).replace(tzinfo=zone)
                    for minutes in (self.begin_min, self.end_min)
                )
                if begin < until and end > since and begin.timestamp() < end.timestamp():
                    spans.append((begin, end))
            day += timedelta(days=1)
        return spans


def edges(working: WorkingTime, since: datetime, until: datetime, zone: tzinfo) -> tuple[Ints, list[bool]] | None:
    """Return the times (ms) at which working hours begin and end in the interval, with its own begin and end.

    And for each part between two of them whether it is inside. ``None`` if the interval is shorter than ``SHORTEST`` or
    longer than ``LONGEST``, or has only one kind.
    """
    if not SHORTEST <= until - since <= LONGEST:
        return None
    low, high = epoch_ms(since), epoch_ms(until)
    spans = [(epoch_ms(begin), epoch_ms(end)) for begin, end in working.spans(since, until, zone)]
    times = sorted({low, high, *(time for span in spans for time in span if low < time < high)})
    starts = [begin for begin, _ in spans]
    inside = [(position := bisect_right(starts, time) - 1) >= 0 and time < spans[position][1] for time in times[:-1]]
    if len(set(inside)) < len(WHEN):
        return None
    return np.array(times, np.int64), inside


def divided(hours: pl.DataFrame, times: Ints, inside: list[bool]) -> pl.DataFrame:
    """Return ``HOURS``. ``hours``: a row for each part between ``times`` (``over_time.over_time``)."""
    placed = hours.with_columns(
        pl.Series("when", [WHEN[0] if part else WHEN[1] for part in inside]),
        pl.Series("hours", np.diff(times) / 3_600_000.0),
    )
    states = ("gpu_hours_idle", "gpu_hours_low", "gpu_hours_busy")
    sums = placed.group_by("when").agg(pl.col("hours", "gpu_hours_allocated", "gpu_hours_unknown", *states).sum())
    measured = (pl.sum_horizontal(states) > 0) | (pl.col("gpu_hours_allocated") == 0)
    state_sums = sums.with_columns(pl.when(measured).then(pl.col(name)).alias(name) for name in states)
    rows = pl.DataFrame({"when": WHEN}).join(state_sums, on="when", maintain_order="left")
    return rows.select(pl.col(name).cast(dtype) for name, dtype in HOURS.items())
