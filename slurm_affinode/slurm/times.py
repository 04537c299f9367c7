"""Conversion of times in accounting records to UTC.

Forms: ``2025-05-02T14:09:39`` (local), the same with an offset (``+02:00``, ``+0200``, ``Z``), and epoch seconds
(``SLURM_TIME_FORMAT=%s``). A local time that is ambiguous or nonexistent because of a clock change has two readings,
with the offset before the change and the one after it. ``choose`` decides between them for a whole record, and
``doubt_s`` tells whether the record leaves them open.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from slurm_affinode.base.errors import AffinodeError

_EPOCH = re.compile(r"^\d{9,11}(?:\.\d+)?$")
_COMPACT_OFFSET = re.compile(r"([+-]\d{2})(\d{2})$")
_UNKNOWN = frozenset({"", "unknown", "none", "n/a", "0", "invalid", "(null)"})

POSSIBLE = (datetime(1970, 1, 1), datetime(2500, 1, 1))  # noqa: DTZ001 - of any zone
"""Range of valid times. Values outside are damaged, and may leave the calendar when converted to another zone."""

ORDER = ("submit", "eligible", "start", "end")
"""The times of a record in chronological order."""


def parse(text: str) -> datetime | None:
    """Parse a time, truncated to seconds: aware (UTC) if it has a zone, else naive.

    ``Unknown`` and ``None`` are ``None``. Raises ``ValueError``.
    """
    clean = text.strip()
    if clean.lower() in _UNKNOWN:
        return None
    if _EPOCH.match(clean):
        return datetime.fromtimestamp(int(clean.partition(".")[0]), UTC)
    if not clean[:4].isdigit() or len(clean) < 10:
        raise ValueError(f"{text!r} is not a time")
    try:
        moment = datetime.fromisoformat(_COMPACT_OFFSET.sub(r"\1:\2", clean))
    except ValueError:
        raise ValueError(f"{text!r} is not a time") from None
    if not POSSIBLE[0] <= moment.replace(tzinfo=None) < POSSIBLE[1]:
        raise ValueError(f"{text!r} is not a time of a job")
    moment = moment.replace(microsecond=0)
    return moment if moment.tzinfo is None else moment.astimezone(UTC)


def normalise(text: str) -> str | None:
    """Return ``text`` as ``YYYY-MM-DDTHH:MM:SS``, with ``Z`` if its zone is known. Raises ``ValueError``."""
    moment = parse(text)
    if moment is None:
        return None
    stamp = moment.replace(tzinfo=None).isoformat()
    return stamp if moment.tzinfo is None else f"{stamp}Z"


def readings(local: datetime, zone: ZoneInfo) -> tuple[datetime, ...]:
    """Return the UTC times that the naive ``local`` may mean in ``zone``: one, or two around a clock change.

    The first uses the offset in force before the change: for a time that exists twice, the earlier one.
    """
    first = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    second = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return (first,) if first == second else (first, second)


def exists(local: datetime, zone: ZoneInfo) -> bool:
    """Return whether the naive ``local`` exists in ``zone``."""
    instant = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    return instant.astimezone(zone).replace(tzinfo=None) == local


def choose(
    candidates: Mapping[str, tuple[datetime, ...]], elapsed_s: int | None, *, not_before: datetime | None = None
) -> dict[str, datetime]:
    """Choose the times of one record; ``candidates`` maps names of ``ORDER`` to one or two readings.

    Criteria, in this order: the times are chronological (submit, eligible, start, end), and a step is not before its
    job (``not_before``); end minus start equals the record's Elapsed; the offset is the one before the clock change.
    """
    best = _best(candidates, elapsed_s, not_before)
    return best[0] if best else {}


def doubt_s(candidates: Mapping[str, tuple[datetime, ...]], elapsed_s: int | None) -> int:
    """Return by how much start and end may be later than ``choose`` says: 0 if the record decides between the readings.

    If both are in the repeated hour, neither their order nor Elapsed may do so.
    """
    best = _best(candidates, elapsed_s, None)
    shifts = [abs(reading[name] - best[0][name]) for reading in best for name in ("start", "end") if name in reading]
    return max((round(shift.total_seconds()) for shift in shifts), default=0)


def _best(
    candidates: Mapping[str, tuple[datetime, ...]], elapsed_s: int | None, not_before: datetime | None
) -> list[dict[str, datetime]]:
    """Return the readings of a record that fit best, those with the offset before the change first."""
    names = [name for name in ORDER if name in candidates]
    ranked: list[tuple[tuple[int, float], dict[str, datetime]]] = []
    for readings_ in itertools.product(*(candidates[name] for name in names)):
        chosen = dict(zip(names, readings_, strict=True))
        in_order = list(chosen.values())
        wrong = sum(a > b for a, b in itertools.pairwise(in_order))
        if not_before is not None:
            wrong += sum(moment < not_before for moment in in_order)
        miss = 0.0
        if elapsed_s is not None and "start" in chosen and "end" in chosen:
            # Minutes of suspension or of step bookkeeping do not justify a reading that is an hour off.
            miss = abs((chosen["end"] - chosen["start"]).total_seconds() - elapsed_s) // 900
        ranked.append(((wrong, miss), chosen))
    least = min(rank for rank, _ in ranked)
    return [chosen for rank, chosen in ranked if rank == least and chosen]


def site_zone(name: str | None, *, localtime: Path = Path("/etc/localtime")) -> ZoneInfo:
    """Return the time zone of the site: the configured one, else this machine's."""
    try:
        zone = zone_name(name, localtime=localtime)
        return ZoneInfo("UTC" if zone == "Etc/UTC" else zone)  # Debian's name for UTC is Etc/UTC
    except AffinodeError:
        if name is not None or not localtime.is_file():
            raise
    with localtime.open("rb") as file:  # a copy instead of a link has no zone name
        return ZoneInfo.from_file(file, key="local time of this machine")


def zone_name(
    requested: str | None, *, env: Mapping[str, str] | None = None, localtime: Path = Path("/etc/localtime")
) -> str:
    """Return the IANA name of the zone of times without an offset: ``requested``, else this machine's.

    ``sacct`` prints local time, so the default is the local zone of the process that ran it. Raises ``AffinodeError``
    if the zone is not known.
    """
    if requested is not None:
        return _checked(requested, f"{requested!r} is not a time zone")
    environ = os.environ if env is None else env
    from_env = environ.get("TZ", "").lstrip(":")
    if from_env:
        return _checked(from_env, f"TZ={from_env!r} is not the name of a time zone")
    try:
        target = str(localtime.resolve(strict=True))
    except OSError:
        return "UTC"
    _, marker, name = target.partition("/zoneinfo/")
    if not marker:
        raise AffinodeError(
            f"{localtime} does not contain the name of a time zone", hint="name the zone of the input: --timezone"
        )
    return _checked(name.removeprefix("posix/").removeprefix("right/"), f"{localtime} names no time zone")


def _checked(name: str, message: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise AffinodeError(message, hint="write an IANA name, for example --timezone Europe/Oslo or UTC") from None
    return name
