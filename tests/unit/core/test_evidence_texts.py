"""Evidence from numbers and codes: values, unknown values, and what a variant replaces."""

from __future__ import annotations

import pytest

from slurm_affinode.core.evidence_texts import EvidenceTexts
from slurm_affinode.model.finding import Evidence

TEXTS = EvidenceTexts(
    {
        "gpu": {
            "memory": {
                "unit": "GiB", "threshold": "above {limit:g} GiB", "text": "{value:.1f} GiB held",
                "unknown": "not known",
            },
            "memory-free": {"text": "{value:.1f} GiB free", "unknown": "not known: {why}"},
            "xid": {"unit": "", "text": "XID {value}"},
        }
    }
)  # fmt: skip


def test_evidence_has_the_texts_of_its_dimension() -> None:
    expected = Evidence("memory", 2.0, "GiB", "above 1 GiB", 0.4, "2.0 GiB held", met=True)
    assert TEXTS.evidence("gpu.memory", 2.0, 0.4, limit=1) == expected


def test_zero_is_a_value() -> None:
    evidence = TEXTS.evidence("gpu.memory", 0.0, 0.4, met=False, limit=1)
    assert (evidence.text, evidence.unknown, evidence.met) == ("0.0 GiB held", False, False)


def test_unknown_value_is_not_met() -> None:
    evidence = TEXTS.evidence("gpu.memory", None, 0.4, limit=1)
    assert (evidence.value, evidence.text, evidence.threshold, evidence.unknown, evidence.points) == (
        None,
        "not known",
        "above 1 GiB",
        True,
        0,
    )


def test_variant_replaces_texts_of_its_dimension() -> None:
    evidence = TEXTS.evidence("gpu.memory-free", 3.0, limit=1, why="")
    assert (evidence.dimension, evidence.unit, evidence.threshold, evidence.text) == (
        "memory",
        "GiB",
        "above 1 GiB",
        "3.0 GiB free",
    )
    assert TEXTS.evidence("gpu.memory-free", None, limit=1, why="no driver").text == "not known: no driver"


def test_threshold_is_optional() -> None:
    assert TEXTS.evidence("gpu.xid", "31").threshold is None


def test_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(KeyError, match="limit"):
        TEXTS.evidence("gpu.memory", 2.0)
