"""Times and durations as users type them (``7d``, ``90m``, ``now``, ``2026-11-01T08:00+01:00``), and local time.

All times are computed and stored in UTC. Pages and terminal tables format times with ``shown`` in the time zone of the
site (``cluster.timezone``) and name that zone once; single sentences use ``named``, machine-readable text ``utc``.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Literal

from slurm_affinode.base.errors import AffinodeError

_FIRST_YEAR, _LAST_YEAR = 1900, 2999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
_HOURS = re.compile(r"([0-9]{1,2}):([0-5][0-9])-([0-9]{1,2}):([0-5][0-9])")
_DAY_MIN = 1440
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def parse_span_s(text: str) -> float:
    """Return the seconds of a span like ``90s``, ``15m``, ``2h30m``, ``7d``, ``1w``. Raises ``AffinodeError``."""
    clean = text.strip().lower()
    if not _SPAN.fullmatch(clean):
        raise AffinodeError(f"{text!r} is not a span of time", hint="write for example 15m, 2h30m, 7d or 4w")
    return sum(float(number) * _UNIT_S[unit] for number, unit in _SPAN_PART.findall(clean))


def parse_when(text: str, *, now: datetime, zone: tzinfo | None = UTC) -> datetime:
    """Return the UTC time of ``now``, ``today``, ``yesterday``, a span before now, or an ISO date or time.

    A date or time without a zone is in ``zone``; ``None`` is this machine's zone, with the offset of that day. Raises
    ``AffinodeError``.
    """
    try:
        moment = _parse_moment(text.strip(), now, zone)
    except (OverflowError, ValueError):  # ValueError: this machine's zone does not know the year
        moment = None
    if moment is None or not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise AffinodeError(f"{text!r} is not a time between {_FIRST_YEAR} and {_LAST_YEAR}")
    return moment


def _parse_moment(clean: str, now: datetime, zone: tzinfo | None) -> datetime:
    word = clean.lower()
    if word == "now":
        return now.astimezone(UTC)
    midnight = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    if word in ("today", "yesterday"):
        day = midnight if word == "today" else midnight - timedelta(days=1)
        return _utc(day, zone)
    if _SPAN.fullmatch(word):
        return now.astimezone(UTC) - timedelta(seconds=parse_span_s(word))
    try:
        moment = datetime.fromisoformat(clean)
    except ValueError:
        raise AffinodeError(
            f"{clean!r} is not a time",
            hint="write for example 7d (seven days ago), now, 2026-11-01 or 2026-11-01T08:00",
        ) from None
    return _utc(moment, zone) if moment.tzinfo is None else moment.astimezone(UTC)


def _utc(naive: datetime, zone: tzinfo | None) -> datetime:
    return (naive if zone is None else naive.replace(tzinfo=zone)).astimezone(UTC)


def parse_hours(text: str) -> tuple[int, int]:
    """Return begin and end of ``08:00-18:00`` in minutes after midnight; the end may be ``24:00``.

    Raises ``AffinodeError`` unless the begin is before the end.
    """
    match = _HOURS.fullmatch(text.strip())
    if match is not None:
        begin, end = (60 * int(match[hour]) + int(match[hour + 1]) for hour in (1, 3))
        if begin < end <= _DAY_MIN:
            return begin, end
    raise AffinodeError(f"{text!r} is not a part of a day", hint="write for example 08:00-18:00, or 00:00-24:00")


_HOUR_S, _DAY_S = 3600, 86400
_MOST_CHANGE = timedelta(hours=3)
"""Upper bound of the time by which a clock change repeats or skips local times."""


def shown(moment: datetime, zone: tzinfo, *, seconds: bool = False) -> str:
    """Return ``2026-11-01 08:00`` in ``zone``; a local time that occurs twice gets the name of its offset."""
    local = moment.astimezone(zone)
    text = local.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")
    return f"{text} {local:%Z}" if twice(local) else text


def named(moment: datetime, zone: tzinfo | None) -> str:
    """Return ``2026-11-01 08:00 CET``: for a text that does not name the zone elsewhere; ``None``: of this machine."""
    return f"{moment.astimezone(zone):%Y-%m-%d %H:%M %Z}"


def utc(moment: datetime, timespec: Literal["auto", "seconds", "milliseconds"] = "seconds") -> str:
    """Return ``2026-11-01T07:00:00Z``: for JSON, and for names and messages that programs may read."""
    return moment.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def epoch_ms(moment: datetime) -> int:
    """Return the milliseconds since 1970, rounded down."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def twice(local: datetime) -> bool:
    """Return whether this local time occurs twice that day."""
    return local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset()


def edges(since: datetime, until: datetime, width_s: int, zone: tzinfo) -> list[datetime]:
    """Return the UTC times at which local spans of ``width_s`` begin, around the half-open interval.

    The first is at or before ``since``, the last at or after ``until``. ``width_s`` divides a day or is a multiple of
    it: days begin at local midnight, weeks on Monday, and a span with a clock change is shorter or longer. An hour that
    occurs twice is two spans, unless the spans are longer than an hour.
    """
    width = timedelta(seconds=width_s)
    first, last = (moment.astimezone(zone).replace(tzinfo=None) for moment in (since, until))
    wall = first.replace(hour=0, minute=0, second=0, microsecond=0)
    if width_s == 7 * _DAY_S:
        wall -= timedelta(days=wall.weekday())
    elif width_s < _DAY_S:
        wall += (first - _MOST_CHANGE - wall) // width * width
    folds = (0, 1) if width_s <= _HOUR_S else (0,)
    moments: set[datetime] = set()
    while wall <= last + _MOST_CHANGE + width:
        for fold in folds:
            moment = wall.replace(tzinfo=zone, fold=fold).astimezone(UTC)
            # A skipped local time is the moment of the change, by the offset before it.
            if fold == 0 or moment.astimezone(zone).replace(tzinfo=None) == wall:
                moments.add(moment)
        wall += width
    ordered = sorted(moments)
    begin = max(time for time in ordered if time <= since)
    end = min(time for time in ordered if time >= until)
    return [time for time in ordered if begin <= time <= end]
