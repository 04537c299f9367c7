"""The help texts of the figures."""

from __future__ import annotations

from pathlib import Path

from slurm_affinode.analysis import metrics, metrics_doc
from slurm_affinode.analysis.result import MEASURES

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_measure_is_explained() -> None:
    """A measure without a text would be shown without help."""
    assert set(MEASURES) <= set(metrics.load())


def test_every_text_is_filled_in() -> None:
    """Name, unit, formula, source and help are all there."""
    for metric in metrics.load().values():
        assert all((metric.name, metric.unit, metric.formula, metric.source, metric.help)), metric.id


def test_document_is_what_the_table_says() -> None:
    """docs/metrics.md was generated from the table as it is now."""
    assert (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_doc.render()
