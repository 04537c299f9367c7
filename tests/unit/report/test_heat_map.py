"""Heat maps: colors, unknown and empty fields, the nodes on the map, and the columns of the map of weekdays."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from waste_samples import HOSTILE, make_result

from slurm_affinode.analysis.measures import GPUS
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.report.charts import Words
from slurm_affinode.report.heat_map import NODES, Field, gpu_map, heat_map, week_map
from slurm_affinode.report.links import Links
from slurm_affinode.report.pages import render_report

MONDAY = datetime(2026, 11, 2, tzinfo=UTC)


def with_gpus(*rows: tuple[str | None, str, float, float | None]) -> WasteResult:
    """A report with GPUs: node, number, allocated and idle hours."""
    frame = pl.DataFrame(
        [
            {"cluster": "c", "node": node, "gpu": gpu, "gpu_model": "A100", "gpu_hours_allocated": held,
             "gpu_hours_busy": None, "gpu_hours_low": None, "gpu_hours_idle": idle, "gpu_hours_unknown": 0.0}
            for node, gpu, held, idle in rows
        ],
        schema=GPUS,
    )  # fmt: skip
    return replace(make_result(0), gpus=frame)


def fields(html: str) -> list[str]:
    """Return class and text of each field."""
    return [f"{kind}:{text}" for kind, text in re.findall(r'<td(?: class="(h\w)" title="[^"]*")?>([^<]*)</td>', html)]


def over_time(width_s: int, count: int, *, zone: ZoneInfo | None = None) -> WasteResult:
    """Buckets from a Monday on; every second one is completely idle, the last one unknown."""
    starts = [MONDAY + timedelta(seconds=width_s * number) for number in range(count)]
    idle = [float(number % 2) for number in range(count - 1)] + [None]
    frame = pl.DataFrame(
        {"bucket": starts, "gpu_hours_allocated": [1.0] * count, "gpu_hours_idle": idle,
         "gpu_hours_low": [0.0] * (count - 1) + [None], "gpu_hours_busy": [None if n is None else 1 - n for n in idle],
         "gpu_hours_unknown": [0.0] * (count - 1) + [1.0]}
    )  # fmt: skip
    result = make_result(5)
    return replace(result, over_time=frame, bucket_s=width_s, query=replace(result.query, zone=zone or UTC))


@pytest.mark.parametrize(
    ("share", "level"), [(0.0, "h0"), (0.01, "h1"), (0.2, "h1"), (0.21, "h2"), (0.5, "h3"), (0.99, "h5"), (1.0, "h5")]
)
def test_strength_of_the_color(share: float, level: str) -> None:
    """Five equal steps above 0."""
    html = heat_map(Words("k", "t", "s"), "Node", ["0"], [("n1", [Field(share, "tip")])])
    assert fields(html) == [f"{level}:{round(100 * share)}"]


def test_unknown_and_unallocated_gpus_are_not_idle() -> None:
    """They have no percentage, and differ from each other."""
    result = with_gpus(("n1", "0", 10.0, 5.0), ("n1", "1", 10.0, None), ("n1", "2", 0.0, 0.0), ("n2", "0", 10.0, 0.0))
    assert fields(gpu_map(result)) == ["h3:50", "hu:?", ":", "h0:0", ":", ":"]
    assert "There are no GPU metrics." in gpu_map(make_result(0))


def test_fields_link_to_the_run_with_most_idle_time() -> None:
    """To its page, or else to its row in the table of all jobs; without either, there is no link."""
    result = make_result()
    (first, second, third) = result.jobs.select("cluster", "job_id", "submit").head(3).rows()
    frame = pl.DataFrame(
        [
            {"cluster": cluster, "node": "n1", "gpu": str(number), "gpu_hours_allocated": 10.0, "gpu_hours_idle": 5.0,
             "job_id": job, "submit": submit}
            for number, (cluster, job, submit) in enumerate((first, second, third, ("alpha", None, None)))
        ],
        schema=GPUS,
    )  # fmt: skip
    html = gpu_map(replace(result, gpus=frame), Links({first: "job.html"}), row_count=2)
    assert re.findall(r'<td class="h3"[^>]*>(?:<a href="([^"]+)"[^>]*>)?50', html) == ["job.html", "#run-1", "", ""]
    assert f"most by job {first[1]}" in html
    assert 'id="run-1"' in render_report(result, title="t", top=15)


def test_nodes_with_most_idle_hours_are_on_the_map() -> None:
    """In the order of their names; the others are counted."""
    result = with_gpus(*((f"n{number:03d}", "0", 100.0, float(number)) for number in range(NODES + 5)))
    shown = re.findall(r"<bdi>(n\d+)</bdi>", gpu_map(result))
    assert shown == [f"n{number:03d}" for number in range(5, NODES + 5)]
    assert f"of {NODES + 5}." in gpu_map(result)


def test_names_of_nodes_are_escaped() -> None:
    """They are input of other programs."""
    html = gpu_map(with_gpus(*((name, name, 1.0, 1.0) for name in HOSTILE)))
    assert "<script" not in html


@pytest.mark.parametrize(
    ("width_s", "count", "columns"),
    [
        (3600, 48, [str(hour) for hour in range(24)]),
        (6 * 3600, 28, ["0–6 h", "6–12 h", "12–18 h", "18–24 h"]),
        (86400, 28, ["2026-W45", "2026-W46", "2026-W47", "2026-W48"]),
    ],
)
def test_columns_of_the_week_follow_the_buckets(width_s: int, count: int, columns: list[str]) -> None:
    """No hours are shown that the report does not resolve; a week has seven rows."""
    html = week_map(over_time(width_s, count))
    assert re.findall(r'<th scope="col">([^<]*)</th>', html) == ["Day", *columns]
    assert html.count("<bdi>") == (2 if width_s == 3600 else 7)
    assert fields(html)[-1] == "hu:?"


def test_weekdays_are_local() -> None:
    """Sunday evening in New York is Monday in UTC."""
    html = week_map(over_time(3600, 3, zone=ZoneInfo("America/New_York")))
    assert re.findall(r"<bdi>(\w+)</bdi>", html) == ["Sunday"]


def test_short_interval_has_no_week() -> None:
    """Minutes of an hour are no times of day."""
    assert "The interval is too short." in week_map(over_time(60, 30))
