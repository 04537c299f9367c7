"""Figures of engines for reports: what is unknown stays unknown, and costs add up."""

from __future__ import annotations

from datetime import timedelta

import pytest
from server_samples import START, STEP_S, engine, gpus, idle, overloaded, serving

from slurm_affinode.engines.diagnosis.examination import Fleet, examine_all
from slurm_affinode.engines.diagnosis.usage import ENGINES, EngineUsage, costs, table, usage


def used(frame, diagnoses=None) -> EngineUsage:
    (item,) = examine_all(frame.lazy(), Fleet(gpus=None if diagnoses is None else diagnoses.lazy()))
    return usage(item.health, item.series)


def test_counters_are_those_of_the_period():
    """The value of a counter before the first scrape does not count."""
    item = used(engine("a:1", serving(80)))
    assert (item.requests, item.generated_tokens, item.failed_requests) == (237, 79 * 900, 0)
    assert (item.kv_max, item.waiting_max, item.running_max, item.preemptions) == (0.2, 0, 2, 0)
    assert item.uptime_s == 79 * STEP_S


def test_metrics_that_are_not_exported_are_unknown():
    item = used(engine("a:1", [{} for _ in range(80)]))
    unknown = (
        item.requests,
        item.failed_requests,
        item.generated_tokens,
        item.kv_max,
        item.waiting_max,
        item.preemptions,
    )
    assert unknown == (None,) * 6
    assert (item.idle_gpu_hours, item.idle_gib_hours, item.gpus) == (None, None, None)


def test_restart_does_not_count_as_uptime():
    rows = [{**row, "start_time": 0.0 if place < 40 else 9999.0} for place, row in enumerate(serving(80))]
    assert used(engine("a:1", rows)).uptime_s == 78 * STEP_S


def test_idle_time_counts_gpus_and_their_memory():
    """Half an hour of one GPU with 78,000 MiB."""
    result = gpus("GPU-1", 30, used_mib=78_000.0, util_pct=0.0, power_w=70.0)
    item = used(engine("a:1", [{**row, "gpus": "GPU-1"} for row in idle(30)]), result)
    hours = 119 * STEP_S / 3600
    assert item.idle_gpu_hours == pytest.approx(hours)
    assert item.idle_gib_hours == pytest.approx(hours * 78_000 / 1024)


def test_idle_hours_are_zero_only_if_requests_were_seen():
    assert used(engine("a:1", serving())).idle_gpu_hours == 0
    assert used(engine("a:1", idle(30))).idle_gpu_hours is None, "idle, but its GPUs are unknown"


def test_engines_are_ordered_by_severity_then_idle_hours():
    lazy = [{**row, "gpus": "GPU-1"} for row in idle(30)]
    frames = (engine("fine:1", serving()), engine("lazy:1", lazy), engine("busy:1", overloaded()))
    result = sorted((used(frame) for frame in frames), key=lambda item: item.urgency)
    assert [item.health.key.address for item in result] == ["busy:1", "lazy:1", "fine:1"]


def test_costs_add_up_over_engines():
    """GPU-hours are those of the engines with known GPUs; the others are counted."""
    rows = [{**row, "gpus": "GPU-1,GPU-2"} for row in idle(30)]
    result = {cost.kind: cost for cost in costs([used(engine("a:1", rows)), used(engine("b:1", idle(20)))])}
    item = result["idle"]
    assert (item.engines, item.episodes, item.gpus_unknown, item.severity) == (2, 2, 1, "warning")
    assert item.seconds == (119 + 79) * STEP_S
    assert item.gpu_hours == pytest.approx(2 * 119 * STEP_S / 3600)
    assert item.gib_hours is None
    assert "sleep" in item.advice


def test_costs_of_engines_without_known_gpus_are_unknown():
    assert [cost.gpu_hours for cost in costs([used(engine("b:1", idle(20)))])] == [None]


def test_table_has_a_row_for_each_engine():
    frame = table([used(engine("a:1", overloaded(), job="7", user="ann")), used(engine("b:1", serving()))])
    assert dict(frame.schema) == ENGINES
    assert frame["worst"].to_list() == ["queue-unstable", None]
    assert frame["until"][0] == START + timedelta(seconds=79 * STEP_S)
    assert table([]).columns == list(ENGINES)
