"""The page on model servers lists the rules as the code has them."""

from __future__ import annotations

from pathlib import Path

from slurm_affinode.engines.diagnosis.rules import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "model-servers.md"


def test_table_of_rules_is_that_of_the_code() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
