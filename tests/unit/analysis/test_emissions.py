"""Factors of emissions: the site's own, and that of a country in a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.analysis import emissions
from slurm_affinode.base.config import EmissionsConfig
from slurm_affinode.base.errors import ConfigError

TABLE = """\
iso3,country,year,g_co2e_per_kwh
NOR,Norway,2021,26.5
NOR,Norway,2023,30.08
NOR,Norway,2022,
POL,Poland,2023,661.9
"""
"""Synthetic figures."""


def in_table(
    tmp_path: Path, text: str = TABLE, country: str = "NOR", **keys: object
) -> emissions.EmissionFactor | None:
    path = tmp_path / "co2.csv"
    path.write_text(text)
    return emissions.load(EmissionsConfig(country=country, table=path, **keys))  # type: ignore[arg-type]


def test_site_without_keys_has_no_emissions() -> None:
    assert emissions.load(EmissionsConfig()) is None
    assert emissions.load(EmissionsConfig(pue=1.2, origin="none")) is None


def test_emissions_are_energy_times_pue_times_factor() -> None:
    factor = emissions.load(EmissionsConfig(grams_per_kwh=400.0, origin="contract of 2026", pue=1.5))
    assert factor is not None
    assert factor.kg(10.0) == pytest.approx(6.0)
    assert factor.kg(None) is None, "unknown energy"
    assert factor.rule == "400 g CO2e per kWh (contract of 2026); PUE 1.5; without hosts and manufacture"
    without = emissions.load(EmissionsConfig(grams_per_kwh=0.0))
    assert without is not None
    assert (without.kg(10.0), "GPUs alone" in without.rule) == (0.0, True)


@pytest.mark.parametrize("country", ["NOR", "nor", "Norway", " norway "])
def test_latest_year_with_a_figure_counts(tmp_path: Path, country: str) -> None:
    factor = in_table(tmp_path, country=country)
    assert factor is not None
    assert factor.grams_per_kwh == 30.08
    assert "2023" in factor.source
    assert "co2.csv" in factor.source


def test_named_source_has_the_year(tmp_path: Path) -> None:
    factor = in_table(tmp_path, origin="Ember, location-based")
    assert factor is not None
    assert factor.source == "Ember, location-based, 2023"


@pytest.mark.parametrize(
    "header",
    ["country,year,iso_code,carbon_intensity_elec", "Entity,Year,Code,Carbon intensity of electricity - gCO2/kWh"],
)
def test_tables_of_our_world_in_data_are_read_as_published(tmp_path: Path, header: str) -> None:
    factor = in_table(tmp_path, f"\ufeff{header}\nNorway,2020,NOR,28\nWorld,2023,OWID_WRL,480\n")
    assert factor is not None
    assert factor.grams_per_kwh == 28.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE.replace("NOR", "SWE").replace("Norway", "Sweden"), "no row for 'NOR'"),
        ("a,b\n1,2\n", "no table of emissions"),
        ("", "no table of emissions"),
        (TABLE.replace("26.5", "few"), "co2.csv:2: a number and a year"),
        (TABLE.replace("26.5", "-1"), "co2.csv:2: -1 is not grams"),
        (TABLE.replace("26.5", "nan"), "co2.csv:2: nan is not grams"),
        (TABLE.replace("26.5", "26500"), "co2.csv:2: 26500 is not grams"),
        ("iso3,year,g_co2e_per_kwh\nNOR,soon,26\n", "co2.csv:2"),
    ],
)
def test_invalid_table_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_table(tmp_path, text)


def test_unreadable_table_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: the table of emissions cannot be read: No such file"):
        emissions.load(EmissionsConfig(country="NOR", table=tmp_path / "none.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not CSV in UTF-8"):
        emissions.load(EmissionsConfig(country="NOR", table=tmp_path / "binary.csv"))


def test_keys_that_do_not_go_together_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both set"):
        emissions.load(EmissionsConfig(grams_per_kwh=1.0, country="NOR"))
    with pytest.raises(ConfigError, match="table is missing"):
        emissions.load(EmissionsConfig(country="NOR"))
    with pytest.raises(ConfigError, match="country is missing"):
        emissions.load(EmissionsConfig(table=tmp_path))
