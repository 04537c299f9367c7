"""What to do about idle GPU-hours, and the bounds of what it would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis import actions, waste
from slurm_affinode.analysis.result import QualityIssue, WasteQuery, WasteResult
from slurm_affinode.demo.histories import RECORDING
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.slurm.accounting import sacct
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, empty

Analysed = Callable[..., WasteResult]
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]

DAY = 86400
TIMES = [300.0 * k for k in range(288)]


def busy_until(end_s: float) -> Callable[[float], float]:
    return lambda t: 80.0 if t < end_s else 0.0


def test_causes_and_hours_by_owner(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Idle all the time, with and without memory, and idle after some work: with what following the advice returns."""
    rows = (
        samples(TIMES, uuid="GPU-0", index=0, job="1", util_pct=0, fb_used_mib=5)
        + samples(TIMES, uuid="GPU-1", index=1, job="2", util_pct=0, fb_used_mib=20_480)
        + samples(TIMES, uuid="GPU-2", index=2, job="3", util_pct=busy_until(4 * 3600), fb_used_mib=20_480)
        + samples(TIMES, uuid="GPU-3", index=3, job="4", util_pct=90, fb_used_mib=20_480)
    )
    runs = jobs(*({"job_id": n, "start": 0, "end": DAY, "user": user} for n, user in enumerate("abcd", 1)))
    result = actions.actions(analysed(rows, runs, until=DAY))
    assert [(diagnosis.kind, diagnosis.user, diagnosis.job_id) for diagnosis in result] == [
        ("empty", "a", 1),
        ("loaded", "b", 2),
        ("pauses", "c", 3),
    ]
    assert [item.hours_returned for item in result] == pytest.approx([24, 23.75, 19.75])
    assert [item.hours_idle for item in result] == pytest.approx([24, 24, 20])


def test_runs_of_an_owner_are_summed(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The run with most hours is named, and the owner with most hours comes first."""
    rows = samples(TIMES, job=lambda t: "1" if t < DAY / 4 else "2", util_pct=0, fb_used_mib=20_480) + samples(
        TIMES, uuid="GPU-1", index=1, job="3", util_pct=busy_until(12 * 3600), fb_used_mib=20_480
    )
    runs = jobs(
        {"job_id": 1, "start": 0, "end": DAY / 4},
        {"job_id": 2, "start": DAY / 4, "end": DAY},
        {"job_id": 3, "start": 0, "end": DAY, "user": "bob"},
    )
    first, second = actions.actions(analysed(rows, runs, until=DAY))
    assert (first.user, first.runs, first.job_id, first.hours_returned) == ("ann", 2, 2, pytest.approx(23.5))
    assert (second.user, second.hours_returned) == ("bob", pytest.approx(11.75))
    assert len(actions.actions(analysed(rows, runs, until=DAY), top=1)) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"util_pct": lambda t: 0 if t < DAY / 2 else None, "fb_used_mib": 20_480},
        {"util_pct": 0, "fb_used_mib": None},
        {"util_pct": None, "fb_used_mib": 20_480},
    ],
    ids=["half-measured", "memory-unknown", "nothing-measured"],
)
def test_unknown_is_no_cause(analysed: Analysed, samples: Rows, jobs: Jobs, values: dict[str, Any]) -> None:
    """Nothing is advised without measurements of nearly the whole run, and of its memory."""
    result = analysed(samples(TIMES, job="1", **values), jobs({"start": 0, "end": DAY}), until=DAY)
    assert [action for action in actions.actions(result) if action.kind != "pauses"] == []


def test_unused_gpus_of_an_active_run_are_a_cause(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """With their idle hours. Suspending the run would return nothing: one of its GPUs is active all the time."""
    rows = samples(TIMES, uuid="GPU-0", index=0, job="1", util_pct=90, fb_used_mib=20_480)
    for number in (1, 2, 3):
        rows += samples(TIMES, uuid=f"GPU-{number}", index=number, job="1", util_pct=0, fb_used_mib=5)
    result = analysed(rows, jobs({"start": 0, "end": DAY, "gpus": 4}), until=DAY)
    (action,) = actions.actions(result)
    assert (action.kind, action.gpus, action.gpus_unused) == ("unused", 4, 3)
    assert action.hours_returned == pytest.approx(72)
    assert result.jobs.select("gpus_unused", "gpu_hours_unused", "all_idle_s").row(0) == (3, pytest.approx(72), 0)


def test_gpus_that_were_hardly_measured_are_not_unused(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    rows = samples(TIMES, uuid="GPU-0", index=0, job="1", util_pct=90, fb_used_mib=20_480)
    rows += samples(TIMES[: len(TIMES) // 2], uuid="GPU-1", index=1, job="1", util_pct=0, fb_used_mib=5)
    for known in (2, 3):  # a third GPU, if any, is in no sample
        result = analysed(rows, jobs({"start": 0, "end": DAY, "gpus": known}), until=DAY)
        assert result.jobs["gpus_unused"].item() is None
        assert actions.actions(result) == ()  # the unmeasured GPU may have been active at any time


def test_pauses_count_while_all_gpus_are_idle(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Of a run of a day, idle for 16 and for 20 hours, at least 12 hours are idle on both GPUs: twice 11.75 hours."""
    rows = samples(TIMES, uuid="GPU-0", index=0, job="1", util_pct=busy_until(8 * 3600), fb_used_mib=20_480)
    rows += samples(TIMES, uuid="GPU-1", index=1, job="1", util_pct=busy_until(4 * 3600), fb_used_mib=20_480)
    (action,) = actions.actions(analysed(rows, jobs({"start": 0, "end": DAY, "gpus": 2}), until=DAY))
    assert (action.kind, action.longest_s) == ("pauses", pytest.approx(20 * 3600))
    assert action.hours_returned == pytest.approx(2 * 11.75)


def test_pauses_in_turn_return_nothing(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run that is active on one of its GPUs at any time cannot be suspended."""
    rows = samples(TIMES, uuid="GPU-0", index=0, job="1", util_pct=busy_until(DAY / 2), fb_used_mib=20_480)
    later = samples(
        TIMES, uuid="GPU-1", index=1, job="1", util_pct=lambda t: 0 if t < DAY / 2 else 80, fb_used_mib=9000
    )
    assert actions.actions(analysed(rows + later, jobs({"start": 0, "end": DAY, "gpus": 2}), until=DAY)) == ()


@pytest.mark.parametrize(
    ("submit_line", "submission", "kind"),
    [
        ("salloc --gpus=1", "interactive", "interactive"),
        ("/usr/bin/srun --pty bash", "interactive", "interactive"),
        ("sbatch job.sh", "batch", "pauses"),
        (None, None, "pauses"),
    ],
)
def test_advice_for_idle_sessions_is_not_that_for_batch_jobs(  # noqa: PLR0917
    analysed: Analysed, samples: Rows, jobs: Jobs, submit_line: str | None, submission: str | None, kind: str
) -> None:
    """Interactive jobs cannot be suspended; they can be ended."""
    rows = samples(TIMES, job="1", util_pct=busy_until(4 * 3600), fb_used_mib=20_480)
    result = analysed(rows, jobs({"start": 0, "end": DAY, "submit_line": submit_line}), until=DAY)
    assert result.jobs["submission"].item() == submission
    (action,) = actions.actions(result)
    assert (action.kind, action.hours_returned) == (kind, pytest.approx(19.75))
    assert ("--gpu-suspend-idle" in actions.texts()[kind].advice) == (kind == "pauses")


def test_work_that_only_keeps_a_gpu_from_being_idle_is_a_cause(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A kernel every half an hour, and 20 GiB of memory held: never idle for an hour, 0.5 % utilization."""
    rows = samples(TIMES, job="1", util_pct=lambda t: 3 if t % 1800 == 0 else 0, fb_used_mib=20_480)
    (action,) = actions.actions(analysed(rows, jobs({"start": 0, "end": DAY}), until=DAY))
    assert (action.kind, action.utilization_pct) == ("slight", pytest.approx(0.5))
    assert action.hours_returned == pytest.approx(24)
    busier = samples(TIMES, job="2", util_pct=lambda t: 30 if t % 1800 == 0 else 0, fb_used_mib=20_480)
    assert actions.actions(analysed(busier, jobs({"start": 0, "end": DAY, "job_id": 2}), until=DAY)) == ()


H100 = {"model": "NVIDIA H100 80GB HBM3", "fb_total_mib": 81_559}
A30 = {
    "model": "NVIDIA A30",
    "fb_total_mib": 24_576,
    "node": "n2",
    "uuid": "GPU-9",
    "util_pct": 90,
    "fb_used_mib": 20_000,
}
SLICE = {**A30, "model": "NVIDIA A100-SXM4-40GB", "mig": "7", "mig_profile": "1g.5gb", "fb_total_mib": 4864}


def test_large_gpu_for_a_small_job_is_a_cause_where_a_smaller_one_exists(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """The larger GPU would have been free for its allocated time; no hour is returned."""
    rows = samples(TIMES, **H100, job="1", util_pct=10, fb_used_mib=6 * 1024) + samples(TIMES, **A30, job="2")
    runs = jobs({"start": 0, "end": DAY}, {"job_id": 2, "start": 0, "end": DAY, "user": "bob", "node_list": "n2"})
    (action,) = actions.actions(analysed(rows, runs, until=DAY))
    assert (action.kind, action.user, action.job_id) == ("oversized", "ann", 1)
    assert (action.hours_returned, action.hours_moved) == (0, pytest.approx(24))
    assert (action.memory_gib, action.utilization_pct) == (pytest.approx(6), pytest.approx(10))
    assert (action.gpu_model, action.model_gib) == (H100["model"], pytest.approx(81_559 / 1024))
    assert (action.smaller_model, action.smaller_gib) == (A30["model"], pytest.approx(24))


def test_moved_hours_come_after_returned_hours(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A moved hour occupies another GPU, so 24 of them rank below 5.75 returned ones."""
    rows = samples(TIMES, **H100, job="1", util_pct=10, fb_used_mib=6 * 1024) + samples(TIMES, **A30, job="2")
    rows += samples(TIMES, uuid="GPU-5", index=5, job="3", util_pct=busy_until(18 * 3600), fb_used_mib=60_000)
    runs = jobs({"start": 0, "end": DAY}, {"job_id": 2, "start": 0, "end": DAY, "user": "bob", "node_list": "n2"},
                {"job_id": 3, "start": 0, "end": DAY, "user": "cat"})  # fmt: skip
    result = analysed(rows, runs, until=DAY)
    ranked = [(each.kind, each.hours_returned, each.hours_moved) for each in actions.actions(result)]
    assert ranked == [("pauses", pytest.approx(5.75), 0), ("oversized", 0, pytest.approx(24))]
    assert [each.kind for each in actions.actions(result, top=1)] == ["pauses"]


@pytest.mark.parametrize(
    ("job", "other"),
    [
        ({}, {"model": "NVIDIA A40", "fb_total_mib": 46_068}),
        ({}, {"fb_total_mib": None}),
        ({}, {"cluster": "d"}),
        ({}, {**SLICE}),
        ({"fb_total_mib": None}, {}),
        ({"fb_used_mib": lambda t: 6 * 1024 if t < DAY / 2 else None}, {}),
        ({"fb_used_mib": None}, {}),
        ({"fb_used_mib": lambda t: 6 * 1024 if t else 70_000}, {}),
        ({"util_pct": 16}, {}),
        ({"util_pct": None, "sm_active": 0.1}, {}),
    ],
    ids=["more-than-half-the-memory", "memory-of-other-unknown", "other-cluster", "slice-too-small", "memory-unknown",
         "half-of-use-unknown", "use-unknown", "short-peak", "busy", "utilization-unknown"],
)  # fmt: skip
def test_large_gpu_is_no_cause_without_evidence_and_smaller_gpu(
    analysed: Analysed, samples: Rows, jobs: Jobs, job: dict[str, Any], other: dict[str, Any]
) -> None:
    """A model of at most half the memory, memory in use of nearly the whole run, and low utilization are needed."""
    large = {**H100, "job": "1", "util_pct": 10, "fb_used_mib": 6 * 1024, **job}
    rows = samples(TIMES, **large) + samples(TIMES, **{**A30, **other})
    assert actions.actions(analysed(rows, jobs({"start": 0, "end": DAY}), until=DAY)) == ()


def test_smaller_gpu_has_room_for_each_run_of_the_owner(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A MIG slice would do for the first run alone, the A30 for both of them."""
    rows = samples(TIMES, **H100, job="1", util_pct=10, fb_used_mib=2048)
    rows += samples(TIMES, **H100, uuid="GPU-1", index=1, job="2", util_pct=5, fb_used_mib=9000)
    rows += samples(TIMES, **A30) + samples(TIMES, **{**SLICE, "uuid": "GPU-10", "index": 1})
    runs = jobs({"start": 0, "end": DAY}, {"job_id": 2, "start": DAY / 2, "end": DAY})
    (action,) = actions.actions(analysed(rows, runs, until=DAY))
    assert (action.runs, action.hours_moved, action.job_id) == (2, pytest.approx(36), 1)
    assert action.smaller_model == A30["model"]
    (action,) = actions.actions(analysed(rows, runs.head(1), until=DAY))
    assert action.smaller_model == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


def test_averages_have_no_peak_of_memory(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    rows = samples(TIMES, **H100, job="1", util_pct=10, fb_used_mib=2048) + samples(TIMES, **A30)
    result = analysed(rows, jobs({"start": 0, "end": DAY}), until=DAY)
    averaged = replace(result.quality, issues=(QualityIssue("per-run-averages", "Averages", "", 1),))
    assert [action.kind for action in actions.actions(result)] == ["oversized"]
    assert actions.actions(replace(result, quality=averaged)) == ()


def test_memory_in_use_of_every_gpu_is_needed(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Of ten GPUs, one without memory in use may be full, although nine tenths of the time are measured."""
    rows = samples(TIMES, **A30)
    for number in range(10):
        memory = None if number == 9 else 2048
        rows += samples(
            TIMES, **H100, uuid=f"GPU-{number}{number}", index=number, job="1", util_pct=10, fb_used_mib=memory
        )
    result = analysed(rows, jobs({"start": 0, "end": DAY, "gpus": 10}), until=DAY)
    assert result.jobs["gpus_memory_measured"].item() == 9
    assert actions.actions(result) == ()


def test_short_pauses_are_no_cause(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A job that pauses for half an hour now and then gets no advice, but its windows count for the bound."""
    pauses = samples(TIMES, job="1", util_pct=lambda t: 0 if t % 7200 < 1800 else 70, fb_used_mib=20_480)
    result = analysed(pauses, jobs({"start": 0, "end": DAY}), until=DAY)
    assert actions.actions(result) == ()
    bound = actions.suspension_bound(result)
    assert bound is not None
    assert (bound.windows, bound.gpu_hours) == (12, pytest.approx(3.0))


def test_bound_is_unknown_without_measurements(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    assert actions.suspension_bound(analysed([], jobs({"start": 0, "end": DAY}), until=DAY)) is None


def test_every_cause_has_texts() -> None:
    """The texts name only values that an action has."""
    assert list(actions.texts()) == ["empty", "unused", "loaded", "interactive", "pauses", "slight", "oversized"]
    values = {
        "runs": "2 job runs",
        "memory": "3 GiB",
        "longest": "2h",
        "unused": "3",
        "gpus": "4",
        "utilization": "1 %",
        "model": "NVIDIA H100 80GB HBM3",
        "model_memory": "79.6 GiB",
        "smaller": "NVIDIA A30",
        "smaller_memory": "24 GiB",
    }
    for text in actions.texts().values():
        assert text.evidence.format(**values)


@pytest.mark.parametrize("model", [None, "NVIDIA A30"], ids=["one-model", "two-models"])
def test_recorded_jobs_move_to_a_smaller_gpu_if_the_cluster_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    """Recorded jobs with 9 of 80 GiB and 20 % utilization. Both nodes have H100s; the second gets A30s instead."""
    monkeypatch.setattr(actions, "SMALL_PCT", 25.0)
    gpus = pl.concat([pl.read_parquet(path) for path in sorted(RECORDING.glob("gpu-*.parquet"))])
    if model is not None:
        other = pl.col("node") == "c2"
        gpus = gpus.with_columns(
            pl.when(other).then(pl.lit(model)).otherwise("model").alias("model"),
            pl.when(other).then(pl.lit(24_576, pl.Float32)).otherwise("fb_total_mib").alias("fb_total_mib"),
        )
    store = SampleStore(tmp_path / "recording")
    store.ingest(gpus, source="recording")
    runs = sacct.read(RECORDING / "sacct.txt").jobs
    since, until = (datetime(2026, 11, 21, 4, *time, tzinfo=UTC) for time in ((32, 44), (44, 50)))
    result = waste.analyse(WasteQuery(since, until), runs, empty(ALLOCATION_GPUS), store, now=until)
    memory = {"NVIDIA H100 80GB HBM3": pytest.approx(81_559 / 1024), "NVIDIA A30": pytest.approx(24)}
    assert result.gpu_memory is not None
    models = dict(result.gpu_memory.select("gpu_model", "memory_gib").iter_rows())
    assert models == {name: gib for name, gib in memory.items() if name in {"NVIDIA H100 80GB HBM3", model}}
    moved = [action for action in actions.actions(result, top=20) if action.kind == "oversized"]
    assert sum(action.runs for action in moved) == (0 if model is None else 2)
    assert {(action.smaller_model, round(action.memory_gib or 0)) for action in moved} <= {(model, 9)}
