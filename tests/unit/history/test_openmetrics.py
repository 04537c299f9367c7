"""The history as OpenMetrics. What is written is read back in ``tests/unit/cli/test_prometheus.py``."""

from __future__ import annotations

from slurm_affinode.history.openmetrics import FAMILIES
from slurm_affinode.history.schema import METRICS


def test_every_metric_of_a_sample_is_exported() -> None:
    """A column that is added to the samples gets a family; none is there twice."""
    assert sorted(family.field for family in FAMILIES) == sorted(METRICS)
