"""Where GPU-hours went, on histories small enough to count by hand. Samples are 60 s apart unless said otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis import kernel, waste
from slurm_affinode.analysis.prices import Price, PriceTable
from slurm_affinode.analysis.result import GROUPINGS, JOB_COLUMNS, MEASURES, Thresholds, WasteQuery, WasteResult
from slurm_affinode.history.schema import SAMPLES
from slurm_affinode.history.store import SampleStore
from slurm_affinode.slurm.schema import ALLOCATION_GPUS, JOBS

Analysed = Callable[..., WasteResult]
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]
Case = tuple[list[dict[str, Any]], pl.DataFrame]

HOUR = 3600
EUROS = PriceTable("EUR", (Price(("a100*",), 2.0),))
SUMMED = [
    name
    for name in MEASURES
    if name.startswith("gpu_hours") or name in {"mem_gib_h", "idle_mem_gib_h", "energy_kwh", "idle_energy_kwh", "cost"}
]


@pytest.fixture(params=["array operations", "compiled loops"])
def either_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations of the join answer."""
    wanted = request.param == "compiled loops"
    if wanted:
        pytest.importorskip("numba")
    monkeypatch.setattr(kernel, "compiled", lambda _rows: wanted)


both = pytest.mark.usefixtures("either_kernel")


def every(start: float, end: float, step: float = 60) -> list[float]:
    """Times from ``start`` to before ``end``."""
    return [start + step * k for k in range(round((end - start) / step))]


def seconds(result: WasteResult, word: str) -> float:
    """A class of hours of the total, in seconds."""
    return float(result.total[f"gpu_hours_{word}"] or 0) * HOUR


@both
def test_an_hour_idle_and_an_hour_busy(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run of two hours that computes in the second: two hours allocated, one idle, one busy, nothing unknown."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 90)
    result = analysed(rows, jobs({"start": 0, "end": 7200}))
    total = result.total
    assert total["jobs"] == total["users"] == 1
    assert total["gpu_hours_allocated"] == total["gpu_hours_measured"] == pytest.approx(2)
    assert total["gpu_hours_idle"] == total["gpu_hours_busy"] == pytest.approx(1)
    assert (total["gpu_hours_low"], total["gpu_hours_unknown"]) == (0, 0)
    assert total["idle_fraction"] == pytest.approx(0.5)
    assert total["util_mean_pct"] == pytest.approx(45)
    assert result.jobs.columns == [*JOB_COLUMNS, *MEASURES]
    assert result.jobs.select(MEASURES.keys()).row(0, named=True) == {name: total[name] for name in MEASURES}


@both
def test_a_sample_counts_until_the_next_and_not_beyond_the_run(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run of 90 s: the sample at 60 s, which the next follows at 120 s, counts for the 30 s that are left."""
    rows = samples(every(0, HOUR), util_pct=lambda t: 0 if t == 60 else 90)
    result = analysed(rows, jobs({"start": 0, "end": 90}))
    assert (seconds(result, "busy"), seconds(result, "idle")) == (pytest.approx(60), pytest.approx(30))
    assert result.jobs["longest_idle_s"].item() == 30


@both
def test_samples_uneven_but_near_count_to_the_next(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A sample late by 25 s: the one before it counts longer by these, and it counts less."""
    times = [t + 25 if t == 300 else t for t in every(0, 1200)]
    result = analysed(samples(times, util_pct=lambda t: 0 if t == 325 else 50), jobs({"start": 0, "end": 1200}))
    assert (seconds(result, "idle"), seconds(result, "busy")) == (pytest.approx(35), pytest.approx(1165))


@both
def test_the_time_before_the_first_sample_is_unknown(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run that starts 20 s after a sample: what that sample said was before the run, so 40 s are unknown."""
    result = analysed(samples(every(0, HOUR), util_pct=0), jobs({"start": 20, "end": HOUR}))
    assert (seconds(result, "unknown"), seconds(result, "idle")) == (pytest.approx(40), pytest.approx(HOUR - 60))


@both
@pytest.mark.parametrize(("gap", "counts"), [(180, 180), (181, 60), (600, 60)])
def test_a_gap_of_more_than_three_steps_is_unknown_but_for_one_step(
    analysed: Analysed, samples: Rows, jobs: Jobs, gap: int, counts: int
) -> None:
    """Three steps are bridged; beyond, the last sample before the gap counts for one step."""
    back, unknown = 540 + gap, gap - counts
    rows = samples([*every(0, 600), *every(back, back + 600)], util_pct=lambda t: 0 if t == 540 else 90)
    result = analysed(rows, jobs({"start": 0, "end": back + 600}))
    assert seconds(result, "idle") == pytest.approx(counts)
    assert seconds(result, "unknown") == pytest.approx(unknown)
    assert seconds(result, "busy") == pytest.approx(540 + 600)
    assert result.quality.gap_gpu_hours * HOUR == pytest.approx(unknown)
    assert ("gaps" in {issue.code for issue in result.quality.issues}) is (unknown > 0)


def test_the_limit_of_a_gap_is_the_query_s(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """With ten steps allowed a gap of ten minutes at a step of one is bridged."""
    rows = samples([*every(0, 600), *every(1140, 1740)], util_pct=0)
    wide = Thresholds(max_gap_steps=10)
    result = analysed(rows, jobs({"start": 0, "end": 1740}), thresholds=wide)
    assert (seconds(result, "idle"), seconds(result, "unknown")) == (pytest.approx(1740), 0)


def test_after_the_last_sample_one_step_counts(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A history that stops in the middle of a run."""
    result = analysed(samples(every(0, 1800), util_pct=50), jobs({"start": 0, "end": HOUR}))
    assert (seconds(result, "busy"), seconds(result, "unknown")) == (pytest.approx(1800), pytest.approx(1800))


@both
@pytest.mark.parametrize(
    ("signals", "word"),
    [
        (
            {"util_pct": 100, "engine_active": 0, "sm_active": 0, "dram_active": 0, "xid": 31},
            "busy",
        ),
        ({"util_pct": 0, "engine_active": 0.5}, "busy"),
        ({"util_pct": 0, "sm_active": 0.5}, "busy"),
        ({"util_pct": 0, "tensor_active": 0.5}, "busy"),
        ({"util_pct": 0, "dram_active": 0.5}, "busy"),
        ({"util_pct": 0, "engine_active": 0.04}, "low"),
        ({"util_pct": 0, "engine_active": 0, "dram_active": 0}, "idle"),
        ({"engine_active": 0}, "idle"),
        ({"util_pct": 0}, "idle"),
        ({"util_pct": 5}, "low"),
        ({"util_pct": 5.01}, "busy"),
        ({"engine_active": 0.05}, "low"),
        ({"util_pct": 0.1}, "low"),
        ({"fb_used_mib": 1024, "power_w": 60, "xid": 0}, "unknown"),
    ],
)
def test_the_largest_signal_says_what_a_gpu_does(
    analysed: Analysed, samples: Rows, jobs: Jobs, signals: dict[str, float], word: str
) -> None:
    """A GPU is idle only where every signal that there is says so; without a signal its time is unknown."""
    result = analysed(samples(every(0, HOUR), **signals), jobs({"start": 0, "end": HOUR}))
    assert {w: seconds(result, w) for w in ("idle", "low", "busy", "unknown")} == {
        w: pytest.approx(HOUR if w == word else 0) for w in ("idle", "low", "busy", "unknown")
    }
    codes = {issue.code for issue in result.quality.issues}
    assert ("no-activity-signal" in codes) is (word == "unknown")
    if word == "unknown":
        assert result.total["idle_fraction"] is None
        assert result.total["idle_windows"] is None


@both
def test_thresholds_are_inclusive(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """With 2 and 10 percent: 2 is idle, 3 and 10 are low, 11 is busy."""
    rows = samples(every(0, 2400), util_pct=lambda t: (2, 3, 10, 11)[int(t // 600)])
    result = analysed(rows, jobs({"start": 0, "end": 2400}), thresholds=Thresholds(idle_pct=2, low_pct=10))
    assert [seconds(result, w) for w in ("idle", "low", "busy")] == [pytest.approx(s) for s in (600, 1200, 600)]


def test_runs_are_clipped_to_the_asked_interval(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run from an hour before to an hour after an interval of two hours has two hours in it."""
    rows = samples(every(-HOUR, 3 * HOUR), util_pct=lambda t: 0 if t < 0 else 50)
    result = analysed(rows, jobs({"start": -HOUR, "end": 3 * HOUR, "submit": -HOUR}))
    assert result.total["gpu_hours_allocated"] == pytest.approx(2)
    assert (seconds(result, "busy"), seconds(result, "idle")) == (pytest.approx(7200), 0)


def test_a_run_outside_the_interval_is_none_of_its(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The interval is half-open: a run that ends where it begins, or starts where it ends, is not in it."""
    found = jobs(
        {"job_id": 1, "start": -HOUR, "end": 0},
        {"job_id": 2, "start": 7200, "end": 9000},
        {"job_id": 3, "start": None, "end": None, "state": "PENDING"},
    )
    result = analysed(samples(every(0, 7200), util_pct=0), found)
    assert (result.total["jobs"], result.total["gpu_hours_allocated"], len(result.jobs)) == (0, 0, 0)
    assert result.total["idle_fraction"] is None


def test_a_running_job_ends_now(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Half an hour after its start a running job has half an hour, whatever the interval asks; its end stays open."""
    result = analysed(
        samples(every(0, 1800), util_pct=0), jobs({"start": 0, "end": None, "state": "RUNNING"}), now=1800
    )
    assert (seconds(result, "allocated"), seconds(result, "idle")) == (pytest.approx(1800), pytest.approx(1800))
    assert result.jobs["end"].to_list() == [None]


def test_a_requeued_job_has_two_runs(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The same id, submitted twice: two rows, each with its own hours."""
    found = jobs(
        {"start": 0, "end": 1800, "state": "REQUEUED"},
        {"submit": 1800, "start": HOUR, "end": 2 * HOUR},
    )
    result = analysed(samples(every(0, 7200), util_pct=lambda t: 0 if t < 1800 else 50), found)
    assert result.total["jobs"] == 2
    assert result.jobs.sort("submit").select("gpu_hours_idle", "gpu_hours_busy").rows() == [
        (pytest.approx(0.5), 0),
        (0, pytest.approx(1)),
    ]


def test_round_numbers_stay_round(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """An hour is 1, not 0.9999999999999999, in every row of a table as in the total."""
    found = jobs(*({"job_id": n, "start": n * HOUR, "end": (n + 1) * HOUR} for n in range(2)))
    result = analysed(samples(every(0, 7200), util_pct=0, fb_used_mib=3072, power_w=300), found, prices=EUROS)
    columns = ("gpu_hours_allocated", "gpu_hours_idle", "mem_gib_h", "energy_kwh", "cost", "idle_cost")
    assert result.jobs.select(columns).rows() == [(1, 1, 3, 0.3, 2, 2)] * 2
    assert tuple(result.total[name] for name in columns) == (2, 2, 6, 0.6, 4, 4)


def test_a_report_of_one_cluster(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Runs and free GPUs of another cluster are not in it, even on a node of the same name."""
    rows = samples(every(0, 7200), util_pct=0)
    rows += samples(every(0, 7200), util_pct=50, cluster="d", uuid="GPU-d")
    rows += samples(every(0, 7200), util_pct=0, node="n2", uuid="GPU-2")
    found = jobs({"start": 0, "end": 7200}, {"cluster": "d", "start": 0, "end": 7200})
    whole, one = analysed(rows, found), analysed([], found, clusters=("d",))
    assert (whole.total["gpu_hours_busy"], whole.total["unallocated_gpu_hours"]) == (2, 2)
    assert whole.groups["cluster"].select("name", "gpu_hours_idle", "gpu_hours_busy").rows() == [
        ("c", 2, 0),
        ("d", 0, 2),
    ]
    assert one.jobs["cluster"].to_list() == ["d"]
    assert (one.total["gpu_hours_busy"], one.total["unallocated_gpu_hours"]) == (2, 0)


def test_runs_without_gpus_are_left_out(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A CPU job beside a GPU job on a node takes no part; accounting that tracks no GPUs is said so."""
    found = jobs(
        {"job_id": 1, "start": 0, "end": 7200},
        {"job_id": 2, "start": 0, "end": 7200, "gpus": 0, "user": "bob"},
        {"job_id": 3, "start": 0, "end": 7200, "gpus": None, "user": "eve", "node_list": "n9"},
    )
    result = analysed(samples(every(0, 7200), util_pct=0), found)
    assert result.jobs["job_id"].to_list() == [1]
    assert (result.total["users"], result.total["gpu_hours_idle"]) == (1, pytest.approx(2))
    assert (result.quality.job_runs, result.quality.gpu_job_runs) == (3, 1)
    assert [issue.count for issue in result.quality.issues if issue.code == "no-gpu-tres"] == [1]


@pytest.mark.parametrize("gpus", [None, 0])
def test_a_run_without_a_whole_gpu_is_allocated_its_share(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int | None
) -> None:
    """Labels place a run on a GPU that accounting does not count for it (shards, or GPUs not tracked)."""
    found = jobs({"job_id": 1, "start": 0, "end": 7200, "gpus": gpus})
    result = analysed(samples(every(0, 7200), util_pct=0, job="1"), found)
    assert result.total["gpu_hours_allocated"] == result.total["gpu_hours_idle"] == pytest.approx(2)
    assert result.over_time["gpu_hours_allocated"].to_list() == [pytest.approx(1), pytest.approx(1)]


@both
@pytest.mark.parametrize(("gpus", "allocated"), [(1, 2), (0, 1)])
def test_runs_that_share_a_gpu_share_what_it_did(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int, allocated: float
) -> None:
    """Two labelled jobs on a GPU for two hours: an hour, half the energy and half the memory each, nothing doubled.

    Where accounting gave each a whole GPU, the other hour of each is unknown.
    """
    found = jobs(*({"job_id": n, "start": 0, "end": 7200, "gpus": gpus} for n in (1, 2)))
    result = analysed(samples(every(0, 7200), util_pct=0, power_w=100, fb_used_mib=1024, job="1,2"), found)
    for row in result.jobs.iter_rows(named=True):
        assert row["gpu_hours_allocated"] == pytest.approx(allocated)
        assert row["gpu_hours_idle"] == pytest.approx(1)
        assert row["gpu_hours_unknown"] == pytest.approx(allocated - 1)
        assert (row["energy_kwh"], row["mem_gib_h"], row["fb_peak_gib"]) == (pytest.approx(0.1), pytest.approx(1), 1)
        assert row["longest_idle_s"] == 7200
    total = result.total
    assert (total["gpu_hours_measured"], total["energy_kwh"]) == (pytest.approx(2), pytest.approx(0.2))
    assert ("shared-gpus" in {issue.code for issue in result.quality.issues}) is (gpus > 0)


def test_sharing_is_seen_in_the_report_of_one_user(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Half of a GPU that another user's job holds too, though the report leaves the other out."""
    found = jobs({"job_id": 1, "start": 0, "end": 7200}, {"job_id": 2, "start": 0, "end": 7200, "user": "bob"})
    result = analysed(samples(every(0, 7200), util_pct=0, job="1,2"), found, users=("bob",))
    assert result.jobs["user"].to_list() == ["bob"]
    assert (result.total["gpu_hours_idle"], result.total["unallocated_gpu_hours"]) == (pytest.approx(1), None)


@both
def test_energy_and_memory(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """An idle hour at 60 W with 40 GiB and a busy one at 400 W with 20 GiB."""
    rows = samples(
        every(0, 7200),
        util_pct=lambda t: 0 if t < HOUR else 100,
        power_w=lambda t: 60 if t < HOUR else 400,
        fb_used_mib=lambda t: 40960 if t < HOUR else 20480,
    )
    total = analysed(rows, jobs({"start": 0, "end": 7200})).total
    assert (total["energy_kwh"], total["idle_energy_kwh"]) == (pytest.approx(0.46), pytest.approx(0.06))
    assert (total["mem_gib_h"], total["idle_mem_gib_h"]) == (pytest.approx(60), pytest.approx(40))
    assert (total["fb_mean_gib"], total["fb_peak_gib"]) == (pytest.approx(30), 40)


@both
def test_what_the_history_never_said_is_none_and_what_it_said_is_0(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """No power in the history: no energy, rather than none drawn; no memory held is a measurement."""
    total = analysed(samples(every(0, 7200), util_pct=50, fb_used_mib=0), jobs({"start": 0, "end": 7200})).total
    assert total["energy_kwh"] is None
    assert total["idle_energy_kwh"] is None
    assert total["cost"] is None
    assert (total["mem_gib_h"], total["idle_mem_gib_h"], total["fb_peak_gib"]) == (0, 0, 0)
    assert total["util_mean_pct"] == pytest.approx(50)


@both
def test_idle_windows(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Ten minutes and two hours of idle time are two windows, however many hours of the report they cross."""
    rows = samples(every(0, 4 * HOUR), util_pct=lambda t: 0 if t < 600 or 1200 <= t < 8400 else 70)
    result = analysed(rows, jobs({"start": 0, "end": 4 * HOUR}), until=4 * HOUR)
    assert (result.total["idle_windows"], result.total["longest_idle_s"]) == (2, 7200)
    histogram = {row["label"]: (row["windows"], row["gpu_hours"]) for row in result.window_histogram.to_dicts()}
    assert histogram.pop("5-15 min") == (1, pytest.approx(1 / 6))
    assert histogram.pop("1-4 h") == (1, pytest.approx(2))
    assert set(histogram.values()) == {(0, 0)}


@both
def test_midnight_does_not_cut_an_idle_window(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A GPU that idles from 22:00 to 04:00 does so in one window of six hours."""
    first, last = 12 * HOUR, 22 * HOUR
    rows = samples(every(first, last), util_pct=lambda t: 0 if 14 * HOUR <= t < 20 * HOUR else 70)
    result = analysed(rows, jobs({"start": first, "end": last}), until=24 * HOUR)
    assert (result.total["idle_windows"], result.total["longest_idle_s"]) == (1, 6 * HOUR)
    assert (result.total["gpu_hours_idle"], result.total["gpu_hours_unknown"]) == (pytest.approx(6), 0)


@both
def test_a_gap_ends_an_idle_window(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Of what is not known nobody can say that it was idle."""
    result = analysed(samples([*every(0, 600), *every(1200, 1800)], util_pct=0), jobs({"start": 0, "end": 1800}))
    assert (result.total["idle_windows"], result.total["longest_idle_s"]) == (2, 600)


def test_amounts(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two hours at 2 EUR, one of them idle; the amount of a model without a price is absent, and said so."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 90)
    rows += samples(every(0, 7200), util_pct=0, node="n2", uuid="GPU-9", model="NVIDIA B200")
    found = jobs(
        {"job_id": 1, "start": 0, "end": 7200},
        {"job_id": 2, "start": 0, "end": 7200, "node_list": "n2", "gpu_type": "b200"},
    )
    result = analysed(rows, found, prices=EUROS)
    amounts = {row["job_id"]: (row["cost"], row["idle_cost"]) for row in result.jobs.iter_rows(named=True)}
    assert amounts == {1: (pytest.approx(4), pytest.approx(2)), 2: (None, None)}
    assert (result.total["cost"], result.total["idle_cost"]) == (pytest.approx(4), pytest.approx(2))
    assert (result.currency, result.prices) == ("EUR", {"NVIDIA A100-SXM4-80GB": 2.0, "NVIDIA B200": None})
    assert [(i.count, i.examples) for i in result.quality.issues if i.code == "no-price"] == [(1, ("NVIDIA B200",))]


def test_time_that_nobody_held(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A GPU without a run for two hours, and another in the hour after its run: three hours not allocated."""
    rows = samples(every(0, 7200), util_pct=0, job=lambda t: "1" if t < HOUR else None)
    rows += samples(every(0, 7200), util_pct=0, uuid="GPU-1", index=1)
    result = analysed(rows, jobs({"start": 0, "end": HOUR}))
    assert result.total["unallocated_gpu_hours"] == pytest.approx(3)
    assert result.total["gpu_hours_idle"] == pytest.approx(1)
    (issue,) = (i for i in result.quality.issues if i.code == "devices-without-runs")
    assert (issue.count, issue.gpu_hours, issue.examples) == (1, pytest.approx(2), ("n1 GPU-1",))


def test_without_history_everything_is_unknown(analysed: Analysed, jobs: Jobs) -> None:
    """Accounting alone says what was allocated, not what came of it."""
    result = analysed([], jobs({"start": 0, "end": 7200, "gpus": 4}), prices=EUROS)
    assert result.total["gpu_hours_allocated"] == result.total["gpu_hours_unknown"] == pytest.approx(8)
    assert result.total["cost"] == pytest.approx(16)
    for absent in ("idle_fraction", "unallocated_gpu_hours", "energy_kwh", "idle_windows", "idle_cost"):
        assert result.total[absent] is None
    assert [issue.code for issue in result.quality.issues] == ["no-history"]
    assert result.timelines.is_empty()


@pytest.fixture
def varied(samples: Rows, jobs: Jobs) -> Case:
    """Two clusters' worth of cases: whole nodes, labels, sharing, unknown GPUs, another model, gaps."""
    rows = samples(every(0, 7200), util_pct=lambda t: t % 7, power_w=100, fb_used_mib=2048, job="1")
    rows += samples(every(0, 5000), util_pct=0, power_w=50, fb_used_mib=1024, uuid="GPU-1", index=1, job="2,3")
    rows += samples(every(0, 7200), util_pct=30, node="n2", uuid="GPU-2", model="NVIDIA H100 80GB HBM3", power_w=500)
    rows += samples(every(0, 7200), util_pct=0, node="n3", uuid="GPU-3", power_w=70)
    rows += samples(every(0, 7200), util_pct=0, node="n3", uuid="GPU-4", index=1, power_w=70)
    found = jobs(
        {"job_id": 1, "start": 0, "end": 7000},
        {"job_id": 2, "start": 100, "end": 4000, "user": "bob", "account": "chem"},
        {"job_id": 3, "start": 2000, "end": 6500, "user": "eve", "qos": "high", "gpus": 0},
        {"job_id": 4, "start": 50, "end": 7200, "node_list": "n2", "partition": "h100", "user": None, "account": None},
        {"job_id": 5, "start": 0, "end": 6000, "node_list": "n3", "qos": "high"},
        {"job_id": 6, "start": 0, "end": 6000, "node_list": "n[8-9]", "gpus": 4, "gpu_type": None, "qos": None},
    )
    return rows, found


@both
def test_every_grouping_sums_to_the_total(analysed: Analysed, varied: Case) -> None:
    """By user, account, partition, QOS, node, model and cluster; by bucket of time; by run."""
    result = analysed(*varied, prices=EUROS)
    assert tuple(result.groups) == GROUPINGS
    for frame in (*result.groups.values(), result.jobs):
        for name in SUMMED:
            assert frame[name].sum() == pytest.approx(result.total[name]), name
        measured = frame["gpu_hours_idle"] + frame["gpu_hours_low"] + frame["gpu_hours_busy"]
        assert frame["gpu_hours_measured"].to_list() == pytest.approx(measured.to_list())
        allocated = frame["gpu_hours_measured"] + frame["gpu_hours_unknown"]
        assert frame["gpu_hours_allocated"].to_list() == pytest.approx(allocated.to_list())
    for name in result.over_time.columns[1:]:
        assert result.over_time[name].sum() == pytest.approx(result.total[name]), name
    assert result.groups["user"]["name"].null_count() == 1
    assert set(result.groups["node"]["name"]) == {"n1", "n2", "n3", "n8", "n9"}


def test_time_passes_in_buckets(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Hours for up to three days; a run of an hour and a half puts an hour into one and a half into the next."""
    result = analysed(
        samples(every(0, 5400), util_pct=lambda t: 0 if t < HOUR else 50), jobs({"start": 0, "end": 5400})
    )
    assert result.bucket_s == HOUR
    assert result.over_time.drop("bucket").rows() == [(1.0, 1.0, 0.0, 0.0, 0.0), (0.5, 0.0, 0.0, 0.5, 0.0)]


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
    """Up to a quarter of an hour, an hour, three days, three weeks, more."""
    assert analysed([], jobs(), until=until).bucket_s == width


@both
def test_timelines(analysed: Analysed, varied: Case) -> None:
    """The fractions of a slot sum to 1, its slots to the run's hours; the most idle run is the first."""
    result = analysed(*varied, top_runs=2)
    lines = result.timelines
    assert lines["job_id"].unique(maintain_order=True).to_list() == result.jobs["job_id"].head(2).to_list()
    assert lines.select(pl.sum_horizontal("idle", "low", "busy", "unknown")).to_series().to_list() == pytest.approx(
        [1.0] * len(lines)
    )
    for row in result.jobs.head(2).iter_rows(named=True):
        own = lines.filter(pl.col("job_id") == row["job_id"])
        idle = (own["idle"] * (own["to"] - own["from"]).dt.total_milliseconds()).sum() / 1000 / HOUR
        assert idle * (row["gpus"] or 1) <= row["gpu_hours_idle"] * 2
        if row["gpus"]:
            assert idle * row["gpus"] == pytest.approx(row["gpu_hours_idle"])


def test_runs_by_how_idle_they_were(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Ten bins of the idle share; 0 is in the first, 1 in the last; a run of which nothing is known is in none."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 50)
    found = jobs(
        {"job_id": 1, "start": 0, "end": HOUR},
        {"job_id": 2, "start": HOUR, "end": 7200},
        {"job_id": 3, "start": 0, "end": 7200, "node_list": "n9"},
    )
    histogram = analysed(rows, found).idle_fraction_histogram
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
    """Whatever the history: allocated is measured and unknown, measured is idle, low and busy; so in every grouping."""

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
