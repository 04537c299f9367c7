"""The figures of a report are those of the rules, for a few random clusters; ``make oracle`` compares a thousand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, reject, settings

from oracle import rules
from oracle.clusters import clusters
from oracle.comparison import differences
from oracle.model import Cluster, dumps, loads


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(clusters())
def test_figures_agree_with_the_rules(cluster: Cluster) -> None:
    """Each run's and all, through three formats of GPU metrics."""
    try:
        assert differences(cluster) == []
    except rules.UndecidedError:
        reject()


@settings(max_examples=5, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(clusters())
def test_saved_clusters_are_read_back(cluster: Cluster) -> None:
    """A failing cluster can be compared again."""
    assert loads(dumps(cluster)) == cluster
