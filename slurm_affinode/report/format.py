"""Formatting of numbers, times and names. ``None`` becomes ``unknown``, never 0.

Thousands are separated by commas, a number and its unit by a no-break space.
"""

from __future__ import annotations

import math
from datetime import datetime, tzinfo

from slurm_affinode.base import text, times
from slurm_affinode.base.text import figure, span, visible

UNKNOWN = "unknown"
NBSP = "\N{NO-BREAK SPACE}"


def number(value: float | None, *, digits: int | None = None) -> str:
    """Format as ``text.figure``; ``digits``: number of digits after the point."""
    return UNKNOWN if value is None or not math.isfinite(value) else figure(value, digits)


def quantity(value: float | None, unit: str, digits: int | None = None) -> str:
    """Format a number with its unit."""
    return with_unit(number(value, digits=digits), unit)


def count(value: float | None) -> str:
    """Format a whole number: ``12,346``."""
    return number(value, digits=0)


def hours(value: float | None, unit: str = "h") -> str:
    """Format GPU-hours with their unit: ``1,234 h``."""
    return quantity(value, unit)


def with_unit(words: str, unit: str) -> str:
    """Append ``unit`` to ``words``, unless that is ``unknown`` or the unit is empty."""
    return words if words == UNKNOWN or not unit else f"{words}{NBSP}{unit}"


def percent(fraction: float | None, *, digits: int | None = None) -> str:
    """Format a fraction 0-1 as percent, as ``text.percent``; ``digits``: number of digits after the point."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    if digits is not None:
        return quantity(fraction * 100, "%", digits=digits)
    return text.percent(fraction).replace(" ", NBSP)


def pct(value: float | None) -> str:
    """Format a percentage 0-100, such as a mean utilization: ``46 %``."""
    return percent(None if value is None else value / 100)


def money(value: float | None, currency: str) -> str:
    """Format an amount: ``EUR 12,346``; two decimals below 100."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    amount = number(value, digits=2 if 0 < abs(value) < 100 else 0)
    return f"{currency}{NBSP}{amount}" if currency else amount


def energy(kwh: float | None) -> str:
    """Format an energy in kWh with a suitable unit: Wh, kWh, MWh or GWh."""
    if kwh is None or not math.isfinite(kwh):
        return UNKNOWN
    for factor, unit in ((1e6, "GWh"), (1e3, "MWh")):
        if abs(kwh) >= 10 * factor or (unit == "GWh" and abs(kwh) >= factor):
            return quantity(kwh / factor, unit)
    if 0 < abs(kwh) < 1:
        return quantity(kwh * 1000, "Wh")
    return quantity(kwh, "kWh")


def emissions(kg: float | None) -> str:
    """Format kilograms of CO2 equivalent with a suitable unit: g, kg or t."""
    if kg is None or not math.isfinite(kg):
        return UNKNOWN
    if 0 < abs(kg) < 1:
        return quantity(kg * 1000, f"g{NBSP}CO2e")
    return quantity(kg, f"kg{NBSP}CO2e") if abs(kg) < 10_000 else quantity(kg / 1000, f"t{NBSP}CO2e")


def gib_hours(value: float | None) -> str:
    """Format memory-time in GiB h: ``980 GiB h``; ``12.3 TiB h`` from 10 TiB h."""
    if value is not None and abs(value) >= 10_240:
        return quantity(value / 1024, f"TiB{NBSP}h")
    return quantity(value, f"GiB{NBSP}h")


def duration(seconds: float | None) -> str:
    """Format a duration for a page, without a line break in it: ``45s``, ``12m``, ``3h 5m``, ``2d 4h``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return span(seconds).replace(" ", NBSP)


def moment(value: datetime | None, zone: tzinfo, *, seconds: bool = False) -> str:
    """Format a local time: ``2026-11-01 08:00``."""
    return UNKNOWN if value is None else times.shown(value, zone, seconds=seconds)


def period(since: datetime, until: datetime, zone: tzinfo, *, seconds: bool = False) -> str:
    """Format a period: ``2026-11-01 08:00 to 09:30``; the date of the end only if it is another one."""
    begin, end = moment(since, zone, seconds=seconds), moment(until, zone, seconds=seconds)
    day, _, clock = end.partition(" ")
    return f"{begin} to {clock if begin.startswith(day) else end}"


def name(value: object | None) -> str:
    """Return a name (of a user, partition, node, ...) made ``visible``, or ``unknown`` if there is none."""
    return UNKNOWN if value is None else visible(value) or "(empty)"


def clip(words: str, length: int) -> str:
    """Truncate ``words`` to ``length`` characters, including an ellipsis."""
    return words if len(words) <= length else words[: length - 1].rstrip() + "…"
