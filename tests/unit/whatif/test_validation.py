"""The simulation reproduces published figures, and docs/whatif.md shows what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.whatif import validation
from slurm_affinode.whatif.validation import Compared

PAGE = Path(__file__).resolve().parents[3] / "docs" / "whatif.md"


@pytest.fixture(scope="module")
def compared(shared_data: Path) -> list[Compared]:
    return list(validation.validate(shared_data))


def test_published_figures_are_reproduced(compared: list[Compared]) -> None:
    """To the printed digits, where the published figures have four or more."""
    assert len(compared) == 13
    for row in compared:
        assert row.difference < 2e-5, row


def test_tables_of_the_page_are_the_computed_ones(compared: list[Compared]) -> None:
    text = PAGE.read_text()
    for log in validation.FILES:
        headings, cells = validation.table([row for row in compared if row.log == log])
        lines = [f"| {' | '.join(row)} |" for row in (headings, *cells)]
        assert lines[0] in text
        assert "\n".join(lines[1:]) in text
