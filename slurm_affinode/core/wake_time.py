"""Wake times of jobs with ``wake=TIME``: the forms that the submission option accepts. Uses no clock."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, tzinfo

_CLOCK = {"midnight": time(0), "noon": time(12), "fika": time(15), "teatime": time(16)}
"""Slurm's words for times of the day. Source: sbatch(1), ``--begin``."""
_UNITS = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_RELATIVE = re.compile(r"now\+(\d{1,9})(|second|minute|hour|day|week)s?")
_SPAN = re.compile(r"(\d{1,9})([smhd])")
_SPAN_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_END_OF_TIME = 253_402_300_800
"""The year 10000, beyond the range of ``datetime``."""


def wake_time(text: str, since: float, zone: tzinfo | None = None) -> float:
    """Return the wake time of a job asleep since ``since``; both in epoch seconds.

    ``2h`` and ``now+2hours`` count from ``since``; a time of day, with or without seconds, is the next one after it;
    ``tomorrow`` and a date are midnight of that day. Clock times are in ``zone``; ``None`` is this machine's zone, with
    the offset of that day. Raises ``ValueError``.
    """
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        return _moment_after(since, int(relative[1]) * _UNITS[relative[2]])
    span = _SPAN.fullmatch(text)
    if span is not None:
        return _moment_after(since, int(span[1]) * _SPAN_UNITS[span[2]])
    today = datetime.fromtimestamp(since, zone).date()
    if text == "tomorrow":
        return _epoch(today + timedelta(days=1), time(0), zone)
    clock = _CLOCK.get(text)
    if clock is None and re.fullmatch(r"\d?\d:\d\d(?::\d\d)?", text):
        clock = time.fromisoformat(_full_hour(text))
    if clock is not None:
        moment = _epoch(today, clock, zone)
        return moment if moment > since else _epoch(today + timedelta(days=1), clock, zone)
    if re.fullmatch(r"\d{4}-\d\d-\d\d(?:T\d?\d:\d\d(?::\d\d)?)?", text):
        day, separator, clock_text = text.partition("T")
        return _epoch(
            date.fromisoformat(day), time.fromisoformat(_full_hour(clock_text)) if separator else time(0), zone
        )
    raise ValueError(f"{text!r} is not a time to wake at")


def _moment_after(since: float, seconds: int) -> float:
    wake_at = since + seconds
    if wake_at >= _END_OF_TIME:
        raise ValueError(f"{seconds} seconds from now is not a valid time")
    return wake_at


def _full_hour(clock: str) -> str:
    return clock if clock[2] == ":" else f"0{clock}"


def _epoch(day: date, clock: time, zone: tzinfo | None) -> float:
    return datetime.combine(day, clock, tzinfo=zone).timestamp()


def backoff_s(first_s: float, limit_s: float, attempts: int) -> float:
    """Return the seconds to wait after this many attempts: ``first_s`` after one, doubled for each further one."""
    return min(limit_s, first_s * 2.0 ** min(max(0, attempts - 1), 60))
