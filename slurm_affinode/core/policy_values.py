"""Values of the policy file: each function converts a TOML value, or raises ``ValueError``."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from datetime import date, datetime, time, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from slurm_affinode.base.toml_lines import span_s
from slurm_affinode.model.cleanup import NEVER

Kind = Callable[[Any], Any]

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_SHORTEST_DAY = 3
_ADDRESS = re.compile(r"[^\s@<>,;\"]+(?:@[^\s@<>,;\"]+)?")
_HOURS = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")
MOST_S = 36525 * 86400.0
"""Maximum span of time: 100 years. Longer and infinite spans are mistakes, and would overflow date arithmetic."""


def anything(value: Any) -> Any:
    """Return the value unchanged: a table that is read separately."""
    return value


def span(value: Any) -> float:
    """Return the seconds of a span of time: ``"15m"``, ``"2h30m"``."""
    seconds = span_s(value)
    if seconds is None:
        raise ValueError(f'{value!r} is not a span of time: write for example "15m", "2h30m" or "7d"')
    if seconds > MOST_S:
        raise ValueError(f"{value!r} is more than a hundred years")
    return seconds


def span_above_0(value: Any) -> float:
    """Return the seconds of a span above 0."""
    seconds = span(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return seconds


def span_up_to(most_s: float) -> Kind:
    """Return a converter for spans of at most ``most_s``, to seconds."""

    def convert(value: Any) -> float:
        seconds = span(value)
        if seconds > most_s:
            raise ValueError(f"{value!r} is more than {most_s:g} s")
        return seconds

    return convert


def text(value: Any) -> str:
    """Return a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of strings; a single string is a list of one."""
    if isinstance(value, str) and value:
        return (value,)
    if isinstance(value, list) and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    raise ValueError(f'{value!r} is not a list of texts: write for example ["a", "b"]')


def _some(value: Any, whole_set: str) -> tuple[str, ...]:
    found = texts(value)
    if not found:
        raise ValueError(f"the list is empty: leave the key out where {whole_set} is meant")
    return found


def patterns(value: Any) -> tuple[str, ...]:
    """Return names or patterns (``*``, ``?``), at least one. Rejects values that match nothing, or all, by mistake."""
    found = _some(value, "everything")
    for one in found:
        if one != one.strip() or any(char in "[]," or not char.isprintable() for char in one):
            raise ValueError(f'{one!r} is not a name: write each by itself, ["a", "b*"]; patterns are * and ?')
    return found


def job_patterns(value: Any) -> tuple[str, ...]:
    """Return job IDs or patterns of job IDs: ``123``, ``123_4``, ``123_*``."""
    found = patterns(value)
    for one in found:
        if not re.fullmatch(r"[0-9_+*?]+", one):
            raise ValueError(f'{one!r} is not a job ID: write for example ["123", "124_5"]')
    return found


def host_lists(value: Any) -> tuple[str, ...]:
    """Return node names, patterns, or host lists (``gpu[01-04,7]``), at least one."""
    return _some(value, "every node")


def texts_of(*known: str) -> Kind:
    """Return a converter for lists of at least one string, all among ``known``."""

    def convert(value: Any) -> tuple[str, ...]:
        found = _some(value, "everything")
        for one in found:
            if one not in known:
                raise ValueError(f"{one!r} is unknown; use {', '.join(known)}")
        return found

    return convert


def one_of(*known: str) -> Kind:
    """Return a converter for one of the ``known`` words."""

    def convert(value: Any) -> str:
        if value not in known:
            raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        return str(value)

    return convert


def whole(least: int, most: int | None = None) -> Kind:
    """Return a converter for integers from ``least`` to ``most``."""

    def convert(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{value!r} is not a whole number of at least {least}")
        if most is not None and value > most:
            raise ValueError(f"{value!r} is more than {most}")
        return value

    return convert


def number(low: float, high: float, *, above: bool = False) -> Kind:
    """Return a converter for numbers from ``low`` (``above``: excluding ``low``) to ``high``."""

    def convert(value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not good or (above and value == low):
            raise ValueError(f"{value!r} is not a number {'above' if above else 'from'} {low:g} to {high:g}")
        return float(value)

    return convert


def yes_no(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")  # noqa: TRY004 - all mistakes are of one kind
    return value


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
        raise ValueError(f'{value!r} is not a day: write 2027-03-31, or "never"') from None


def zone(value: Any) -> str:
    """Return the name of an IANA time zone."""
    name = text(value)
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        raise ValueError(f"{name!r} is not a time zone: write for example Europe/Berlin") from None
    return name


def zone_of(name: str | None) -> tzinfo | None:
    """Return the time zone; ``None`` is that of the process, as for ``datetime.astimezone``."""
    return None if name is None else ZoneInfo(name)


def weekdays(value: Any) -> frozenset[int]:
    """Return days of the week: ``["mon", "tue"]``. Monday is 0."""
    found = set()
    for one in texts(value):
        named = [number for number, name in enumerate(_DAYS) if name.startswith(one.lower())]
        if not named or len(one) < _SHORTEST_DAY:
            known = ", ".join(name[:_SHORTEST_DAY] for name in _DAYS)
            raise ValueError(f"{one!r} is not a day of the week; known: {known}")
        found.update(named)
    return frozenset(found)


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
    raise ValueError(f'{value!r} is not a part of a day: write for example "08:00-18:00"')


def _end(hour: int, minute: int) -> time:
    return time.max if (hour, minute) == (24, 0) else time(hour, minute)


def holidays(value: Any) -> tuple[frozenset[date], frozenset[tuple[int, int]]]:
    """Return dates (``2027-05-01``), and month and day of yearly holidays (``"12-25"``)."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of days")  # noqa: TRY004
    once: set[date] = set()
    yearly: set[tuple[int, int]] = set()
    for one in value:
        match = re.fullmatch(r"(\d{2})-(\d{2})", one) if isinstance(one, str) else None
        if match is None:
            once.add(day(one))
            continue
        month, number_ = int(match[1]), int(match[2])
        if not 1 <= month <= 12 or not 1 <= number_ <= calendar.monthrange(2024, month)[1]:
            raise ValueError(f"{one!r} is not a day of a year")
        yearly.add((month, number_))
    return frozenset(once), frozenset(yearly)


def address(value: Any) -> str:
    """Return a mail address, or the name of a local user."""
    found = text(value)
    if not _ADDRESS.fullmatch(found):
        raise ValueError(f"{found!r} is not a mail address")
    return found


def addresses(value: Any) -> tuple[str, ...]:
    """Return mail addresses."""
    return tuple(address(one) for one in texts(value))


def address_pattern(value: Any) -> str:
    """Return a pattern such as ``{user}@example.org``."""
    found = text(value)
    if "{user}" not in found or not _ADDRESS.fullmatch(found.replace("{user}", "name")):
        raise ValueError(f"{found!r} is not an address with {{user}} in it")
    return found


def address_table(value: Any) -> dict[str, str]:
    """Return a table of user = address."""
    return {name: address(one) for name, one in text_table(value).items()}


def text_table(value: Any) -> dict[str, str]:
    """Return a table of strings."""
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError(f"{value!r} is not a table of texts")
    return dict(value)


def language(value: Any) -> str:
    """Return a language code: ``en``, ``de``, ``pt_BR``."""
    found = text(value)
    if not re.fullmatch(r"[a-z]{2,3}(?:[_-][A-Za-z]{2,4})?", found):
        raise ValueError(f"{found!r} is not a language: write for example en or de")
    return found


def language_table(value: Any) -> dict[str, str]:
    """Return a table of user = language."""
    return {name: language(one) for name, one in text_table(value).items()}


def url(value: Any) -> str:
    """Return an HTTP or HTTPS URL."""
    found = text(value)
    if not re.fullmatch(r"https?://[^\s]+", found):
        raise ValueError(f"{found!r} is not an address that begins with https:// or http://")
    return found
