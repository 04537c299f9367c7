"""The alias table: names and units under which exporters publish the columns of the sample schema."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from slurm_affinode.base.errors import ConfigError
from slurm_affinode.base.toml_schema import Kind, TomlEntries, TomlFile, TomlList, string
from slurm_affinode.metrics.schema import IDENTITY, METRICS

HELPERS = ("fb_free_mib", "fb_reserved_mib")
"""Read only to compute ``fb_total_mib``."""
VALUES = (*METRICS, *HELPERS)
"""Fields that numbers in a file can belong to."""

UNITS: dict[str, float] = {
    "percent": 1.0,
    "ratio": 1.0,
    "percent_or_ratio": 1.0,
    "mib": 1.0,
    "bytes": 1 / 2**20,
    "kib": 1 / 2**10,
    "mb": 1e6 / 2**20,
    "gib": 2.0**10,
    "watts": 1.0,
    "milliwatts": 1e-3,
    "number": 1.0,
}
"""Unit -> factor to the unit of the schema, before percent and ratio are distinguished (see ``Alias.factor``)."""

_BRACKETS = {
    "%": "percent", "mib": "mib", "mb": "mib", "kib": "kib", "gib": "gib", "w": "watts", "mw": "milliwatts",
    "b": "bytes", "bytes": "bytes", "ratio": "ratio",
}  # fmt: skip
"""Units in brackets after a column name, as written by nvidia-smi and by users; ``MB`` of older nvidia-smi is MiB."""
_UNIT_OF = re.compile(r"\s*[\[(]\s*([^\])]*?)\s*[\])]\s*$")
_SEPARATORS = re.compile(r"[^0-9a-z]+")
_RATIO_FIELDS = ("engine_active", "sm_active", "tensor_active", "dram_active")


@dataclass(frozen=True, slots=True)
class Alias:
    """The field and unit that a name stands for."""

    field: str
    """A column of the sample schema, one of ``HELPERS``, ``time``, ``metric`` or ``value``."""
    unit: str = "number"
    rank: int = 0
    """If a file has several names for one field, the one with the lowest rank is used."""

    @property
    def factor(self) -> float:
        """The factor to the unit of the schema. ``percent_or_ratio`` counts as percent here."""
        if self.field in _RATIO_FIELDS:
            return 0.01 if self.unit == "percent" else UNITS[self.unit]
        if self.field == "util_pct" and self.unit == "ratio":
            return 100.0
        return UNITS[self.unit]


def folded(name: str) -> str:
    """Normalize ``name`` for comparison: lower case, without a unit in brackets, words joined by ``_``."""
    bare = _UNIT_OF.sub("", name.strip())
    if bare == "__name__":  # Prometheus' label for the name of a metric, distinct from ``name``
        return bare
    return _SEPARATORS.sub("_", bare.lower()).strip("_")


def bracket_unit(name: str) -> str | None:
    """Return the unit in brackets at the end of a column name, or None."""
    match = _UNIT_OF.search(name)
    return _BRACKETS.get(match.group(1).lower()) if match else None


@dataclass(frozen=True, slots=True)
class Aliases:
    """The parsed alias table."""

    metrics: Mapping[str, Alias]
    """Folded name -> field and unit."""
    labels: Mapping[str, tuple[str, ...]]
    """Identity column or ``job`` -> folded label names, in order."""
    columns: Mapping[str, Alias]
    """Folded header -> identity column, ``job``, ``time``, ``metric`` or ``value``."""
    spelled: Mapping[str, str]
    """Folded name of a metric -> its spelling in the table."""
    site_metrics: frozenset[str] = frozenset()
    """Folded names of metrics added by the site."""
    texts: tuple[str, str, str] = dataclasses.field(init=False, repr=False, compare=False)
    """``metrics``, ``labels`` and ``columns``, sorted, as Python shows them: part of the fingerprint of every file."""

    def __post_init__(self) -> None:
        texts = (
            repr(sorted(self.metrics.items(), key=str)),
            repr(sorted(self.labels.items())),
            repr(sorted(self.columns.items(), key=str)),
        )
        object.__setattr__(self, "texts", texts)

    def metric(self, name: str) -> Alias | None:
        """Return the field and unit of the metric ``name``; None if the schema has no such field."""
        return self.metrics.get(folded(name))

    def column(self, header: str) -> Alias | None:
        """Return the field and unit of the column ``header``; a unit in brackets overrides that of the table."""
        key = folded(header)
        alias = self.columns.get(key) or self.metrics.get(key)
        unit = bracket_unit(header)
        if alias is None or unit is None or alias.field not in VALUES:
            return alias
        return Alias(alias.field, unit, alias.rank)


def load(extra: Path | None = None, columns: Mapping[str, str] | None = None) -> Aliases:
    """Load the built-in table, then the file ``extra``, then ``columns`` (header -> ``FIELD`` or ``FIELD:UNIT``).

    Raises ``ConfigError`` for unknown fields and units.
    """
    table = _builtin()
    if extra is not None:
        try:
            text = extra.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{extra}: no such file", hint="see gpu_history.aliases in the configuration") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{extra}: {error}") from error
        table = _merged(table, _parse(text, str(extra)))
    aliases = {folded(header): _column_alias(header, what) for header, what in (columns or {}).items()}
    return replace(table, columns={**table.columns, **aliases})


def _column_alias(header: str, what: str) -> Alias:
    field, _, unit = what.partition(":")
    fields_known = {*VALUES, *IDENTITY, "job", "time", "metric", "value"}
    if field not in fields_known:
        raise ConfigError(
            f"gpu_history.columns: {header!r}: {field!r} is not a field",
            hint=f"fields: {', '.join(sorted(fields_known))}",
        )
    if unit and unit not in UNITS:
        raise ConfigError(f"gpu_history.columns: {header!r}: {unit!r} is not a unit", hint=f"units: {', '.join(UNITS)}")
    return Alias(field, unit or bracket_unit(header) or ("ratio" if field in _RATIO_FIELDS else "number"), rank=-1)


@functools.cache
def _builtin() -> Aliases:
    text = resources.files("slurm_affinode.metrics").joinpath("aliases.toml").read_text(encoding="utf-8")
    return _parse(text, "aliases.toml")


_NAMES = TomlList(string)
_TABLES: Mapping[str, Kind] = {
    "metrics": TomlEntries(TomlEntries(_NAMES, UNITS), (*VALUES, "job")),
    "labels": TomlEntries(_NAMES, (*IDENTITY, "job")),
    "columns": TomlEntries(_NAMES, (*IDENTITY, "job", "time", "metric", "value")),
}


def _parse(text: str, where: str) -> Aliases:
    """Parse a table. Raises ``TomlError`` with all errors."""
    file = TomlFile(text)
    tables = file.table(file.data, (), _TABLES)
    file.check(where)
    metrics: dict[str, Alias] = {}
    spelled: dict[str, str] = {}
    for field, units in tables.get("metrics", {}).items():
        named = ((unit, name) for unit, names in units.items() for name in names)
        for rank, (unit, name) in enumerate(named):
            metrics.setdefault(folded(name), Alias(field, unit, rank))
            spelled.setdefault(folded(name), name)
    labels: dict[str, tuple[str, ...]] = tables.get("labels", {})
    headers: dict[str, tuple[str, ...]] = tables.get("columns", {})
    columns: dict[str, Alias] = {}
    for field in {**headers, **labels}:
        for rank, name in enumerate((*headers.get(field, ()), *labels.get(field, ()))):
            columns.setdefault(folded(name), Alias(field, "number", rank))
    return Aliases(metrics, labels, columns, spelled)


def _merged(base: Aliases, extra: Aliases) -> Aliases:
    labels = {
        field: (*extra.labels.get(field, ()), *base.labels.get(field, ())) for field in {**base.labels, **extra.labels}
    }
    return Aliases(
        {**base.metrics, **extra.metrics}, labels, {**base.columns, **extra.columns},
        {**base.spelled, **extra.spelled}, base.site_metrics | frozenset(extra.metrics),
    )  # fmt: skip
