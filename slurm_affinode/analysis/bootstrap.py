"""Intervals by a block bootstrap over days: jobs of a day depend on each other, so days are drawn and not jobs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
LEVEL = 0.95
_DAY_S = 86_400


def interval(days: npt.NDArray[np.int64], values: npt.NDArray[np.float64], *, mean: bool) -> tuple[float, float] | None:
    """Return an interval of ``LEVEL`` for the mean or the sum of ``values``; ``None`` for less than two days."""
    which = np.unique(days)
    if len(which) < 2:
        return None
    position = np.searchsorted(which, days)
    sums, counts = np.bincount(position, values), np.bincount(position)
    drawn = np.random.default_rng(0).integers(0, len(which), (RESAMPLES, len(which)))
    results = sums[drawn].sum(axis=1) / (counts[drawn].sum(axis=1) if mean else 1)
    low, high = np.quantile(results, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def day_of(seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the UTC day of each time."""
    return seconds // _DAY_S
