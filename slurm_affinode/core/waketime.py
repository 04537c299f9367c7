"""When a job with ``wake=TIME`` is to wake: the forms that the submission option takes, without a clock."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta

_CLOCK = {"midnight": time(0), "noon": time(12), "fika": time(15), "teatime": time(16)}
"""Slurm's words for times of the day. Source: sbatch(1), ``--begin``."""
_UNITS = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_RELATIVE = re.compile(r"now\+(\d{1,9})(|second|minute|hour|day|week)s?")


def wake_time(text: str, asleep: datetime) -> datetime:
    """The time that ``text`` names for a job asleep since ``asleep`` (aware; its zone is that of clock times).

    ``now+2hours`` counts from ``asleep``; a time of day, with or without seconds, is the next one after it;
    ``tomorrow`` and a date are that day's midnight. Raises ``ValueError``.
    """
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        return asleep + timedelta(seconds=int(relative[1]) * _UNITS[relative[2]])
    today = asleep.date()
    if text == "tomorrow":
        return _at(today + timedelta(days=1), time(0), asleep)
    clock = _CLOCK.get(text)
    if clock is None and re.fullmatch(r"\d\d:\d\d(?::\d\d)?", text):
        clock = time.fromisoformat(text)
    if clock is not None:
        found = _at(today, clock, asleep)
        return found if found > asleep else _at(today + timedelta(days=1), clock, asleep)
    if re.fullmatch(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d(?::\d\d)?)?", text):
        return datetime.fromisoformat(text).replace(tzinfo=asleep.tzinfo)
    raise ValueError(f"{text!r} is not a time to wake at")


def _at(day: date, clock: time, like: datetime) -> datetime:
    return datetime.combine(day, clock, tzinfo=like.tzinfo)
