"""Where GPU-hours went, on histories small enough to count by hand. Samples are 60 s apart unless said otherwise."""

from __future__ import annotations

import pytest
from waste_cases import EUROS, HOUR, Analysed, Jobs, Rows, both, every

from slurm_affinode.analysis.result import JOB_COLUMNS, MEASURES, Thresholds, WasteResult


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
def test_of_what_was_not_measured_nobody_knows_how_much_was_idle(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Not 0: of a run on a node without history, its user, its hours; the measured run beside it keeps its own."""
    rows = samples(every(0, HOUR), util_pct=100, fb_used_mib=1024, power_w=90)
    blind = {"job_id": 2, "user": "bob", "node_list": "n2", "start": HOUR, "end": 2 * HOUR}
    result = analysed(rows, jobs({"start": 0, "end": HOUR}, blind))
    states = ["gpu_hours_idle", "gpu_hours_low", "gpu_hours_busy"]
    assert result.jobs.select("job_id", *states).rows() == [(1, 0, 0, 1), (2, None, None, None)]
    assert result.groups["user"].select("name", *states).rows() == [("ann", 0, 0, 1), ("bob", None, None, None)]
    assert result.over_time.select(states).rows() == [(0, 0, 1), (None, None, None)]
    assert [result.total[name] for name in states] == [0, 0, 1]


@both
def test_memory_without_activity_is_not_memory_held_while_busy(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The history has memory and power alone: whether the GPU was idle meanwhile is unknown, and what it held then."""
    rows = samples(every(0, HOUR), fb_used_mib=1024, power_w=90)
    result = analysed(rows, jobs({"start": 0, "end": HOUR}), until=HOUR)
    assert result.total["mem_gib_h"] == pytest.approx(1)
    assert [result.total[name] for name in ("gpu_hours_idle", "idle_mem_gib_h", "idle_energy_kwh")] == [None] * 3
    assert set(result.window_histogram.select("windows", "gpu_hours").rows()) == {(None, None)}


def test_where_no_job_ran_nothing_was_idle(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """No GPU-hours at all are known to have no idle ones."""
    result = analysed(samples(every(0, HOUR), util_pct=0), jobs({"start": 0, "end": HOUR, "gpus": 0}), until=HOUR)
    assert (result.total["gpu_hours_allocated"], result.total["gpu_hours_idle"]) == (0, 0)
    assert set(result.over_time["gpu_hours_idle"]) == {0}


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


@both
@pytest.mark.parametrize(
    ("dram", "idle"),
    [(0.000131, 2.0), (0.0005, 2.0), (0.00051, 0.0), (None, 2.0)],
    ids=["noise", "floor", "above", "none"],
)
def test_activity_at_or_below_the_floor_of_its_signal_is_idle(
    analysed: Analysed, samples: Rows, jobs: Jobs, dram: float | None, idle: float
) -> None:
    """An unused L40S reads 0.0131 % on its memory interface; above the floor of 0.05 % it counts."""
    rows = samples(every(0, 7200), util_pct=0, dram_active=dram, fb_used_mib=0)
    total = analysed(rows, jobs({"start": 0, "end": 7200})).total
    assert (total["gpu_hours_idle"], total["gpu_hours_low"]) == (pytest.approx(idle), pytest.approx(2 - idle))


@both
def test_floors_of_the_site_apply_to_each_signal_by_itself(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """1 % of utilization is noise there, 1 % of SM activity is not; what has no value stays unknown."""
    site = Thresholds(floors_pct={"utilization": 1.0})
    rows = samples(every(0, HOUR), util_pct=1, sm_active=lambda t: None if t < 1800 else 0.01)
    rows += samples(every(HOUR, 7200), util_pct=None, sm_active=None)
    total = analysed(rows, jobs({"start": 0, "end": 7200}), thresholds=site).total
    assert (total["gpu_hours_idle"], total["gpu_hours_low"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert total["gpu_hours_unknown"] == pytest.approx(1)
