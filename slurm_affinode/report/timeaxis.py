"""Ticks of a time axis: round hours, days, weeks or months in UTC, few enough not to collide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_STEPS_H = (1, 2, 3, 6, 12, 24, 48, 7 * 24, 14 * 24)
_MAX_TICKS = 9


@dataclass(frozen=True, slots=True)
class TimeTick:
    """A tick at ``at``; ``label`` is short; ``major`` ones are kept where there is little room."""

    at: datetime
    label: str
    major: bool


def time_ticks(since: datetime, until: datetime) -> tuple[TimeTick, ...]:
    """At most nine ticks in the half-open interval."""
    since, until = since.astimezone(UTC), until.astimezone(UTC)
    span_h = (until - since).total_seconds() / 3600
    step = next((s for s in _STEPS_H if span_h / s <= _MAX_TICKS), None)
    moments = list(_months(since, until) if step is None else _steps(since, until, step))
    if not moments:
        moments = [since]
    every = max(1, -(-len(moments) // 4))
    return tuple(TimeTick(at, _label(at, step), i % every == 0) for i, at in enumerate(moments))


def _steps(since: datetime, until: datetime, step_h: int) -> Iterator[datetime]:
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    if step_h == 7 * 24:
        day -= timedelta(days=day.weekday())
    at = day
    while at < until:
        if at >= since:
            yield at
        at += timedelta(hours=step_h)


def _months(since: datetime, until: datetime) -> Iterator[datetime]:
    total = (until.year - since.year) * 12 + until.month - since.month + 1
    every = next((n for n in (1, 2, 3, 6) if total / n <= _MAX_TICKS), 12)
    for i in range(0, total + 1):
        index = since.month - 1 + i
        at = datetime(since.year + index // 12, index % 12 + 1, 1, tzinfo=UTC)
        if since <= at < until and (at.month - 1) % every == 0:
            yield at


def _label(at: datetime, step_h: int | None) -> str:
    if step_h is None:
        return at.strftime("%Y" if at.month == 1 else "%b")
    if step_h < 24 and (at.hour or at.minute):
        return at.strftime("%H:%M")
    return f"{at.day} {at:%b}"
