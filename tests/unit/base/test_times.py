"""Times as users type them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.times import epoch_ms, parse_hours, parse_span_s, parse_when
from slurm_affinode.cli.options import When

NOW = datetime(2026, 11, 9, 12, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h30m", 9000), ("7d", 604800), ("1w", 604800), ("1.5h", 5400), (" 2H ", 7200)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    """Units range from seconds to weeks, and can be combined."""
    assert parse_span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d7", "1y", "-3d", "7 days"])
def test_invalid_duration_is_refused(text: str) -> None:
    """A number without a unit is refused rather than guessed."""
    with pytest.raises(AffinodeError, match="not a span"):
        parse_span_s(text)


@pytest.mark.parametrize(
    ("text", "minutes"), [("08:00-18:00", (480, 1080)), ("0:00-24:00", (0, 1440)), (" 7:30-7:31 ", (450, 451))]
)
def test_parts_of_a_day_are_parsed(text: str, minutes: tuple[int, int]) -> None:
    assert parse_hours(text) == minutes


@pytest.mark.parametrize("text", ["", "8-18", "08:00", "18:00-08:00", "08:00-08:00", "08:60-09:00", "08:00-24:01"])
def test_invalid_part_of_a_day_is_refused(text: str) -> None:
    """Hours beyond midnight are refused rather than guessed."""
    with pytest.raises(AffinodeError, match="not a part of a day"):
        parse_hours(text)


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("now", NOW),
        ("7d", NOW - timedelta(days=7)),
        ("2026-11-01", datetime(2026, 10, 31, 23, tzinfo=UTC)),
        ("2026-11-01T08:00", datetime(2026, 11, 1, 7, tzinfo=UTC)),
        ("2026-11-01T08:00+05:00", datetime(2026, 11, 1, 3, tzinfo=UTC)),
        ("2026-11-01T08:00:00Z", datetime(2026, 11, 1, 8, tzinfo=UTC)),
        ("today", datetime(2026, 11, 8, 23, tzinfo=UTC)),
        ("yesterday", datetime(2026, 11, 7, 23, tzinfo=UTC)),
        ("1900-01-02", datetime(1900, 1, 1, 23, tzinfo=UTC)),
        ("2999-12-31", datetime(2999, 12, 30, 23, tzinfo=UTC)),
    ],
)
def test_times_are_parsed(text: str, when: datetime) -> None:
    """Words, durations before now, and ISO times; without an offset they are in the given time zone."""
    parsed = parse_when(text, now=NOW + timedelta(seconds=text == "today"), zone=ZoneInfo("Europe/Oslo"))
    assert (parsed, parsed.tzinfo) == (when, UTC)


@pytest.mark.parametrize("text", ["0001-01-01", "9999-12-31", "99999999d", "999999999999999999w", "3000-01-02"])
def test_time_out_of_range_is_refused(text: str) -> None:
    """Arithmetic with it would overflow later."""
    with pytest.raises(AffinodeError, match="is not a time between 1900 and 2999"):
        parse_when(text, now=NOW, zone=ZoneInfo("Europe/Oslo"))
    with pytest.raises(AffinodeError, match="is not a time between 1900 and 2999"):
        parse_when(text, now=NOW, zone=None)


@pytest.fixture
def in_oslo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone of the machine."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Oslo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_oslo")
@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("2026-07-01", datetime(2026, 6, 30, 22, tzinfo=UTC)),
        ("2026-11-01T08:00", datetime(2026, 11, 1, 7, tzinfo=UTC)),
        ("yesterday", datetime(2026, 11, 7, 23, tzinfo=UTC)),
    ],
)
def test_local_time_has_the_offset_of_its_day(text: str, when: datetime) -> None:
    """A day of July that is typed in November begins at midnight in summer time."""
    assert parse_when(text, now=NOW, zone=None) == when
    assert text == "yesterday" or When().convert(text, None, None) == when, "as the commands do"


def test_invalid_time_is_refused() -> None:
    """The hint has valid forms."""
    with pytest.raises(AffinodeError, match="'soon' is not a time") as refused:
        parse_when("soon", now=NOW)
    assert "7d" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("moment", "milliseconds"),
    [
        (datetime(1970, 1, 1, 0, 0, 1, 1999, tzinfo=UTC), 1001),
        (datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=UTC), -1),
        (datetime(2026, 11, 9, 13, 30, tzinfo=ZoneInfo("Europe/Oslo")), 1_794_227_400_000),
    ],
)
def test_milliseconds_are_rounded_down(moment: datetime, milliseconds: int) -> None:
    assert epoch_ms(moment) == milliseconds
