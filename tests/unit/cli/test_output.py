"""Everything that commands print passes one of a few functions, which replace control characters."""

from __future__ import annotations

import ast
import io
import re
import sys
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
    result = set()
    for path in Path(str(cli.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "click.secho", "print"):
                result.add(path.stem)
    assert result == set(PRINTERS)


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


@pytest.mark.parametrize(
    ("width", "heading", "left_out"),
    [
        (40, ["user  gpu hours  oom  partition"], None),
        (28, ["        gpu", "user  hours  oom  partition"], None),
        (18, ["        gpu", "user  hours  oom"], "Not shown on 18 columns: partition (--json has them)"),
        (11, ["        gpu", "user  hours"], "Not shown on 11 columns: partition, oom (--json has them)"),
    ],
)  # fmt: skip
def test_table_that_does_not_fit_leaves_columns_out(
    width: int,
    heading: list[str],
    left_out: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Numbers are never broken, and headings only between words."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("user", "gpu hours", "oom", "partition")
    options.print_table(columns, [("anna", "123.4", 5, "gpu")], right=columns[1:3], minor=("partition", "oom"))
    lines = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[: len(heading)] == heading
    assert "123.4" in lines[len(heading)]
    note = lines[len(heading) + 1 :]
    assert " ".join(note) == (left_out or "")
    assert max(map(len, note), default=0) <= max(width, len("partition,"))


def test_wide_table_has_every_column(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On any terminal, without broken lines; a command with --wide names it where columns are left out."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "18")
    columns, rows = ("user", "gpu hours", "partition"), [("anna", "123.4", "a long name of a partition")]
    for wide in (True, False):
        options.print_table(columns, rows, right=columns[1:2], minor=("partition",), wide=wide)
    lines = [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["user  gpu hours  partition", "anna      123.4  a long name of a partition"]
    assert " ".join(lines).endswith("Not shown on 18 columns: partition (--wide has them)")
