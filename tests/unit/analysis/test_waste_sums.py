"""Sums over runs: costs, groups, time buckets, timelines."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import waste
from slurm_affinode.analysis.result import GROUPINGS, MEASURES, WasteQuery
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS

from .waste_cases import EUROS, HOUR, Analysed, Jobs, Rows, every

YEAR = 365.25 * 24 * HOUR
Case = tuple[list[dict[str, Any]], pl.DataFrame]
SUMMED = [
    name
    for name in MEASURES
    if name.startswith("gpu_hours") or name in {"mem_gib_h", "idle_mem_gib_h", "energy_kwh", "idle_energy_kwh", "cost"}
]


def test_costs_are_computed_from_prices(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two hours at 2 EUR, one of them idle; the cost of a model without a price is null and reported as an issue."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 90)
    rows += samples(every(0, 7200), util_pct=0, node="n2", uuid="GPU-9", model="NVIDIA B200")
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": 7200},
        {"job_id": 2, "start": 0, "end": 7200, "node_list": "n2", "gpu_type": "b200"},
    )
    result = analysed(rows, outcome, prices=EUROS)
    amounts = {row["job_id"]: (row["cost"], row["idle_cost"]) for row in result.jobs.iter_rows(named=True)}
    assert amounts == {1: (pytest.approx(4), pytest.approx(2)), 2: (None, None)}
    assert (result.total["cost"], result.total["idle_cost"]) == (pytest.approx(4), pytest.approx(2))
    assert (result.currency, result.prices) == ("EUR", {"NVIDIA A100-SXM4-80GB": 2.0, "NVIDIA B200": None})
    assert [(i.count, i.examples) for i in result.quality.issues if i.code == "no-price"] == [(1, ("NVIDIA B200",))]


def test_buckets_cover_only_the_time_of_runs(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """An interval of a century does not give 36,525 empty daily buckets."""
    outcome = jobs({"start": 0, "end": HOUR})
    result = analysed(samples(every(0, HOUR), util_pct=0), outcome, since=-50 * YEAR, until=50 * YEAR)
    assert (result.over_time.height, result.bucket_s) == (60, 60), "minutes of that hour"
    assert result.over_time["gpu_hours_idle"].sum() == pytest.approx(1)


def test_unallocated_hours_are_counted(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """One GPU is free for two hours, another for the hour after its run: three unallocated hours."""
    rows = samples(every(0, 7200), util_pct=0, job=lambda t: "1" if t < HOUR else None)
    rows += samples(every(0, 7200), util_pct=0, uuid="GPU-1", index=1)
    result = analysed(rows, jobs({"start": 0, "end": HOUR}))
    assert result.total["unallocated_gpu_hours"] == pytest.approx(3)
    assert result.total["gpu_hours_idle"] == pytest.approx(1)
    (issue,) = (i for i in result.quality.issues if i.code == "devices-without-runs")
    assert (issue.count, issue.gpu_hours, issue.examples) == (1, pytest.approx(2), ("n1 GPU-1",))


def test_without_metrics_all_hours_are_unknown(analysed: Analysed, jobs: Jobs) -> None:
    """Accounting alone gives allocated hours, not how they were used."""
    result = analysed([], jobs({"start": 0, "end": 7200, "gpus": 4}), prices=EUROS)
    assert result.total["gpu_hours_allocated"] == result.total["gpu_hours_unknown"] == pytest.approx(8)
    assert result.total["cost"] == pytest.approx(16)
    for absent in ("idle_fraction", "unallocated_gpu_hours", "energy_kwh", "idle_windows", "idle_cost"):
        assert result.total[absent] is None
    assert [issue.code for issue in result.quality.issues] == ["no-history"]
    assert result.timelines.is_empty()


@pytest.fixture
def varied(samples: Rows, jobs: Jobs) -> Case:
    """A mix of cases: whole nodes, labels, shared GPUs, unknown GPUs, another model, gaps."""
    rows = samples(every(0, 7200), util_pct=lambda t: t % 7, power_w=100, fb_used_mib=2048, job="1")
    rows += samples(every(0, 5000), util_pct=0, power_w=50, fb_used_mib=1024, uuid="GPU-1", index=1, job="2,3")
    rows += samples(every(0, 7200), util_pct=30, node="n2", uuid="GPU-2", model="NVIDIA H100 80GB HBM3", power_w=500)
    rows += samples(every(0, 7200), util_pct=0, node="n3", uuid="GPU-3", power_w=70)
    rows += samples(every(0, 7200), util_pct=0, node="n3", uuid="GPU-4", index=1, power_w=70)
    result = jobs(
        {"job_id": 1, "start": 0, "end": 7000},
        {"job_id": 2, "start": 100, "end": 4000, "user": "bob", "account": "chem"},
        {"job_id": 3, "start": 2000, "end": 6500, "user": "eve", "qos": "high", "gpus": 0},
        {"job_id": 4, "start": 50, "end": 7200, "node_list": "n2", "partition": "h100", "user": None, "account": None},
        {"job_id": 5, "start": 0, "end": 6000, "node_list": "n3", "qos": "high"},
        {"job_id": 6, "start": 0, "end": 6000, "node_list": "n[8-9]", "gpus": 4, "gpu_type": None, "qos": None},
    )
    return rows, result


def test_every_grouping_sums_to_the_total(analysed: Analysed, varied: Case) -> None:
    """Groups by user, account, partition, QOS, node, model and cluster; time buckets; runs."""
    result = analysed(*varied, prices=EUROS)
    assert tuple(result.groups) == GROUPINGS
    for frame in (*result.groups.values(), result.jobs):
        for name in SUMMED:
            assert frame[name].sum() == pytest.approx(result.total[name]), name
        measured = frame.select(pl.sum_horizontal("gpu_hours_idle", "gpu_hours_low", "gpu_hours_busy")).to_series()
        assert frame["gpu_hours_measured"].to_list() == pytest.approx(measured.to_list())
        allocated = frame["gpu_hours_measured"] + frame["gpu_hours_unknown"]
        assert frame["gpu_hours_allocated"].to_list() == pytest.approx(allocated.to_list())
    for name in result.over_time.columns[1:]:
        assert result.over_time[name].sum() == pytest.approx(result.total[name]), name
    assert result.groups["user"]["name"].null_count() == 1
    assert set(result.groups["node"]["name"]) == {"n1", "n2", "n3", "n8", "n9"}


def test_runs_are_split_over_hourly_buckets(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Buckets are hours for up to three days; a run of 90 minutes puts one hour and half an hour into two buckets."""
    result = analysed(
        samples(every(0, 5400), util_pct=lambda t: 0 if t < HOUR else 50), jobs({"start": 0, "end": 5400})
    )
    assert result.bucket_s == HOUR
    assert result.over_time.drop("bucket").rows() == [(1.0, 1.0, 0.0, 0.0, 0.0), (0.5, 0.0, 0.0, 0.5, 0.0)]


@pytest.mark.parametrize(
    ("name", "day", "hours"),
    [
        ("Europe/Berlin", (2026, 3, 29), 23),
        ("Europe/Berlin", (2026, 10, 25), 25),
        ("America/St_Johns", (2026, 11, 1), 25),
        ("Asia/Kolkata", (2026, 10, 25), 24),
    ],
)
def test_buckets_of_local_day_follow_clock_changes(  # noqa: PLR0917
    analysed: Analysed, samples: Rows, jobs: Jobs, t0: datetime, name: str, day: tuple[int, int, int], hours: int
) -> None:
    """A job that runs all day fills each hour of the day on which the clock changes, and no other."""
    zone = ZoneInfo(name)
    begin, end = datetime(*day, tzinfo=zone), datetime(*day, tzinfo=zone) + timedelta(days=1)
    since, until = (at.timestamp() - t0.timestamp() for at in (begin, end))
    rows = samples(every(since, until, 600), util_pct=0.0)
    result = analysed(rows, jobs({"start": since, "end": until}), since=since, until=until, zone=zone)
    assert result.over_time["gpu_hours_idle"].to_list() == pytest.approx([1.0] * hours)
    local = [at.astimezone(zone) for at in result.over_time["bucket"]]
    assert (local[0].hour, local[-1].hour, {at.minute for at in local}) == (0, 23, {0})


@pytest.mark.parametrize(
    ("until", "width"),
    [
        (900, 15),
        (1000, 60),
        (HOUR, 60),
        (2 * HOUR, HOUR),
        (72 * HOUR, HOUR),
        (96 * HOUR, 6 * HOUR),
        (504 * HOUR, 6 * HOUR),
        (528 * HOUR, 24 * HOUR),
    ],
)
def test_longer_intervals_have_wider_buckets(analysed: Analysed, jobs: Jobs, until: int, width: int) -> None:
    """The width changes at a quarter of an hour, an hour, three days and three weeks."""
    assert analysed([], jobs(), until=until).bucket_s == width


def test_timelines_agree_with_runs(analysed: Analysed, varied: Case) -> None:
    """The fractions of a slot sum to 1, its slots to the hours of the run; the run with the most idle time is first."""
    result = analysed(*varied, top_runs=2)
    lines = result.timelines
    assert lines["job_id"].unique(maintain_order=True).to_list() == result.jobs["job_id"].head(2).to_list()
    assert lines.select(pl.sum_horizontal("idle", "low", "busy", "unknown")).to_series().to_list() == pytest.approx(
        [1.0] * len(lines)
    )
    for row in result.jobs.head(2).iter_rows(named=True):
        job_lines = lines.filter(pl.col("job_id") == row["job_id"])
        idle = (job_lines["idle"] * (job_lines["to"] - job_lines["from"]).dt.total_milliseconds()).sum() / 1000 / HOUR
        assert idle * (row["gpus"] or 1) <= row["gpu_hours_idle"] * 2
        if row["gpus"]:
            assert idle * row["gpus"] == pytest.approx(row["gpu_hours_idle"])


def test_histogram_bins_runs_by_idle_fraction(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """There are ten bins; 0 is in the first, 1 in the last; a run without measurements is in none."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 50)
    result = jobs(
        {"job_id": 1, "start": 0, "end": HOUR},
        {"job_id": 2, "start": HOUR, "end": 7200},
        {"job_id": 3, "start": 0, "end": 7200, "node_list": "n9"},
    )
    histogram = analysed(rows, result).idle_fraction_histogram
    assert histogram["jobs"].to_list() == [1, *[0] * 8, 1]
    assert histogram["gpu_hours_allocated"].to_list() == pytest.approx([1, *[0] * 8, 1])


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([30, 60, 60, 60, 90, 180, 200, 500]), min_size=1, max_size=40),
    signals=st.lists(st.sampled_from([None, 0.0, 3.0, 5.0, 80.0]), min_size=41, max_size=41),
    starts=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=4),
    labelled=st.booleans(),
)
def test_hours_add_up(
    gaps: list[int], signals: list[float | None], starts: list[tuple[int, int]], labelled: bool
) -> None:
    """Allocated = measured + unknown and measured = idle + low + busy, in the total and in every grouping."""

    t0 = datetime(2026, 11, 2, 8, tzinfo=UTC)
    times = [0]
    for gap in gaps:
        times.append(times[-1] + gap)
    label = ",".join(str(n) for n in range(1, len(starts) + 1)) if labelled else None
    count = len(times)
    given_columns = {
        "cluster": ["c"] * count, "node": ["n1"] * count, "uuid": ["GPU-0"] * count,
        "time": [t0 + timedelta(seconds=t) for t in times], "util_pct": signals[:count], "job": [label] * count,
    }  # fmt: skip
    frame = pl.DataFrame({n: pl.Series(given_columns.get(n, [None] * count), dtype=d) for n, d in SAMPLES.items()})
    runs = [
        {"cluster": "c", "job_id": n, "submit": t0, "start": t0 + timedelta(seconds=s),
         "end": t0 + timedelta(seconds=s + d), "gpus": 1, "node_list": "n1", "user": f"u{n}"}
        for n, (s, d) in enumerate(starts, 1)
    ]  # fmt: skip
    jobs = pl.DataFrame({n: pl.Series([r.get(n) for r in runs], dtype=d) for n, d in JOBS.items()})
    query = WasteQuery(t0 + timedelta(seconds=600), t0 + timedelta(seconds=4200))
    with tempfile.TemporaryDirectory() as folder:
        store = SampleStore(Path(folder))
        store.ingest(frame, source="x")
        result = waste.analyse(query, jobs, pl.DataFrame(schema=ALLOCATION_GPUS), store, now=query.until)
    clipped = sum(max(0, min(s + d, 4200) - max(s, 600)) for s, d in starts) / HOUR
    assert result.total["gpu_hours_allocated"] == pytest.approx(clipped)
    for row in (result.total, *result.jobs.to_dicts(), *result.groups["user"].to_dicts(), *result.over_time.to_dicts()):
        idle, low, busy = (float(row[f"gpu_hours_{word}"] or 0) for word in ("idle", "low", "busy"))
        assert min(idle, low, busy, float(row["gpu_hours_unknown"] or 0)) >= 0
        assert idle + low + busy + float(row["gpu_hours_unknown"] or 0) == pytest.approx(row["gpu_hours_allocated"])
