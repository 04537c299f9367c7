"""Tables with a line per row: the same characters and styles as those of ``rich.table.Table``, and numbers uncut."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slurm_affinode.cli.line_table import LineColumn, LineTable, fitted, remainder

KINDS = ["squatter", "orphan-process", "", "ends with spaces  ", "日本語日本語日本語"]
HOURS = ["1,234.5", "0.3", "", "12,345.6", "7.0"]
REASONS = ["holds 76.1 of 80 GiB", "über \N{BOX DRAWINGS LIGHT HORIZONTAL}", "", "é" * 40, "日本語" * 15]


def _columns(space: int) -> list[LineColumn]:
    columns = [
        LineColumn("what", KINDS, ["red", "", "yellow", "", "red"], least=8, most=10),
        LineColumn("GPU-h", HOURS, number=True),
        LineColumn("score", ["0.90"] * 5, number=True),
    ]
    return fitted(columns, space, ("score", "GPU-h"))


def _printed(table: object, width: int, *, terminal: bool) -> str:
    text = io.StringIO()
    colors = "standard" if terminal else None
    Console(file=text, highlight=False, width=width, force_terminal=terminal, color_system=colors).print(table)
    return text.getvalue()


def _rich(columns: Sequence[LineColumn]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.name, justify="right" if column.number else "left", no_wrap=True, overflow="ellipsis",
                         width=column.width)  # fmt: skip
    for row in range(len(KINDS)):
        styles = [column.style if isinstance(column.style, str) else column.style[row] for column in columns]
        cells = [column.cells[row] for column in columns]
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return table


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [24, 30, 40, 60, 100])
def test_lines_are_those_of_a_rich_table(width: int, terminal: bool) -> None:
    columns = _columns(width)
    room = width - sum(column.width + 1 for column in columns)
    if room >= 10:
        columns.append(remainder("why", REASONS, "dim", room))
    lines = _printed(LineTable(columns), width, terminal=terminal)
    assert lines == _printed(_rich(columns), width, terminal=terminal)
    assert ("\x1b[31m" in lines) == terminal


def test_columns_get_the_space_that_they_need() -> None:
    assert {column.name: column.width for column in _columns(100)} == {"what": 18, "GPU-h": 8, "score": 5}


def test_text_is_cut_before_numbers_and_before_a_column_is_left_out() -> None:
    """The least width of ``what`` is 8: the line has 8 + 1 + 8 + 1 + 5 characters."""
    assert {column.name: column.width for column in _columns(23)} == {"what": 8, "GPU-h": 8, "score": 5}
    assert {column.name: column.width for column in _columns(22)} == {"what": 12, "GPU-h": 8}
    assert {column.name: column.width for column in _columns(16)} == {"what": 15}
    lines = _printed(LineTable(_columns(23)), 23, terminal=False).splitlines()
    assert lines[4] == "ends wi… 12,345.6  0.90"


def test_table_without_rows_has_its_headings() -> None:
    columns = fitted([LineColumn("what", []), LineColumn("score", [], number=True)], 40)
    assert _printed(LineTable(columns), 40, terminal=False) == "what score\n"
