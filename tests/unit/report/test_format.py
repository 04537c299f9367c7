"""Formatting of numbers, times and names."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from slurm_affinode.report import format as fmt


def plain(text: str) -> str:
    return text.replace(fmt.NBSP, " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"), (math.nan, "unknown"), (math.inf, "unknown"), (0, "0"), (0.0, "0"), (-0.0, "0"),
        (12345.6, "12,346"), (46.34, "46.3"), (7, "7"), (0.0421, "0.042"), (0.000001234, "0.000001"), (-3.25, "-3.2"),
        (999.6, "1,000"),
    ],
)  # fmt: skip
def test_number_has_three_digits_and_thousands_separators(value: float | None, text: str) -> None:
    """Zero is a number; a missing value is unknown."""
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, "unknown"), (0.0, "0 %"), (0.0004, "<0.1 %"), (0.004, "0.4 %"), (0.05, "5 %"), (0.4634, "46 %"),
        (0.994, "99.4 %"), (0.99999, ">99.9 %"), (1.0, "100 %"),
    ],
)  # fmt: skip
def test_percent_is_not_rounded_to_0_or_100(fraction: float | None, text: str) -> None:
    assert plain(fmt.percent(fraction)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"), (0, "0s"), (59.4, "59s"), (60, "1m"), (3599, "59m 59s"), (3600 * 3 + 300, "3h 5m"),
        (7200, "2h"), (3600 * 52, "2d 4h"), (86400 * 7, "7d"),
    ],
)  # fmt: skip
def test_duration_has_at_most_two_units(seconds: float | None, text: str) -> None:
    assert plain(fmt.duration(seconds)) == text


@pytest.mark.parametrize(
    ("kwh", "text"),
    [(None, "unknown"), (0, "0 kWh"), (0.25, "250 Wh"), (12.34, "12.3 kWh"), (25_000, "25 MWh"), (3e6, "3 GWh")],
)
def test_energy_has_a_fitting_unit(kwh: float | None, text: str) -> None:
    """Units range from watt-hours to gigawatt-hours."""
    assert plain(fmt.energy(kwh)) == text


def test_money_has_currency_and_cents_for_small_amounts() -> None:
    """Without a currency only the number is given."""
    assert plain(fmt.money(12.5, "EUR")) == "EUR 12.50"
    assert plain(fmt.money(12345.67, "EUR")) == "EUR 12,346"
    assert fmt.money(3, "") == "3.00"
    assert fmt.money(None, "EUR") == "unknown"


def test_large_memory_time_is_in_tib() -> None:
    """Values below ten TiB h are in GiB h."""
    assert plain(fmt.gib_hours(980)) == "980 GiB h"
    assert plain(fmt.gib_hours(10_240)) == "10 TiB h"
    assert fmt.gib_hours(None) == "unknown"


def test_time_is_shown_in_local_time() -> None:
    at = datetime(2026, 11, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    assert fmt.moment(at, UTC) == "2026-10-31 23:30"
    assert fmt.moment(at, ZoneInfo("Asia/Kolkata")) == "2026-11-01 05:00"
    assert fmt.moment(datetime(2026, 11, 1, tzinfo=UTC), UTC, seconds=True) == "2026-11-01 00:00:00"
    assert fmt.moment(None, UTC) == "unknown"


def test_period_names_the_date_once_if_it_is_one_day() -> None:
    """In Tokyo, 16:00 UTC is on the next day."""
    since, until = datetime(2026, 11, 1, 8, tzinfo=UTC), datetime(2026, 11, 1, 16, tzinfo=UTC)
    assert fmt.period(since, until, UTC) == "2026-11-01 08:00 to 16:00"
    assert fmt.period(since, until, ZoneInfo("Asia/Tokyo")) == "2026-11-01 17:00 to 2026-11-02 01:00"
    assert fmt.period(since, since, UTC, seconds=True) == "2026-11-01 08:00:00 to 08:00:00"


def test_missing_name_differs_from_empty_name() -> None:
    assert fmt.name(None) == "unknown"
    assert fmt.name("") == "(empty)"


def test_long_text_is_truncated_with_ellipsis() -> None:
    """The result has at most the given length, including the ellipsis."""
    assert fmt.clip("abcdef", 6) == "abcdef"
    assert fmt.clip("abcdefg", 6) == "abcde…"
