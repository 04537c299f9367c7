"""The pass over the samples of a block: everything that is done once per sample is done here.

Rows are taken in tiles that stay in the cache of a core through all steps. A tile ends where a place ends, so that no
sum is cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from slurm_affinode.analysis.block import (
    FB,
    FRACTIONS,
    IDLE,
    PERCENT,
    POWER,
    UNKNOWN,
    UTIL,
    Block,
    Classes,
    Column,
    Float32s,
    Int32s,
    OutOfOrderError,
    Scratch,
)
from slurm_affinode.analysis.places import Places, Rows
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.segments import Floats, Ints

TILE_ROWS = 48 * 1024
SUMMED = (UTIL, FB, POWER)


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums of one metric over the rows of each full place, before the last sample is cut to the cell."""

    total: Floats
    """Value x ms."""
    idle: Floats
    """Value x ms while idle."""
    missing: Ints
    """Time without a value, ms."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the pass gives."""

    weight: Int32s
    """How long each sample counts before it is cut to its cell, ms."""
    activity: Classes
    changes: Ints
    """Rows at which a place, another class of activity, or a stretch behind a gap begins; row 0 among them."""
    gap_after: Ints
    """Rows that a gap follows, within a piece."""
    gap_until: Ints
    """Times at which these gaps end."""
    gap_piece: Ints
    metrics: Mapping[str, Summed]
    fb_peak: Floats
    """Per full place, MiB; NaN: unknown."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows ``low`` to ``high``; the full places ``first`` to ``behind``."""

    low: int
    high: int
    first: int
    behind: int


def sweep(block: Block, rows: Rows, at: Places, thresholds: Thresholds, scratch: Scratch) -> Sweep:
    """Weigh, classify and sum every sample of ``block``."""
    count = len(block)
    weight, activity = scratch.ints("weight", count), scratch.flags("activity", count).view(np.uint8)
    mark = scratch.flags("mark", count)
    there = {name: block.columns[name] for name in SUMMED if name in block.columns}
    sums = {name: _empty(len(at.full)) for name in there}
    peak = np.full(len(at.full), np.nan)
    gaps: list[tuple[Ints, Ints]] = []
    for tile in _tiles(at.start, count):
        here = slice(tile.low, tile.high)
        gaps.append(_weigh(block.time, rows, tile, weight, block.row))
        size = tile.high - tile.low
        signals = {n: Column(c.values[here], c.complete) for n, c in block.columns.items() if n not in (FB, POWER)}
        classify(signals, thresholds, scratch, activity[here])
        start = at.start[tile.first : tile.behind] - tile.low
        weight32, idle = scratch.floats("weight32", size), scratch.floats("idle", size)
        np.copyto(weight32, weight[here], casting="unsafe")
        np.copyto(idle, np.equal(activity[here], IDLE, out=scratch.flags("low", size)))
        for name, column in there.items():
            part = Column(column.values[here], column.complete)
            _sum(part, weight[here], weight32, idle, start, sums[name], tile, scratch)
            if name == FB:
                largest = np.maximum if column.complete else np.fmax
                peak[tile.first : tile.behind] = largest.reduceat(part.values, start)
    gap, piece = (np.concatenate(parts) for parts in zip(*gaps, strict=True))
    gap_until = block.time[np.minimum(gap + 1, count - 1)]
    np.not_equal(activity[1:], activity[:-1], out=mark[1:])
    mark[at.start] = True
    mark[gap + 1] = True
    return Sweep(weight, activity, np.flatnonzero(mark), gap, gap_until, piece, sums, peak)


def _empty(count: int) -> Summed:
    return Summed(np.zeros(count), np.zeros(count), np.zeros(count, np.int64))


def _tiles(start: Ints, count: int) -> Iterator[_Tile]:
    wanted = np.arange(TILE_ROWS, count, TILE_ROWS)
    cuts = np.unique(np.concatenate([[0], np.searchsorted(start, wanted), [len(start)]]))
    for first, behind in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        high = int(start[behind]) if behind < len(start) else count
        yield _Tile(int(start[first]), high, first, behind)


def _weigh(time: Ints, rows: Rows, tile: _Tile, weight: Int32s, row: int) -> tuple[Ints, Ints]:
    """Fill in the weights of a tile; return the rows in it that a gap follows, and their pieces. Raises
    ``UnreachableError``, with the number ``row`` of the first row, where times do not ascend."""
    # Within a piece, that is within a day, distances fit 32 bits; modulo 2^32 they come from the low words alone.
    low = time.view(np.int32)[::2] if sys.byteorder == "little" else time.astype(np.int32)
    high = min(tile.high, len(time) - 1)
    here = weight[tile.low : high]
    np.subtract(low[tile.low + 1 : high + 1], low[tile.low : high], out=here)
    some = slice(*np.searchsorted(rows.last, (tile.low, tile.high)).tolist())
    last = rows.last[some]
    weight[last] = 0
    if len(here) and here.min() < 0:
        raise OutOfOrderError(row)
    gap = piece = np.empty(0, np.int64)
    least = rows.limit.min()
    if len(here) and here.max() > least:
        gap = np.flatnonzero(here > least) + tile.low
        piece = np.searchsorted(rows.last, gap)
        real = weight[gap] > rows.limit[piece]
        gap, piece = gap[real], piece[real]
        weight[gap] = rows.step[piece]
    weight[last] = rows.reach[some] - time[last]
    return gap, piece


def classify(columns: Mapping[str, Column], thresholds: Thresholds, scratch: Scratch, out: Classes) -> None:
    """The class of each sample from the largest of its activity signals."""
    largest = scratch.floats("product", len(out))
    signals_of = {name: _without_noise(name, column, thresholds, scratch) for name, column in columns.items()}
    fraction = _largest([signals_of[name] for name in FRACTIONS if name in signals_of], largest)
    signals = [signals_of[name] for name in PERCENT if name in signals_of]
    if fraction is not None:
        np.multiply(fraction.values, np.float32(100), out=largest)
        signals.append(Column(largest, fraction.complete))
    activity = _largest(signals, largest)
    if activity is None:
        out[:] = UNKNOWN
        return
    low = scratch.flags("low", len(out))
    np.less_equal(activity.values, np.float32(thresholds.idle_pct), out=out.view(np.bool_))
    np.less_equal(activity.values, np.float32(thresholds.low_pct), out=low)
    # Idle is low too: 0 busy, 1 low, 2 idle.
    np.add(out, low.view(np.uint8), out=out)
    if not activity.complete:
        out[np.isnan(activity.values, out=low)] = UNKNOWN


def _without_noise(name: str, column: Column, thresholds: Thresholds, scratch: Scratch) -> Column:
    """0 where a value is at or below the floor of its signal."""
    floor = thresholds.floor(name)
    if floor <= 0:
        return column
    above = np.greater(column.values, np.float32(floor), out=scratch.flags("low", len(column.values)))
    # What is missing stays NaN.
    values = np.multiply(column.values, above, out=scratch.floats(f"{name} above its floor", len(above)))
    return Column(values, column.complete)


def _largest(columns: list[Column], out: Float32s) -> Column | None:
    if not columns:
        return None
    # A complete one makes the result complete; fmax passes over what is missing.
    ordered = sorted(columns, key=lambda column: not column.complete)
    result = ordered[0]
    for column in ordered[1:]:
        take = np.maximum if column.complete else np.fmax
        result = Column(take(result.values, column.values, out=out), result.complete)
    return result


def _sum(  # noqa: PLR0917
    column: Column,
    weight: Int32s,
    weight32: Float32s,
    idle: Float32s,
    start: Ints,
    to: Summed,
    tile: _Tile,
    scratch: Scratch,
) -> None:
    product = scratch.floats("product", len(weight))
    np.multiply(column.values, weight32, out=product)
    if not column.complete:
        # Values are not negative.
        np.fmax(product, 0, out=product)
        missing = np.isnan(column.values, out=scratch.flags("low", len(weight)))
        lost = np.multiply(weight, missing, out=scratch.ints("lost", len(weight)))
        to.missing[tile.first : tile.behind] = np.add.reduceat(lost, start)
    to.total[tile.first : tile.behind] = np.add.reduceat(product, start)
    np.multiply(product, idle, out=product)
    to.idle[tile.first : tile.behind] = np.add.reduceat(product, start)
