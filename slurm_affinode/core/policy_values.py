"""Kinds of values in the clean-up policy, see ``toml_schema``: each function converts a value or raises an error."""

from __future__ import annotations

import calendar
import re
from datetime import date, datetime, time, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from slurm_affinode.base import toml_schema as schema
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.toml_schema import Check, TomlList, checked, either, text
from slurm_affinode.model.cleanup import NEVER

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_SHORTEST_DAY = 3
_ADDRESS = re.compile(r"[^\s@<>,;\"]+(?:@[^\s@<>,;\"]+)?")
_HOURS = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")


def _pattern(value: str) -> str:
    """Return a name or pattern (``*``, ``?``). Rejects values that match nothing, or all, by mistake."""
    if value != value.strip() or any(char in "[]," or not char.isprintable() for char in value):
        raise AffinodeError(f'{value!r} is not a name: write each by itself, ["a", "b*"]; patterns are * and ?')
    return value


def _job_pattern(value: str) -> str:
    if not re.fullmatch(r"[0-9_+*?]+", _pattern(value)):
        raise AffinodeError(f'{value!r} is not a job ID: write for example ["123", "124_5"]')
    return value


def words(*alternatives: str) -> TomlList:
    """Return the kind of lists of at least one of ``alternatives``."""
    return TomlList(checked(text, either(*alternatives)), single=True, whole_set="everything")


texts = TomlList(text, single=True)
patterns = TomlList(_pattern, single=True, whole_set="everything")
"""Names or patterns (``*``, ``?``), at least one."""
job_patterns = TomlList(_job_pattern, single=True, whole_set="everything")
"""Job IDs or patterns of job IDs: ``123``, ``123_4``, ``123_*``."""
host_lists = TomlList(text, single=True, whole_set="every node")
"""Node names, patterns, or host lists (``gpu[01-04,7]``), at least one."""
zone = checked(text, schema.zone)
"""Name of an IANA time zone."""


def up_to(most_s: float) -> Check:
    """Return a check for spans of at most ``most_s`` seconds."""

    def check(value: float) -> None:
        if value > most_s:
            raise AffinodeError(f"{value:g} s is more than {most_s:g} s")

    return check


def day(value: Any) -> date:
    """Return a date, or ``NEVER`` for ``never``."""
    if value == "never":
        return NEVER
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    try:
        return date.fromisoformat(str(value))
    except ValueError:
        raise AffinodeError(f'{value!r} is not a day: write 2027-03-31, or "never"') from None


def zone_of(name: str | None) -> tzinfo | None:
    """Return the time zone; ``None`` is that of the process, as for ``datetime.astimezone``."""
    return None if name is None else ZoneInfo(name)


def _weekday(value: str) -> int:
    named = [number for number, name in enumerate(_DAYS) if name.startswith(value.lower())]
    if len(named) != 1 or len(value) < _SHORTEST_DAY:
        day_names = ", ".join(name[:_SHORTEST_DAY] for name in _DAYS)
        raise AffinodeError(f"{value!r} is not a day of the week; known: {day_names}")
    return named[0]


weekdays = TomlList(_weekday, single=True)
"""Days of the week: ``["mon", "tue"]``. Monday is 0."""


def hours(value: Any) -> tuple[time, time]:
    """Return begin and end of ``08:00-18:00``."""
    match = _HOURS.fullmatch(text(value).strip())
    try:
        if match is not None:
            begin, end = time(int(match[1]), int(match[2])), _end(int(match[3]), int(match[4]))
            if begin < end:
                return begin, end
    except ValueError:
        pass
    raise AffinodeError(f'{value!r} is not a part of a day: write for example "08:00-18:00"')


def _end(hour: int, minute: int) -> time:
    return time.max if (hour, minute) == (24, 0) else time(hour, minute)


def holidays(value: Any) -> tuple[frozenset[date], frozenset[tuple[int, int]]]:
    """Return dates (``2027-05-01``), and month and day of yearly holidays (``"12-25"``)."""
    if not isinstance(value, list):
        raise AffinodeError(f"{value!r} is not a list of days")
    once: set[date] = set()
    yearly: set[tuple[int, int]] = set()
    for entry in value:
        match = re.fullmatch(r"(\d{2})-(\d{2})", entry) if isinstance(entry, str) else None
        if match is None:
            once.add(day(entry))
            continue
        month, number_ = int(match[1]), int(match[2])
        if not 1 <= month <= 12 or not 1 <= number_ <= calendar.monthrange(2024, month)[1]:
            raise AffinodeError(f"{entry!r} is not a day of a year")
        yearly.add((month, number_))
    return frozenset(once), frozenset(yearly)


def address(value: Any) -> str:
    """Return a mail address, or the name of a local user."""
    if not _ADDRESS.fullmatch(text(value)):
        raise AffinodeError(f"{value!r} is not a mail address")
    return str(value)


addresses = TomlList(address, single=True)


def address_pattern(value: Any) -> str:
    """Return a pattern such as ``{user}@example.org``."""
    if "{user}" not in text(value) or not _ADDRESS.fullmatch(value.replace("{user}", "name")):
        raise AffinodeError(f"{value!r} is not an address with {{user}} in it")
    return str(value)


def language(value: Any) -> str:
    """Return a language code: ``en``, ``de``, ``pt_BR``."""
    if not re.fullmatch(r"[a-z]{2,3}(?:[_-][A-Za-z]{2,4})?", text(value)):
        raise AffinodeError(f"{value!r} is not a language: write for example en or de")
    return str(value)


def url(value: Any) -> str:
    """Return an HTTP or HTTPS URL."""
    if not re.fullmatch(r"https?://[^\s]+", text(value)):
        raise AffinodeError(f"{value!r} is not an address that begins with https:// or http://")
    return str(value)
