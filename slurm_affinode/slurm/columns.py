"""Columns of strings -> typed columns, all rows at once, remembering which cells could not be read.

Each function is the vectorised form of one in ``units``, ``times``, ``states`` or ``jobid``, and falls back to that
one for the distinct values that its quick form does not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from slurm_affinode.slurm import times, units
from slurm_affinode.slurm.schema import TIME

_FACTORS = {suffix: factor for suffix, factor in units.SCALE.items() if suffix not in ("", "E")}


@dataclass(frozen=True, slots=True)
class Typed:
    """A typed column and the positions of cells that say something unreadable (null in ``values``)."""

    values: pl.Series
    bad: dict[int, str]
    """Position -> why."""


def mapped(cells: pl.Series, function: Callable[[str], Any], dtype: pl.DataType) -> Typed:
    """Apply ``function`` to each distinct cell once; ``ValueError`` from it marks the cell as bad."""
    distinct = cells.drop_nulls().unique()
    keys = distinct.to_list()
    out: list[Any] = []
    wrong: dict[str, str] = {}
    for key in keys:
        try:
            out.append(function(key))
        except (ValueError, OverflowError) as error:
            out.append(None)
            wrong[key] = str(error)
    if len(keys) == 1 and len(cells) == cells.count():
        values = pl.Series(cells.name, out, dtype=dtype, strict=False).new_from_index(0, len(cells))
    else:
        table = pl.DataFrame({"key": distinct, "value": pl.Series(out, dtype=dtype, strict=False)})
        values = cells.to_frame("key").join(table, on="key", how="left", maintain_order="left")["value"]
    return Typed(values.rename(cells.name), _positions(cells, wrong))


def _positions(cells: pl.Series, wrong: dict[str, str]) -> dict[int, str]:
    if not wrong:
        return {}
    hit = cells.is_in(pl.Series(list(wrong), dtype=pl.String).implode()).fill_null(value=False)
    return {at: wrong[cells[at]] for at in hit.arg_true().to_list()}


def _fallback(cells: pl.Series, quick: pl.Series, function: Callable[[str], Any]) -> Typed:
    """``quick``, with ``function`` applied where it is null though the cell says something."""
    open_ = quick.is_null() & cells.is_not_null() & (cells != "")
    if not open_.any():
        return Typed(quick, {})
    where = open_.arg_true()
    slow = mapped(cells.gather(where), function, quick.dtype)
    values = quick.scatter(where, slow.values) if slow.values.null_count() < len(where) else quick
    positions = where.to_list() if slow.bad else []
    return Typed(values, {positions[at]: why for at, why in slow.bad.items()})


def whole(cells: pl.Series) -> Typed:
    """Counts: ``12``, also ``1.5K`` (1024-based)."""
    quick = cells.cast(pl.Int64, strict=False)
    return _fallback(cells, quick.set(quick > units.NO_VALUE, None), units.parse_count)


def joules(cells: pl.Series) -> Typed:
    """ConsumedEnergy: ``4217``, also ``1.5K`` (1000-based)."""
    quick = cells.cast(pl.Int64, strict=False)
    return _fallback(cells, quick.set(quick > units.NO_VALUE, None), units.parse_joules)


def seconds(cells: pl.Series) -> Typed:
    """Spans like ``[DD-]HH:MM:SS[.frac]`` in seconds, fraction kept."""
    plain = cells.str.contains(r"^\d+:\d+(?::\d+)?(?:\.\d+)?$")
    first, second, third = cells.str.split_exact(":", 2).struct.unnest().get_columns()
    one, two = first.cast(pl.Int64, strict=False), second.cast(pl.Float64, strict=False)
    clock = one * 3600 + two * 60 + third.cast(pl.Float64, strict=False)
    quick = clock.zip_with(third.is_not_null(), one * 60 + two)
    days = cells.str.contains("-", literal=True).arg_true()
    quick = quick.set(~plain.fill_null(value=False) | (quick > units.MAX_SECONDS).fill_null(value=False), None)
    if not days.is_empty():
        quick = quick.scatter(days, _with_days(cells.gather(days)))
    return _fallback(cells, quick.rename(cells.name), units.parse_duration_s)


def _with_days(cells: pl.Series) -> pl.Series:
    groups = cells.str.extract_groups(r"^(\d+)-(\d+):(\d+):(\d+(?:\.\d+)?)$").struct.unnest()
    days, hours, minutes, secs = groups.cast(pl.Float64).get_columns()
    total = days * 86400 + hours * 3600 + minutes * 60 + secs
    return total.set(total > units.MAX_SECONDS, None)


def bytes_(cells: pl.Series, *, bare: str = "") -> Typed:
    """Sizes in bytes; a number without a suffix is in ``bare`` (see ``units.parse_memory``)."""
    last = cells.str.slice(-1)
    factor = last.replace_strict(_FACTORS, default=units.SCALE[bare], return_dtype=pl.Int64)
    digits = cells.str.head(-1).zip_with(last.is_in(list(_FACTORS)).fill_null(value=False), cells)
    number = digits.cast(pl.Int64, strict=False)
    # A number so large that bytes overflow is Slurm's "not set"; the slow way knows.
    quick = number.set(number >= units.NO_VALUE // factor, None) * factor

    def slow(text: str) -> int | None:
        found = units.parse_memory(text, bare=bare)
        return None if found is None else found.size_bytes

    return _fallback(cells, quick.rename(cells.name), slow)


@dataclass(frozen=True, slots=True)
class Times:
    """A column of times in UTC, with the cells that need a decision."""

    values: pl.Series
    """``TIME``; for an open cell, its first reading."""
    bad: dict[int, str]
    open: dict[int, Any]
    """Position -> the naive local time that has two readings."""


def moments(cells: pl.Series, zone: str) -> Times:
    """Times of any form that ``times.parse`` knows; those without an offset are local in ``zone``."""
    naive = cells.str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ms", strict=False, exact=True)
    utc = pl.Series(cells.name, [None], dtype=TIME).new_from_index(0, len(cells))
    if (cells.str.len_bytes() > 19).any():
        utc = _with_offset(cells, utc)
    possible = naive.is_between(*times.POSSIBLE, closed="left")
    if not possible.all():
        naive = naive.set(~possible, None)
    left = naive.is_null() & utc.is_null() & cells.is_not_null()
    slow = mapped(cells.filter(left), times.normalise, pl.String()) if left.any() else None
    bad: dict[int, str] = {}
    if slow is not None:
        where = left.arg_true()
        positions = where.to_list()
        bad = {positions[at]: why for at, why in slow.bad.items()}
        ends_z = slow.values.str.ends_with("Z").fill_null(value=False)
        parsed = slow.values.str.strip_suffix("Z").str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ms")
        naive = naive.scatter(where.filter(~ends_z), parsed.filter(~ends_z))
        utc = utc.scatter(where.filter(ends_z), parsed.filter(ends_z).dt.replace_time_zone("UTC"))
    local, open_ = _local(naive, zone)
    return Times(utc.zip_with(utc.is_not_null(), local).rename(cells.name), bad, open_)


def _with_offset(cells: pl.Series, utc: pl.Series) -> pl.Series:
    """``2025-05-02T14:09:39+02:00``, ``+0200``, ``Z``: the offset, of which there are few, is subtracted."""
    offset = mapped(cells.str.slice(19), _offset_ms, pl.Int64()).values
    if offset.null_count() == len(cells):
        return utc
    stamp = cells.str.slice(0, 19).str.to_datetime("%Y-%m-%dT%H:%M:%S", time_unit="ms", strict=False)
    stamp = stamp.set(~stamp.is_between(*times.POSSIBLE, closed="left"), None)
    return (stamp - offset.cast(pl.Duration("ms"))).dt.replace_time_zone("UTC").cast(TIME)


def _offset_ms(text: str) -> int | None:
    if text in ("Z", "z"):
        return 0
    match = re.fullmatch(r"([+-])(\d\d):?([0-5]\d)", text)
    if match is None:
        return None
    minutes = int(match[2]) * 60 + int(match[3])
    return minutes * 60_000 * (-1 if match[1] == "-" else 1)


def _local(naive: pl.Series, zone: str) -> tuple[pl.Series, dict[int, Any]]:
    if zone == "UTC" or naive.null_count() == len(naive):
        return naive.dt.replace_time_zone("UTC").cast(TIME), {}
    first = naive.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null").dt.convert_time_zone("UTC")
    last = naive.dt.replace_time_zone(zone, ambiguous="latest", non_existent="null").dt.convert_time_zone("UTC")
    doubtful = (first != last).fill_null(value=False) | (first.is_null() & naive.is_not_null())
    if not doubtful.any():
        return first.cast(TIME), {}
    where = doubtful.arg_true().to_list()
    return first.cast(TIME), {at: naive[at] for at in where}


TRES = {
    "cpu": pl.Int64(), "mem": pl.Int64(), "node": pl.Int64(), "energy": pl.Int64(), "gpus": pl.Int64(),
    "kind": pl.String(), "gpus_bad": pl.String(),
}  # fmt: skip


def tres(cells: pl.Series) -> tuple[pl.DataFrame, dict[int, str]]:
    """What TRES strings say: the columns of ``TRES`` (``mem`` in bytes), and the cells that cannot be read.

    ``gpus_bad`` is why a number of GPUs cannot be read; the rest of the cell counts.
    """

    def parts(text: str) -> dict[str, Any]:
        amounts = units.parse_tres(text)
        memory = units.parse_memory(amounts.get("mem", ""), bare="M")
        gpus, bad = units.Gpus(None), None
        try:
            gpus = units.gpus_of_tres(amounts)
        except ValueError as error:
            bad = str(error)
        return {
            **{name: units.parse_count(amounts.get(name, "")) for name in ("cpu", "node", "energy")},
            "mem": None if memory is None else memory.size_bytes,
            "gpus": gpus.count,
            "kind": gpus.kind,
            "gpus_bad": bad,
        }

    found = mapped(cells, parts, pl.Struct(TRES))
    return found.values.struct.unnest(), found.bad
