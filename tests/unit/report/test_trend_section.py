"""The section on the trend: one base of percentages, the period before, and periods without a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from waste_samples import SINCE, make_result

from slurm_affinode.analysis.result import PeriodHours, Trend, WasteResult
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import TrendSection
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.trend_section import section

WEEK = timedelta(days=7)
TOTAL = {
    "gpu_hours_capacity": 1000.0, "gpu_hours_allocated": 800.0, "gpu_hours_busy": 400.0, "gpu_hours_low": 100.0,
    "gpu_hours_idle": 200.0, "gpu_hours_unknown": 100.0, "unallocated_gpu_hours": 200.0,
}  # fmt: skip


def week(before: int, **total: float | None) -> PeriodHours:
    """A week, ``before`` weeks before that of the report."""
    since = SINCE - before * WEEK
    return PeriodHours(f"2026-W{44 - before}", since, since + WEEK, {**TOTAL, **total})


def with_trend(earlier: Sequence[PeriodHours], **total: float | None) -> WasteResult:
    return replace(make_result(20), total={**TOTAL, **total}, trend=Trend("week", tuple(earlier)))


def section_of(result: WasteResult) -> TrendSection:
    made = section(result)
    assert made is not None
    return made


def lead(result: WasteResult) -> str:
    return section_of(result).lead.replace(fmt.NBSP, " ")


def test_percentages_refer_to_the_capacity() -> None:
    """In the sentence and in the table, whose first row is this period."""
    result = with_trend([week(2, gpu_hours_busy=100.0), week(1, gpu_hours_busy=300.0)])
    assert lead(result) == (
        "GPUs were busy for 40 % of the capacity; in the week before for 30 %. The median of the last 3: 30 %."
    )
    rows = [[cell.text.replace(fmt.NBSP, " ") for cell in row] for row in section_of(result).table.rows]
    assert rows[0] == ["this week", "1,000", "80 %", "40 %", "20 %", "10 %"]
    assert [row[0] for row in rows] == ["this week", "2026-W43", "2026-W42"]
    page = render_report(result, title="t", top=5)
    assert 'id="fig-trend"' in page
    assert 'href="#trend"' in page


def test_base_is_the_allocated_hours_if_a_capacity_is_unknown() -> None:
    """All periods have the same base: otherwise they could not be compared."""
    made = section_of(with_trend([week(2, gpu_hours_capacity=None), week(1)]))
    assert "busy for 50" in made.lead
    assert "of the allocated GPU-hours" in made.lead
    assert made.table.columns[2].unit == "of allocated"
    assert made.table.rows[2][1].text == "unknown"


def test_missing_period_is_not_the_period_before() -> None:
    """The last one with a report is named."""
    assert "in the last one with a report, 2026-W42, for 40 %." in lead(with_trend([week(3), week(2)]))


@pytest.mark.parametrize(
    ("earlier", "now", "text"),
    [
        (None, 400.0, "in the week before that is unknown."),
        (400.0, None, "How busy the GPUs were in this week is unknown."),
    ],
)
def test_unmeasured_periods_are_unknown(earlier: float | None, now: float | None, text: str) -> None:
    """They are not 0, and the median leaves them out."""
    result = with_trend([week(1, gpu_hours_busy=earlier)], gpu_hours_busy=now)
    assert text in lead(result)
    assert "median" not in lead(result)


def test_section_is_left_out_without_earlier_reports() -> None:
    """A single bar is no trend."""
    assert section(make_result(5)) is None
    assert 'id="trend"' not in render_report(make_result(5), title="t", top=5)
