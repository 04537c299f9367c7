"""Definitions shared by the tests of the analysis; the fixtures are in ``tests/unit/analysis/conftest.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from slurm_affinode.analysis.prices import Price, PriceTable
from slurm_affinode.analysis.result import WasteResult

Analysed = Callable[..., WasteResult]
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]

HOUR = 3600
EUROS = PriceTable("EUR", (Price(("a100*",), 2.0),))


def every(start: float, end: float, step: float = 60) -> list[float]:
    """Times from ``start`` to before ``end``."""
    return [start + step * k for k in range(round((end - start) / step))]
