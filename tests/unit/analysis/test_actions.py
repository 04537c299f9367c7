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
    found = actions.actions(analysed(rows, runs, until=DAY))
    assert [(one.kind, one.user, one.job_id) for one in found] == [
        ("empty", "a", 1),
        ("loaded", "b", 2),
        ("pauses", "c", 3),
    ]
    assert [one.hours_returned for one in found] == pytest.approx([24, 23.75, 19.75])
    assert [one.hours_idle for one in found] == pytest.approx([24, 24, 20])


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
    assert [one for one in actions.actions(result) if one.kind != "pauses"] == []


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
    assert list(actions.texts()) == ["empty", "loaded", "pauses"]
    for text in actions.texts().values():
        assert text.evidence.format(runs="2 job runs", memory="3 GiB", longest="2h")
