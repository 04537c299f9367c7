"""Hours inside and outside of working hours: local clock, clock changes, sums."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest

from slurm_affinode.analysis.working_hours import HOURS, WorkingTime, divided, edges

from .waste_cases import HOUR, Analysed, Jobs, Rows, every

OFFICE = WorkingTime((0, 1, 2, 3, 4), 8 * 60, 18 * 60)
DAY = 24 * HOUR
MONDAY = datetime(2026, 11, 2, tzinfo=UTC)


def inside_h(working: WorkingTime, since: datetime, until: datetime, zone: str = "UTC") -> float | None:
    """Return the working hours in an interval."""
    result = edges(working, since, until, ZoneInfo(zone))
    if result is None:
        return None
    times, inside = result
    return float(np.diff(times)[np.array(inside)].sum() / 3_600_000)


@pytest.mark.parametrize(
    ("working", "days", "zone", "hours"),
    [
        (OFFICE, 7, "UTC", 50),
        (OFFICE, 1, "UTC", 10),
        (OFFICE, 7, "Asia/Kolkata", 50),
        (OFFICE, 7, "America/New_York", 50),
        (WorkingTime((5, 6), 0, 1440), 7, "UTC", 48),
        (WorkingTime((6,), 8 * 60 + 30, 9 * 60), 14, "UTC", 1),
    ],
)
def test_hours_follow_days_and_clock(working: WorkingTime, days: int, zone: str, hours: float) -> None:
    """A whole week has the same hours in each zone, although its first and last working hours may be cut."""
    assert inside_h(working, MONDAY, MONDAY + timedelta(days=days), zone) == hours


def test_interval_cuts_working_hours() -> None:
    """From Monday 12:00 to Tuesday 12:30: 6 hours, and 4.5."""
    assert inside_h(OFFICE, MONDAY + timedelta(hours=12), MONDAY + timedelta(hours=36.5)) == 10.5


@pytest.mark.parametrize(("day", "hours"), [(datetime(2026, 3, 29), 2), (datetime(2026, 10, 25), 4)])  # noqa: DTZ001
def test_clock_changes_shorten_and_lengthen_hours(day: datetime, hours: float) -> None:
    """01:00 to 04:00 on the Sundays on which the clock is changed."""
    zone = ZoneInfo("Europe/Berlin")
    since, until = ((day + timedelta(days=n)).replace(tzinfo=zone).astimezone(UTC) for n in (0, 1.5))
    assert inside_h(WorkingTime((6,), 60, 240), since, until, "Europe/Berlin") == hours


@pytest.mark.parametrize(
    ("since", "until"),
    [
        (MONDAY, MONDAY + timedelta(hours=23)),
        (MONDAY, MONDAY + timedelta(days=101)),
        (MONDAY + timedelta(days=5), MONDAY + timedelta(days=7)),
    ],
)
def test_short_long_and_uniform_intervals_are_not_divided(since: datetime, until: datetime) -> None:
    """Less than a day, more than 100 days, a weekend."""
    assert inside_h(OFFICE, since, until) is None


def test_idle_hours_are_divided_to_the_minute(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A GPU is busy from Monday 08:00 to 17:30, and idle until the end of the job on Tuesday 08:15."""
    rows = samples(every(0, DAY + 900), util_pct=lambda t: 90 if t < 9.5 * HOUR else 0)
    outcome = jobs({"start": 0, "end": DAY + 900})
    result = analysed(rows, outcome, until=3 * DAY, working=OFFICE)
    assert result.working_hours is not None
    assert dict(result.working_hours.schema) == HOURS
    inside, outside = result.working_hours.iter_rows(named=True)
    assert (inside["when"], inside["hours"], outside["hours"]) == ("working", 30, 42)
    assert inside["gpu_hours_busy"] == pytest.approx(9.5)
    assert inside["gpu_hours_idle"] == pytest.approx(0.5 + 0.25)
    assert (outside["gpu_hours_busy"], outside["gpu_hours_idle"]) == (pytest.approx(0), pytest.approx(14))


def test_division_changes_no_other_figure(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two jobs have a GPU each, and a third has none that was measured; the two kinds add up to the total."""
    rows = samples(every(0, 3 * DAY, 600), util_pct=lambda t: 90 * (t // 7000 % 2), job="1")
    rows += samples(every(0, 3 * DAY, 600), util_pct=lambda t: 90 * (t // 9000 % 2), job="2", uuid="GPU-1", index=1)
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": 2 * DAY},
        {"job_id": 2, "start": HOUR, "end": 2.5 * DAY, "user": "bob"},
        {"job_id": 3, "start": 30 * HOUR, "end": 50 * HOUR, "node_list": "n2"},
    )
    plain = analysed(rows, outcome, until=3 * DAY)
    result = analysed(rows, outcome, until=3 * DAY, working=OFFICE)
    assert plain.working_hours is None
    for name in ("allocated", "idle", "busy", "unknown"):
        assert result.total[f"gpu_hours_{name}"] == pytest.approx(plain.total[f"gpu_hours_{name}"])
    numbers = [name for name, dtype in plain.over_time.schema.items() if dtype.is_numeric()]
    assert plain.total["gpu_hours_idle"]
    assert np.allclose(
        result.over_time.select(numbers).to_numpy(), plain.over_time.select(numbers).to_numpy(), equal_nan=True
    )
    assert result.working_hours is not None
    for name in numbers:
        assert result.working_hours[name].sum() == pytest.approx(plain.over_time[name].sum())


def test_unmeasured_hours_are_unknown(analysed: Analysed, jobs: Jobs) -> None:
    result = analysed([], jobs({"start": 0, "end": DAY}), until=2 * DAY, working=OFFICE)
    assert result.working_hours is not None
    assert result.working_hours["gpu_hours_allocated"].to_list() == [pytest.approx(10), pytest.approx(14)]
    assert result.working_hours["gpu_hours_idle"].null_count() == 2


def test_kind_without_a_measurement_is_unknown() -> None:
    """Hours of a kind are unknown if no part of it was measured."""
    states = ("idle", "low", "busy")
    # The first part has no allocated time, and so no idle time; the third one was not measured.
    hours = pl.DataFrame(
        {"gpu_hours_allocated": [0.0, 1.0, 2.0], "gpu_hours_unknown": [0.0, 0.0, 2.0]}
        | {f"gpu_hours_{state}": [0.0, 1.0 if state == "idle" else 0.0, None] for state in states},
        schema_overrides={f"gpu_hours_{state}": pl.Float64() for state in states},
    )
    times = np.array([0, 3_600_000, 7_200_000, 10_800_000], np.int64)
    made = divided(hours, times, [True, False, True])
    assert made["gpu_hours_idle"].to_list() == [None, 1.0]
    assert made["hours"].to_list() == [2.0, 1.0]
