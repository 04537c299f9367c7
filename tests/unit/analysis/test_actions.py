"""What to do about idle GPU-hours, and the bounds of what it would bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis import actions
from slurm_affinode.analysis.result import WasteResult

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
    assert list(actions.texts()) == ["empty", "unused", "loaded", "interactive", "pauses", "slight"]
    values = {
        "runs": "2 job runs",
        "memory": "3 GiB",
        "longest": "2h",
        "unused": "3",
        "gpus": "4",
        "utilization": "1 %",
    }
    for text in actions.texts().values():
        assert text.evidence.format(**values)
