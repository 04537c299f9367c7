"""Inequality and percentiles of a list of amounts: plain definitions, no units of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import polars as pl


def gini(amounts: Sequence[float]) -> float | None:
    """Gini coefficient: 0 when all are equal, towards 1 when one has everything. None without a positive sum.

    G = sum_i (2 i - n - 1) x_i / (n sum_i x_i), with x sorted ascending and i = 1..n. No correction for small n.
    Raises ``ValueError`` for a negative amount.
    """
    ordered = sorted(amounts)
    total = math.fsum(ordered)
    if ordered and ordered[0] < 0:
        raise ValueError("the Gini coefficient is for amounts that are not negative")
    if total <= 0:
        return None
    n = len(ordered)
    return math.fsum((2 * i - n - 1) * x for i, x in enumerate(ordered, start=1)) / (n * total)


def top_share(amounts: Sequence[float], fraction: float) -> float | None:
    """Share (0-1) of the sum that the largest ceil(fraction x n) amounts have. None without a positive sum."""
    total = math.fsum(amounts)
    if total <= 0:
        return None
    # 0.05 x 20 is 1.0000000000000002 in binary for some pairs: a count must not grow by that
    count = math.ceil(round(fraction * len(amounts), 9))
    return math.fsum(sorted(amounts, reverse=True)[:count]) / total


def lorenz(amounts: Sequence[float]) -> list[tuple[float, float]]:
    """Points (share of owners, share of the sum), from (0, 0) to (1, 1), poorest owners first. Empty without a sum."""
    ordered = sorted(amounts)
    total = math.fsum(ordered)
    if total <= 0:
        return []
    points, held = [(0.0, 0.0)], 0.0
    for i, x in enumerate(ordered, start=1):
        held += x
        points.append((i / len(ordered), min(1.0, held / total)))
    points[-1] = (1.0, 1.0)
    return points


def percentile(values: pl.Series, q: float) -> float | None:
    """The value at rank q (0-1) with linear interpolation between neighbours; nulls are left out; None when empty."""
    found = values.drop_nulls()
    if found.is_empty():
        return None
    result = found.quantile(q, interpolation="linear")
    return None if result is None else float(result)


def mean(values: pl.Series) -> float | None:
    """Arithmetic mean; nulls are left out; None when empty."""
    result = values.drop_nulls().mean()
    return float(result) if isinstance(result, int | float) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``; None where either is unknown or ``whole`` is 0."""
    if part is None or whole is None or whole == 0:
        return None
    return part / whole
