"""Names, units, formulas and help texts of the figures, from ``reports/metrics.toml``.

The report shows them as help; ``docs/metrics.md`` is generated from them (``metrics_doc``), so the two cannot differ.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from slurm_affinode.resources import asset_dir


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    id: str
    """The column or key under which results carry it."""
    name: str
    unit: str
    """``GPU-h``, ``GiB h``, ``kWh``, ``%``, ``fraction`` (0-1), ``currency`` (that of the price table), ..."""
    formula: str
    source: str
    help: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule by which samples and runs become figures."""

    id: str
    title: str
    text: str


@functools.cache
def load() -> Mapping[str, Metric]:
    """Every figure by id, in the order in which a reader meets them."""
    return MappingProxyType({entry["id"]: Metric(**entry) for entry in _table()["metric"]})


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Every rule by id; texts are one paragraph on one line."""
    return MappingProxyType(
        {
            entry["id"]: Rule(id=entry["id"], title=entry["title"], text=" ".join(entry["text"].split()))
            for entry in _table()["rule"]
        }
    )


@functools.cache
def _table() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((asset_dir("reports") / "metrics.toml").read_text(encoding="utf-8"))
