"""Earlier values of a key as of any moment, for many submissions at once.

Only values of jobs that had *ended* before a submission exist for it: the run time of a running job is unknown. All
queries are vectorized: one search in the ends of all jobs, sorted by key and end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SPAN = 1 << 32
"""Above any time in seconds: ``key * _SPAN + time`` sorts by key, then by time."""
_CHUNK = 1 << 19
"""Elements of a window matrix at a time, which bounds its memory."""


class History:
    """Values by key and end."""

    def __init__(self, keys: Ints, ends: Ints, values: Floats) -> None:
        """``keys``: -1 belongs to nothing; ``ends``: -1 has not ended, else 0 to 2**32 - 1; ``values``: NaN unknown."""
        usable = (keys >= 0) & (ends >= 0) & ~np.isnan(values)
        order = np.argsort(keys[usable] * _SPAN + ends[usable], kind="stable")
        self._places = (keys[usable] * _SPAN + ends[usable])[order]
        self._values = values[usable][order]

    def before(self, keys: Ints, moments: Ints) -> EndedValues:
        """Return for each key and moment the values of this key that ended before it."""
        order = np.argsort(keys * _SPAN + moments)  # searches in the order of the places find them in the cache
        sorted_keys = keys[order] * _SPAN
        first, after = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
        first[order] = np.searchsorted(self._places, sorted_keys)
        after[order] = np.searchsorted(self._places, sorted_keys + moments[order])
        no_key = keys < 0
        return EndedValues(self._values, np.where(no_key, 0, first), np.where(no_key, 0, after))


class EndedValues:
    """For each submission a range of values, by their end."""

    def __init__(self, values: Floats, first: Ints, after: Ints) -> None:
        """``first``, ``after``: position of the first value, and of the one after the last."""
        self._values, self._first, self._after = values, first, after

    def count(self) -> Ints:
        """Return the number of values."""
        return self._after - self._first

    def last(self, back: int) -> Floats:
        """Return the value that ended ``back`` (1: last) values before; NaN: there is none."""
        positions = self._after - back
        if not len(self._values):
            return np.full(len(positions), np.nan)
        return np.where(positions >= self._first, self._values[np.maximum(positions, 0)], np.nan)

    def quantiles(self, window: int, levels: Sequence[float]) -> Floats:
        """Return quantiles of the last ``window`` values, one row per level; NaN: there is none."""
        first, after = self._first, self._after
        estimates = np.full((len(levels), len(after)), np.nan)
        if not len(self._values):
            return estimates
        size = max(1, _CHUNK // window)
        for begin in range(0, len(after), size):
            part = slice(begin, begin + size)
            positions = after[part, None] - 1 - np.arange(window)
            exists = positions >= first[part, None]
            values = np.where(exists, self._values[np.maximum(positions, 0)], np.nan)
            values.sort(axis=1)  # NaN last
            rows, most = np.arange(len(values)), np.maximum(exists.sum(axis=1), 1) - 1
            for number, level in enumerate(levels):
                place = level * most
                low = np.floor(place).astype(np.int64)
                high = np.minimum(low + 1, most)
                below, above = values[rows, low], values[rows, high]
                estimates[number, part] = below + (above - below) * (place - low)
        return estimates
