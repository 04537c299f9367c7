"""Ticks of a time axis: round minutes, hours, days, weeks or months of the local clock, few enough not to collide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, tzinfo

from slurm_affinode import zones

_HOUR_S, _DAY_S = 3600, 86400
_STEPS_S = (
    15, 30, 60, 120, 300, 600, 900, 1800,
    _HOUR_S, 2 * _HOUR_S, 3 * _HOUR_S, 6 * _HOUR_S, 12 * _HOUR_S, _DAY_S, 2 * _DAY_S, 7 * _DAY_S, 14 * _DAY_S,
)  # fmt: skip
_MAX_TICKS = 9


@dataclass(frozen=True, slots=True)
class TimeTick:
    """A tick at ``at`` (UTC); ``label`` is short; ``major`` ones are kept where there is little room."""

    at: datetime
    label: str
    major: bool


def time_ticks(since: datetime, until: datetime, zone: tzinfo) -> tuple[TimeTick, ...]:
    """At most nine ticks in the half-open interval."""
    span_s = (until - since).total_seconds()
    step = next((s for s in _STEPS_S if span_s / s <= _MAX_TICKS), None)
    found = _months(since, until, zone) if step is None else zones.edges(since, until, step, zone)
    moments = [at for at in found if since <= at < until] or [since]
    every = max(1, -(-len(moments) // 4))
    return tuple(TimeTick(at, _label(at.astimezone(zone), step), i % every == 0) for i, at in enumerate(moments))


def _months(since: datetime, until: datetime, zone: tzinfo) -> Iterator[datetime]:
    first, last = since.astimezone(zone), until.astimezone(zone)
    total = (last.year - first.year) * 12 + last.month - first.month + 1
    every = next((n for n in (1, 2, 3, 6) if total / n <= _MAX_TICKS), 12)
    for i in range(total + 1):
        index = first.month - 1 + i
        if index % 12 % every == 0:
            yield datetime(first.year + index // 12, index % 12 + 1, 1, tzinfo=zone).astimezone(UTC)


def _label(at: datetime, step_s: int | None) -> str:
    if step_s is None:
        return at.strftime("%Y" if at.month == 1 else "%b")
    if step_s < _DAY_S and at.time() != time.min:
        return at.strftime("%H:%M" if step_s % 60 == 0 else "%H:%M:%S")
    return f"{at.day} {at:%b}"
