"""Numbers, times and names as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_a_number_has_about_three_digits_and_thousands_are_parted(value: float | None, text: str) -> None:
    """Zero is a number; what is missing is unknown."""
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, "unknown"), (0.0, "0 %"), (0.0004, "<0.1 %"), (0.004, "0.4 %"), (0.05, "5 %"), (0.4634, "46 %"),
        (0.994, "99.4 %"), (0.99999, ">99.9 %"), (1.0, "100 %"),
    ],
)  # fmt: skip
def test_a_share_never_looks_like_none_or_all_unless_it_is(fraction: float | None, text: str) -> None:
    """A small share does not read 0 %, nor a large one 100 %."""
    assert plain(fmt.percent(fraction)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"), (0, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "1 h"), (3600 * 3 + 300, "3 h 05 min"),
        (7200, "2 h"), (3600 * 52, "2 d 4 h"), (86400 * 7, "7 d"),
    ],
)  # fmt: skip
def test_a_duration_is_given_in_units_that_fit(seconds: float | None, text: str) -> None:
    """Two units at most."""
    assert plain(fmt.duration(seconds)) == text


@pytest.mark.parametrize(
    ("kwh", "text"),
    [(None, "unknown"), (0, "0 kWh"), (0.25, "250 Wh"), (12.34, "12.3 kWh"), (25_000, "25 MWh"), (3e6, "3 GWh")],
)
def test_energy_is_given_in_the_unit_that_fits(kwh: float | None, text: str) -> None:
    """From watt-hours to gigawatt-hours."""
    assert plain(fmt.energy(kwh)) == text


def test_money_has_its_currency_and_cents_only_where_they_matter() -> None:
    """Without a currency the number stands alone."""
    assert plain(fmt.money(12.5, "EUR")) == "EUR 12.50"
    assert plain(fmt.money(12345.67, "EUR")) == "EUR 12,346"
    assert fmt.money(3, "") == "3.00"
    assert fmt.money(None, "EUR") == "unknown"


def test_memory_time_turns_into_tebibytes_when_large() -> None:
    """GiB h up to ten TiB h."""
    assert plain(fmt.gib_hours(980)) == "980 GiB h"
    assert plain(fmt.gib_hours(10_240)) == "10 TiB h"
    assert fmt.gib_hours(None) == "unknown"


def test_a_moment_is_shown_in_local_time() -> None:
    """Whatever zone it came in."""
    at = datetime(2026, 11, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    assert fmt.moment(at, UTC) == "2026-10-31 23:30"
    assert fmt.moment(at, ZoneInfo("Asia/Kolkata")) == "2026-11-01 05:00"
    assert fmt.moment(datetime(2026, 11, 1, tzinfo=UTC), UTC, seconds=True) == "2026-11-01 00:00:00"
    assert fmt.moment(None, UTC) == "unknown"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"), ("a\x1b[31m", r"a\x1b[31m"), ("a\nb\tc\r", r"a\nb\tc\r"), ("\x7f\x85", r"\x7f\x85"),
        ("a\u202eb", "a[U+202E]b"), ("a\u200bb", "a[U+200B]b"), ("\ufeff", "[U+FEFF]"), ("\u2028", "[U+2028]"),
        ("née 計算", "née 計算"), ("👩\u200d🔬", "👩\u200d🔬"), ("a\u00a0b", "a b"), ("\udc80", "[U+DC80]"),
    ],
)  # fmt: skip
def test_a_name_cannot_hide_or_reorder_text(raw: str, shown: str) -> None:
    """Controls, bidirectional overrides, zero-width characters and broken bytes are seen; scripts and emoji stay."""
    assert fmt.visible(raw) == shown


@given(st.text())
def test_a_visible_name_has_no_control_and_can_be_encoded(raw: str) -> None:
    """Whatever a user calls a job."""
    shown = fmt.visible(raw)
    shown.encode("utf-8")
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u202a\u202b\u202d\u202e\u2066\u2067" for c in shown)


def test_no_name_and_an_empty_name_are_told_apart() -> None:
    """``None`` is unknown; an empty text is empty."""
    assert fmt.name(None) == "unknown"
    assert fmt.name("") == "(empty)"


def test_a_long_text_is_cut_with_an_ellipsis() -> None:
    """The result has the asked length at most."""
    assert fmt.clip("abcdef", 6) == "abcdef"
    assert fmt.clip("abcdefg", 6) == "abcde…"
