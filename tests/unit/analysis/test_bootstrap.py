"""Intervals by a bootstrap of days."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_affinode.analysis.bootstrap import interval


def test_interval_covers_the_mean_and_needs_two_days() -> None:
    days, values = np.repeat([1, 2, 3, 4], 25), np.tile(np.arange(25.0), 4) + np.repeat([0.0, 1, 2, 3], 25)
    result = interval(days, values, mean=True)
    assert result is not None
    assert result[0] < values.mean() < result[1]
    assert interval(np.ones(5, np.int64), np.ones(5), mean=True) is None


def test_interval_of_two_days_is_between_them() -> None:
    """With one value a day, a draw is one of three sums; both ends are far into the tails."""
    days, values = np.array([1, 2]), np.array([10.0, 30.0])
    assert interval(days, values, mean=False) == (20.0, 60.0)
    assert interval(days, values, mean=True) == (10.0, 30.0)
    assert interval(days, values, mean=True) == interval(days + 100, values, mean=True)


def test_interval_has_95_percent_of_the_resamples() -> None:
    """For many days, it is that of the normal distribution of the mean: 1.96 standard errors on each side."""
    values = np.tile([0.0, 1.0], 200)
    result = interval(np.arange(400), values, mean=True)
    assert result is not None
    error = 0.5 / 400**0.5
    assert result[0] == pytest.approx(0.5 - 1.96 * error, abs=0.25 * error)
    assert result[1] == pytest.approx(0.5 + 1.96 * error, abs=0.25 * error)
