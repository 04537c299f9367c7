"""Array operations in place of the loops over samples of ``loops``, for few samples: they need no compiler.

Each function has the parameters and the result of the function of ``loops`` with its name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.block import IDLE, Classes, Float32s, Int32s
from slurm_affinode.analysis.result import SUMS
from slurm_affinode.analysis.segments import Floats, Ints

_UTIL = SUMS.index("util")
_CLASS = 127
"""Bits of a class without the mark of a gap."""
_INFINITY = 0x7F800000


def ascends(times: Ints, begin: int, stop: int) -> bool:
    """See ``loops.ascends``."""
    return bool((times[begin + 1 : stop] > times[begin : stop - 1]).all())


def weigh(times: Ints, first: int, size: int, out: Int32s) -> np.int32:
    """See ``loops.weigh``."""
    weight = out[:size]
    np.subtract(times[first + 1 : first + size + 1], times[first : first + size], out=weight, casting="unsafe")
    return np.int32(weight.max(initial=0))


def mark_gaps(  # noqa: PLR0917
    times: Ints, first: int, size: int, after_last: int, limit: float, step: int, weights: Int32s, kinds: Classes
) -> None:
    """See ``loops.mark_gaps``."""
    gaps = np.flatnonzero(np.diff(times[first : first + size], append=after_last) > limit)
    weights[gaps] = step
    kinds[gaps] += 128


def classify(  # noqa: PLR0917
    v: Any, first: int, size: int, idle_pct: float, low_pct: float, floors: Float32s, out: Classes
) -> None:
    """See ``loops.classify``."""
    largest = np.full(size, -1, np.float32)
    signals = v.engine, v.sm, v.tensor, v.dram, v.util
    for signal, floor in zip(signals, (*floors[1:], floors[0]), strict=True):
        if signal is v.util:
            largest *= np.float32(100)
        values = signal[first : first + size]
        np.fmax(largest, np.where(values <= floor, np.float32(0), values), out=largest)
    out[:size] = largest <= idle_pct
    out[:size] += largest <= low_pct
    out[:size] += largest < 0


def sum_up(  # noqa: PLR0917
    values: Float32s,
    low: int,
    high: int,
    offset: int,
    weights: Int32s,
    kinds: Classes,
    sums: Floats,
    cell: int,
    column: int,
) -> None:
    """See ``loops.sum_up``."""
    product, known = _products(values, low, high, offset, weights)
    sums[cell, column] += product.sum()
    sums[cell, column + 1] += known
    sums[cell, column + 2] += product[kinds[low:high] & _CLASS == IDLE].sum()


def sum_complete(  # noqa: PLR0917
    values: Float32s,
    low: int,
    high: int,
    offset: int,
    weights: Int32s,
    kinds: Classes,
    sums: Floats,
    cell: int,
    column: int,
) -> None:
    """See ``loops.sum_complete``."""
    product = _product(values, low, high, offset, weights)
    sums[cell, column] += product.sum()
    sums[cell, column + 2] += product[kinds[low:high] & _CLASS == IDLE].sum()


def sum_plainly(  # noqa: PLR0917
    values: Float32s, low: int, high: int, offset: int, weights: Int32s, sums: Floats, cell: int
) -> None:
    """See ``loops.sum_plainly``."""
    sums[cell, _UTIL] += _product(values, low, high, offset, weights).sum()


def sum_known(  # noqa: PLR0917
    values: Float32s, low: int, high: int, offset: int, weights: Int32s, sums: Floats, cell: int
) -> None:
    """See ``loops.sum_known``."""
    product, known = _products(values, low, high, offset, weights)
    sums[cell, _UTIL] += product.sum()
    sums[cell, _UTIL + 1] += known


def _product(values: Float32s, low: int, high: int, offset: int, weights: Int32s) -> Floats:
    return np.multiply(values[offset + low : offset + high], weights[low:high], dtype=np.float64)


def _products(values: Float32s, low: int, high: int, offset: int, weights: Int32s) -> tuple[Floats, np.int64]:
    """Return value x time of each row, 0 where the value is missing, and the time with a value."""
    there = values[offset + low : offset + high] >= 0
    product = np.where(there, _product(values, low, high, offset, weights), 0.0)
    return product, weights[low:high].sum(where=there, dtype=np.int64)


def raise_peak(bits: Int32s, first: int, last: int, peaks: Int32s, cell: int) -> None:
    """See ``loops.raise_peak``."""
    here = bits[first:last]
    peaks[cell] = max(peaks[cell], here[here <= _INFINITY].max(initial=-1))


def change(kinds: Classes, words: npt.NDArray[np.uint64], at: int, high: int) -> int:
    """See ``loops.change``."""
    other = kinds[at:high] != kinds[at - 1]
    first = int(other.argmax()) if at < high else 0
    return at + first if at < high and other[first] else high
