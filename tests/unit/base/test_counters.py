"""Metrics that a process keeps of itself."""

from __future__ import annotations

import pytest

from slurm_affinode.base.counters import NO_COUNTERS, Counters, DeclaredMetric

METRICS = (
    DeclaredMetric("a_total", "counter", "A", {"outcome": ("ok", "failed")}),
    DeclaredMetric("b_total", "counter", "B", {"operation": ()}),
    DeclaredMetric("c", "gauge", "C"),
)


def values(counters: Counters) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {family["name"]: [(labels, value) for labels, value in family["samples"]] for family in counters.families()}


def test_counters_with_known_labels_begin_at_zero() -> None:
    """A gauge that was never set, and a counter whose labels are not known beforehand, have no value."""
    assert values(Counters(METRICS)) == {"a_total": [({"outcome": "ok"}, 0.0), ({"outcome": "failed"}, 0.0)]}


def test_unknown_gauge_is_absent() -> None:
    counters = Counters(METRICS)
    counters.set("c", 0.0)
    assert values(counters)["c"] == [({}, 0.0)]
    counters.set("c", None)
    assert "c" not in values(counters)


def test_counter_never_decreases() -> None:
    """Not even when the clock was set back."""
    counters = Counters(METRICS)
    counters.add("b_total", 2.5, operation="jobs")
    counters.add("b_total", -7.0, operation="jobs")
    assert values(counters)["b_total"] == [({"operation": "jobs"}, 2.5)]


def test_undeclared_label_is_an_error() -> None:
    with pytest.raises(KeyError):
        Counters(METRICS).add("a_total", result="ok")
    with pytest.raises(KeyError):
        Counters(METRICS).add("a_total")


def test_nothing_is_kept_without_metrics() -> None:
    NO_COUNTERS.add("whatever", outcome="ok")
    assert NO_COUNTERS.families() == []
