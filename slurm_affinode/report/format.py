"""Numbers, times and names as people read them. ``None`` becomes ``unknown``, never 0.

Thousands are separated by commas, a number and its unit by a no-break space. Names come from users of the cluster:
``visible`` makes every character that could hide, reorder or erase text something that can be seen.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import datetime, tzinfo

from slurm_affinode import zones

UNKNOWN = "unknown"
NBSP = "\N{NO-BREAK SPACE}"
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def number(value: float | None, *, digits: int | None = None) -> str:
    """``12,346``, ``46.3``, ``0.042``: about three significant digits unless ``digits`` after the point are asked."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if digits is None:
        digits = _digits(abs(value))
    text = f"{value:,.{digits}f}"
    return text.lstrip("-") if float(text.replace(",", "")) == 0 else text


def _digits(size: float) -> int:
    if size == 0 or size >= 100 or size == int(size):
        return 0
    if size >= 1:
        return 1
    return min(6, 1 - math.floor(math.log10(size)))


def count(value: float | None) -> str:
    """A whole number: ``12,346``."""
    return number(value, digits=0)


def hours(value: float | None, unit: str = "h") -> str:
    """GPU-hours with their unit: ``1,234 h``."""
    return with_unit(number(value), unit)


def with_unit(text: str, unit: str) -> str:
    """``text`` and ``unit``; the unit is left out when the text is ``unknown`` or the unit is empty."""
    return text if text == UNKNOWN or not unit else f"{text}{NBSP}{unit}"


def percent(fraction: float | None) -> str:
    """A fraction 0-1 as percent: ``46 %``, ``0.4 %``; ``<0.1 %`` for what is not zero but would look so."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    value = fraction * 100
    if 0 < value < 0.1:
        return f"<0.1{NBSP}%"
    if 99.9 < value < 100:
        return f">99.9{NBSP}%"
    digits = 1 if (0 < value < 10 and value != int(value)) or 99 < value < 100 else 0
    return f"{value:.{digits}f}{NBSP}%"


def pct(value: float | None) -> str:
    """A percentage 0-100, e.g. a mean utilization: ``46 %``."""
    return percent(None if value is None else value / 100)


def money(value: float | None, currency: str) -> str:
    """``EUR 12,346``; two digits below 100."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    amount = number(value, digits=2 if 0 < abs(value) < 100 else 0)
    return f"{currency}{NBSP}{amount}" if currency else amount


def energy(kwh: float | None) -> str:
    """Energy from kWh in the unit that fits: Wh, kWh, MWh, GWh."""
    if kwh is None or not math.isfinite(kwh):
        return UNKNOWN
    for factor, unit in ((1e6, "GWh"), (1e3, "MWh")):
        if abs(kwh) >= 10 * factor or (unit == "GWh" and abs(kwh) >= factor):
            return with_unit(number(kwh / factor), unit)
    if 0 < abs(kwh) < 1:
        return with_unit(number(kwh * 1000), "Wh")
    return with_unit(number(kwh), "kWh")


def gib_hours(value: float | None) -> str:
    """Memory-time from GiB h: ``980 GiB h``, ``12.3 TiB h`` from ten TiB h on."""
    if value is not None and abs(value) >= 10_240:
        return with_unit(number(value / 1024), f"TiB{NBSP}h")
    return with_unit(number(value), f"GiB{NBSP}h")


def duration(seconds: float | None) -> str:
    """``45 s``, ``12 min``, ``3 h 05 min``, ``2 d 4 h``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{NBSP}s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min"
    full_hours, minutes = divmod(minutes, 60)
    if full_hours < 48:
        return f"{full_hours}{NBSP}h" + (f"{NBSP}{minutes:02d}{NBSP}min" if minutes else "")
    days, rest = divmod(round(whole / 3600), 24)
    return f"{days}{NBSP}d" + (f"{NBSP}{rest}{NBSP}h" if rest else "")


def moment(value: datetime | None, zone: tzinfo, *, seconds: bool = False) -> str:
    """A local time: ``2026-11-01 08:00``."""
    return UNKNOWN if value is None else zones.shown(value, zone, seconds=seconds)


def visible(text: object) -> str:
    """``text`` with control, bidirectional, zero-width and separator characters replaced by something visible.

    Controls become ``\\n``, ``\\x1b``, others ``[U+202E]``; joiners of scripts and emoji stay.
    """
    source = str(text)
    if source.isascii() and source.isprintable():
        return source
    return "".join(_shown(c) for c in source)


def _shown(char: str) -> str:
    if char.isprintable() or char in _JOINERS:
        return char
    code = ord(char)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return _ESCAPES.get(char, f"\\x{code:02x}")
    kind = unicodedata.category(char)
    if kind == "Zs":
        return " "
    return char if kind in ("Co", "Cn") else f"[U+{code:04X}]"


def name(value: object | None) -> str:
    """The name of a user, partition, node...: ``visible``, or ``unknown`` where there is none."""
    return UNKNOWN if value is None else visible(value) or "(empty)"


def clip(text: str, length: int) -> str:
    """``text`` cut to ``length`` characters, the last an ellipsis where something was cut."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
