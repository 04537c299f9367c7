"""The charts of a report: the number of bars and the time or group of each."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.report import waste_charts

SINCE = datetime(2024, 1, 17, tzinfo=UTC)  # a Wednesday


def of_days(result: WasteResult, days: int) -> WasteResult:
    """Return ``result`` with the given number of days, each with 24 idle and 24 busy GPU-hours."""
    starts = [SINCE + timedelta(days=i) for i in range(days)]
    hours = {"allocated": 48.0, "idle": 24.0, "low": 0.0, "busy": 24.0, "unknown": 0.0}
    frame = pl.DataFrame(
        {"bucket": starts, **{f"gpu_hours_{name}": [value] * days for name, value in hours.items()}}
    ).with_columns(pl.col("bucket").cast(pl.Datetime("ms", "UTC")))
    query = replace(result.query, since=SINCE, until=SINCE + timedelta(days=days))
    return replace(result, query=query, over_time=frame, bucket_s=86400)


@pytest.mark.parametrize(
    ("days", "bars", "bar", "second"),
    [
        (92, 92, "One bar is a day", "2024-01-18"),
        (107, 16, "One bar is a week", "2024-01-22"),
        (731, 105, "One bar is a week", "2024-01-22"),
        (1096, 37, "One bar is a month", "2024-02-01"),
        (3653, 11, "One bar is a year", "2025-01-01"),
    ],
)
def test_bars_over_time_stay_wide_enough(result: WasteResult, days: int, bars: int, bar: str, second: str) -> None:
    """Bars are days, then weeks from Monday, then months, then years, as the caption says; a cut bar is a mean."""
    chart = str(waste_charts.hours_over_time(of_days(result, days))).replace("\N{NO-BREAK SPACE}", " ")
    tips = re.findall(r'<g class="bucket"><title>(\S+) 00:00: (.*?)</title>', chart)
    assert len(tips) == bars
    assert tips[1][0] == second
    assert {text for _, text in tips} == {"Busy 1, Low 0, Idle 1, Unknown 0"}
    assert f"{bar}." in chart
    widths = [float(width) for width in re.findall(r'class="hit" x="[\d.]+%" y="26" width="([\d.]+)%"', chart)]
    assert sum(widths) == pytest.approx(100, abs=0.5)
    assert min(widths) > 0.8


@pytest.mark.parametrize("days", [92, 107])
def test_bar_without_measurements_is_unknown(result: WasteResult, days: int) -> None:
    """This also applies if its week includes days without jobs, for which everything is known."""
    shown = of_days(result, days)
    nothing, unknown = pl.col("bucket") >= datetime(2024, 2, 12, tzinfo=UTC), pl.col("bucket").dt.weekday() == 3
    names = ["gpu_hours_idle", "gpu_hours_low", "gpu_hours_busy"]
    frame = shown.over_time.with_columns(
        *(pl.when(nothing & unknown).then(None).when(nothing).then(0.0).otherwise(name).alias(name) for name in names),
        *(
            pl.when(nothing & unknown).then(48.0).when(nothing).then(0.0).otherwise(name).alias(name)
            for name in ("gpu_hours_allocated", "gpu_hours_unknown")
        ),
    )
    chart = str(waste_charts.hours_over_time(replace(shown, over_time=frame)))
    tips = dict(re.findall(r'<g class="bucket"><title>(\S+) 00:00: (.*?)</title>', chart))
    day = "2024-02-14" if days == 92 else "2024-02-12"
    assert tips[day].startswith("Busy unknown, Low unknown, Idle unknown, Unknown ")
    assert tips["2024-01-22"].startswith("Busy 1, ")


@pytest.mark.parametrize(
    ("measured", "note"),
    [(100.0, "100 h, 40 % idle"), (50.0, "100 h, 20 % idle, 50 % unknown"), (0.0, "100 h, idle unknown")],
)
def test_idle_share_of_a_bar_is_relative_to_its_allocated_hours(
    result: WasteResult, measured: float, note: str
) -> None:
    """The label of the bar gives the allocated hours."""
    row = {
        "name": "gpu", "gpu_hours_allocated": 100.0, "gpu_hours_unknown": 100.0 - measured,
        "gpu_hours_measured": measured, "gpu_hours_idle": 0.4 * measured, "gpu_hours_busy": 0.6 * measured,
        "gpu_hours_low": 0.0, "idle_fraction": 0.4 if measured else None,
    }  # fmt: skip
    shown = replace(result, groups={"partition": pl.DataFrame([row])})
    chart = str(waste_charts.group_bars(shown, "partition", "By partition", "partition"))
    assert f">{note}<" in chart.replace("\N{NO-BREAK SPACE}", " ")
