"""docs/traces.md contains only figures that the analysis computes from the published trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.traces import claims, fleet, gentd26

PAGE = Path(__file__).resolve().parents[3] / "docs" / "traces.md"
ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| ([0-9.,]+)( %)? \|", re.MULTILINE)


@pytest.fixture(scope="module")
def figures(shared_data: Path) -> dict[str, Any]:
    """Return figures by name; the keys of nested objects are joined with a dot."""
    summary = fleet.analyse(gentd26.read([shared_data / "gentd26"])).summary.as_dict()
    flat = dict(summary)
    for key, value in summary.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": part for name, part in value.items()}
    return flat


def test_table_figures_match_the_analysis(figures: dict[str, Any]) -> None:
    """Each value is the computed one, rounded to the printed number of decimals."""
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) > 35
    for key, text, percent in rows:
        digits = len(text.partition(".")[2])
        value = figures[key] * (100 if percent else 1)
        assert f"{value:,.{digits}f}" == text, key


def test_page_lists_all_claims_not_borne_out(figures: dict[str, Any]) -> None:
    """The page gives their number and the computed values."""
    text = PAGE.read_text()
    doubted = [c for c in claims.judge(claims.load("gentd26"), figures) if c.verdict != claims.BORNE_OUT]
    assert f"{['no', 'One', 'Two', 'Three', 'Four', 'Five'][len(doubted)]} are not borne out" in text
    table = text.split("| published | the data |")[1].split("\n\n")[0]
    assert len(table.strip().splitlines()) == len(doubted) + 1
    for claim in doubted:
        assert claim.computed is not None
        printed = [f"{claim.computed:.{digits}f}" for digits in (1, 2)]
        assert any(number in table for number in printed), claim.id
        assert f"{claim.published:.{claim.decimals}f}" in table
