"""Spans of time and counts, as people write them."""

from __future__ import annotations

import pytest

from slurm_affinode.core.spans import counted, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (59.4, "59 s"), (59.6, "1m"), (90, "1m 30s"), (7500, "2h 5m"), (86400, "1d"), (273600, "3d 4h")],
)
def test_a_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    """Whole seconds; nothing is negative."""
    assert span(seconds) == text


def test_one_is_not_several() -> None:
    """And none is."""
    assert [counted(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
