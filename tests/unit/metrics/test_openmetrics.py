"""Export of samples as OpenMetrics. Reading the export back is tested in ``tests/unit/cli/test_prometheus.py``."""

from __future__ import annotations

from slurm_affinode.metrics.openmetrics import FAMILIES
from slurm_affinode.metrics.schema import METRICS


def test_every_metric_of_a_sample_is_exported() -> None:
    """Each metric has exactly one family."""
    assert sorted(family.field for family in FAMILIES) == sorted(METRICS)
