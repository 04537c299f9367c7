"""Everything that commands print passes one of a few functions, which replace control characters."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest

from slurm_affinode import cli
from slurm_affinode.cli import options

ODD = "a\x1b[31m\x9b31m\r\nforged\u202e[/b]\x7f"
PRINTERS = {
    "completion": "the script of click",
    "main": "errors, which are escaped",
    "options": "the functions themselves",
    "zombies_policy": "the commented policy of this package",
}


def test_only_these_modules_print_text_themselves() -> None:
    """All others use ``echo``, ``warn``, ``print_table`` and ``print_json`` of ``options``."""
    found = set()
    for path in Path(str(cli.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "click.secho", "print"):
                found.add(path.stem)
    assert found == set(PRINTERS)


def test_printed_text_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    options.echo(ODD, ODD)
    options.warn(ODD)
    options.print_table(("name",), [(ODD,)], title=ODD)
    options.print_json({"name": ODD})
    printed = capsys.readouterr()
    assert all(line.isprintable() for text in printed for line in text.split("\n"))
    assert printed.out.count("forged") == 5


def test_progress_shows_markup_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file name with square brackets ended the command with an error of the markup."""
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with options.stages() as stage:
        stage(ODD)
    with options.progress(ODD, 2) as advance:
        advance(1)
    assert "[31m\N{REPLACEMENT CHARACTER}" in terminal.getvalue()
    assert "\x9b" not in terminal.getvalue()
