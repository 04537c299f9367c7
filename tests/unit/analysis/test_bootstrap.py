"""Intervals by a bootstrap of days."""

from __future__ import annotations

import numpy as np

from slurm_affinode.analysis.bootstrap import interval


def test_interval_covers_the_mean_and_needs_two_days() -> None:
    days, values = np.repeat([1, 2, 3, 4], 25), np.tile(np.arange(25.0), 4) + np.repeat([0.0, 1, 2, 3], 25)
    found = interval(days, values, mean=True)
    assert found is not None
    assert found[0] < values.mean() < found[1]
    assert interval(np.ones(5, np.int64), np.ones(5), mean=True) is None
