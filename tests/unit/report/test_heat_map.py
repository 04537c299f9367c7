"""Heat maps: colors, unknown and empty fields, the nodes on the map, and the columns of the map of weekdays."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from waste_samples import HOSTILE, make_result

from slurm_affinode.analysis.measures import GPU_RUNS, GPUS
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.report import heat_map as heat_map_module
from slurm_affinode.report.charts import Words
from slurm_affinode.report.heat_map import NODES, Field, drawn_gpus, gpu_map, heat_map, week_map
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
    assert fields(gpu_map(result, drawn_gpus(result))) == ["h3:50", "hu:?", ":", "h0:0", ":", ":"]
    assert "There are no GPU metrics." in gpu_map(make_result(0), drawn_gpus(make_result(0)))


def test_fields_link_to_the_runs_of_their_gpu() -> None:
    """Rows name their fields. Without scripts a link leads to the run with most idle time, or to the table."""
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
    pairs = pl.DataFrame([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 2)], schema=GPU_RUNS, orient="row")
    result = replace(result, gpus=frame, gpu_runs=pairs)
    drawn = drawn_gpus(result)
    html = gpu_map(result, drawn, row_count=2)
    links = re.findall(
        r'<td class="h3"[^>]*>(?:<a href="([^"]+)" data-g="(\d+)" data-n="(\d+)" data-gpu="([^"]+)")?', html
    )
    assert links == [
        ("#run-0", "0", "2", "n1:0"), ("#run-1", "1", "2", "n1:1"), ("#jobs", "2", "2", "n1:2"), ("", "", "", ""),
    ]  # fmt: skip
    assert f"2 job runs, most idle time in job {first[1]}" in html
    assert heat_map_module.fields_of_runs(result, drawn, 2) == {0: "0-2", 1: "0-1"}
    page = render_report(result, title="t", top=15)
    assert '<tr id="run-0" data-g="0-2">' in page
    assert '<tr id="run-1" data-g="0-1">' in page


def test_large_map_adds_little_to_the_page() -> None:
    """100,000 runs on 480 GPUs: rows of runs on whole nodes have ranges of fields."""
    nodes, gpus, runs = NODES, 8, 100_000
    result = make_result()
    jobs = pl.concat([result.jobs.head(1)] * 1000)
    frame = with_gpus(*((f"n{node:02d}", str(gpu), 9.0, 5.0) for node in range(nodes) for gpu in range(gpus))).gpus
    pairs = pl.DataFrame({"run": range(runs)}, schema={"run": pl.UInt32}).with_columns(
        gpu=pl.int_ranges((pl.col("run") % nodes) * gpus, (pl.col("run") % nodes + 1) * gpus)
    ).explode("gpu").select("gpu", "run").cast(dict(GPU_RUNS))  # type: ignore[arg-type]  # fmt: skip
    result = replace(result, jobs=jobs, gpus=frame, gpu_runs=pairs)
    drawn = drawn_gpus(result)
    fields = heat_map_module.fields_of_runs(result, drawn, 1000)
    assert len(fields) == 1000
    assert (fields[0], fields[61]) == ("0-7", "8-15")
    assert drawn["runs"].sum() == runs * gpus
    assert len(gpu_map(result, drawn, row_count=1000)) < 250_000


def test_nodes_with_most_idle_hours_are_on_the_map() -> None:
    """In the order of their names; the others are counted."""
    result = with_gpus(*((f"n{number:03d}", "0", 100.0, float(number)) for number in range(NODES + 5)))
    shown = re.findall(r"<bdi>(n\d+)</bdi>", gpu_map(result, drawn_gpus(result)))
    assert shown == [f"n{number:03d}" for number in range(5, NODES + 5)]
    assert f"of {NODES + 5}." in gpu_map(result, drawn_gpus(result))


def test_names_of_nodes_are_escaped() -> None:
    """They are input of other programs."""
    result = with_gpus(*((name, name, 1.0, 1.0) for name in HOSTILE))
    runs = pl.DataFrame({"gpu": range(len(HOSTILE)), "run": [0] * len(HOSTILE)}, schema=GPU_RUNS)
    result = replace(result, gpu_runs=runs, jobs=make_result().jobs)
    html = gpu_map(result, drawn_gpus(result), row_count=1)
    assert html.count("data-gpu=") == len(HOSTILE)
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
