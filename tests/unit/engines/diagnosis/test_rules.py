"""Texts of the diagnoses: each code has one, each text is used, and each value that it shows is given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_affinode.base.text_templates import filled, placeholders
from slurm_affinode.engines.diagnosis import rules
from slurm_affinode.engines.diagnosis.rules import TEXTS

SOURCES = sorted(Path(rules.__file__).parent.glob("*.py"))
RECORDED = Path(__file__).with_name("texts.txt")


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the string constants in an expression."""
    return (item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str))


def calls(name: str) -> Iterator[tuple[list[str], set[str]]]:
    """Yield the codes and the names of values of each call of a function in the detectors."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield [text for text in strings(node.args[0]) if "." in text], {str(item.arg) for item in node.keywords}


def shown(entry: Any) -> set[str]:
    """Return the names of all values in the texts of an entry."""
    templates = [entry] if isinstance(entry, str | list) else [entry.get("text", ""), entry.get("threshold", "")]
    return set().union(*(placeholders(template) for template in templates))


def test_every_code_has_a_text_and_every_value_is_given() -> None:
    common: dict[str, set[str]] = {}
    for codes, values in calls("evidence"):
        assert codes
        for code in codes:
            assert shown(TEXTS.entry(code)) <= values | {"value"}, code
    for codes, values in calls("diagnosis"):
        assert codes
        for code in codes:
            assert shown(TEXTS.entry(code)) <= values, code
            kind = code.partition(".")[0]
            common[kind] = common.get(kind, values) & values
    doubts = [code for code in TEXTS.codes() if ".doubt-" in code]
    assert doubts
    for code in doubts:
        used = [values for codes, values in calls("diagnosis") if any(item.startswith(code.partition(".")[0] + ".")
                for item in codes) and "doubts" in values]  # fmt: skip
        assert any(shown(TEXTS.entry(code)) <= values for values in used), code


def test_every_kind_has_a_rule() -> None:
    assert set(TEXTS.tables) - set(rules.RULES) == {"no-progress"}
    assert set(rules.RULES) - set(rules.ADVICE) == {"healthy", "asleep"}


def rendered(entry: Any) -> Iterator[str]:
    """Yield the texts of an entry for sample values: all known, and all unknown."""
    if isinstance(entry, dict):
        for key in ("unit", "threshold", "text", "unknown"):
            for text in rendered(entry[key]) if entry.get(key) else ():
                yield f"{key}: {text}"
        return
    names = sorted(placeholders(entry))
    yield filled(entry, {name: 1.5 + number for number, name in enumerate(names)}) or ""
    if names and isinstance(entry, list):
        yield filled(entry, dict.fromkeys(names)) or "(nothing)"


def test_all_texts_are_as_recorded() -> None:
    """A change of a text is deliberate: users' scripts and translations depend on it. The values are synthetic."""
    lines = [f"{code}: {text}" for code in TEXTS.codes() for text in rendered(TEXTS.entry(code))]
    assert lines == RECORDED.read_text(encoding="utf-8").splitlines()
