"""Calibration of intervals by conformal prediction.

Bounds are widened (or narrowed) by a factor per side, so that a given share of the last jobs that had ended would
have been inside (conformalized quantile regression: Y. Romano, E. Patterson, E. Candes, NeurIPS 2019). Since work
changes, the factors follow the jobs: before each block of submissions they are determined anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slurm_affinode.prediction.features import LEVELS, FeatureTable, within
from slurm_affinode.prediction.history import Floats, Ints

COVERAGE = LEVELS[-1] - LEVELS[0]
RECENT = 2000
"""Jobs that had ended last, of which the factors are taken."""
LEAST_JOBS = 40
"""With fewer jobs there is no calibrated interval: 5 % of them are two."""
_BLOCK = 256
"""Submissions with the same factors."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Logarithms of the factors by which the bounds of an interval change."""

    lower: float
    upper: float


def calibrated(table: FeatureTable, predictions: Floats, first: int) -> Floats:
    """Return the calibrated lower and upper bounds, two rows, of the submissions from row ``first`` on.

    ``predictions``: rows ``LEVELS``. Only jobs from row ``first`` on are used, which no model was trained with; NaN
    until ``LEAST_JOBS`` of them have ended, and before ``first``.
    """
    bounds = np.full((2, len(table)), np.nan)
    rows = _ended_rows(table, predictions, first)
    lower, upper = _scores(table, predictions, rows)
    ends = table.end[rows]
    for begin in range(first, len(table), _BLOCK):
        after = int(np.searchsorted(ends, table.submit[begin]))
        if after < LEAST_JOBS:
            continue
        recent = slice(max(0, after - RECENT), after)
        part = slice(begin, begin + _BLOCK)
        bounds[:, part] = apply(_factors(lower[recent], upper[recent]), predictions[:, part], table.limit[part])
    return bounds


def last_factors(table: FeatureTable, predictions: Floats, first: int) -> Factors | None:
    """Return the factors after the last job; ``None`` if too few have ended."""
    rows = _ended_rows(table, predictions, first)
    if len(rows) < LEAST_JOBS:
        return None
    return _factors(*_scores(table, predictions, rows[-RECENT:]))


def apply(factors: Factors, predictions: Floats, limit: Floats) -> Floats:
    """Return lower and upper bounds of predictions (rows ``LEVELS``), at most the request."""
    bounds = np.stack([predictions[0] * math.exp(-factors.lower), predictions[-1] * math.exp(factors.upper)])
    bounds[1] = np.maximum(bounds[1], bounds[0])
    return within(bounds, limit)


def _ended_rows(table: FeatureTable, predictions: Floats, first: int) -> Ints:
    """Return the rows of ended jobs with a prediction, by their end."""
    rows = np.flatnonzero((table.end >= 0) & ~np.isnan(table.actual) & ~np.isnan(predictions).any(axis=0))
    rows = rows[rows >= first]
    return rows[np.argsort(table.end[rows], kind="stable")]


def _scores(table: FeatureTable, predictions: Floats, rows: Ints) -> tuple[Floats, Floats]:
    """Return by how much, as a logarithm, each job was below its lower and above its upper bound."""
    actual = np.log(np.maximum(table.actual[rows], 1.0))
    return np.log(predictions[0, rows]) - actual, actual - np.log(predictions[-1, rows])


def _factors(lower: Floats, upper: Floats) -> Factors:
    # ceil((n + 1) q) of n, for a single side.
    rank = min(len(lower), math.ceil((len(lower) + 1) * LEVELS[-1])) - 1
    return Factors(float(np.partition(lower, rank)[rank]), float(np.partition(upper, rank)[rank]))
