"""What a GPU-hour costs, by GPU model: a TOML table that the site sets, else examples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from slurm_affinode.errors import ConfigError
from slurm_affinode.resources import asset_dir
from slurm_affinode.tomllines import syntax_fault

_INSTANCE = re.compile(r"(?:^| )(?:mig (\d+)g\b|(\d+)g\.\d+gb\b)")
_BETWEEN_MODELS = re.compile(r"\+(?!me|gfx)")
"""And not what stands in the profile of an instance, such as ``1g.10gb+me``."""


def _slices(text: str) -> int:
    """Compute slices of a GPU that can be divided: 4 on an A30, 7 on the others (NVIDIA MIG user guide)."""
    return 4 if text.startswith("a30") else 7


@dataclass(frozen=True, slots=True)
class Price:
    """One row of the table."""

    patterns: tuple[str, ...]
    """Shell patterns, lower case, matched against the model as ``normalized``."""
    per_hour: float


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices of a GPU-hour; the first row that matches a model counts."""

    currency: str
    prices: tuple[Price, ...] = ()
    default: float | None = None
    """For models that no row matches; None: they have no price."""
    source: str | None = None
    """Where the prices come from."""
    as_of: str | None = None
    example: bool = False
    """Whether this is the built-in table, which no site pays."""

    @property
    def note(self) -> str:
        """What people have to know of where the prices come from; empty for a table of the site's own."""
        of = f" of {self.as_of}" if self.as_of else ""
        example = f"Amounts use example prices{of}, not yours: set price.table in the configuration."
        return example if self.example else ""

    def of(self, model: str | None) -> float | None:
        """The price of an hour of ``model`` ("NVIDIA A100-SXM4-80GB", or a GRES type "a100"); None: unknown.

        A MIG instance ("... MIG 1g.10gb", or a GRES type "a100_1g.10gb") that no row names as such costs its share of
        the GPU's compute slices. Several models ("a100+v100") have a price where it is the same of all.
        """
        if model is None:
            return self.default
        if len(models := _BETWEEN_MODELS.split(model)) > 1:
            found = {self.of(one) for one in models}
            return found.pop() if len(found) == 1 else None
        text = normalized(model)
        instance = _INSTANCE.search(text)
        if instance is None:
            return self._match(text, self.default)
        named = [replace(p, patterns=tuple(w for w in p.patterns if " mig" in w or "g." in w)) for p in self.prices]
        price = replace(self, prices=tuple(named))._match(text, None)
        if price is not None:
            return price
        whole = self._match(text[: instance.start()], self.default)
        return None if whole is None else whole * min(1.0, int(instance[1] or instance[2]) / _slices(text))

    def _match(self, text: str, default: float | None) -> float | None:
        for price in self.prices:
            if any(fnmatchcase(text, pattern) for pattern in price.patterns):
                return price.per_hour
        return default


NO_PRICES = PriceTable(currency="")


def normalized(model: str) -> str:
    """``NVIDIA A100-SXM4-80GB`` as ``a100 sxm4 80gb``: lower case, no maker, words parted by one space."""
    words = re.sub(r"[\s_\-]+", " ", model.lower()).strip()
    return re.sub(r"^(?:nvidia |tesla |geforce )+", "", words)


def load(path: Path | None = None, *, currency: str | None = None) -> PriceTable:
    """Read the table at ``path``, else the built-in examples; ``currency`` replaces that of the table.

    Raises ``ConfigError`` naming file and key.
    """
    where = path or asset_dir("reports") / "prices.toml"
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{where}: the price table cannot be read: {reason}") from error
    table = replace(parse(text, where=str(where)), example=path is None)
    return table if currency is None else replace(table, currency=currency)


def parse(text: str, *, where: str) -> PriceTable:
    """A table from TOML text; ``where`` names its origin in errors. Raises ``ConfigError``."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fault = syntax_fault(error, text)
        raise ConfigError(f"{where}:{fault.line}: {fault.message}", hint=fault.hint) from error
    unknown = sorted(set(data) - {"currency", "source", "as_of", "default_per_hour", "gpu"})
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]}", hint="known: currency, source, as_of, default_per_hour, [[gpu]]"
        )
    rows = data.get("gpu", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{where}: gpu: a list of tables is needed, each headed [[gpu]]")
    default = data.get("default_per_hour")
    return PriceTable(
        currency=_text(data, "currency", where) or "",
        prices=tuple(_price(row, f"{where}: gpu {number}") for number, row in enumerate(rows, 1)),
        default=None if default is None else _amount(default, f"{where}: default_per_hour"),
        source=_text(data, "source", where),
        as_of=None if "as_of" not in data else str(data["as_of"]),
    )


def _text(data: Mapping[str, Any], key: str, where: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {key}: a string is needed")
    return value


def _price(row: Mapping[str, Any], where: str) -> Price:
    unknown = sorted(set(row) - {"match", "per_hour"})
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]}", hint="known: match, per_hour")
    match = row.get("match")
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{where}: match: a pattern or a list of patterns is needed", hint='write match = "*a100*"')
    if "per_hour" not in row:
        raise ConfigError(f"{where}: per_hour is missing")
    return Price(tuple(normalized(p) for p in patterns), _amount(row["per_hour"], f"{where}: per_hour"))


def _amount(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: a number that is not negative is needed")
    return float(value)
