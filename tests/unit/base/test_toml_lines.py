"""Syntax errors in TOML are reported with the line, its text, and a hint."""

from __future__ import annotations

import tomllib

import pytest

from slurm_affinode.base.toml_lines import syntax_fault


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("[limits]\ncancel = 5\n[default\n", 3, "[default", "close the heading: [name]"),
        ("[[rule]\n", 1, "[[rule]", "close the heading: [[name]]"),
        ("cancel = 5\ncancel = 6\n", 2, "cancel = 6", "twice"),
        ("[limits]\n\n[limits]\n", 3, "[limits]", "twice"),
        ("a = 1\nmin_run = 1h\n", 2, "min_run = 1h", "quotes"),
        ("name = squatters\n", 1, "name = squatters", "quotes"),
        ('name = "x\n', 1, 'name = "x', "quote"),
        ("kinds = [1,\n", 1, "kinds = [1,", "brackets"),
        ("just words\n", 1, "just words", "key = value"),
        ("é = 1\n", 1, "é = 1", "key = value"),
        ("\ufeff[limits]\n", 1, "byte order mark", "without a BOM"),
    ],
)
def test_syntax_error_is_reported_with_line_and_hint(text: str, line: int, message: str, hint: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as caught:
        tomllib.loads(text)
    fault = syntax_fault(caught.value, text)
    assert fault.line == line
    assert fault.message.startswith("not TOML: ")
    assert message in fault.message
    assert hint in (fault.hint or "")
