"""Greenhouse gases of the energy that GPUs draw, by the site's grams of CO2 equivalent for a kilowatt-hour."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.base.config import EmissionsConfig
from slurm_affinode.base.errors import ConfigError

_CODES = ("iso3", "iso_code", "code")
_NAMES = ("country", "entity")
_INTENSITIES = ("g_co2e_per_kwh", "carbon_intensity_elec", "carbon intensity of electricity")
"""Headers of tables by country and year, lower case, those of Our World in Data included (``iso_code``,
``carbon_intensity_elec``; its charts: ``Entity``, ``Code``, ``Carbon intensity of electricity - gCO2/kWh``)."""
_MOST_GRAMS = 2000.0
"""Electricity from lignite alone emits about 1,200 g/kWh (IPCC AR5 WG3, annex III); more is an error of unit."""


@dataclass(frozen=True, slots=True)
class EmissionFactor:
    """Emissions of a kilowatt-hour that GPUs draw."""

    grams_per_kwh: float
    """CO2 equivalent of a kilowatt-hour of electricity."""
    source: str
    """Its origin, with the year."""
    pue: float | None = None
    """Energy of the site for each kilowatt-hour of its machines (power usage effectiveness); ``None``: left out."""

    def kg(self, kwh: float | None) -> float | None:
        """Return kilograms of CO2 equivalent for ``kwh`` drawn by GPUs: energy x PUE x grams / 1000."""
        return None if kwh is None else kwh * (self.pue or 1.0) * self.grams_per_kwh / 1000.0

    @property
    def rule(self) -> str:
        """The rule in words, with its values."""
        extent = "GPUs alone, without cooling" if self.pue is None else f"PUE {self.pue:g}"
        return f"{self.grams_per_kwh:g} g CO2e per kWh ({self.source}); {extent}; without hosts and manufacture"


def load(config: EmissionsConfig) -> EmissionFactor | None:
    """Return the site's factor: its own, else that of its country in its table; ``None`` if neither is set.

    Raises ``ConfigError`` for keys that do not go together, and for a table that cannot be read or lacks the country.
    """
    if config.grams_per_kwh is not None:
        if config.country is not None or config.table is not None:
            raise ConfigError(
                "emissions: grams_per_kwh and a country's figure are both set",
                hint="leave out grams_per_kwh, or country and table",
            )
        return EmissionFactor(config.grams_per_kwh, config.origin or "set by the site", config.pue)
    if config.country is None and config.table is None:
        return None
    if config.country is None or config.table is None:
        missing = "country" if config.country is None else "table"
        raise ConfigError(
            f"emissions: {missing} is missing", hint="set country and table, or grams_per_kwh alone; see docs/report.md"
        )
    grams, year = _latest_of_country(config.table, config.country)
    source = config.origin or f"{config.country}, {year}, {config.table.name}"
    return EmissionFactor(grams, source if str(year) in source else f"{source}, {year}", config.pue)


def _latest_of_country(table: Path, country: str) -> tuple[float, int]:
    """Return the figure of the latest year that ``table`` has for ``country`` (code or name), and that year."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            years = _years(csv.DictReader(file), country.strip().casefold(), str(table))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is not CSV in UTF-8"
        raise ConfigError(f"{table}: the table of emissions cannot be read: {reason}") from error
    if not years:
        raise ConfigError(
            f"{table}: no row for {country!r} has a figure",
            hint="emissions.country is a code of three letters (ISO 3166-1) or a name in the table",
        )
    year = max(years)
    return years[year], year


def _years(rows: csv.DictReader[str], country: str, where: str) -> dict[int, float]:
    headers = {(header or "").strip().casefold(): header for header in rows.fieldnames or ()}
    intensity = _header(headers, _INTENSITIES)
    keys = [header for header in (_header(headers, _CODES), _header(headers, _NAMES)) if header is not None]
    year = headers.get("year")
    if intensity is None or year is None or not keys:
        raise ConfigError(
            f"{where}: no table of emissions: its first line has not the columns of one",
            hint="columns: iso3 or country, year, g_co2e_per_kwh; or a table of Our World in Data",
        )
    years = {}
    for row in rows:
        of_country = any((row[key] or "").strip().casefold() == country for key in keys)
        if not of_country or not (row[intensity] or "").strip():
            continue
        place = f"{where}:{rows.line_num}"
        try:
            grams = float(row[intensity])
            years[int(row[year])] = grams
        except (TypeError, ValueError):
            raise ConfigError(f"{place}: a number and a year are needed") from None
        if not math.isfinite(grams) or not 0 <= grams <= _MOST_GRAMS:
            raise ConfigError(
                f"{place}: {row[intensity]} is not grams of CO2 equivalent per kWh (0 to {_MOST_GRAMS:g})"
            )
    return years


def _header(headers: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the header that is or begins with the first of ``names`` that the table has."""
    for name in names:
        for header, written in headers.items():
            if header == name or (" " in name and header.startswith(name)):
                return written
    return None
