"""Gini, Lorenz, top share and percentiles agree with their textbook definitions."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slurm_affinode.traces.fleet import gini, lorenz, mean, percentile, ratio, top_share

amounts = st.lists(st.integers(0, 10_000), min_size=1, max_size=40)


@given(amounts)
def test_gini_is_half_the_relative_mean_difference(values: list[int]) -> None:
    """G = mean |x - y| over all ordered pairs, divided by twice the mean."""
    assume(sum(values) > 0)
    n = len(values)
    difference = sum(abs(x - y) for x in values for y in values) / n**2
    result = gini(values)
    assert result is not None
    assert result == pytest.approx(difference / (2 * statistics.fmean(values)), abs=1e-12)
    assert -1e-12 <= result < 1


@given(amounts)
def test_gini_is_the_area_between_the_lorenz_curve_and_equality(values: list[int]) -> None:
    """G = 1 - 2 * area under the Lorenz curve, by the trapezoidal rule."""
    assume(sum(values) > 0)
    points = lorenz(values)
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))
    assert gini(values) == pytest.approx(1 - 2 * area, abs=1e-9)
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1.0, 1.0)
    assert all(y <= x + 1e-9 for x, y in points)


def test_gini_of_extreme_distributions() -> None:
    """All equal: 0; one has everything: (n - 1) / n; a sum of 0: unknown."""
    assert gini([3, 3, 3]) == pytest.approx(0)
    assert gini([0, 0, 0, 8]) == pytest.approx(3 / 4)
    assert gini([]) is None
    assert gini([0, 0]) is None
    assert lorenz([0]) == []
    with pytest.raises(ValueError, match="not negative"):
        gini([-1, 2])


@given(amounts, st.floats(0, 1))
def test_top_share_is_the_sum_of_the_largest(values: list[int], fraction: float) -> None:
    """The sum of the largest ceil(fraction * n) values, divided by the total."""
    assume(sum(values) > 0)
    exact = fraction * len(values)
    assume(abs(exact - round(exact)) > 1e-6)
    kept = sorted(values, reverse=True)[: math.ceil(exact)]
    assert top_share(values, fraction) == pytest.approx(sum(kept) / sum(values))


def test_top_share_rounds_owner_count_up() -> None:
    """5 % of 20 owners is one, of 21 owners two; a total of 0 gives unknown."""
    assert top_share([1] * 20, 0.05) == pytest.approx(1 / 20)
    assert top_share([1] * 21, 0.05) == pytest.approx(2 / 21)
    assert top_share([0], 0.5) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_percentile_interpolates_linearly(values: list[float], q: float) -> None:
    """The rank is q (n - 1) in the sorted values."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low = min(int(rank), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    expected = ordered[low] + (rank - low) * (ordered[high] - ordered[low])
    result = percentile(pl.Series(values, dtype=pl.Float64), q)
    assert result == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_nulls_and_empty_series_give_unknown() -> None:
    """Nulls are ignored; an empty series gives null; division by zero gives null."""
    assert percentile(pl.Series([None, 4.0, None, 2.0]), 0.5) == 3.0
    assert percentile(pl.Series([], dtype=pl.Float64), 0.5) is None
    assert mean(pl.Series([None, 4.0, 0.0])) == 2.0
    assert mean(pl.Series([None], dtype=pl.Float64)) is None
    assert ratio(1, 0) is None
    assert ratio(None, 2) is None
    assert ratio(0, 2) == 0
