"""Texts in TOML files: each code that the source names has a text, and each text is used."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.text_templates import TextTable, placeholders
from slurm_affinode.core import finding_texts, signatures
from slurm_affinode.engines import tuning
from slurm_affinode.engines.crashes import crash_log, triage
from slurm_affinode.engines.diagnosis import rules

PACKAGE = Path(rules.__file__).parents[2]
BY_KIND = ("advice", "meaning", "rule")
"""Keys whose codes are made from a kind."""


@dataclass(frozen=True)
class Texts:
    """A file of texts, and the modules that name its codes."""

    name: str
    table: TextTable
    modules: tuple[str, ...]
    whole: tuple[str, ...] = ()
    """Tables that are read as a whole."""

    @cached_property
    def named(self) -> set[str]:
        """Codes in the modules: strings that begin with a table of the file."""
        sources = [path for pattern in self.modules for path in PACKAGE.glob(pattern)]
        assert sources
        nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        return {text for text in strings if text.partition(".")[0] in self.table.tables and text.partition(".")[2]}


ALL = (
    Texts("diagnoses", rules.TEXTS, ("engines/diagnosis/*.py",)),
    Texts("signatures", signatures.TEXTS, ("core/signatures.py",)),
    Texts("findings", finding_texts.TEXTS, (
        "core/finding_texts.py", "core/explanation.py", "analysis/*.py", "zombies/*.py",
    ), ("xid",)),
    Texts("tuning", tuning.TEXTS, ("engines/tuning.py",)),
    Texts("triage", triage.TEXTS, ("engines/crashes/triage.py",), ("memory",)),
)  # fmt: skip
each = pytest.mark.parametrize("texts", ALL, ids=lambda texts: texts.name)


@each
def test_named_codes_have_a_text(texts: Texts) -> None:
    assert texts.named <= set(texts.table.codes())


@each
def test_every_text_is_used(texts: Texts) -> None:
    """A text that no code names is a leftover. A dimension is used by its variants."""
    used = texts.named | {code.partition("-")[0] for code in texts.named}
    unused = {
        code
        for code in texts.table.codes()
        if code not in used and code.partition(".")[0] not in texts.whole and code.partition(".")[2] not in BY_KIND
        and not any(other.startswith(f"{code}-") for other in texts.named)
    }  # fmt: skip
    assert unused == set()


def values(entry: Any) -> set[str]:
    """Return the names of all values in an entry."""
    parts = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else None
    return placeholders(entry) if parts is None else set().union(*(values(part) for part in parts))


@each
def test_values_are_no_parameters_of_evidence(texts: Texts) -> None:
    """``sources`` in a text would get no value."""
    parameters = {"code", "weight", "met", "sources"}
    assert {code for code in texts.table.codes() if values(texts.table.entry(code)) & parameters} == set()


def test_every_kind_of_failure_has_a_meaning() -> None:
    assert set(crash_log.KINDS) == {kind for kind, table in triage.TEXTS.tables.items() if "meaning" in table}
    assert {kind.memory for kind in crash_log.KINDS.values()} - {None} == set(triage.MEMORIES)
