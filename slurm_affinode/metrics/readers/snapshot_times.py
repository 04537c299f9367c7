"""Times of snapshots: lines of ``date`` and of nvidia-smi before a snapshot, and the name of its file."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})"
_DAY = r"(?P<day>\d{1,2})"
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d\d):(?P<second>\d\d)(?:\s+(?P<half>[AP]M))?"
_ZONE = r"(?:\s+(?P<zone>[A-Z]{1,5}|[+-]\d\d(?::?\d\d)?))?"
_YEAR = r"(?P<year>(?:19|20)\d\d)"
_WEEKDAY = r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w*,?\s+"
_LINES = (
    re.compile(rf"{_WEEKDAY}{_MONTH}\s+{_DAY}\s+{_CLOCK}{_ZONE}\s+{_YEAR}\b"),  # ctime, and date in the C locale
    re.compile(rf"{_WEEKDAY}{_DAY}\s+{_MONTH}\s+{_YEAR}\s+{_CLOCK}{_ZONE}(?!\S)"),  # date in en_US, and date -R
)
_ISO = re.compile(
    r"(?<!\d)(\d{4}[-/]\d\d[-/]\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)\s*(Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)?(?!\S)"
)
_EPOCH = re.compile(r"\d{10}(?:\.\d+)?")
_NAME = re.compile(
    r"(?<!\d)((?:19|20)\d\d)[-_.]?(0[1-9]|1[0-2])[-_.]?([0-2]\d|3[01])[-_.T ]?([01]\d|2[0-3])[-_.:h]?([0-5]\d)"
    r"(?:[-_.:m]?([0-5]\d))?s?(Z|\+\d{4})?(?!\d)"
)
_NAMED_EPOCH = re.compile(r"(?<!\d)(1\d{9})(?!\d)")
_MOMENT = re.compile(r"^\d{10}(?:\.\d+)?$|:\d\d(?:[.,]\d+)?(?:Z|UTC|GMT|[+-]\d[\d:]*)$")
LONGEST_LINE = 1_000
"""Characters of a line that are examined: lines of nvidia-smi are shorter, and patterns take quadratic time."""
_UNIVERSAL = ("UTC", "GMT", "Z")


@dataclass(frozen=True, slots=True)
class SnapshotTime:
    """A time as text that ``local_time.parse`` reads."""

    text: str
    ignored_zone: str | None = None
    """Abbreviation of a time zone, such as CST, that has several meanings; the time counts as one without a zone."""

    @property
    def has_zone(self) -> bool:
        """Whether the text is a moment without a further time zone."""
        return _MOMENT.search(self.text) is not None


def later(before: SnapshotTime | None, now: SnapshotTime) -> SnapshotTime:
    """Return the time of a snapshot for two lines above it: the last one, unless only the first one has a zone."""
    return before if before is not None and before.has_zone and not now.has_zone else now


def time_from_line(line: str) -> SnapshotTime | None:
    """Return the time in a line of ``date`` (C and en_US locale, ``-Is``, ``-R``, ``+%s``) or of nvidia-smi."""
    line = line[:LONGEST_LINE].strip()
    if _EPOCH.fullmatch(line):
        return SnapshotTime(line)
    if match := _ISO.search(line):
        day, clock, zone = match.groups()
        return SnapshotTime(f"{day} {clock}{zone or ''}")
    for pattern in _LINES:
        if match := pattern.search(line):
            return _from_parts(match.groupdict())
    return None


def _from_parts(part: dict[str, str | None]) -> SnapshotTime:
    hour = int(part["hour"] or 0)
    if part["half"] is not None:
        hour = hour % 12 + (12 if part["half"] == "PM" else 0)
    month = _MONTHS.index(part["month"] or "Jan") + 1
    zone = part["zone"]
    zone_known = zone in _UNIVERSAL or (zone is not None and zone[0] in "+-")
    text = f"{part['year']}-{month:02}-{int(part['day'] or 0):02} {hour:02}:{part['minute']}:{part['second']}"
    return SnapshotTime(f"{text}{zone if zone_known else ''}", None if zone_known else zone)


def time_from_name(name: str) -> str | None:
    """Return the time in the name of a file, to the minute at least.

    Examples: ``smi_gpu01_2026-11-01T08:00:00.txt``, ``gpu01-20261101_0800.log``, ``smi.1793520000.txt``. ``Z`` and
    ``+0100`` are time zones. None: the name has no time, or several.
    """
    times = _NAME.findall(name)
    if len(times) == 1:
        year, month, day, hour, minute, second, zone = times[0]
        return f"{year}-{month}-{day} {hour}:{minute}:{second or '00'}{zone}"
    epochs = _NAMED_EPOCH.findall(name)
    return str(epochs[0]) if not times and len(epochs) == 1 else None
