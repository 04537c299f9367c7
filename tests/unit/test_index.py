"""Every module has its tests in the file of the mirrored name, or where ``index.toml`` says."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "slurm_affinode"
INDEX: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("index.toml").read_text(encoding="utf-8"))["tests"]
MODULES = sorted(
    str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if file.name not in ("__init__.py", "api.py")
)

STARTED = {"pipeline/suspension_mail.py"}
"""Programs that the package starts by name."""


def mirrored(module: str) -> Path:
    """Return the file of the mirrored name: ``unit/base/test_files.py`` for ``base/files.py``."""
    path = Path(module)
    return TESTS / "unit" / path.parent / f"test_{path.name}"


@cache
def imports(file: Path) -> frozenset[str]:
    """Return the modules of the package that a file imports, and the helpers of the tests, as paths of both trees."""
    result = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [
                ".".join(filter(None, (node.module, name))) for name in ("", *(alias.name for alias in node.names))
            ]
        for name in filter(None, names):
            path = Path(*name.split(".")).with_suffix(".py")
            places = (TESTS.parent / path, TESTS / path, *(folder / path for folder in file.parents[:3]))
            result |= {str(place) for place in places if place.is_file()}
    return frozenset(result)


@cache
def reached(file: Path) -> frozenset[str]:
    """Return the modules that a test reaches through imports, its own and those of the fixtures of its folders."""
    result: set[str] = set()
    folders = [folder for folder in file.parents if folder.is_relative_to(TESTS)]
    todo = [str(file), *(str(folder / "conftest.py") for folder in folders if (folder / "conftest.py").is_file())]
    while todo:
        path = todo.pop()
        if path not in result:
            result.add(path)
            todo += imports(Path(path))
    return frozenset(result)


def test_every_module_has_tests() -> None:
    """A new module gets a test file of its name, or an entry; one with such a file needs no entry."""
    assert [module for module in MODULES if mirrored(module).is_file() == (module in INDEX)] == []


def test_no_entry_is_left_over() -> None:
    assert set(INDEX) - set(MODULES) == set()


@pytest.mark.parametrize("module", INDEX)
def test_named_tests_reach_the_module(module: str) -> None:
    """They exist, and import it, directly or not, but for tests that run the command line or a program by its name."""
    assert INDEX[module]
    for name in INDEX[module]:
        assert (TESTS / name).is_file(), name
        if not name.startswith("unit/cli/") and module not in STARTED and not module.startswith("cli/"):
            assert str(PACKAGE / module) in reached(TESTS / name), name
