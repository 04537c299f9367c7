"""Calendar periods in a site's own zone: which are complete, which are due. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

KINDS = ("day", "week", "month")

CATCH_UP = {"day": 31, "week": 5, "month": 3}
"""Periods that were missed are made up for: as many of each kind, no more."""

RECHECK = {"day": 9, "week": 3, "month": 2}
"""As many of the latest complete periods are looked at again: late data makes their report anew."""


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar day, ISO week or month."""

    kind: str
    """A word of ``KINDS``."""
    label: str
    """``2026-11-20``, ``2026-W47``, ``2026-11``."""
    since: datetime
    """Local midnight, as UTC."""
    until: datetime
    """The local midnight that ends it, as UTC; 23 or 25 hours after ``since`` on some days."""

    @property
    def path(self) -> str:
        """Directory of its report, below the root of the reports."""
        return f"{self.kind}/{self.label}"


def containing(kind: str, day: date, zone: ZoneInfo) -> Period:
    """The period of ``kind`` that ``day`` lies in."""
    if kind == "day":
        return _period(kind, day.isoformat(), day, day + timedelta(days=1), zone)
    if kind == "week":
        monday = day - timedelta(days=day.weekday())
        year, week, _ = day.isocalendar()
        return _period(kind, f"{year}-W{week:02d}", monday, monday + timedelta(days=7), zone)
    first = day.replace(day=1)
    return _period(kind, f"{first:%Y-%m}", first, (first + timedelta(days=32)).replace(day=1), zone)


def _period(kind: str, label: str, first: date, after: date, zone: ZoneInfo) -> Period:
    since, until = (datetime.combine(day, time(), zone).astimezone(UTC) for day in (first, after))
    return Period(kind, label, since, until)


def complete(kind: str, now: datetime, zone: ZoneInfo, count: int) -> list[Period]:
    """The last ``count`` periods of ``kind`` that have ended at ``now``, newest first."""
    found: list[Period] = []
    current = containing(kind, now.astimezone(zone).date(), zone)
    while len(found) < count:
        current = containing(kind, current.since.astimezone(zone).date() - timedelta(days=1), zone)
        found.append(current)
    return found


def candidates(now: datetime, zone: ZoneInfo, rendered: Iterable[tuple[str, str]]) -> list[Period]:
    """The complete periods whose report may have to be made, oldest first.

    ``rendered`` are (kind, label) of the reports that there are. Candidates of a kind are the last complete period,
    those missed since the newest report, and recent ones that have a report, which late data may have changed.
    """
    there = set(rendered)
    found: list[Period] = []
    for kind in KINDS:
        last = complete(kind, now, zone, max(CATCH_UP[kind], RECHECK[kind]))
        missed: list[Period] = []
        for period in last[: CATCH_UP[kind]]:
            if (kind, period.label) in there:
                break
            missed.append(period)
        else:
            missed = missed[:1]  # no report of this kind within reach: begin with the last complete period
        again = [period for period in last[: RECHECK[kind]] if (kind, period.label) in there]
        found += sorted({*missed, *again}, key=lambda period: period.since)
    return found
