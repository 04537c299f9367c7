"""Durations and counts as text."""

from __future__ import annotations

import pytest

from slurm_affinode.base.text import counted, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.4, "59s"), (59.6, "1m"), (90, "1m 30s"), (7500, "2h 5m"), (86400, "1d"), (273600, "3d 4h")],
)
def test_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    """They are whole seconds; negative durations are 0."""
    assert span(seconds) == text


def test_count_has_singular_and_plural() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
