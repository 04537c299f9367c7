"""Texts of findings: errors that the driver reported, and advice with values."""

from __future__ import annotations

import pytest

from slurm_affinode.core.finding_texts import TEXTS, advice, xid
from slurm_affinode.model.finding import KINDS


@pytest.mark.parametrize(
    ("number", "text", "unknown"),
    [
        (79, "XID 79: the GPU has fallen off the bus", False),
        (999, "XID 999: see the documentation of the driver", False),
        (0, "no XID was reported", False),
        (None, "no XID can be read", True),
    ],
)
def test_xid_has_a_meaning(number: int | None, text: str, unknown: bool) -> None:
    """It is shown, and adds nothing to the score."""
    item = xid(number)
    assert (item.text, item.unknown, item.met, item.points) == (text, unknown, False, 0)


def test_advice_shows_its_values() -> None:
    assert advice("time-limit.advice", limit=5400) == "A limit of 1h 30m would start it sooner."


def test_kinds_with_advice_exist() -> None:
    assert {table for table, entry in TEXTS.tables.items() if "advice" in entry} <= set(KINDS)
