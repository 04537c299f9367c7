"""The directory of past reports: calendar periods in the site's zone, the index page, expiry."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from slurm_affinode import __version__
from slurm_affinode.analysis.result import PeriodHours, Trend, WasteQuery
from slurm_affinode.base import files
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.times import utc
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.report.archive_index import IndexEntry, render_index

KINDS = ("day", "week", "month")

CATCH_UP = {"day": 31, "week": 5, "month": 3}
"""Maximum number of missed periods of each kind that are rendered later."""

RECHECK = {"day": 9, "week": 3, "month": 2}
"""Number of latest complete periods that are checked again: late data makes their reports due again."""


TREND_PERIODS = 11
"""Earlier periods in a trend: twelve with the period of the report."""


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
    """The local midnight at its end, as UTC; a day may have 23 or 25 hours."""

    @property
    def path(self) -> str:
        """Return the directory of the report, relative to the root of the reports."""
        return f"{self.kind}/{self.label}"


def containing(kind: str, day: date, zone: ZoneInfo) -> Period:
    """Return the period of ``kind`` that contains ``day``."""
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
    """Return the last ``count`` periods of ``kind`` that are complete at ``now``, newest first."""
    periods: list[Period] = []
    current = containing(kind, now.astimezone(zone).date(), zone)
    while len(periods) < count:
        current = containing(kind, current.since.astimezone(zone).date() - timedelta(days=1), zone)
        periods.append(current)
    return periods


def _complete_since(kind: str, now: datetime, zone: ZoneInfo, since: datetime) -> Iterator[Period]:
    """Yield the periods of ``kind`` that are complete at ``now`` and begin at ``since`` or later, newest first."""
    current = containing(kind, now.astimezone(zone).date(), zone)
    while (current := containing(kind, current.since.astimezone(zone).date() - timedelta(days=1), zone)).since >= since:
        yield current


def candidates(
    now: datetime, zone: ZoneInfo, rendered: Iterable[tuple[str, str]], *, since: datetime | None = None
) -> list[Period]:
    """Return the complete periods with reports that may be due, oldest first.

    ``rendered`` has (kind, label) of the existing reports. Candidates of each kind are the last complete period, those
    missed since the newest report, and recent ones with a report, which late data may have outdated; with ``since``,
    all without a report that begin at that time or later.
    """
    existing = set(rendered)
    periods: list[Period] = []
    for kind in KINDS:
        last = complete(kind, now, zone, max(CATCH_UP[kind], RECHECK[kind]))
        missed: list[Period] = []
        for period in last[: CATCH_UP[kind]]:
            if (kind, period.label) in existing:
                break
            missed.append(period)
        else:
            missed = missed[:1]  # no recent report of this kind: begin with the last complete period
        if since is not None:
            missed += [
                period for period in _complete_since(kind, now, zone, since) if (kind, period.label) not in existing
            ]
        again = [period for period in last[: RECHECK[kind]] if (kind, period.label) in existing]
        periods += sorted({*missed, *again}, key=lambda period: period.since)
    return periods


REPORT = "report.html"
INDEX = "index.html"
INDEX_DATA = "index.json"

_LABEL = re.compile(r"\d{4}-(?:\d{2}(?:-\d{2})?|W\d{2})")


def holds(out: Path, path: str) -> bool:
    """Return whether the report at ``path`` (below ``out``) exists."""
    return (out / path / REPORT).is_file()


_LENGTHS_H = {"day": (23, 25), "week": (167, 169), "month": (28 * 24 - 1, 31 * 24 + 1)}
"""Shortest and longest period of each kind, with a change of the clock."""


def trend(records: Iterable[ReportRecord], query: WasteQuery) -> Trend | None:
    """Return the stored figures of up to eleven periods before an interval that is as long as a day, week or month.

    ``None`` if there are none, or if the query has filters: the stored reports are about everything.
    """
    kind = _kind(query)
    if kind is None or any(query.filters.values()):
        return None
    earlier = [record for record in records if record.period == kind and record.until <= query.since]
    if not earlier:
        return None
    earlier.sort(key=lambda record: record.since)
    return Trend(
        kind,
        tuple(
            PeriodHours(
                record.label, record.since, record.until,
                {key: value for key, value in record.summary.items() if not isinstance(value, str)},
            )
            for record in earlier[-TREND_PERIODS:]
        ),
    )  # fmt: skip


def preceding(query: WasteQuery, count: int) -> tuple[str, list[Period]]:
    """Return the kind of an interval, and the ``count`` intervals before it, latest first.

    The intervals before a calendar day, week or month are calendar ones; otherwise they are as long as the interval by
    the local clock, and ``interval`` is the kind of one that is not as long as a day, week or month.
    """
    kind = _kind(query)
    first, after = (moment.astimezone(query.zone).replace(tzinfo=None) for moment in (query.since, query.until))
    if kind is not None and isinstance(query.zone, ZoneInfo):
        current = containing(kind, first.date(), query.zone)
        if (current.since, current.until) == (query.since, query.until):
            return kind, complete(kind, query.since, query.zone, count)
    form = "%Y-%m-%d" if first.time() == time() and after - first >= timedelta(days=1) else "%Y-%m-%d %H:%M"
    periods = []
    for _ in range(count):
        first, after = first - (after - first), first
        since, until = (moment.replace(tzinfo=query.zone).astimezone(UTC) for moment in (first, after))
        periods.append(Period(kind or "interval", f"{first:{form}}", since, until))
    return kind or "interval", periods


def _kind(query: WasteQuery) -> str | None:
    hours = (query.until - query.since).total_seconds() / 3600
    return next((kind for kind, (least, most) in _LENGTHS_H.items() if least <= hours <= most), None)


def headline(summary: Mapping[str, Any]) -> dict[str, float | int | str | None]:
    """Return the figures of ``summary.json`` that the index page shows."""
    total = summary["total"]
    if summary["price_source"] != "site":
        total = {key: value for key, value in total.items() if not key.endswith("cost")}
    return {**total, "currency": summary["currency"]}


def write_index(
    out: Path, records: Sequence[ReportRecord], now: datetime, *, zone: tzinfo, force: bool = False
) -> bool:
    """Write ``index.html`` and ``index.json`` of the existing reports; return whether they were written.

    They are not written if they are up to date, unless ``force`` is set. Raises ``AffinodeError`` if that fails.
    """
    entries = [
        IndexEntry(
            kind=record.period,
            label=record.label,
            since=record.since,
            until=record.until,
            href=f"{record.path}/{REPORT}",
            total={key: value for key, value in record.summary.items() if not isinstance(value, str)},
            currency=str(record.summary.get("currency") or ""),
            clusters=_clusters(out / record.path / "clusters.csv", priced="idle_cost" in record.summary),
        )
        for record in records
        if holds(out, record.path)
    ]
    fields = {
        "generator": f"slurm-affinode {__version__}",
        "timezone": str(zone),
        "reports": [_plain(entry) for entry in entries],
    }
    data = json.dumps(fields, indent=1, ensure_ascii=False) + "\n"
    if not force and (out / INDEX).is_file() and _read(out / INDEX_DATA) == data:
        return False
    html = render_index(entries, generated=now, zone=zone)
    try:
        files.write_text(out / INDEX, html)
        files.write_text(out / INDEX_DATA, data)  # last: it marks the page as up to date
    except OSError as error:
        raise AffinodeError(f"{out}: cannot be written: {error.strerror}") from error
    return True


_FIGURES = ("allocated", "measured", "idle", "low", "busy", "unknown")


def _clusters(path: Path, *, priced: bool) -> dict[str, dict[str, float | int | None]]:
    """Return the figures of each cluster in a stored report; empty if the table is absent."""
    names = [*(f"gpu_hours_{name}" for name in _FIGURES), *(["idle_cost"] if priced else [])]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return {row["name"]: {key: float(row[key]) if row[key] else None for key in names} for row in rows}
    except (OSError, ValueError, KeyError, csv.Error):
        return {}


def _plain(entry: IndexEntry) -> dict[str, object]:
    return {
        "kind": entry.kind,
        "label": entry.label,
        "since": utc(entry.since),
        "until": utc(entry.until),
        "href": entry.href,
        "currency": entry.currency,
        "total": entry.total,
        "clusters": dict(entry.clusters),
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def remove(out: Path, record: ReportRecord) -> None:
    """Remove the directory of a report, if it exists.

    The path is rebuilt from kind and label after both are checked, so that the database cannot name another directory.
    Raises ``AffinodeError`` for an invalid name, or if the directory cannot be removed.
    """
    if record.period not in KINDS or not _LABEL.fullmatch(record.label):
        raise AffinodeError(f"{record.period}/{record.label}: not a report of this program; nothing was removed")
    try:
        shutil.rmtree(out / record.period / record.label)
    except FileNotFoundError:
        return
    except OSError as error:
        raise AffinodeError(f"{out / record.path}: cannot be removed: {error.strerror or error}") from error
