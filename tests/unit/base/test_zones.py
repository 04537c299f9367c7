"""Local time: intervals begin by the local clock, also on days on which it changes."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base import times

BERLIN, ST_JOHNS, KOLKATA = (ZoneInfo(name) for name in ("Europe/Berlin", "America/St_Johns", "Asia/Kolkata"))
HOUR, DAY = 3600, 86400


def of_day(zone: ZoneInfo, year: int, month: int, day: int, width_s: int) -> list[datetime]:
    begin = datetime(year, month, day, tzinfo=zone)
    return times.edges(begin.astimezone(UTC), (begin + timedelta(days=1)).astimezone(UTC), width_s, zone)


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        (BERLIN, (2026, 3, 29), 23),
        (BERLIN, (2026, 10, 25), 25),
        (BERLIN, (2026, 6, 1), 24),
        (ST_JOHNS, (2026, 3, 8), 23),
        (ST_JOHNS, (2026, 11, 1), 25),
        (KOLKATA, (2026, 3, 29), 24),
    ],
)
def test_edges_of_a_day_follow_the_local_clock(zone: ZoneInfo, day: tuple[int, int, int], hours: int) -> None:
    """One interval per elapsed hour, each from a full local hour; one per day, from midnight to midnight."""
    result = of_day(zone, *day, HOUR)
    assert len(result) == hours + 1
    assert {b - a for a, b in itertools.pairwise(result)} == {timedelta(hours=1)}
    assert {at.astimezone(zone).minute for at in result} == {0}
    midnights = of_day(zone, *day, DAY)
    assert [at.astimezone(zone).hour for at in midnights] == [0, 0]
    assert midnights[1] - midnights[0] == timedelta(hours=hours)


def test_edges_of_six_hours_absorb_the_change_of_the_clock() -> None:
    """The six hours in which the clock changes are an hour shorter or longer."""
    spring, autumn = of_day(BERLIN, 2026, 3, 29, 6 * HOUR), of_day(BERLIN, 2026, 10, 25, 6 * HOUR)
    assert [(b - a) / timedelta(hours=1) for a, b in itertools.pairwise(spring)] == [5, 6, 6, 6]
    assert [(b - a) / timedelta(hours=1) for a, b in itertools.pairwise(autumn)] == [7, 6, 6, 6]


def test_edges_of_a_week_begin_on_monday() -> None:
    """A week begins on Monday at local midnight."""
    edges = times.edges(datetime(2026, 3, 27, tzinfo=UTC), datetime(2026, 3, 31, tzinfo=UTC), 7 * DAY, BERLIN)
    assert [times.shown(at, BERLIN) for at in edges] == ["2026-03-23 00:00", "2026-03-30 00:00", "2026-04-06 00:00"]


def test_edges_where_midnight_is_skipped_begin_the_day_at_the_change() -> None:
    """In Beirut the clock goes from 00:00 to 01:00: the day begins at 01:00."""
    beirut = ZoneInfo("Asia/Beirut")
    day = times.edges(datetime(2026, 3, 29, 3, tzinfo=UTC), datetime(2026, 3, 29, 4, tzinfo=UTC), DAY, beirut)
    assert [times.shown(at, beirut) for at in day] == ["2026-03-29 01:00", "2026-03-30 00:00"]


@given(
    st.integers(1_290_000_000, 1_890_000_000),
    st.integers(1, 5 * DAY),
    st.sampled_from([15, 60, 900, HOUR, 6 * HOUR, DAY, 2 * DAY, 7 * DAY]),
    st.sampled_from(["Europe/Berlin", "America/St_Johns", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"]),
)
def test_edges_enclose_the_interval_in_order(second: int, span_s: int, width_s: int, name: str) -> None:
    """They cover the interval without gaps, and none is outside of it."""
    since = datetime.fromtimestamp(second, UTC)
    until = since + timedelta(seconds=min(span_s, 300 * width_s))
    edges = times.edges(since, until, width_s, ZoneInfo(name))
    assert edges == sorted(set(edges))
    assert edges[0] <= since < edges[1]
    assert edges[-2] < until <= edges[-1]


def test_printed_times_distinguish_the_repeated_hour() -> None:
    """The zone is printed only if the local time occurs twice."""
    first = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    assert [times.shown(first + timedelta(hours=h), BERLIN) for h in (-1, 0, 1, 2)] == [
        "2026-10-25 01:30", "2026-10-25 02:30 CEST", "2026-10-25 02:30 CET", "2026-10-25 03:30",
    ]  # fmt: skip
    assert times.shown(datetime(2026, 1, 1, tzinfo=UTC), KOLKATA, seconds=True) == "2026-01-01 05:30:00"


def test_time_for_a_text_has_the_name_of_its_zone() -> None:
    moment = datetime(2026, 7, 1, 6, 5, 4, 987_654, tzinfo=UTC)
    assert times.named(moment, BERLIN) == "2026-07-01 08:05 CEST"
    assert times.utc(moment.astimezone(BERLIN)) == "2026-07-01T06:05:04Z"
    assert times.utc(moment.astimezone(KOLKATA), "milliseconds") == "2026-07-01T06:05:04.987Z"


@pytest.mark.parametrize(
    ("width_s", "minutes"), [(HOUR, [0, 60, 120, 180, 240]), (HOUR // 2, [0, 30, 60, 90, 120, 150, 180, 210, 240])]
)
def test_repeated_hour_is_two_intervals(width_s: int, minutes: list[int]) -> None:
    """From 01:00 to 04:00 of the day on which the clock goes back, four hours elapse."""
    first = datetime(2026, 10, 24, 23, tzinfo=UTC)
    edges = times.edges(first, first + timedelta(hours=4), width_s, BERLIN)
    assert [(at - first) / timedelta(minutes=1) for at in edges] == minutes


def test_edge_at_either_end_of_the_interval_is_its_end() -> None:
    """Other edges beyond it are left out; an interval between two edges has both."""
    first = datetime(2026, 6, 1, 10, tzinfo=UTC)
    hours = [first + timedelta(hours=hour) for hour in range(3)]
    assert times.edges(hours[0], hours[2], HOUR, UTC) == hours
    late = timedelta(seconds=1)
    assert times.edges(hours[0] + late, hours[2] - late, HOUR, UTC) == hours
    assert times.edges(hours[0] - late, hours[1] + late, HOUR, UTC) == [first - timedelta(hours=1), *hours]
