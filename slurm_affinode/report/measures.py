"""Access to the measures of a ``WasteResult`` row, and their formatting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import polars as pl

from slurm_affinode.analysis import definitions
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Cell, Column

Row = Mapping[str, Any]

STATES = (("busy", "Busy"), ("low", "Low"), ("idle", "Idle"), ("unknown", "Unknown"))
"""States of GPU time in stacking order, with their labels."""


def known_value(row: Row, key: str) -> float | None:
    """Return the measure as a number, or ``None`` if it is unknown."""
    value = row.get(key)
    return None if value is None or not math.isfinite(value) else float(value)


def idle_share(row: Row) -> float | None:
    """Return the idle fraction of the allocated hours, as in all shares on pages; ``None`` if nothing was measured."""
    idle, allocated = known_value(row, "gpu_hours_idle"), known_value(row, "gpu_hours_allocated")
    return idle / allocated if idle is not None and allocated and known_value(row, "gpu_hours_measured") else None


def total(column: pl.Series) -> float:
    """Return the sum of a column, ignoring nulls."""
    return float(column.cast(pl.Float64).sum())


def shown(row: Row, key: str, currency: str = "") -> str:
    """Return the measure as text with its unit."""
    return _text(known_value(row, key), key, currency, unit=True)


def _text(value: float | None, key: str, currency: str, *, unit: bool) -> str:
    if key.endswith("_fraction"):
        return fmt.percent(value)
    if key.endswith("_pct"):
        return fmt.pct(value)
    if key.endswith("cost"):
        return fmt.money(value, currency if unit else "")
    if key.endswith("_kwh"):
        return fmt.energy(value)
    if key.endswith("_gib_h"):
        return fmt.gib_hours(value) if unit else fmt.number(value)
    if key.endswith("_s"):
        return fmt.duration(value)
    if key.endswith("_gib"):
        return fmt.quantity(value, "GiB" if unit else "")
    if key.startswith(("gpu_hours", "unallocated", "gap")):
        return fmt.hours(value, "GPU-h" if unit else "")
    return fmt.count(value)


def cell(row: Row, key: str) -> Cell:
    """Return a table cell of the measure; the column heading has the unit."""
    value = known_value(row, key)
    if value is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(_text(value, key, "", unit=False), "number", sort=f"{value:.6g}")


def share_cell(row: Row) -> Cell:
    """Return a table cell of ``idle_share``."""
    share = idle_share(row)
    if share is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(fmt.percent(share), "number", sort=f"{share:.6g}")


SHARE_COLUMN = Column("Idle share", "number", "of allocated", "Idle GPU-hours in percent of the allocated GPU-hours.")


def column(key: str, label: str, unit: str = "") -> Column:
    """Return the column of the measure, with its help as title. Rows are sorted by idle hours."""
    metric = definitions.load().get(key)
    order = "descending" if key == "gpu_hours_idle" else ""
    return Column(label, "number", unit, metric.help if metric else "", order)


def help_for(key: str) -> str | None:
    """Return definition, formula and source of a figure as one text."""
    metric = definitions.load().get(key)
    if metric is None:
        return None
    return f"{metric.help} Formula: {metric.formula}. Source: {metric.source}."
