"""The definitions of the figures."""

from __future__ import annotations

from pathlib import Path

from slurm_affinode.analysis import definitions
from slurm_affinode.analysis.result import MEASURES

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_measure_is_explained() -> None:
    """A measure without a definition would be shown without help."""
    assert set(MEASURES) <= set(definitions.load())


def test_every_definition_is_complete() -> None:
    """Name, unit, formula, source and help are present."""
    for metric in definitions.load().values():
        assert all((metric.name, metric.unit, metric.formula, metric.source, metric.help)), metric.id
