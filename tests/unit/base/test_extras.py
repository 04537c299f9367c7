"""The extra ``analysis``: modules that are not installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from slurm_affinode.base import extras


def test_error_of_a_missing_module_names_the_extra() -> None:
    """Also if a part of it was imported; errors of other modules are not translated."""
    shown = extras.explained(ModuleNotFoundError("No module", name="polars.exceptions"), "report")
    assert str(shown) == f"report: needs the extra analysis (there is no module polars); {extras.INSTALL}"
    assert extras.explained(ModuleNotFoundError("No module", name="polarsky"), "report") is None


def test_missing_modules_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.missing() == []
    monkeypatch.setattr(extras, "LIBRARIES", ("json", "no_such_module"))
    assert extras.missing() == ["no_such_module"]


def test_table_has_the_libraries_of_the_extra() -> None:
    file = Path(__file__).parents[3] / "pyproject.toml"
    declared = tomllib.loads(file.read_text())["project"]["optional-dependencies"]["analysis"]
    assert tuple(item.partition(">")[0] for item in declared) == extras.LIBRARIES
