"""What makes figures less certain is said with numbers."""

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
    """An entry of the journal."""

    kind: str = "sacct"
    source: str = "sacct.txt"
    bad: int = 0
    problems: tuple[Bad, ...] = field(default_factory=tuple)


def issue(result: WasteResult, code: str) -> QualityIssue:
    """The one issue of that code."""
    (found,) = (found for found in result.quality.issues if found.code == code)
    return found


def codes(result: WasteResult) -> set[str]:
    """The words of all issues."""
    return {found.code for found in result.quality.issues}


def test_whole_data_have_no_issue(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """And counts that say what there was."""
    quality = analysed(samples(TIMES, util_pct=50), jobs({"start": 0, "end": 7200})).quality
    assert quality.issues == ()
    assert (quality.samples, quality.devices, quality.nodes) == (120, 1, 1)
    assert (quality.job_runs, quality.gpu_job_runs, quality.gap_gpu_hours) == (1, 1, 0)
    assert quality.steps_s == {60.0: 1}


def test_sampling_steps_are_counted_by_device(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Three GPUs of which one is sampled every ten seconds."""
    rows = samples(TIMES, util_pct=1) + samples(TIMES, util_pct=1, uuid="GPU-1")
    rows += samples([10.0 * k for k in range(100)], util_pct=1, uuid="GPU-2", node="n2")
    quality = analysed(rows, jobs()).quality
    assert quality.steps_s == {10.0: 1, 60.0: 2}
    assert (quality.samples, quality.devices, quality.nodes) == (340, 3, 2)


def test_unknown_gpus_on_nodes_without_history(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The hours, the run, and that its node is not watched."""
    found = jobs({"job_id": 1, "start": 0, "end": 7200}, {"job_id": 2, "start": 0, "end": HOUR, "node_list": "n7"})
    unmapped = issue(analysed(samples(TIMES, util_pct=50), found), "unmapped-gpus")
    assert (unmapped.count, unmapped.gpu_hours, unmapped.examples) == (1, pytest.approx(1), ("job 2 of ann on n7",))
    assert "1 of them ran on nodes that the history does not have at all" in unmapped.detail


def test_clusters_of_other_names_are_the_reason(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Accounting of two clusters, a history that names neither: how to take it in is said."""
    found = jobs({"job_id": 1, "cluster": "b", "start": 0}, {"job_id": 1, "cluster": "c", "start": 0})
    history = samples(TIMES, util_pct=50, job="1", cluster="default")
    unmapped = issue(analysed(history, found), "unmapped-gpus")
    assert "The history names the cluster default, accounting b, c" in unmapped.detail
    assert "--cluster NAME" in unmapped.detail


def test_a_run_too_short_for_a_sample(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Twenty seconds between two samples."""
    result = analysed(samples(TIMES, util_pct=50, job="9"), jobs({"job_id": 9, "start": 70, "end": 90}))
    assert issue(result, "no-samples").gpu_hours == pytest.approx(20 / HOUR)
    assert result.total["idle_fraction"] is None


def test_samples_without_activity_name_the_gpu(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A MIG instance of which only the memory is known."""
    rows = samples(TIMES, fb_used_mib=10, mig="3", mig_profile="1g.10gb")
    silent = issue(analysed(rows, jobs({"start": 0, "end": 7200})), "no-activity-signal")
    assert (silent.count, silent.gpu_hours, silent.examples) == (1, pytest.approx(2), ("n1 GPU-0 MIG 3",))


@pytest.mark.parametrize(("shift", "said"), [(60, "start, in the median"), (-120, "end, in the median"), (0, None)])
def test_a_wrong_clock_shows_in_the_labels(
    analysed: Analysed, samples: Rows, jobs: Jobs, shift: int, said: str | None
) -> None:
    """Labels that in the median begin a minute before their runs, or end a minute after them."""
    rows = [
        row
        for n in range(3)
        for row in samples(
            TIMES, util_pct=9, uuid=f"GPU-{n}", job=lambda t, n=n: str(n + 1) if 600 <= t < HOUR else None
        )
    ]
    found = jobs(*({"job_id": n + 1, "start": 600 + shift, "end": HOUR + shift} for n in range(3)))
    result = analysed(rows, found)
    if said is None:
        assert "clock-skew" not in codes(result)
    else:
        text = issue(result, "clock-skew")
        assert said in " ".join((text.title, text.detail, *text.examples))


def test_records_that_could_not_be_used(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """As the journal has them: how many, where, why."""
    journal = (
        Taken(bad=2, problems=(Bad("no start", 17), Bad("odd"))),
        Taken(kind="gpu", source="gpu.csv"),
    )
    result = analysed(samples(TIMES, util_pct=50), jobs({"start": 0, "end": 7200}), ingests=journal)
    bad = issue(result, "bad-records")
    assert bad.count == 2
    assert bad.examples == ("sacct.txt, record 17: no start", "sacct.txt: odd")
    assert "bad-records" not in codes(analysed([], jobs({"start": 0, "end": 7200}), ingests=journal[1:]))


def test_quality_counts_one_user_s_runs(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """With a filter the runs are those that pass it."""
    found = jobs({"job_id": 1, "start": 0, "end": HOUR}, {"job_id": 2, "start": HOUR, "end": 7200, "user": "bob"})
    quality = analysed(samples(TIMES, util_pct=50), found, users=("bob",)).quality
    assert (quality.job_runs, quality.mapped_runs["whole-node"]) == (1, 1)


def test_a_run_that_accounting_has_not_seen_for_long_is_named(analysed: Analysed, jobs: Jobs) -> None:
    """It counts as running to the end, though only its last record is certain; a day without news is usual."""
    found = jobs(
        {"job_id": 1, "start": 0, "end": None, "state": "RUNNING", "elapsed_s": HOUR, "gpus": 2},
        {"job_id": 2, "start": 0, "end": None, "state": "RUNNING", "elapsed_s": 30 * HOUR, "node_list": "n2"},
        {"job_id": 3, "start": 0, "end": None, "state": "RUNNING", "elapsed_s": None, "node_list": "n3"},
        {"job_id": 4, "start": -60 * HOUR, "end": None, "state": "RUNNING", "elapsed_s": HOUR, "node_list": "n4"},
    )
    result = analysed([], found, until=50 * HOUR, now=99 * HOUR)
    found_ = issue(result, "running-unseen")
    assert (found_.count, found_.gpu_hours) == (2, pytest.approx(2 * 49 + 50))
    assert found_.examples == ("job 4 of ann on n4", "job 1 of ann on n1")
    hour = issue(analysed([], found, since=49 * HOUR, until=50 * HOUR, now=99 * HOUR), "running-unseen")
    assert hour.gpu_hours == pytest.approx(3)


def test_gpu_model_that_never_reads_zero_is_reported(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Model, signal and the smallest value, where a GPU without memory held is never idle; and the remedy."""
    gpu = {"model": "NVIDIA L40S", "fb_used_mib": 3.0, "util_pct": 0}
    rows = samples(TIMES, **gpu, dram_active=lambda t: 0.0007 + 0.0001 * (t % 120 > 0))
    found = issue(analysed(rows, jobs({"start": 0, "end": 7200})), "never-zero")
    assert found.examples == (
        "NVIDIA L40S (1 GPU): dram reads at least 0.07 %, and up to 0.08 % while no memory is held",
    )
    assert "floors_pct" in found.detail


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
def test_gpu_model_that_is_idle_or_in_use_is_not_reported(
    analysed: Analysed, samples: Rows, jobs: Jobs, values: dict[str, Any]
) -> None:
    """Nothing is said of GPUs that can be idle, that are used, or of which nobody knows."""
    rows = samples(TIMES, **{"util_pct": 0, "fb_used_mib": 3.0, **values})
    assert "never-zero" not in codes(analysed(rows, jobs({"start": 0, "end": 7200})))
