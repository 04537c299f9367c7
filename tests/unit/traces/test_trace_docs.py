"""docs/traces.md contains only figures that the analysis computes from the published trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.traces import (
    alibaba_instances,
    claims,
    fleet,
    gentd26,
    instances,
    job_figures,
    pai2020,
    philly,
    spot2026,
    swf,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "traces.md"
ROW = re.compile(r"^\| `([A-Za-z0-9_.-]+)` \| ([0-9.,]+)( %)? \|", re.MULTILINE)


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
    check_rows(PAGE.read_text().split("\n## ")[1], figures, at_least=36)


def check_rows(text: str, figures: dict[str, Any], *, at_least: int) -> None:
    rows = ROW.findall(text)
    assert len(rows) >= at_least
    for key, printed, percent in rows:
        digits = len(printed.partition(".")[2])
        value = figures[key] * (100 if percent else 1)
        assert f"{value:,.{digits}f}" == printed, key


@pytest.mark.parametrize(
    ("name", "file", "at_least"),
    [("kth-sp2", "kth-sp2/KTH-SP2-1996-2.swf.gz", 12), ("philly", "philly/philly_pollux.csv.gz", 13)],
)
def test_tables_of_job_logs_match_the_analysis(shared_data: Path, name: str, file: str, at_least: int) -> None:
    log = (philly if name == "philly" else swf).read(shared_data / file)
    figures = claims.flat(job_figures.analyse(log).as_dict())
    check_rows(figures_of(name), figures, at_least=at_least)


@pytest.mark.parametrize(
    ("name", "folder", "at_least"), [("dlrm2025", "alibaba-gpu-v2025", 15), ("pai2023", "alibaba-gpu-v2023", 10)]
)
def test_tables_of_instances_match_the_analysis(shared_data: Path, name: str, folder: str, at_least: int) -> None:
    read = {"dlrm2025": alibaba_instances.read_dlrm2025, "pai2023": alibaba_instances.read_pai2023}[name]
    log = read(shared_data / folder)
    figures = claims.flat(instances.analyse(log).summary.as_dict())
    check_rows(figures_of(name), figures, at_least=at_least)


def test_table_of_spot_gpus_matches_the_analysis(shared_data: Path) -> None:
    summary = spot2026.analyse(spot2026.read(shared_data / "alibaba-spot-gpu")).summary
    check_rows(figures_of("spot2026"), claims.flat(summary.as_dict()), at_least=5)


def test_table_of_pai_matches_the_analysis(shared_data: Path) -> None:
    figures = claims.flat(pai2020.analyse(pai2020.read(shared_data / "alibaba-gpu-v2020")).as_dict())
    check_rows(figures_of("pai2020"), figures, at_least=5)
    judged = claims.judge(claims.load("pai2020"), figures)
    assert [claim.verdict for claim in judged if claim.verdict != claims.UNKNOWN] == [claims.BORNE_OUT] * 7
    assert f"Of {len(judged)} published statements" in PAGE.read_text()


def figures_of(name: str) -> str:
    """Return the table of the page that is marked with the name of a trace."""
    return PAGE.read_text().split(f"<!-- figures of {name}:")[1].split("\n\n")[0]


def test_page_counts_the_claims_about_philly_that_hold(shared_data: Path) -> None:
    log = philly.read(shared_data / "philly" / "philly_pollux.csv.gz")
    judged = claims.judge(claims.load("philly"), claims.flat(job_figures.analyse(log).as_dict()))
    known = [claim for claim in judged if claim.verdict != claims.UNKNOWN]
    assert (len(known), [c.id for c in known if c.verdict == claims.BORNE_OUT]) == (8, ["largest-job"])


def test_page_lists_all_claims_not_borne_out(figures: dict[str, Any]) -> None:
    """The page gives their number and the computed values."""
    text = PAGE.read_text()
    judged = claims.judge(claims.load("gentd26"), figures)
    doubted = [c for c in judged if c.verdict not in (claims.BORNE_OUT, claims.UNKNOWN)]
    assert [c.id for c in judged if c.verdict == claims.UNKNOWN] == ["computation-share"]
    assert "One statement is unknown: that computation is 15 to 30 %" in text
    assert f"{['no', 'One', 'Two', 'Three', 'Four', 'Five', 'Six'][len(doubted)]} are not borne out" in text
    table = text.split("| published | the data |")[1].split("\n\n")[0]
    assert len(table.strip().splitlines()) == len(doubted) + 1
    for claim in doubted:
        assert claim.computed is not None
        printed = [f"{claim.computed:.{digits}f}" for digits in (1, 2)]
        assert any(number in table for number in printed), claim.id
        assert f"{claim.published:.{claim.decimals}f}" in table
