"""When a job with ``wake=TIME`` is to wake: the forms that the submission option takes, without a clock."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta

_CLOCK = {"midnight": time(0), "noon": time(12), "fika": time(15), "teatime": time(16)}
"""Slurm's words for times of the day. Source: sbatch(1), ``--begin``."""
_UNITS = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_RELATIVE = re.compile(r"now\+(\d{1,9})(|second|minute|hour|day|week)s?")
_SPAN = re.compile(r"(\d{1,9})([smhd])")
_SPAN_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def wake_time(text: str, asleep: datetime) -> datetime:
    """The time that ``text`` names for a job asleep since ``asleep`` (aware; its zone is that of clock times).

    ``2h`` and ``now+2hours`` count from ``asleep``; a time of day, with or without seconds, is the next one after it;
    ``tomorrow`` and a date are that day's midnight. Raises ``ValueError``.
    """
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        return _after(asleep, int(relative[1]) * _UNITS[relative[2]])
    span = _SPAN.fullmatch(text)
    if span is not None:
        return _after(asleep, int(span[1]) * _SPAN_UNITS[span[2]])
    today = asleep.date()
    if text == "tomorrow":
        return _at(today + timedelta(days=1), time(0), asleep)
    clock = _CLOCK.get(text)
    if clock is None and re.fullmatch(r"\d?\d:\d\d(?::\d\d)?", text):
        clock = time.fromisoformat(_full_hour(text))
    if clock is not None:
        found = _at(today, clock, asleep)
        return found if found > asleep else _at(today + timedelta(days=1), clock, asleep)
    if re.fullmatch(r"\d{4}-\d\d-\d\d(?:T\d?\d:\d\d(?::\d\d)?)?", text):
        day, at, clock_text = text.partition("T")
        return _at(date.fromisoformat(day), time.fromisoformat(_full_hour(clock_text)) if at else time(0), asleep)
    raise ValueError(f"{text!r} is not a time to wake at")


def _after(asleep: datetime, seconds: int) -> datetime:
    try:
        return asleep + timedelta(seconds=seconds)
    except OverflowError:
        raise ValueError(f"{seconds} seconds from now is no time that there is") from None


def _full_hour(clock: str) -> str:
    return clock if clock[2] == ":" else f"0{clock}"


def _at(day: date, clock: time, like: datetime) -> datetime:
    return datetime.combine(day, clock, tzinfo=like.tzinfo)
