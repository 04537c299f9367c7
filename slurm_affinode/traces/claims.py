"""Comparison of published statements with computed figures, at the precision in which they were printed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from importlib.resources import files
from typing import Any

BORNE_OUT = "borne-out"
OTHER_RECIPE = "other-recipe"
"""The data gives another number; a different recipe, which is named, reproduces the published one."""
NOT_BORNE_OUT = "not-borne-out"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Claim:
    """One published statement and the figure computed from the data. Numbers are in ``unit``; None is unknown."""

    id: str
    finding: str
    """Section of the page that shows the claim."""
    text: str
    source: str
    measure: str
    """Key of the summary."""
    unit: str
    decimals: int
    published: float
    computed: float | None
    verdict: str
    """One of the four verdicts above."""
    note: str | None = None
    other_recipe: str | None = None
    other_computed: float | None = None
    published_to: float | None = None
    """End of the published range; ``None``: a single number."""
    reason: str | None = None
    """Why the figure is unknown although its tables are there: they contradict themselves."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of ``summary.json``."""
        keys = ("id", "text", "source", "measure", "unit", "published", "computed", "verdict", "note")
        values = {key: getattr(self, key) for key in keys}
        if self.other_recipe is not None:
            values |= {"other_recipe": self.other_recipe, "other_computed": self.other_computed}
        values |= {key: value for key in ("published_to", "reason") if (value := getattr(self, key)) is not None}
        return values


def load(name: str) -> Mapping[str, Any]:
    """Load ``NAME_claims.toml`` from the package."""
    text = files("slurm_affinode.traces").joinpath(f"{name}_claims.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def judge(table: Mapping[str, Any], figures: Mapping[str, Any], cluster: str | None = None) -> tuple[Claim, ...]:
    """Compare every claim of the table with ``figures``, the values of a summary by name.

    Claims about one ``cluster`` of a trace are compared only with figures of that cluster.
    """
    sources: Mapping[str, str] = table["sources"]
    entries = (entry for entry in table["claim"] if entry.get("cluster", cluster) == cluster)
    return tuple(_judge(entry, sources, figures) for entry in entries)


def _judge(entry: Mapping[str, Any], sources: Mapping[str, str], figures: Mapping[str, Any]) -> Claim:
    decimals, published, published_to = int(entry["decimals"]), float(entry["value"]), entry.get("to")
    computed = _scaled(figures.get(entry["measure"]), entry["scale"])
    reference = _scaled(figures.get(entry.get("other", "")), entry["scale"])
    if computed is None:
        verdict = UNKNOWN
    elif agrees(computed, published, decimals, published_to):
        verdict = BORNE_OUT
    elif reference is not None and agrees(reference, published, decimals, published_to):
        verdict = OTHER_RECIPE
    else:
        verdict = NOT_BORNE_OUT
    contradicted = computed is None and figures.get(entry.get("contradicted_by", "")) is not None
    return Claim(
        id=entry["id"], finding=entry["finding"], text=entry["text"], source=sources[entry["source"]],
        measure=entry["measure"], unit=entry["unit"], decimals=decimals, published=published, computed=computed,
        verdict=verdict, note=entry.get("note"), other_recipe=entry.get("other_recipe"), other_computed=reference,
        published_to=published_to, reason=entry["contradiction"] if contradicted else None,
    )  # fmt: skip


def _scaled(value: object, scale: float) -> float | None:
    return float(value) * scale if isinstance(value, int | float) else None


def flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects by keys joined with dots; lists are left out."""
    values: dict[str, Any] = {}
    for key, value in figures.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list | tuple):
            values[f"{prefix}{key}"] = value
    return values


def agrees(computed: float, published: float, decimals: int, published_to: float | None = None) -> bool:
    """Return whether ``computed``, rounded half up to ``decimals`` digits, equals ``published``.

    With ``published_to``: whether it is in that range, ends included.
    """
    step = Decimal(1).scaleb(-decimals)
    # Format with 12 digits first: the rounding of 0.6685 x 100 must not depend on its last binary digit.
    rounded = Decimal(f"{computed:.12g}").quantize(step, rounding=ROUND_HALF_UP)
    low = Decimal(repr(published)).quantize(step)
    return low <= rounded <= (low if published_to is None else Decimal(repr(published_to)).quantize(step))
