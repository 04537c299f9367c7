"""Times at which a suspended job is to wake."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from slurm_affinode.core.waketime import wake_time

ASLEEP = datetime(2026, 11, 20, 15, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now+90", "2026-11-20T15:31:30"),
        ("now+2hours", "2026-11-20T17:30:00"),
        ("now+1day", "2026-11-21T15:30:00"),
        ("2h", "2026-11-20T17:30:00"),
        ("90s", "2026-11-20T15:31:30"),
        ("1d", "2026-11-21T15:30:00"),
        ("9:05", "2026-11-21T09:05:00"),
        ("2026-12-01T8:15", "2026-12-01T08:15:00"),
        ("16:00", "2026-11-20T16:00:00"),
        ("15:30", "2026-11-21T15:30:00"),
        ("06:00:30", "2026-11-21T06:00:30"),
        ("midnight", "2026-11-21T00:00:00"),
        ("teatime", "2026-11-20T16:00:00"),
        ("fika", "2026-11-21T15:00:00"),
        ("tomorrow", "2026-11-21T00:00:00"),
        ("2026-12-01", "2026-12-01T00:00:00"),
        ("2026-12-01T08:15", "2026-12-01T08:15:00"),
    ],
)
def test_times_are_those_that_slurm_would_take(text, expected):
    """Words, clock times, dates, and spans from the moment the job fell asleep."""
    assert wake_time(text, ASLEEP) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "text", ["", "auto", "25:00", "now+", "now+3fortnights", "2026-13-01", "2026-02-29", "30", "now+999999999weeks"]
)
def test_what_is_no_time_is_an_error(text):
    with pytest.raises(ValueError, match=r"time|month|hour|day"):
        wake_time(text, ASLEEP)
