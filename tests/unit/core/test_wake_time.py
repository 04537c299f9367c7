"""Wake times of suspended jobs."""

from __future__ import annotations

from datetime import UTC, datetime
from time import tzset
from zoneinfo import ZoneInfo

import pytest

from slurm_affinode.core.wake_time import backoff_s, wake_time

ASLEEP = datetime(2026, 11, 20, 15, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now+90", "2026-11-20T15:31:30"),
        ("now+2hours", "2026-11-20T17:30:00"),
        ("now+1day", "2026-11-21T15:30:00"),
        ("now+5seconds", "2026-11-20T15:30:05"),
        ("now+2minutes", "2026-11-20T15:32:00"),
        ("now+1week", "2026-11-27T15:30:00"),
        ("15m", "2026-11-20T15:45:00"),
        ("2h", "2026-11-20T17:30:00"),
        ("90s", "2026-11-20T15:31:30"),
        ("1d", "2026-11-21T15:30:00"),
        ("9:05", "2026-11-21T09:05:00"),
        ("2026-12-01T8:15", "2026-12-01T08:15:00"),
        ("16:00", "2026-11-20T16:00:00"),
        ("15:30", "2026-11-21T15:30:00"),
        ("06:00:30", "2026-11-21T06:00:30"),
        ("noon", "2026-11-21T12:00:00"),
        ("midnight", "2026-11-21T00:00:00"),
        ("teatime", "2026-11-20T16:00:00"),
        ("fika", "2026-11-21T15:00:00"),
        ("tomorrow", "2026-11-21T00:00:00"),
        ("2026-12-01", "2026-12-01T00:00:00"),
        ("2026-12-01T08:15", "2026-12-01T08:15:00"),
    ],
)
def test_times_are_interpreted_as_by_slurm(text, expected):
    """Words, clock times, dates, and durations from the time of suspension."""
    assert wake_time(text, ASLEEP.timestamp(), UTC) == datetime.fromisoformat(expected).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "text", ["", "auto", "25:00", "now+", "now+3fortnights", "2026-13-01", "2026-02-29", "30", "now+999999999weeks"]
)
def test_invalid_time_is_an_error(text):
    with pytest.raises(ValueError, match=r"time|month|hour|day"):
        wake_time(text, ASLEEP.timestamp(), UTC)


@pytest.mark.parametrize(
    ("text", "hours"), [("06:00", 15), ("tomorrow", 8), ("2026-10-26T06:00", 39), ("now+1day", 24)]
)
def test_clock_times_have_the_offset_of_their_day(text, hours, monkeypatch):
    """Clocks are set back in the night of the suspension; the time zone is that of the machine or a given one."""
    berlin = ZoneInfo("Europe/Berlin")
    asleep = datetime(2026, 10, 24, 16, 0, tzinfo=berlin).timestamp()
    assert wake_time(text, asleep, berlin) == asleep + hours * 3600
    monkeypatch.setenv("TZ", "Europe/Berlin")
    tzset()
    try:
        assert wake_time(text, asleep) == asleep + hours * 3600
    finally:
        monkeypatch.undo()
        tzset()


def test_latest_wake_time_is_in_the_year_9999() -> None:
    """Later ones are no valid dates."""
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    assert wake_time("1s", last - 1) == last
    with pytest.raises(ValueError, match="1 seconds from now is not a valid time"):
        wake_time("1s", last)


@pytest.mark.parametrize(
    ("attempts", "expected_s"), [(0, 10), (1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (7, 300), (10**6, 300)]
)
def test_pause_doubles_with_each_attempt_up_to_a_limit(attempts: int, expected_s: float) -> None:
    assert backoff_s(10.0, 300.0, attempts) == expected_s


def test_pause_is_a_number_after_many_attempts() -> None:
    """Also without a limit."""
    assert backoff_s(1.0, float("inf"), 61) == backoff_s(1.0, float("inf"), 10**6) == 2.0**60
