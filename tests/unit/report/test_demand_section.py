"""The section on unmet demand: its sentence, its tables, and what is unknown."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
from waste_samples import make_result

from slurm_affinode.analysis.result import UnmetDemand, WasteResult
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import UnmetSection
from slurm_affinode.report.demand_section import section
from slurm_affinode.report.pages import render_report


def demand_of(result: WasteResult) -> UnmetDemand:
    assert result.demand is not None
    return result.demand


def section_of(result: WasteResult) -> UnmetSection:
    made = section(result)
    assert made is not None
    return made


def test_lead_has_waits_and_unmet_hours() -> None:
    """The hours are the sums of the partitions."""
    result = make_result(100)
    made = section_of(result)
    assert made.lead.replace(fmt.NBSP, " ") == (
        "100 jobs waited for 300 GPU-hours; for 100 of them (33 %), as many GPUs of the same partition were held and "
        "idle. 75 GPU-hours were waits behind a job that needed more GPUs."
    )
    assert len(made.partitions.rows) == demand_of(result).partitions.height
    assert made.holders is not None
    assert len(made.holders.rows) == 10
    assert 'id="unmet-holders"' in render_report(result, title="t", top=5)


def test_without_metrics_only_the_waits_are_known() -> None:
    """Unknown hours are not 0."""
    made = section_of(make_result(20, measured=False))
    assert "Without GPU metrics it is unknown" in made.lead
    assert (made.models, made.holders) == (None, None)
    assert [cell.text for cell in made.partitions.rows[0]][1:4:2] == ["unknown", "unknown"]


def test_section_is_left_out_if_no_wait_is_known() -> None:
    """There is no empty section."""
    result = make_result(20)
    assert section(replace(result, demand=None)) is None
    assert section(replace(result, demand=replace(demand_of(result), partitions=pl.DataFrame()))) is None
    assert 'id="unmet"' not in render_report(replace(result, demand=None), title="t", top=5)
