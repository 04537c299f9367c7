"""Times and spans as people type them: ``7d``, ``90m``, ``now``, ``2026-11-01``, ``2026-11-01T08:00+01:00``."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo

from slurm_affinode.errors import AffinodeError

_FIRST_YEAR, _LAST_YEAR = 1900, 2999
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def parse_span_s(text: str) -> float:
    """Seconds of a span like ``90s``, ``15m``, ``2h30m``, ``7d``, ``1w``. Raises ``AffinodeError``."""
    clean = text.strip().lower()
    if not _SPAN.fullmatch(clean):
        raise AffinodeError(f"{text!r} is not a span of time", hint="write for example 15m, 2h30m, 7d or 4w")
    return sum(float(number) * _UNIT_S[unit] for number, unit in _SPAN_PART.findall(clean))


def parse_when(text: str, *, now: datetime, zone: tzinfo | None = UTC) -> datetime:
    """The UTC time that ``text`` names: ``now``, ``today``, ``yesterday``, a span before now, or an ISO date or time.

    A date or time without a zone is in ``zone``; ``None`` is this machine's, with the offset of that day. Raises
    ``AffinodeError``.
    """
    try:
        moment = _when(text.strip(), now, zone)
    except (OverflowError, ValueError):  # the latter where this machine's zone does not know the year
        moment = None
    if moment is None or not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise AffinodeError(f"{text!r} is not a time between {_FIRST_YEAR} and {_LAST_YEAR}")
    return moment


def _when(clean: str, now: datetime, zone: tzinfo | None) -> datetime:
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
