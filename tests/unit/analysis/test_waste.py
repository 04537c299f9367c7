"""GPU-hours of runs, on data small enough to check by hand. The sampling interval is 60 s unless noted."""

from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_affinode.analysis.result import JOB_COLUMNS, MEASURES, RUN_MEASURES, StartedWaits, Thresholds, WasteResult

from .conftest import T0
from .waste_cases import EUROS, HOUR, Analysed, Jobs, Rows, every


def seconds(result: WasteResult, word: str) -> float:
    """Return the total of a class of hours, in seconds."""
    return float(result.total[f"gpu_hours_{word}"] or 0) * HOUR


def test_idle_and_busy_hours_add_up_to_allocated(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A two-hour run that computes only in the second hour has one idle, one busy and no unknown hour."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 90)
    result = analysed(rows, jobs({"start": 0, "end": 7200}))
    total = result.total
    assert total["jobs"] == total["users"] == 1
    assert total["gpu_hours_allocated"] == total["gpu_hours_measured"] == pytest.approx(2)
    assert total["gpu_hours_idle"] == total["gpu_hours_busy"] == pytest.approx(1)
    assert (total["gpu_hours_low"], total["gpu_hours_unknown"]) == (0, 0)
    assert total["idle_fraction"] == pytest.approx(0.5)
    assert total["util_mean_pct"] == pytest.approx(45)
    assert result.jobs.columns == [*JOB_COLUMNS, *MEASURES, *RUN_MEASURES]
    assert result.jobs.select(MEASURES.keys()).row(0, named=True) == {name: total[name] for name in MEASURES}


def test_sample_counts_until_next_sample_or_end_of_run(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """In a run of 90 s, the sample at 60 s counts for the remaining 30 s."""
    rows = samples(every(0, HOUR), util_pct=lambda t: 0 if t == 60 else 90)
    result = analysed(rows, jobs({"start": 0, "end": 90}))
    assert (seconds(result, "busy"), seconds(result, "idle")) == (pytest.approx(60), pytest.approx(30))
    assert result.jobs["longest_idle_s"].item() == 30


def test_late_sample_extends_the_sample_before_it(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A sample is 25 s late: the one before it counts 25 s longer, and it counts 25 s less."""
    times = [t + 25 if t == 300 else t for t in every(0, 1200)]
    result = analysed(samples(times, util_pct=lambda t: 0 if t == 325 else 50), jobs({"start": 0, "end": 1200}))
    assert (seconds(result, "idle"), seconds(result, "busy")) == (pytest.approx(35), pytest.approx(1165))


def test_time_before_first_sample_is_unknown(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The run starts 20 s after a sample; that sample was taken before the run, so 40 s are unknown."""
    result = analysed(samples(every(0, HOUR), util_pct=0), jobs({"start": 20, "end": HOUR}))
    assert (seconds(result, "unknown"), seconds(result, "idle")) == (pytest.approx(40), pytest.approx(HOUR - 60))


@pytest.mark.parametrize(("gap", "counts"), [(180, 180), (181, 60), (600, 60)])
def test_gap_longer_than_three_intervals_is_unknown(
    analysed: Analysed, samples: Rows, jobs: Jobs, gap: int, counts: int
) -> None:
    """Up to three intervals are bridged; in a longer gap, the sample before it counts for one interval."""
    back, unknown = 540 + gap, gap - counts
    rows = samples([*every(0, 600), *every(back, back + 600)], util_pct=lambda t: 0 if t == 540 else 90)
    result = analysed(rows, jobs({"start": 0, "end": back + 600}))
    assert seconds(result, "idle") == pytest.approx(counts)
    assert seconds(result, "unknown") == pytest.approx(unknown)
    assert seconds(result, "busy") == pytest.approx(540 + 600)
    assert result.quality.gap_gpu_hours * HOUR == pytest.approx(unknown)
    assert ("gaps" in {issue.code for issue in result.quality.issues}) is (unknown > 0)


def test_gap_limit_is_configurable(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """With ten intervals allowed, a gap of ten minutes at an interval of one minute is bridged."""
    rows = samples([*every(0, 600), *every(1140, 1740)], util_pct=0)
    wide = Thresholds(max_gap_steps=10)
    result = analysed(rows, jobs({"start": 0, "end": 1740}), thresholds=wide)
    assert (seconds(result, "idle"), seconds(result, "unknown")) == (pytest.approx(1740), 0)


def test_last_sample_counts_for_one_interval(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The samples stop in the middle of a run."""
    result = analysed(samples(every(0, 1800), util_pct=50), jobs({"start": 0, "end": HOUR}))
    assert (seconds(result, "busy"), seconds(result, "unknown")) == (pytest.approx(1800), pytest.approx(1800))


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
def test_largest_signal_determines_activity(
    analysed: Analysed, samples: Rows, jobs: Jobs, signals: dict[str, float], word: str
) -> None:
    """A GPU is idle only if all available signals agree; without any signal its time is unknown."""
    result = analysed(samples(every(0, HOUR), **signals), jobs({"start": 0, "end": HOUR}))
    assert {w: seconds(result, w) for w in ("idle", "low", "busy", "unknown")} == {
        w: pytest.approx(HOUR if w == word else 0) for w in ("idle", "low", "busy", "unknown")
    }
    codes = {issue.code for issue in result.quality.issues}
    assert ("no-activity-signal" in codes) is (word == "unknown")
    if word == "unknown":
        assert result.total["idle_fraction"] is None
        assert result.total["idle_windows"] is None


def test_thresholds_are_inclusive(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """With thresholds of 2 and 10 %, 2 is idle, 3 and 10 are low, 11 is busy."""
    rows = samples(every(0, 2400), util_pct=lambda t: (2, 3, 10, 11)[int(t // 600)])
    result = analysed(rows, jobs({"start": 0, "end": 2400}), thresholds=Thresholds(idle_pct=2, low_pct=10))
    assert [seconds(result, w) for w in ("idle", "low", "busy")] == [pytest.approx(s) for s in (600, 1200, 600)]


def test_runs_are_clipped_to_the_interval(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The run starts an hour before and ends an hour after an interval of two hours."""
    rows = samples(every(-HOUR, 3 * HOUR), util_pct=lambda t: 0 if t < 0 else 50)
    result = analysed(rows, jobs({"start": -HOUR, "end": 3 * HOUR, "submit": -HOUR}))
    assert result.total["gpu_hours_allocated"] == pytest.approx(2)
    assert (seconds(result, "busy"), seconds(result, "idle")) == (pytest.approx(7200), 0)


def test_run_outside_the_interval_is_excluded(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The interval is half-open: runs that end at its start or start at its end are excluded."""
    outcome = jobs(
        {"job_id": 1, "start": -HOUR, "end": 0},
        {"job_id": 2, "start": 7200, "end": 9000},
        {"job_id": 3, "start": None, "end": None, "state": "PENDING"},
    )
    result = analysed(samples(every(0, 7200), util_pct=0), outcome)
    assert (result.total["jobs"], result.total["gpu_hours_allocated"], len(result.jobs)) == (0, 0, 0)
    assert result.total["idle_fraction"] is None


def test_running_job_counts_until_now(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A job that started half an hour ago has half an hour, whatever the interval; its end stays empty."""
    result = analysed(
        samples(every(0, 1800), util_pct=0), jobs({"start": 0, "end": None, "state": "RUNNING"}), now=1800
    )
    assert (seconds(result, "allocated"), seconds(result, "idle")) == (pytest.approx(1800), pytest.approx(1800))
    assert result.jobs["end"].to_list() == [None]


def test_requeued_job_has_a_row_per_attempt(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The same job ID with two submit times gives two rows, each with its own hours."""
    outcome = jobs(
        {"start": 0, "end": 1800, "state": "REQUEUED"},
        {"submit": 1800, "start": HOUR, "end": 2 * HOUR},
    )
    result = analysed(samples(every(0, 7200), util_pct=lambda t: 0 if t < 1800 else 50), outcome)
    assert result.total["jobs"] == 2
    assert result.jobs.sort("submit").select("gpu_hours_idle", "gpu_hours_busy").rows() == [
        (pytest.approx(0.5), 0),
        (0, pytest.approx(1)),
    ]


def test_sums_have_no_floating_point_noise(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """An hour is 1, not 0.9999999999999999, in the table of runs and in the total."""
    outcome = jobs(*({"job_id": n, "start": n * HOUR, "end": (n + 1) * HOUR} for n in range(2)))
    result = analysed(samples(every(0, 7200), util_pct=0, fb_used_mib=3072, power_w=300), outcome, prices=EUROS)
    columns = ("gpu_hours_allocated", "gpu_hours_idle", "mem_gib_h", "energy_kwh", "cost", "idle_cost")
    assert result.jobs.select(columns).rows() == [(1, 1, 3, 0.3, 2, 2)] * 2
    assert tuple(result.total[name] for name in columns) == (2, 2, 6, 0.6, 4, 4)


def test_cluster_filter_excludes_runs_and_free_gpus(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Other clusters are excluded even if they have a node of the same name."""
    rows = samples(every(0, 7200), util_pct=0)
    rows += samples(every(0, 7200), util_pct=50, cluster="d", uuid="GPU-d")
    rows += samples(every(0, 7200), util_pct=0, node="n2", uuid="GPU-2")
    result = jobs({"start": 0, "end": 7200}, {"cluster": "d", "start": 0, "end": 7200})
    whole, group = analysed(rows, result), analysed([], result, clusters=("d",))
    assert (whole.total["gpu_hours_busy"], whole.total["unallocated_gpu_hours"]) == (2, 2)
    assert whole.groups["cluster"].select("name", "gpu_hours_idle", "gpu_hours_busy").rows() == [
        ("c", 2, 0),
        ("d", 0, 2),
    ]
    assert group.jobs["cluster"].to_list() == ["d"]
    assert (group.total["gpu_hours_busy"], group.total["unallocated_gpu_hours"]) == (2, 0)


def test_runs_without_gpus_are_excluded(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A CPU job on the same node does not count; accounting without GPU TRES is reported as an issue."""
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": 7200},
        {"job_id": 2, "start": 0, "end": 7200, "gpus": 0, "user": "bob"},
        {"job_id": 3, "start": 0, "end": 7200, "gpus": None, "user": "eve", "node_list": "n9"},
    )
    result = analysed(samples(every(0, 7200), util_pct=0), outcome)
    assert result.jobs["job_id"].to_list() == [1]
    assert (result.total["users"], result.total["gpu_hours_idle"]) == (1, pytest.approx(2))
    assert (result.quality.job_runs, result.quality.gpu_job_runs) == (3, 1)
    assert [issue.count for issue in result.quality.issues if issue.code == "no-gpu-tres"] == [1]


@pytest.mark.parametrize("gpus", [None, 0])
def test_run_without_allocated_gpu_gets_its_share_by_label(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int | None
) -> None:
    """Labels assign the run a GPU that accounting does not count for it (shards, or untracked GPUs)."""
    outcome = jobs({"job_id": 1, "start": 0, "end": 7200, "gpus": gpus})
    result = analysed(samples(every(0, 7200), util_pct=0, job="1"), outcome)
    assert result.total["gpu_hours_allocated"] == result.total["gpu_hours_idle"] == pytest.approx(2)
    assert result.over_time["gpu_hours_allocated"].to_list() == [pytest.approx(1), pytest.approx(1)]


@pytest.mark.parametrize(("gpus", "allocated"), [(1, 2), (0, 1)])
def test_runs_sharing_a_gpu_split_its_hours(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int, allocated: float
) -> None:
    """Two labeled jobs share a GPU for two hours: each gets an hour, half the energy and half the memory.

    If accounting allocated a whole GPU to each, the other hour of each is unknown.
    """
    outcome = jobs(*({"job_id": n, "start": 0, "end": 7200, "gpus": gpus} for n in (1, 2)))
    result = analysed(samples(every(0, 7200), util_pct=0, power_w=100, fb_used_mib=1024, job="1,2"), outcome)
    for row in result.jobs.iter_rows(named=True):
        assert row["gpu_hours_allocated"] == pytest.approx(allocated)
        assert row["gpu_hours_idle"] == pytest.approx(1)
        assert row["gpu_hours_unknown"] == pytest.approx(allocated - 1)
        assert (row["energy_kwh"], row["mem_gib_h"], row["fb_peak_gib"]) == (pytest.approx(0.1), pytest.approx(1), 1)
        assert row["longest_idle_s"] == 7200
    total = result.total
    assert (total["gpu_hours_measured"], total["energy_kwh"]) == (pytest.approx(2), pytest.approx(0.2))
    assert ("shared-gpus" in {issue.code for issue in result.quality.issues}) is (gpus > 0)


def test_sharing_counts_in_user_filtered_report(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The user gets half of the GPU although the other user's job is filtered out."""
    outcome = jobs({"job_id": 1, "start": 0, "end": 7200}, {"job_id": 2, "start": 0, "end": 7200, "user": "bob"})
    result = analysed(samples(every(0, 7200), util_pct=0, job="1,2"), outcome, users=("bob",))
    assert result.jobs["user"].to_list() == ["bob"]
    assert (result.total["gpu_hours_idle"], result.total["unallocated_gpu_hours"]) == (pytest.approx(1), None)


def test_energy_and_memory(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """An idle hour at 60 W with 40 GiB and a busy hour at 400 W with 20 GiB."""
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


def test_unmeasured_figures_are_none_and_measured_zero_is_zero(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Without power samples, energy is unknown; memory use of 0 is a measurement."""
    total = analysed(samples(every(0, 7200), util_pct=50, fb_used_mib=0), jobs({"start": 0, "end": 7200})).total
    assert total["energy_kwh"] is None
    assert total["idle_energy_kwh"] is None
    assert total["cost"] is None
    assert (total["mem_gib_h"], total["idle_mem_gib_h"], total["fb_peak_gib"]) == (0, 0, 0)
    assert total["util_mean_pct"] == pytest.approx(50)


def test_idle_hours_of_unmeasured_run_are_unknown(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Idle hours are unknown, not 0, for a run on a node without metrics, its user and its time buckets."""
    rows = samples(every(0, HOUR), util_pct=100, fb_used_mib=1024, power_w=90)
    blind = {"job_id": 2, "user": "bob", "node_list": "n2", "start": HOUR, "end": 2 * HOUR}
    result = analysed(rows, jobs({"start": 0, "end": HOUR}, blind))
    states = ["gpu_hours_idle", "gpu_hours_low", "gpu_hours_busy"]
    assert result.jobs.select("job_id", *states).rows() == [(1, 0, 0, 1), (2, None, None, None)]
    assert result.groups["user"].select("name", *states).rows() == [("ann", 0, 0, 1), ("bob", None, None, None)]
    assert result.over_time.select(states).rows() == [(0, 0, 1), (None, None, None)]
    assert [result.total[name] for name in states] == [0, 0, 1]


def test_idle_memory_without_activity_signal_is_unknown(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The samples have only memory and power, so whether the GPU was idle is unknown."""
    rows = samples(every(0, HOUR), fb_used_mib=1024, power_w=90)
    result = analysed(rows, jobs({"start": 0, "end": HOUR}), until=HOUR)
    assert result.total["mem_gib_h"] == pytest.approx(1)
    assert [result.total[name] for name in ("gpu_hours_idle", "idle_mem_gib_h", "idle_energy_kwh")] == [None] * 3
    assert set(result.window_histogram.select("windows", "gpu_hours").rows()) == {(None, None)}


def test_interval_without_gpu_jobs_has_zero_idle_hours(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    result = analysed(samples(every(0, HOUR), util_pct=0), jobs({"start": 0, "end": HOUR, "gpus": 0}), until=HOUR)
    assert (result.total["gpu_hours_allocated"], result.total["gpu_hours_idle"]) == (0, 0)
    assert set(result.over_time["gpu_hours_idle"]) == {0}


def test_idle_windows_are_counted_across_time_buckets(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Idle periods of ten minutes and two hours are two windows, however many buckets they cross."""
    rows = samples(every(0, 4 * HOUR), util_pct=lambda t: 0 if t < 600 or 1200 <= t < 8400 else 70)
    result = analysed(rows, jobs({"start": 0, "end": 4 * HOUR}), until=4 * HOUR)
    assert (result.total["idle_windows"], result.total["longest_idle_s"]) == (2, 7200)
    histogram = {row["label"]: (row["windows"], row["gpu_hours"]) for row in result.window_histogram.to_dicts()}
    assert histogram.pop("5-15 min") == (1, pytest.approx(1 / 6))
    assert histogram.pop("1-4 h") == (1, pytest.approx(2))
    assert set(histogram.values()) == {(0, 0)}


def test_idle_window_continues_across_midnight(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A GPU that is idle from 22:00 to 04:00 has one window of six hours."""
    first, last = 12 * HOUR, 22 * HOUR
    rows = samples(every(first, last), util_pct=lambda t: 0 if 14 * HOUR <= t < 20 * HOUR else 70)
    result = analysed(rows, jobs({"start": first, "end": last}), until=24 * HOUR)
    assert (result.total["idle_windows"], result.total["longest_idle_s"]) == (1, 6 * HOUR)
    assert (result.total["gpu_hours_idle"], result.total["gpu_hours_unknown"]) == (pytest.approx(6), 0)


def test_gap_ends_an_idle_window(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Idle time cannot be assumed in a gap."""
    result = analysed(samples([*every(0, 600), *every(1200, 1800)], util_pct=0), jobs({"start": 0, "end": 1800}))
    assert (result.total["idle_windows"], result.total["longest_idle_s"]) == (2, 600)


@pytest.mark.parametrize(
    ("dram", "idle"),
    [(0.000131, 2.0), (0.0005, 2.0), (0.00051, 0.0), (None, 2.0)],
    ids=["noise", "floor", "above", "none"],
)
def test_activity_at_or_below_signal_floor_is_idle(
    analysed: Analysed, samples: Rows, jobs: Jobs, dram: float | None, idle: float
) -> None:
    """An unused L40S reads 0.0131 % DRAM activity; values above the floor of 0.05 % count."""
    rows = samples(every(0, 7200), util_pct=0, dram_active=dram, fb_used_mib=0)
    total = analysed(rows, jobs({"start": 0, "end": 7200})).total
    assert (total["gpu_hours_idle"], total["gpu_hours_low"]) == (pytest.approx(idle), pytest.approx(2 - idle))


def test_site_floor_applies_per_signal(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The site treats 1 % of utilization as noise, but not 1 % of SM activity; missing values stay unknown."""
    site = Thresholds(floors_pct={"utilization": 1.0})
    rows = samples(every(0, HOUR), util_pct=1, sm_active=lambda t: None if t < 1800 else 0.01)
    rows += samples(every(HOUR, 7200), util_pct=None, sm_active=None)
    total = analysed(rows, jobs({"start": 0, "end": 7200}), thresholds=site).total
    assert (total["gpu_hours_idle"], total["gpu_hours_low"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert total["gpu_hours_unknown"] == pytest.approx(1)


def test_suspended_time_is_not_idle(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Accounting has how long the job was suspended, not when: so much of its idle time is unknown."""
    rows = samples(every(0, 7200), util_pct=lambda t: 0 if t < HOUR else 90, fb_used_mib=1024, power_w=100)
    result = analysed(rows, jobs({"start": 0, "end": 7200, "suspended_s": 900}))
    texts = {name: result.jobs[name].item() for name in (
        "gpu_hours_idle", "gpu_hours_unknown", "gpu_hours_busy", "idle_mem_gib_h", "idle_energy_kwh", "longest_idle_s",
        "idle_windows",
    )}  # fmt: skip
    assert list(texts.values()) == pytest.approx([0.75, 0.25, 1, 0.75, 0.075, 2700, 1])
    assert {name: result.total[name] for name in texts} == texts
    assert result.over_time["gpu_hours_idle"].sum() == pytest.approx(0.75)
    assert result.over_time["gpu_hours_unknown"].sum() == pytest.approx(0.25)
    slots_s = (result.timelines["to"] - result.timelines["from"]).dt.total_seconds()
    assert (result.timelines["idle"] * slots_s).sum() == pytest.approx(2700)
    (item,) = [entry for entry in result.quality.issues if entry.code == "suspended-by-slurm"]
    assert (item.count, item.gpu_hours) == (1, pytest.approx(0.25))


def test_job_suspended_for_longer_than_it_was_idle_has_no_idle_time(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """The rest of the suspension was while nothing was measured, or outside of the interval."""
    result = analysed(samples(every(0, HOUR), util_pct=0), jobs({"start": 0, "end": HOUR, "suspended_s": 9000}))
    names = ("gpu_hours_idle", "gpu_hours_unknown", "idle_windows", "longest_idle_s")
    assert [result.total[name] for name in names] == [None, 1, None, None]


def test_shared_gpu_whose_idle_time_is_all_unknown_has_no_idle_window(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """Half of the idle hour is the job's, who was suspended for longer: no part of the window remains."""
    rows = samples(every(0, 7200), job="1,2", util_pct=lambda t: 0 if t < HOUR else 90)
    both = {"start": 0, "end": 7200, "gpus": 0}
    result = analysed(rows, jobs({"job_id": 1, "suspended_s": 2400, **both}, {"job_id": 2, **both}))
    of_job = {row["job_id"]: row for row in result.jobs.iter_rows(named=True)}
    names = ("gpu_hours_idle", "idle_windows", "longest_idle_s")
    assert [[of_job[job][name] for name in names] for job in (1, 2)] == [[0, 0, 0], [0.5, 1, 3600]]


def test_running_job_that_was_suspended_is_not_unseen(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Elapsed and suspended time together reach the end of accounting."""
    rows = samples(every(0, 7200), util_pct=90)
    job = {"start": 0, "end": None, "state": "RUNNING", "elapsed_s": HOUR, "suspended_s": HOUR}
    codes = [item.code for item in analysed(rows, jobs(job)).quality.issues]
    assert "running-unseen" not in codes


def test_waits_of_jobs_that_started_in_the_interval(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """From when they were eligible; without those of unknown eligibility, and those that had started before."""
    runs = jobs(
        {"job_id": 1, "eligible": T0, "start": 1800, "end": 7200, "gpus": 2},
        {"job_id": 2, "eligible": T0, "start": 30, "end": 7200},
        {"job_id": 3, "eligible": T0, "start": 3600, "end": 7200},
        {"job_id": 4, "start": 3600, "end": 7200},
        {"job_id": 5, "eligible": T0 - timedelta(hours=2), "start": -3600, "end": 7200},
    )
    waits = analysed(samples(every(0, 7200), util_pct=0), runs).waits
    assert waits == StartedWaits(3, 2, pytest.approx((2 * 1800 + 30 + 3600) / 3600), 2700, 3600)  # type: ignore[arg-type]
    assert analysed([], jobs({"start": 0, "end": 7200})).waits is None
