"""Figures of instances: what the window of a trace cuts off is counted, never taken as 0."""

from __future__ import annotations

import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import instances
from slurm_affinode.traces.instances import INSTANCES, InstanceLog

ROWS: list[tuple[str, str, str | None, float | None, float | None, float | None, bool, float, float, float]] = [
    # group, state, service, created, scheduled, deleted, ended, cpus, memory, gpus
    ("a", "s", "x", 0, 10, 110, True, 1, 1, 0.5),
    ("a", "s", "x", None, None, 50, True, 1, 1, 1),
    ("a", "s", "y", 20, 20, None, False, 1, 1, 2),
    ("b", "t", "y", 30, None, 200, False, 4, 8, 4),
    ("b", "t", "y", 40, 60, 200, False, 4, 8, 0),
]


def log(rows: list[tuple[object, ...]], capacity: dict[str, int] | None = None) -> InstanceLog:
    frame = pl.DataFrame(rows, schema=INSTANCES, orient="row")
    return InstanceLog("trace", frame, capacity or {})


def test_cut_off_instances_are_counted_and_left_out() -> None:
    """One began before, one waits, two still run: two waits of 0 would have halved the mean."""
    s = instances.analyse(log(list(ROWS))).summary
    t = s.total
    assert (t.instances, t.created_inside, t.began_before, t.still_waiting, t.still_running) == (5, 4, 1, 1, 2)
    assert (t.waits_known, t.lives_known) == (3, 1)
    assert t.wait_s is not None
    assert t.life_s is not None
    assert (t.wait_s.mean, t.wait_s.median, t.life_s.mean) == (10.0, 10.0, 100.0)
    assert s.groups["b"].life_s is None
    assert (s.groups["b"].instances, s.groups["b"].gpus_sum) == (2, 4.0)
    assert (s.services, s.states, s.span_s, s.capacity_gpus, s.peak_share) == (2, {"s": 3, "t": 2}, 200.0, None, None)


def test_waiting_instances_hold_no_gpus() -> None:
    """0.5 + 1 + 2 GPUs are held at second 20; the four GPUs of the waiting one never are."""
    result = instances.analyse(log(list(ROWS), {"T4": 5, "A10": 2}))
    assert (result.summary.peak_gpus, result.summary.capacity_gpus, result.summary.peak_share) == (3.5, 7, 0.5)
    curve = dict(result.over_time.select((pl.col("day") * 86400).round(3), "a").iter_rows())
    assert (curve[0.0], curve[20.0], curve[60.0], curve[120.0]) == (1.0, 3.5, 2.5, 2.0)
    assert result.over_time["b"].max() == 0
    assert result.summary.peak_is_lower_bound


@pytest.mark.parametrize("row", [("a", "s", "x", 5, 1, None, False, 1, 1, 1), ("a", "s", "x", 5, 9, 8, True, 1, 1, 1)])
def test_times_in_the_wrong_order_are_an_error(row: tuple[object, ...]) -> None:
    with pytest.raises(InputError, match="trace: 1 instance with a scheduling time before the creation, or an end"):
        instances.analyse(log([row]))


def test_no_time_at_all_is_an_error() -> None:
    with pytest.raises(InputError, match="no instance has a time"):
        instances.analyse(log([("a", "s", "x", None, None, None, False, 1, 1, 1)]))
