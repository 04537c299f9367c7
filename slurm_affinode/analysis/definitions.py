"""Names, units, formulas and help texts of the figures, from ``reports/metrics.toml``.

They are the help texts of the report and the source of ``docs/metrics.md``, so the two cannot differ.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from slurm_affinode.base.resources import asset_dir


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    id: str
    """Column or key in the results."""
    name: str
    unit: str
    """``GPU-h``, ``GiB h``, ``kWh``, ``%``, ``fraction`` (0-1), ``currency`` (of the price table), ..."""
    formula: str
    source: str
    help: str


@dataclass(frozen=True, slots=True)
class DefinitionRule:
    """One rule for computing figures from samples and runs."""

    id: str
    title: str
    text: str


@functools.cache
def load() -> Mapping[str, Metric]:
    """Return every figure by ID, in reading order."""
    return MappingProxyType({entry["id"]: Metric(**entry) for entry in _table()["metric"]})


@functools.cache
def rules() -> Mapping[str, DefinitionRule]:
    """Return every rule by ID. Each text is one paragraph on one line."""
    return MappingProxyType(
        {
            entry["id"]: DefinitionRule(id=entry["id"], title=entry["title"], text=" ".join(entry["text"].split()))
            for entry in _table()["rule"]
        }
    )


@functools.cache
def _table() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((asset_dir("reports") / "metrics.toml").read_text(encoding="utf-8"))
