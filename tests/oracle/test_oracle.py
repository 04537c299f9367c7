"""The figures of reports agree with the rules for a few random clusters; ``make oracle`` compares a thousand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from oracle.clusters import clusters
from oracle.comparison import differences
from oracle.model import Cluster, dumps, loads


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(clusters())
def test_figures_agree_with_the_rules(cluster: Cluster) -> None:
    """Compares each run and the total, in three formats of GPU metrics."""
    assert differences(cluster) == []


@settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(clusters())
def test_saved_cluster_is_restored(cluster: Cluster) -> None:
    """A failing cluster can be compared again."""
    assert loads(dumps(cluster)) == cluster
