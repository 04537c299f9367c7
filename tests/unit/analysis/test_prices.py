"""Prices of GPU-hours: the first matching row, the share of MIG instances, and errors that name the location."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.analysis import prices
from slurm_affinode.analysis.prices import NO_PRICES, Price, PriceTable
from slurm_affinode.base.errors import ConfigError

TABLE = PriceTable("EUR", (Price(("a100*80*",), 3.5), Price(("a100*", "a30*"), 2.1), Price(("h100*",), 7.0)))


@pytest.mark.parametrize(
    ("model", "price"),
    [
        ("NVIDIA A100-SXM4-80GB", 3.5),
        ("NVIDIA A100-SXM4-40GB", 2.1),
        ("a100", 2.1),
        ("a100_80", 3.5),
        ("NVIDIA H100 80GB HBM3", 7.0),
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 0.5),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 3.5),
        ("NVIDIA A30 MIG 1g.6gb", 0.525),
        ("Tesla V100 MIG 1g.1gb", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 0.5),
        ("a100_2g.10gb", 0.6),
        ("nvidia_a30_1g.6gb", 0.525),
        ("1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB+a30", 2.1),
        ("a100+h100", None),
        ("a100_1g.5gb+a100_3g.20gb", None),
        (None, None),
    ],
)
def test_price_is_that_of_first_matching_row(model: str | None, price: float | None) -> None:
    """Any spelling of the model is matched; a MIG instance costs its share of the compute slices (7, on an A30 4).

    Several models have a price only if it is the same for all of them.
    """
    assert TABLE.of(model) == (None if price is None else pytest.approx(price))


def test_mig_row_overrides_the_share_of_slices() -> None:
    """A site may charge more for an instance than its share."""
    table = PriceTable("EUR", (Price(("a100*",), 7.0), Price(("a100*mig 1g.*",), 2.0)))
    assert (table.of("NVIDIA A100 MIG 1g.10gb"), table.of("NVIDIA A100 MIG 2g.20gb")) == (2.0, pytest.approx(2.0))
    assert table.of("NVIDIA A100") == 7.0


def test_default_price_applies_to_unmatched_models() -> None:
    """It also applies to an unknown model; 0 is a valid price."""
    assert PriceTable("EUR", default=0.0).of("anything") == 0.0
    assert PriceTable("EUR", default=1.5).of(None) == 1.5
    assert NO_PRICES.of("NVIDIA A100") is None


def test_price_table_is_loaded(tmp_path: Path) -> None:
    """Patterns match model names as people write them; the configuration can override the currency."""
    path = tmp_path / "prices.toml"
    path.write_text(
        'currency = "CHF"\nsource = "finance"\nas_of = 2026-01-31\ndefault_per_hour = 1\n'
        '[[gpu]]\nmatch = ["NVIDIA A100-*", "a40"]\nper_hour = 2\n'
    )
    table = prices.load(path)
    assert (table.currency, table.source, table.as_of, table.default) == ("CHF", "finance", "2026-01-31", 1.0)
    path.write_text(path.read_text() + "[[gpu]]\nmatch = 'K80'\nper_hour = 0\n")
    assert prices.load(path).of("Tesla K80") == 0.0  # a price, and not the default
    path.write_text("[[gpu]]\nmatch = 'K80'\nper_hour = 1\n")
    assert (prices.load(path).currency, prices.load(path).as_of, prices.load(path).default) == ("", None, None)
    assert (table.of("A100-PCIE"), table.of("NVIDIA A40"), table.of("L4"), table.example) == (2.0, 2.0, 1.0, False)
    assert prices.load(path, currency="EUR").currency == "EUR"
    assert prices.load(currency="EUR").currency == prices.load().currency == "USD"


def test_built_in_price_table_is_marked_as_example() -> None:
    """It covers the common models and names the source of its prices."""
    table = prices.load()
    assert table.example
    assert table.source
    assert all(table.of(model) for model in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"))
    assert (table.of("NVIDIA A100-SXM4-80GB") or 0) > (table.of("NVIDIA A100-SXM4-40GB") or 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("currency = ", "t.toml:1: "),
        ("curency = 'EUR'", "t.toml:1: curency: unknown key"),
        ("currency = 3", "t.toml:1: currency: 3 is not a string"),
        ("gpu = 3", "t.toml:1: gpu: is a list of tables"),
        ("default_per_hour = -1", "t.toml:1: default_per_hour: -1 is below 0"),
        ("default_per_hour = inf", "t.toml:1: default_per_hour: inf is not a finite number"),
        (
            "[[gpu]]\nmatch = 'a'\nper_hour = 1\n[[gpu]]\nmatch = 3\nper_hour = 1",
            "t.toml:5: gpu[2].match: 3 is not a list of strings",
        ),
        ("[[gpu]]\nmatch = []\nper_hour = 1", "t.toml:2: gpu[1].match: the list is empty"),
        ("[[gpu]]\nmatch = 'a'", "t.toml:1: gpu[1]: per_hour is missing"),
        ("[[gpu]]\nmatch = 'a'\nper_hour = true", "t.toml:3: gpu[1].per_hour: True is not a number"),
        ("[[gpu]]\nmatch = 'a'\nper_hour = 1\nprice = 2", "t.toml:4: gpu[1].price: unknown key"),
    ],
)
def test_price_table_error_names_file_and_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        prices.parse(text, where="t.toml")
    assert message in str(error.value)


def test_unreadable_price_table_is_reported(tmp_path: Path) -> None:
    """The path does not exist, is a directory, or is not UTF-8."""
    (tmp_path / "latin.toml").write_bytes(b"currency = '\xa3'")
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / "latin.toml"):
        with pytest.raises(ConfigError, match="the price table cannot be read"):
            prices.load(path)
