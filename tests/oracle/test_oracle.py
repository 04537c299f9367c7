"""The figures of reports agree with the rules for a few random clusters; ``make oracle`` compares a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Verbosity, given, settings
from hypothesis.errors import HypothesisWarning

from oracle.clusters import clusters
from oracle.comparison import differences
from oracle.model import Cluster, dumps, loads

FAILED = Path("out/oracle/test.json")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings(f"ignore::{HypothesisWarning.__module__}.{HypothesisWarning.__qualname__}")
@settings(
    max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,  # the cluster would be a page of samples
)  # fmt: skip
@given(clusters())
def test_figures_agree_with_the_rules(cluster: Cluster) -> None:
    """Compares each run and the total, in three formats of GPU metrics. Keeps the smallest cluster that differs."""
    if result := differences(cluster):
        FAILED.parent.mkdir(parents=True, exist_ok=True)
        FAILED.write_text(dumps(cluster), encoding="utf-8")
        pytest.fail("\n".join([f"again: make oracle ARGS='--replay {FAILED}'", *result]), pytrace=False)


@settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(clusters())
def test_saved_cluster_is_restored(cluster: Cluster) -> None:
    """A failing cluster can be compared again."""
    assert loads(dumps(cluster)) == cluster
