"""Prices of GPU-hours by GPU model, from the site's TOML table or built-in examples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from slurm_affinode.base.errors import ConfigError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.toml_schema import Kind, TomlFile, TomlList, anything, checked, number, string, within

_INSTANCE = re.compile(r"(?:^| )(?:mig (\d+)g\b|(\d+)g\.\d+gb\b)")
_BETWEEN_MODELS = re.compile(r"\+(?!me|gfx)")
"""Excludes the ``+`` in the profile of a MIG instance, such as ``1g.10gb+me``."""


def _slices(text: str) -> int:
    """Return the compute slices of a MIG-capable GPU: 4 on an A30, 7 on the others (NVIDIA MIG user guide)."""
    return 4 if text.startswith("a30") else 7


@dataclass(frozen=True, slots=True)
class Price:
    """One row of the price table."""

    patterns: tuple[str, ...]
    """Shell patterns, lower case, matched against the ``normalized`` model."""
    per_hour: float


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices of a GPU-hour; the first matching row applies."""

    currency: str
    prices: tuple[Price, ...] = ()
    default: float | None = None
    """Price of models that no row matches; None if they have no price."""
    source: str | None = None
    """Origin of the prices."""
    as_of: str | None = None
    example: bool = False
    """True for the built-in table, whose prices are not the site's."""

    @property
    def note(self) -> str:
        """Note about the origin of the prices; empty for the site's own table."""
        of = f" of {self.as_of}" if self.as_of else ""
        example = f"Amounts use example prices{of}, not yours: set price.table in the configuration."
        return example if self.example else ""

    def of(self, model: str | None) -> float | None:
        """Return the price per hour of ``model`` ("NVIDIA A100-SXM4-80GB", or a GRES type "a100"); None if unknown.

        A MIG instance ("... MIG 1g.10gb", or a GRES type "a100_1g.10gb") without a row of its own costs its share of
        the GPU's compute slices. Several models ("a100+v100") have a price only if it is the same for all.
        """
        if model is None:
            return self.default
        if len(models := _BETWEEN_MODELS.split(model)) > 1:
            prices = {self.of(part) for part in models}
            return prices.pop() if len(prices) == 1 else None
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
    """Normalize a model name: lower case, no vendor, single spaces (``NVIDIA A100-SXM4-80GB``: ``a100 sxm4 80gb``)."""
    words = re.sub(r"[\s_\-]+", " ", model.lower()).strip()
    return re.sub(r"^(?:nvidia |tesla |geforce )+", "", words)


def load(path: Path | None = None, *, currency: str | None = None) -> PriceTable:
    """Read the table at ``path``, by default the built-in examples.

    ``currency`` is that of a table of the site; amounts are not converted, so the examples keep theirs. Raises
    ``ConfigError`` if it cannot be read, and ``TomlError`` with all errors.
    """
    where = path or asset_dir("reports") / "prices.toml"
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{where}: the price table cannot be read: {reason}") from error
    table = replace(parse(text, where=str(where)), example=path is None)
    return table if currency is None or table.example else replace(table, currency=currency)


def parse(text: str, *, where: str) -> PriceTable:
    """Parse a price table from TOML text. ``where``: its origin, for errors. Raises ``TomlError``."""
    file = TomlFile(text)
    table = file.table(file.data, (), _TABLE)
    prices = []
    for index, row in enumerate(file.tables("gpu")):
        price = file.table(row, ("gpu", index), _PRICE)
        file.required(row, ("gpu", index), _PRICE)
        prices.append(Price(tuple(normalized(p) for p in price.get("match", ())), price.get("per_hour", 0.0)))
    file.check(where)
    return PriceTable(
        currency=table.get("currency", ""),
        prices=tuple(prices),
        default=table.get("default_per_hour"),
        source=table.get("source"),
        as_of=table.get("as_of"),
    )


_AMOUNT = checked(number, within(0))
_TABLE: Mapping[str, Kind] = {
    "currency": string, "source": string, "as_of": str, "default_per_hour": _AMOUNT, "gpu": anything,
}  # fmt: skip
_PRICE: Mapping[str, Kind] = {
    "match": TomlList(string, single=True, whole_set="every model"), "per_hour": _AMOUNT,
}  # fmt: skip
