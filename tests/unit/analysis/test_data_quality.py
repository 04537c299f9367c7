"""Data-quality issues quantify the uncertainty of the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis.result import QualityIssue, WasteResult

Analysed = Callable[..., WasteResult]
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]

HOUR = 3600
TIMES = [60.0 * k for k in range(120)]


@dataclass(frozen=True)
class Bad:
    """A record that could not be used."""

    reason: str
    line: int | None = None


@dataclass(frozen=True)
class Taken:
    """An entry of the ingest journal."""

    kind: str = "sacct"
    source: str = "sacct.txt"
    bad: int = 0
    problems: tuple[Bad, ...] = field(default_factory=tuple)


def issue(result: WasteResult, code: str) -> QualityIssue:
    """Return the only issue with this code."""
    (outcome,) = (actual for actual in result.quality.issues if actual.code == code)
    return outcome


def codes(result: WasteResult) -> set[str]:
    """Return the codes of all issues."""
    return {outcome.code for outcome in result.quality.issues}


def test_complete_data_has_no_issue(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The counts of samples, devices, nodes and runs are reported."""
    quality = analysed(samples(TIMES, util_pct=50), jobs({"start": 0, "end": 7200})).quality
    assert quality.issues == ()
    assert (quality.samples, quality.devices, quality.nodes) == (120, 1, 1)
    assert (quality.job_runs, quality.gpu_job_runs, quality.gap_gpu_hours) == (1, 1, 0)
    assert quality.steps_s == {60.0: 1}


def test_sampling_intervals_are_counted_by_device(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """One of three GPUs is sampled every ten seconds."""
    rows = samples(TIMES, util_pct=1) + samples(TIMES, util_pct=1, uuid="GPU-1")
    rows += samples([10.0 * k for k in range(100)], util_pct=1, uuid="GPU-2", node="n2")
    quality = analysed(rows, jobs()).quality
    assert quality.steps_s == {10.0: 1, 60.0: 2}
    assert (quality.samples, quality.devices, quality.nodes) == (340, 3, 2)


def test_run_on_node_without_metrics_is_unmapped(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The issue gives the hours, the run and the fact that its node has no metrics."""
    result = jobs({"job_id": 1, "start": 0, "end": 7200}, {"job_id": 2, "start": 0, "end": HOUR, "node_list": "n7"})
    unmapped = issue(analysed(samples(TIMES, util_pct=50), result), "unmapped-gpus")
    assert (unmapped.count, unmapped.gpu_hours, unmapped.examples) == (1, pytest.approx(1), ("job 2 of ann on n7",))
    assert "1 of them ran on nodes without any GPU metrics" in unmapped.detail


def test_unmapped_issue_names_mismatched_cluster_names(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """If accounting and metrics use different cluster names, the issue names the ``ingest`` option that fixes it."""
    result = jobs({"job_id": 1, "cluster": "b", "start": 0}, {"job_id": 1, "cluster": "c", "start": 0})
    history = samples(TIMES, util_pct=50, job="1", cluster="default")
    unmapped = issue(analysed(history, result), "unmapped-gpus")
    assert "The GPU metrics name the cluster default, accounting b, c" in unmapped.detail
    assert "--cluster NAME" in unmapped.detail


def test_run_between_two_samples_has_no_samples(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The run lasts 20 seconds, between two samples."""
    result = analysed(samples(TIMES, util_pct=50, job="9"), jobs({"job_id": 9, "start": 70, "end": 90}))
    assert issue(result, "no-samples").gpu_hours == pytest.approx(20 / HOUR)
    assert result.total["idle_fraction"] is None


def test_samples_without_activity_signal_are_reported(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Only memory is measured for the MIG instance."""
    rows = samples(TIMES, fb_used_mib=10, mig="3", mig_profile="1g.10gb")
    unmeasured = issue(analysed(rows, jobs({"start": 0, "end": 7200})), "no-activity-signal")
    assert (unmeasured.count, unmeasured.gpu_hours, unmeasured.examples) == (1, pytest.approx(2), ("n1 GPU-0 MIG 3",))


@pytest.mark.parametrize(("shift", "expected"), [(60, "start, in the median"), (-120, "end, in the median"), (0, None)])
def test_clock_skew_is_detected_from_job_labels(
    analysed: Analysed, samples: Rows, jobs: Jobs, shift: int, expected: str | None
) -> None:
    """The median label starts a minute before its run, or ends two minutes after it."""
    rows = [
        row
        for n in range(3)
        for row in samples(
            TIMES, util_pct=9, uuid=f"GPU-{n}", job=lambda t, n=n: str(n + 1) if 600 <= t < HOUR else None
        )
    ]
    outcome = jobs(*({"job_id": n + 1, "start": 600 + shift, "end": HOUR + shift} for n in range(3)))
    result = analysed(rows, outcome)
    if expected is None:
        assert "clock-skew" not in codes(result)
    else:
        text = issue(result, "clock-skew")
        assert expected in " ".join((text.title, text.detail, *text.examples))


def test_bad_records_are_reported_from_the_journal(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The issue gives the number, file, record and reason of bad records."""
    journal = (
        Taken(bad=2, problems=(Bad("no start", 17), Bad("odd"))),
        Taken(kind="gpu", source="gpu.csv"),
    )
    result = analysed(samples(TIMES, util_pct=50), jobs({"start": 0, "end": 7200}), ingests=journal)
    bad = issue(result, "bad-records")
    assert bad.count == 2
    assert bad.examples == ("sacct.txt, record 17: no start", "sacct.txt: odd")
    assert "bad-records" not in codes(analysed([], jobs({"start": 0, "end": 7200}), ingests=journal[1:]))


def test_quality_counts_follow_user_filter(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    result = jobs({"job_id": 1, "start": 0, "end": HOUR}, {"job_id": 2, "start": HOUR, "end": 7200, "user": "bob"})
    quality = analysed(samples(TIMES, util_pct=50), result, users=("bob",)).quality
    assert (quality.job_runs, quality.mapped_runs["whole-node"]) == (1, 1)


def test_other_clusters_of_the_store_are_not_described(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The other cluster has more nodes, another interval, a model that never reads 0, and a GPU with two indexes."""
    rows = samples(TIMES, util_pct=50)
    gpu = {"cluster": "other", "node": "m1", "uuid": "GPU-1", "util_pct": 0, "fb_used_mib": 3.0, "dram_active": 0.0008}
    rows += samples(TIMES, **gpu) + samples([10.0 * k for k in range(9)], **{**gpu, "node": "m2", "uuid": "GPU-2"})
    rows += samples([9000.0 + k for k in range(9)], **{**gpu, "index": 7})
    runs = jobs({"start": 0, "end": 7200})
    assert {"never-zero", "several-names"} <= codes(analysed(rows, runs, until=3 * HOUR))
    quality = analysed([], runs, until=3 * HOUR, clusters=("c",)).quality
    assert (quality.samples, quality.devices, quality.nodes, quality.steps_s) == (120, 1, 1, {60.0: 1})
    assert quality.issues == ()


def test_running_job_with_stale_accounting_is_reported(analysed: Analysed, jobs: Jobs) -> None:
    """Such a run counts as running until the end, but only its last record is certain; a one-day delay is normal."""
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": None, "state": "RUNNING", "elapsed_s": HOUR, "gpus": 2},
        {"job_id": 2, "start": 0, "end": None, "state": "RUNNING", "elapsed_s": 30 * HOUR, "node_list": "n2"},
        {"job_id": 3, "start": 0, "end": None, "state": "RUNNING", "elapsed_s": None, "node_list": "n3"},
        {"job_id": 4, "start": -60 * HOUR, "end": None, "state": "RUNNING", "elapsed_s": HOUR, "node_list": "n4"},
    )
    result = analysed([], outcome, until=50 * HOUR, now=99 * HOUR)
    unseen = issue(result, "running-unseen")
    assert (unseen.count, unseen.gpu_hours) == (2, pytest.approx(2 * 49 + 50))
    assert unseen.examples == ("job 4 of ann on n4", "job 1 of ann on n1")
    hour = issue(analysed([], outcome, since=49 * HOUR, until=50 * HOUR, now=99 * HOUR), "running-unseen")
    assert hour.gpu_hours == pytest.approx(3)


def test_gpu_model_with_nonzero_idle_reading_is_reported(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The issue gives the model, the signal, its smallest value while no memory is held, and the remedy."""
    gpu = {"model": "NVIDIA L40S", "fb_used_mib": 3.0, "util_pct": 0}
    rows = samples(TIMES, **gpu, dram_active=lambda t: 0.0007 + 0.0001 * (t % 120 > 0))
    result = issue(analysed(rows, jobs({"start": 0, "end": 7200})), "never-zero")
    assert result.examples == (
        "NVIDIA L40S (1 GPU): dram reads at least 0.07 %, and up to 0.08 % while no memory is held",
    )
    assert "floors_pct" in result.detail


@pytest.mark.parametrize(
    "values",
    [
        {"dram_active": 0.0004},
        {"dram_active": 0.0007, "fb_used_mib": 30_000.0},
        {"dram_active": 0.3},
        {"dram_active": lambda t: 0.0007 if t else 0.0},
    ],
    ids=["below the floor", "memory held", "computes", "was 0 once"],
)
def test_gpu_model_that_reads_zero_or_is_in_use_is_not_reported(
    analysed: Analysed, samples: Rows, jobs: Jobs, values: dict[str, Any]
) -> None:
    """Readings below the floor, GPUs that hold memory or compute, and models that once read 0 raise no issue."""
    rows = samples(TIMES, **{"util_pct": 0, "fb_used_mib": 3.0, **values})
    assert "never-zero" not in codes(analysed(rows, jobs({"start": 0, "end": 7200})))
