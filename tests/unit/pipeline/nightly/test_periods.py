"""Calendar periods: local, half-open, complete; and the periods that are due."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.pipeline.report_archive import KINDS, candidates, complete, containing, preceding, trend

UTC_ZONE, OSLO = ZoneInfo("UTC"), ZoneInfo("Europe/Oslo")


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)


def labels(now, zone=UTC_ZONE, rendered=(), since=None):
    return [period.path for period in candidates(now, zone, rendered, since=since)]


def test_last_complete_day_week_and_month_are_due_first():
    assert labels(utc(2026, 11, 20, 4)) == ["day/2026-11-19", "week/2026-W46", "month/2026-10"]


def test_period_ends_at_midnight():
    """At midnight of Monday the 1st, the previous day, week and month have just ended."""
    assert labels(utc(2027, 2, 1)) == ["day/2027-01-31", "week/2027-W04", "month/2027-01"]
    assert labels(utc(2027, 1, 31, 23, 59, 59)) == ["day/2027-01-30", "week/2027-W03", "month/2026-12"]


def test_days_are_local_and_have_23_or_25_hours_at_dst_changes():
    spring, autumn = containing("day", date(2026, 3, 29), OSLO), containing("day", date(2026, 10, 25), OSLO)
    assert (spring.until - spring.since, autumn.until - autumn.since) == (timedelta(hours=23), timedelta(hours=25))
    assert spring.since == utc(2026, 3, 28, 23)
    assert labels(utc(2026, 11, 19, 23, 30), OSLO)[0] == "day/2026-11-19"
    assert labels(utc(2026, 11, 19, 22, 30), OSLO)[0] == "day/2026-11-18"


def test_iso_week_crosses_the_year():
    week = containing("week", date(2027, 1, 2), UTC_ZONE)
    assert (week.label, week.since, week.until) == ("2026-W53", utc(2026, 12, 28), utc(2027, 1, 4))


def test_all_missing_periods_since_a_time_are_due():
    """Those that begin before it, or have a report, are not."""
    rendered = [("day", "2026-11-17"), ("week", "2026-W45")]
    due = labels(utc(2026, 11, 20, 4), rendered=rendered, since=utc(2026, 11, 2))
    days = [f"day/2026-11-{day:02d}" for day in range(2, 20)]  # with a report, the 17th is checked again
    assert due == [*days, "week/2026-W45", "week/2026-W46", "month/2026-10"]
    assert labels(utc(2026, 11, 20, 4), since=utc(2026, 11, 2, 1))[0] == "day/2026-11-03"


def test_missed_days_and_recent_reports_are_candidates():
    rendered = [("day", "2026-11-16"), ("day", "2026-10-01"), ("week", "2026-W46"), ("month", "2026-10")]
    assert labels(utc(2026, 11, 20, 4), rendered=rendered) == [
        "day/2026-11-16", "day/2026-11-17", "day/2026-11-18", "day/2026-11-19", "week/2026-W46", "month/2026-10",
    ]  # fmt: skip


def test_only_last_periods_are_due_after_a_year():
    assert labels(utc(2026, 11, 20, 4), rendered=[("day", "2025-11-19")]) == labels(utc(2026, 11, 20, 4))


@pytest.mark.parametrize("kind", KINDS)
@given(seconds=st.integers(946_684_800, 2_840_140_800), zone=st.sampled_from([UTC_ZONE, OSLO]))
def test_complete_periods_are_contiguous(kind, seconds, zone):
    """They end at or before now, each where the next begins, and contain their own days."""
    now = datetime.fromtimestamp(seconds, UTC)
    result = complete(kind, now, zone, 6)
    assert result[0].until <= now < containing(kind, result[0].until.astimezone(zone).date(), zone).until
    assert [period.since for period in result[:-1]] == [period.until for period in result[1:]]
    for period in result:
        assert containing(kind, period.since.astimezone(zone).date(), zone) == period
        assert containing(kind, (period.until - timedelta(seconds=1)).astimezone(zone).date(), zone) == period


def record(kind: str, label: str, since: datetime, until: datetime, **summary: float | str) -> ReportRecord:
    return ReportRecord(kind, label, since, until, f"{kind}/{label}", until, "", {"currency": "EUR", **summary})


def weeks(count: int) -> list[ReportRecord]:
    """Return the records of ``count`` weeks before 2 November 2026, newest first, with their number as hours."""
    begin = datetime(2026, 11, 2, tzinfo=UTC)
    since = [begin - timedelta(weeks=number) for number in range(1, count + 1)]
    return [record("week", f"w{n}", at, at + timedelta(days=7), hours=n) for n, at in enumerate(since, 1)]


def test_trend_has_the_eleven_periods_before():
    """Oldest first, without texts; later ones and those of another kind are left out."""
    begin = datetime(2026, 11, 2, tzinfo=UTC)
    query = WasteQuery(begin, begin + timedelta(days=7))
    later = record("week", "later", begin, begin + timedelta(days=7))
    other = record("day", "2026-11-01", begin - timedelta(days=1), begin)
    result = trend([later, other, *weeks(20)], query)
    assert result is not None
    assert result.kind == "week"
    assert [period.total for period in result.periods] == [{"hours": n} for n in range(11, 0, -1)]


@pytest.mark.parametrize(("days", "kind"), [(1, "day"), (7, "week"), (28, "month"), (30, "month"), (31, "month")])
def test_kind_of_the_trend_is_that_of_the_interval(days, kind):
    begin = datetime(2026, 11, 2, tzinfo=UTC)
    earlier = record(kind, "x", begin - timedelta(days=days), begin)
    assert trend([earlier], WasteQuery(begin, begin + timedelta(days=days))).kind == kind


def test_there_is_no_trend_of_other_intervals_and_of_parts():
    """The stored reports are about everything, and a fortnight cannot be compared with weeks."""
    begin = datetime(2026, 11, 2, tzinfo=UTC)
    week = begin + timedelta(days=7)
    assert trend([], WasteQuery(begin, week)) is None
    assert trend(weeks(3), WasteQuery(begin, begin + timedelta(days=14))) is None
    assert trend(weeks(3), WasteQuery(begin, week, users=("bob",))) is None


def test_intervals_before_a_period_are_calendar_periods() -> None:
    """Months have different lengths, and a day may have 25 hours."""
    zone = ZoneInfo("Europe/Oslo")
    month = containing("month", date(2026, 11, 5), zone)
    kind, before = preceding(WasteQuery(month.since, month.until, zone=zone), 2)
    assert (kind, [period.label for period in before]) == ("month", ["2026-10", "2026-09"])
    day = containing("day", date(2026, 10, 26), zone)
    _, (long,) = preceding(WasteQuery(day.since, day.until, zone=zone), 1)
    assert (long.until - long.since, long.until) == (timedelta(hours=25), day.since)


def test_intervals_before_another_interval_are_as_long() -> None:
    since = datetime(2026, 11, 2, 6, tzinfo=UTC)
    kind, before = preceding(WasteQuery(since, since + timedelta(hours=12)), 2)
    assert (kind, [period.label for period in before]) == ("interval", ["2026-11-01 18:00", "2026-11-01 06:00"])
    assert [period.until for period in before] == [since, since - timedelta(hours=12)]
    kind, (week,) = preceding(WasteQuery(since, since + timedelta(days=7)), 1)
    assert (kind, week.label, week.until - week.since) == ("week", "2026-10-26 06:00", timedelta(days=7))
