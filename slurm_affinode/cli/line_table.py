"""A table of thousands of rows with a line each: column widths, and the lines as ``rich`` prints them.

``rich.table.Table`` lays out each cell by itself: 10,000 findings take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.segment import Segment


@dataclass(frozen=True, slots=True)
class LineColumn:
    """A column: its heading, and the printable text of each row."""

    name: str
    cells: Sequence[str]
    style: str | Sequence[str] = ""
    """Style of its cells, or of each of them."""
    number: bool = False
    """Numbers are aligned at the right."""
    least: int | None = None
    """Width to which longer cells may be cut; ``None``: they are not cut."""
    most: int | None = None
    """Width beyond which it only gets space that no other column needs; ``None``: no limit."""
    width: int = 0
    """Width in characters, set by ``fitted``."""


def fitted(columns: Sequence[LineColumn], space: int, minor: Sequence[str] = ()) -> list[LineColumn]:
    """Return the columns with widths for a line of ``space`` characters, a space between two.

    Where they do not fit, those that may be cut are cut, the widest first, and then those of ``minor`` are left out,
    the first of them first.
    """
    needed = {column.name: max(cell_len(column.name), _longest(column.cells)) for column in columns}
    least = {column.name: min(needed[column.name], column.least or needed[column.name]) for column in columns}
    chosen = list(columns)
    for name in minor:
        if sum(least[column.name] + 1 for column in chosen) - 1 > space:
            chosen = [column for column in chosen if column.name != name]
    widths = {column.name: min(needed[column.name], column.most or needed[column.name]) for column in chosen}
    remaining_width = space - sum(width + 1 for width in widths.values())
    while remaining_width < -1 and (longer := [name for name, width in widths.items() if width > least[name]]):
        widths[max(longer, key=widths.__getitem__)] -= 1
        remaining_width += 1
    for name, width in widths.items():
        more = min(max(0, remaining_width), needed[name] - width)
        widths[name] += more
        remaining_width -= more
    return [replace(column, width=widths[column.name]) for column in chosen]


def remainder(name: str, cells: Sequence[str], style: str, space: int) -> LineColumn:
    """Return a last column of text in the ``space`` that the others leave."""
    width = min(space, max(cell_len(name), _longest(cells)))
    return LineColumn(name, cells, style, width=width)


def _longest(cells: Sequence[str]) -> int:
    return max(map(cell_len, cells), default=0)


@dataclass(frozen=True, slots=True)
class LineTable:
    """A table for ``Console.print``: headings in bold, cut cells end with an ellipsis."""

    columns: Sequence[LineColumn]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield the lines, for ``Console.print``."""
        bold = console.get_style("bold")
        last = len(self.columns) - 1
        for place, column in enumerate(self.columns):
            yield Segment(_cell(column.name, column.width, right=column.number), bold)
            if place < last:
                yield Segment(" ", bold)
        yield Segment("\n")
        texts = [[_cell(text, column.width, right=column.number) for text in column.cells] for column in self.columns]
        rows = zip(*texts, strict=True)
        named = [
            [column.style] * len(column.cells) if isinstance(column.style, str) else column.style
            for column in self.columns
        ]
        styles = {name: console.get_style(name) for name in {name for names in named for name in names} if name}
        for row, names in zip(rows, zip(*named, strict=True), strict=True):
            plain = ""
            for text, name in zip(row, names, strict=True):
                if name:
                    yield Segment(plain)
                    yield Segment(text, styles[name])
                    plain = " "
                else:
                    plain += f"{text} "
            yield Segment(f"{plain[:-1]}\n")


def _cell(text: str, width: int, *, right: bool) -> str:
    """Return ``text`` in ``width`` characters."""
    if right:
        text = text.rstrip()
    size = cell_len(text)
    if size > width:
        return f"{set_cell_size(text, width - 1)}…"
    return " " * (width - size) + text if right else text + " " * (width - size)
