"""Figures of engines for reports: what is unknown stays unknown, and costs add up."""

from __future__ import annotations

from datetime import timedelta

import pytest
from server_samples import START, STEP_S, engine, gpus, idle, overloaded, serving

from slurm_affinode.engines.diagnosis.examination import Fleet, examine_all
from slurm_affinode.engines.diagnosis.usage import ENGINES, EngineUsage, costs, table, usage


def used(frame, found=None) -> EngineUsage:
    (one,) = examine_all(frame.lazy(), Fleet(gpus=None if found is None else found.lazy()))
    return usage(one.health, one.series)


def test_counters_are_those_of_the_period():
    """The value of a counter before the first scrape does not count."""
    one = used(engine("a:1", serving(80)))
    assert (one.requests, one.generated_tokens, one.failed_requests) == (237, 79 * 900, 0)
    assert (one.kv_max, one.waiting_max, one.running_max, one.preemptions) == (0.2, 0, 2, 0)
    assert one.uptime_s == 79 * STEP_S


def test_metrics_that_are_not_exported_are_unknown():
    one = used(engine("a:1", [{} for _ in range(80)]))
    unknown = (one.requests, one.failed_requests, one.generated_tokens, one.kv_max, one.waiting_max, one.preemptions)
    assert unknown == (None,) * 6
    assert (one.idle_gpu_hours, one.idle_gib_hours, one.gpus) == (None, None, None)


def test_restart_does_not_count_as_uptime():
    rows = [{**row, "start_time": 0.0 if place < 40 else 9999.0} for place, row in enumerate(serving(80))]
    assert used(engine("a:1", rows)).uptime_s == 78 * STEP_S


def test_idle_time_counts_gpus_and_their_memory():
    """Half an hour of one GPU with 78,000 MiB."""
    found = gpus("GPU-1", 30, used_mib=78_000.0, util_pct=0.0, power_w=70.0)
    one = used(engine("a:1", [{**row, "gpus": "GPU-1"} for row in idle(30)]), found)
    hours = 119 * STEP_S / 3600
    assert one.idle_gpu_hours == pytest.approx(hours)
    assert one.idle_gib_hours == pytest.approx(hours * 78_000 / 1024)


def test_idle_hours_are_zero_only_if_requests_were_seen():
    assert used(engine("a:1", serving())).idle_gpu_hours == 0
    assert used(engine("a:1", idle(30))).idle_gpu_hours is None, "idle, but its GPUs are unknown"


def test_engines_are_ordered_by_severity_then_idle_hours():
    lazy = [{**row, "gpus": "GPU-1"} for row in idle(30)]
    frames = (engine("fine:1", serving()), engine("lazy:1", lazy), engine("busy:1", overloaded()))
    found = sorted((used(frame) for frame in frames), key=lambda one: one.urgency)
    assert [one.health.key.address for one in found] == ["busy:1", "lazy:1", "fine:1"]


def test_costs_add_up_over_engines():
    """GPU-hours are those of the engines with known GPUs; the others are counted."""
    rows = [{**row, "gpus": "GPU-1,GPU-2"} for row in idle(30)]
    found = {one.kind: one for one in costs([used(engine("a:1", rows)), used(engine("b:1", idle(20)))])}
    one = found["idle"]
    assert (one.engines, one.episodes, one.gpus_unknown, one.severity) == (2, 2, 1, "warning")
    assert one.seconds == (119 + 79) * STEP_S
    assert one.gpu_hours == pytest.approx(2 * 119 * STEP_S / 3600)
    assert one.gib_hours is None
    assert "sleep" in one.advice


def test_costs_of_engines_without_known_gpus_are_unknown():
    assert [one.gpu_hours for one in costs([used(engine("b:1", idle(20)))])] == [None]


def test_table_has_a_row_for_each_engine():
    frame = table([used(engine("a:1", overloaded(), job="7", user="ann")), used(engine("b:1", serving()))])
    assert dict(frame.schema) == ENGINES
    assert frame["worst"].to_list() == ["queue-unstable", None]
    assert frame["until"][0] == START + timedelta(seconds=79 * STEP_S)
    assert table([]).columns == list(ENGINES)
