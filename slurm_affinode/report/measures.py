"""Reading the measures of a ``WasteResult`` row: which of them are known, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import polars as pl

from slurm_affinode.analysis import metrics
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Cell, Column

Row = Mapping[str, Any]

STATES = (("busy", "Busy"), ("low", "Low"), ("idle", "Idle"), ("unknown", "Unknown"))
"""The states of GPU time in the order in which they are stacked, with their labels."""


def known(row: Row, key: str) -> float | None:
    """The measure as a number, ``None`` where it is unknown."""
    value = row.get(key)
    return None if value is None or not math.isfinite(value) else float(value)


def idle_share(row: Row) -> float | None:
    """The part of the allocated hours that was idle: the base of every share on a page; ``None``: nothing measured."""
    idle, allocated = known(row, "gpu_hours_idle"), known(row, "gpu_hours_allocated")
    return idle / allocated if idle is not None and allocated and known(row, "gpu_hours_measured") else None


def total(column: pl.Series) -> float:
    """The sum of a column, nulls left out."""
    return float(column.cast(pl.Float64).sum())


def shown(row: Row, key: str, currency: str = "") -> str:
    """The measure as a text with its unit."""
    return _text(known(row, key), key, currency, unit=True)


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
        return fmt.with_unit(fmt.number(value), "GiB" if unit else "")
    if key.startswith(("gpu_hours", "unallocated", "gap")):
        return fmt.hours(value, "GPU-h" if unit else "")
    return fmt.count(value)


def cell(row: Row, key: str) -> Cell:
    """A table cell of the measure; its unit stands in the column's heading."""
    value = known(row, key)
    if value is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(_text(value, key, "", unit=False), "number", sort=f"{value:.6g}")


def share_cell(row: Row) -> Cell:
    """A table cell of ``idle_share``."""
    share = idle_share(row)
    if share is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(fmt.percent(share), "number", sort=f"{share:.6g}")


SHARE_COLUMN = Column("Idle share", "number", "of allocated", "Idle GPU-hours in percent of the allocated GPU-hours.")


def column(key: str, label: str, unit: str = "") -> Column:
    """The heading of a column of the measure, with its help as a title. Rows come by idle hours."""
    metric = metrics.load().get(key)
    order = "descending" if key == "gpu_hours_idle" else ""
    return Column(label, "number", unit, metric.help if metric else "", order)


def help_for(key: str) -> str | None:
    """Definition, formula and source of a figure, as one text."""
    metric = metrics.load().get(key)
    if metric is None:
        return None
    return f"{metric.help} Formula: {metric.formula}. Source: {metric.source}."
