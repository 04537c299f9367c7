"""The arrays that the compiled loops of ``scalar`` and ``scalarwindows`` work on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.block import Classes, Float32s, Int32s
from slurm_affinode.analysis.compiled import compiled
from slurm_affinode.analysis.segments import FAR, Flags, Floats, Ints

_FAR = int(FAR)

UTIL, FB, POWER = 4, 6, 9
"""The first column of ``join.SUMS`` of each metric: value x time; behind it, the time with a value; for all but UTIL,
behind that, value x time while idle."""

Words = npt.NDArray[np.uint64]


class Values(NamedTuple):
    """The rows of a block. A metric that the block lacks is NaN throughout."""

    time: Ints
    present: Ints
    """Of ``util``, ``fb``, ``power``: 0 where the block lacks it, 1 where values are missing, 2 where none is."""
    util: Float32s
    engine: Float32s
    sm: Float32s
    tensor: Float32s
    dram: Float32s
    fb: Float32s
    power: Float32s


class Stretches(NamedTuple):
    """``block.Pieces``."""

    device: Ints
    row: Ints
    end: Ints
    step: Ints
    limit: Floats
    next_time: Ints


class Timeline(NamedTuple):
    """``segments.Cells``."""

    offset: Ints
    """First cell of each device, and the number of cells behind the last."""
    start: Ints
    end: Ints
    earliest: Ints
    latest: Ints
    inside: Flags
    held: Flags
    owner_offset: Ints
    owners: Ints


class State(NamedTuple):
    """What one thread sums up."""

    sums: Floats
    peak: Int32s
    """The memory of 32-bit floats; -1 where there is no value."""
    partly_cell: Ints
    partly_sums: Floats
    partly_time: Ints
    counters: Ints
    """Number of ``partly_*`` rows, gaps, ms in gaps, samples within the interval."""


class Open(NamedTuple):
    """Idle windows; of those that may go on, one per allocation. All but the last three: per allocation."""

    owner_start: Ints
    counted: Flags
    begin: Ints
    """Of the open window."""
    end: Ints
    share: Floats
    windows: Ints
    """Number of those that are closed."""
    longest: Ints
    """Of them."""
    bin_counts: Ints
    bin_share: Floats
    bounds: Ints
    """Bounds of the bins, ms."""


class Chunk(NamedTuple):
    """Memory of one thread for the samples that it works on."""

    weight: Int32s
    activity: Classes
    words: Words
    """The same memory as ``activity``, eight classes in one word."""
    idle: Ints
    """Idle time found: rows of cell, begin, end, and the time at which an allocation must have held the device."""


@compiled
def in_order(times: Ints, row: int, ends: Ints) -> bool:
    """Whether the times of a block, of which the first row has number ``row``, ascend within each piece (``ends``: the
    rows behind them). The loops of ``scalar`` rely on that; a damaged file can say otherwise."""
    count, begin = len(times), 0
    piece = np.searchsorted(ends, row, side="right")
    while begin < count:
        if piece == len(ends):
            return False
        stop = min(ends[piece] - row, count)
        wrong = 0
        for j in range(np.uint64(begin), np.uint64(stop - 1)):
            wrong += times[j + np.uint64(1)] <= times[j]
        if wrong or times[begin] <= -_FAR or times[stop - 1] >= _FAR:
            return False
        begin = stop
        piece += 1
    return True
