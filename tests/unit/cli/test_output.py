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


NAMES = tuple(f"{kind}-{'x' * 40}"[:32] for kind in ("user", "node", "part"))


TABLES: dict[str, tuple[dict[str, str], dict[str, tuple[str, ...]]]] = {
    "users": (
        {"user": NAMES[0], "jobs": "12,345", "gpu hours": "123,456.7", "core hours": "9,123,456.7", "node": NAMES[1]},
        {"right": ("jobs", "gpu hours", "core hours"), "minor": ("node", "core hours")},
    ),
    "history": (
        {"at": "2026-11-02 10:15", "verb": "end", "user": NAMES[0], "what": f"idle in {NAMES[2]}, 3h 15m of it"},
        {"whole": ("at",), "minor": ("user", "verb")},
    ),
    "figures": (
        {"figure": "mean wait, with enough GPUs free", "value": "1,234.5 h (1,000.1 to 2,000.2, by days)"},
        {"right": ("value",)},
    ),
}
"""Column -> cell, and the options of ``print_table``."""


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("table", TABLES)
def test_names_and_numbers_are_never_broken(
    width: int, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of 32 characters: columns are left out in their order, and sentences are broken between words."""
    cells, places = TABLES[table]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    options.print_table(tuple(cells), [tuple(cells.values())], **places)
    text = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    rows, _, note = text.partition("Not shown on")
    left_out = note.partition("columns: ")[2].partition(" (--json")[0].replace("\n", " ").split(", ") if note else []
    assert left_out == list(places.get("minor", ())[: len(left_out)])
    for column, cell in cells.items():
        assert column in left_out or set(cell.split()) <= set(rows.split()), (column, rows)
    assert max(map(len, text.splitlines())) <= width


def test_columns_may_have_the_same_heading(capsys: pytest.CaptureFixture[str]) -> None:
    options.print_table(("", "published", "published", ""), [("a", "1", "2", "b")], right=("published",))
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "1", "2", "b"]


def test_number_is_not_broken_on_a_terminal_that_is_too_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is longer than the terminal, which wraps it; text is folded first."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    columns = ("name", "jobs", "hours")
    options.print_table(columns, [("a-long-name-of-a-user", "12,345,678", "1,234,567.8")], right=columns[1:])
    assert "12,345,678  1,234,567.8\n" in capsys.readouterr().out


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
