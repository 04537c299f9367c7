"""Tracks of GPUs: states, idle windows, slots, whatever the batches in which samples arrive."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_affinode.analysis.gpu_tracks import GpuTrack, TrackRows, slot_count, together
from slurm_affinode.analysis.result import Thresholds

MINUTE = 60_000
NAN = float("nan")


def track(values: list[float], *, gap_before: int | None = None, batches: int = 1, slots: int = 1) -> GpuTrack:
    """A GPU sampled once a minute; ``gap_before``: the sample after which ten minutes are missing."""
    time = np.arange(len(values), dtype=np.int64) * MINUTE
    if gap_before is not None:
        time[gap_before:] += 10 * MINUTE
    busiest = np.array(values)
    made = GpuTrack(0, int(time[-1]) + MINUTE, slots)
    for part in np.array_split(np.arange(len(values)), batches):
        if len(part):
            unknown = np.full(len(part), np.nan)
            made.add(TrackRows(time[part], time[part] + MINUTE, busiest[part], busiest[part], unknown, unknown),
                     Thresholds())  # fmt: skip
    made.close()
    return made


@pytest.mark.parametrize("batches", [1, 2, 3, 7])
def test_windows_do_not_depend_on_batches(batches: int) -> None:
    """Days are read one after the other; an idle window may reach over midnight."""
    made = track([0, 0, 90, 0, 0, 0, 3], batches=batches)
    assert made.windows == [(0, 2 * MINUTE), (3 * MINUTE, 6 * MINUTE)]
    assert (made.idle_ms, made.low_ms, made.busy_ms) == (5 * MINUTE, MINUTE, MINUTE)
    assert made.longest_ms == 3 * MINUTE


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_gap_and_unknown_sample_end_window(batches: int) -> None:
    """Unknown time is never idle."""
    assert track([0, 0, 0, 0], gap_before=2, batches=batches).windows == [
        (0, 2 * MINUTE), (12 * MINUTE, 14 * MINUTE)
    ]  # fmt: skip
    made = track([0, NAN, 0, 0], batches=batches)
    assert made.windows == [(0, MINUTE), (2 * MINUTE, 4 * MINUTE)]
    assert made.measured_ms == 3 * MINUTE


def test_slots_are_means_over_measured_time() -> None:
    """A sample that reaches over the edge of a slot counts in both; a slot without a sample is unknown."""
    made = track([100, 0, 50, NAN], slots=8)
    assert made.activity_pct == (100.0, 100.0, 0.0, 0.0, 50.0, 50.0, None, None)
    assert track([100, 0, 50], slots=2).activity_pct == (pytest.approx(66.7), pytest.approx(33.3))


def test_short_run_has_few_slots() -> None:
    """No more slots than samples, at least one."""
    assert slot_count(0, 30 * MINUTE, MINUTE) == 20
    assert slot_count(0, 1, MINUTE) == 1
    assert slot_count(0, 10_000 * MINUTE, MINUTE) == 60


def test_common_windows_are_intersections() -> None:
    """Only time in which every GPU is idle frees the job's GPUs."""
    assert together([[(0, 10), (20, 30)], [(5, 25)], [(0, 100)]]) == [(5, 10), (20, 25)]
    assert together([[(0, 10)], []]) == []
    assert together([]) == []
