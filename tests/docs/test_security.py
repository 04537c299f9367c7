"""The threat model names existing modules and tests, at least one of each for every boundary."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "security.md"
TEXT = PAGE.read_text(encoding="utf-8")
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_MODULE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|c|h|service))`")


@cache
def functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def rows() -> list[list[str]]:
    """Return the cells of the tables of boundaries."""
    section = TEXT.partition("\n## Trust boundaries\n")[2].partition("\n## ")[0]
    result = [line.strip("|\n ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [cells for cells in result if cells[0] not in ("crosses", "---")]


def test_every_boundary_has_an_entry() -> None:
    """The number must be updated with the tables."""
    assert len(rows()) == 48


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_boundary_names_its_mechanism_and_its_test(row: list[str]) -> None:
    _, controls, protection, tests, *_ = row
    assert controls
    assert _MODULE.search(protection) or "TODO-MODULE" in protection
    assert _TEST.search(tests) or "TODO-TEST" in tests


def test_named_tests_exist() -> None:
    names = _TEST.findall(TEXT)
    assert len(names) > 50
    missing = [
        f"{file}::{name}"
        for file, name in names
        if not (path := REPOSITORY / "tests" / file).is_file() or name not in functions(path)
    ]
    assert missing == []


def test_named_modules_exist() -> None:
    names = set(_MODULE.findall(TEXT))
    assert len(names) > 30
    assert {
        name for name in names if not any((top / name).is_file() for top in (REPOSITORY, REPOSITORY / "slurm_affinode"))
    } == set()


def test_no_draft_markers_are_left() -> None:
    assert re.findall(r"TODO-\w+\([^)]*\)|TODO", TEXT) == []
