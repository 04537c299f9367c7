"""CSV with a header, and nvidia-smi query logs.

The delimiter is detected; columns are named by the alias table and the configuration. The output of ``nvidia-smi
--query-gpu=... --format=csv[,noheader][,nounits]`` has units in the header or the values, another header after each
restart of the logger, and possibly a truncated last line. Lines without quotes are split by columns, several times
faster than with ``csv.reader``.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.base.columns import native
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import count_byte
from slurm_affinode.metrics.aliases import VALUES, Aliases, folded
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.lines import LineBlock, pieces, positions
from slurm_affinode.metrics.readers.tables import TableReader


@dataclass(frozen=True, slots=True)
class SplitLines:
    """Lines that were split at their delimiters."""

    cells: pl.DataFrame
    """``c0``, ``c1``, ... and ``number`` of the lines with a cell per column."""
    other_lines: list[tuple[int, str]]
    """Number and text of the other lines, and of those without a cell that begins with a digit: headers, blank ones."""


_MOST_SPACES = 16


def split_lines(block: LineBlock, delimiter: str, count: int) -> SplitLines | None:
    """Split lines into ``count`` cells, without spaces before a cell and quotes around it, as ``csv.reader`` does.

    None if that takes more than a split: a quoted cell contains a delimiter, a quote or a line end, or a cell is partly
    quoted.
    """
    if (cells := _even_lines(block, delimiter, count)) is not None:
        first = cells["c0"]
        doubtful = ((first < "0") | (first >= ":")).arg_true()
        if not len(doubtful):
            return SplitLines(cells, [])
    text, (starts, ends) = block.text, block.bounds
    if not len(starts) or b"\r" in text:
        return None
    marks = positions(text, delimiter.encode())
    last = np.searchsorted(marks, ends)
    fits = np.diff(last, prepend=0) == count - 1
    within = marks if fits.all() else marks[np.repeat(fits, np.diff(last, prepend=0))]
    inner = within.reshape(int(fits.sum()), count - 1)
    begins = np.hstack([starts[fits][:, None], inner + 1])
    stops = np.hstack([inner, ends[fits][:, None]])
    values = np.frombuffer(text, np.uint8)
    for _ in range(_MOST_SPACES):
        space = values[begins] == ord(" ")
        if not space.any():
            break
        begins += space
    else:
        return None
    if quotes := text.count(b'"'):
        quoted = (values[begins] == ord('"')) & (begins + 1 < stops)
        if (quoted != ((values[stops - 1] == ord('"')) & (begins < stops))).any() or quotes != 2 * quoted.sum():
            return None
        begins, stops = begins + quoted, stops - quoted
    doubtful = ~((values[begins] - ord("0")) < 10).any(axis=1)  # the difference is unsigned
    places = np.flatnonzero(fits)
    apart = np.sort(np.concatenate([np.flatnonzero(~fits), places[doubtful]]))
    irregular = [(block.first + index, text[starts[index] : ends[index]].decode()) for index in apart.tolist()]
    if doubtful.any():
        places, begins, stops = places[~doubtful], begins[~doubtful], stops[~doubtful]
    columns = pieces(text, *((begins[:, index], stops[:, index]) for index in range(count)))
    frame = pl.DataFrame({f"c{index}": column for index, column in enumerate(columns)})
    return SplitLines(frame.with_columns(pl.Series("number", block.first + places, pl.Int64)), irregular)


def _even_lines(block: LineBlock, delimiter: str, count: int) -> pl.DataFrame | None:
    """Return the cells if there are no quotes and each line has ``count`` of them."""
    text = block.text
    if b'"' in text or b"\r" in text or text.startswith((b"\n", codecs.BOM_UTF8)):
        return None
    if (cells := even_cells(text, delimiter, count)) is None:
        return None
    return cells.with_columns(pl.int_range(block.first, block.first + len(cells), eager=True).alias("number"))


def even_cells(text: bytes, delimiter: str, count: int) -> pl.DataFrame | None:
    """Return ``c0``, ``c1``, ... of lines with LF at their ends, without spaces before a cell, as ``csv.reader`` does.

    None if not each of them has ``count`` cells, or without the compiled library.
    """
    lines = count_byte(text, b"\n")
    if not lines or count < 2:
        return None
    return native.split(text, delimiter, [f"c{index}" for index in range(count)], lines, skip_spaces=True)


def columns(lines: pl.DataFrame, delimiter: str, count: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return ``c0``, ``c1``, ... and ``number`` of the lines with ``count`` cells; and the other lines."""
    fits = lines["line"].str.count_matches(delimiter, literal=True) == count - 1
    good = lines.filter(fits)
    # split_exact cannot split into one part.
    cells = good["line"].str.split_exact(delimiter, count - 1).struct.unnest() if count > 1 else good.select("line")
    cells.columns = [f"c{index}" for index in range(count)]
    return cells.with_columns(good["number"]), lines.filter(~fits)


DELIMITERS = (",", "\t", ";", "|")
_TELLING = (*VALUES, "value")
"""A header has at least one of these fields."""
_SMI_COLUMN = re.compile(
    r"(?:[a-z]\w*(?:\.\w+)+|gpu_\w+|timestamp|name|uuid|index|count|serial|pstate|hostname|module_id|compute_cap|"
    r"\w+_(?:mode|version|attached|active))(?:\s*\[.+\])?"
)
"""Columns of ``nvidia-smi --help-query-gpu``: names of several words joined by dots, and these."""
_PREFACE = re.compile(r'\s*(?:$|#|"?sep=."?\s*$)', re.IGNORECASE)
_PREFACE_LINES = 100
_SMI_MARK = re.compile(r"(?:utilization\.|memory\.|power\.draw|pci\.bus_id)")


def delimiter_of(line: str) -> str:
    """Return the delimiter of a header line: the one that splits it into most columns."""

    def columns(mark: str) -> int:
        try:
            return len(next(csv.reader([line], delimiter=mark), []))
        except csv.Error:  # reported when the whole file is read
            return 0

    return max(DELIMITERS, key=columns)


def is_smi_header(line: str) -> bool:
    """Return whether a line is the header of an nvidia-smi query."""
    cells = [cell.strip() for cell in line.split(",")]
    return _SMI_MARK.search(line) is not None and all(_SMI_COLUMN.fullmatch(cell) for cell in cells)


def is_table(line: str, aliases: Aliases) -> bool:
    """Return whether a line is the header of a table: it has a metric, or at least two names in the alias table."""
    if not any(mark in line for mark in DELIMITERS):
        return False
    cells = [cell.strip().strip('"') for cell in line.split(delimiter_of(line))]
    aliases_known = [alias for cell in cells if (alias := aliases.column(cell)) is not None]
    return len(aliases_known) >= 2 or any(alias.field in VALUES for alias in aliases_known)


def after_preface(lines: list[str], aliases: Aliases) -> list[str]:
    """Return ``lines`` from the header of a table, if only comments and Excel's ``sep=`` precede it; else all."""
    start = next(
        (index for index, line in enumerate(lines) if not _PREFACE.match(line) or is_table(line, aliases)), None
    )
    return lines[start:] if start is not None and is_table(lines[start], aliases) else lines


@dataclass(frozen=True, slots=True)
class Dialect:
    """Properties of a kind of table."""

    log: bool
    """A log may end in the middle of its last line and may repeat its header."""


class CsvReader:
    """Read one table of text."""

    def __init__(self, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None, dialect: Dialect) -> None:
        self._notes = notes
        self._options = options
        self._node = fallback_node
        self._dialect = dialect
        self._table: TableReader | None = None
        self._delimiter = ","
        self._header: list[str] = []

    def read(self, blocks: Iterator[LineBlock]) -> Iterator[pl.DataFrame]:
        """Yield samples."""
        rest = ""
        number = 1
        for index, raw_block in enumerate(blocks):
            whole = raw_block if index else self._after_preface(raw_block)
            block = whole if rest else self._without_header(whole)
            if not rest and (split := self._split(block)) is not None:
                cells, misfits = split
                for line, row in misfits:
                    self._misfit(line, row, last=line == block.open_line)
                yield from self._rows_of(cells)
                continue
            number = number if rest else block.first
            text = rest + block.text.decode()
            text, rest = _whole_records(text) if block.open_line is None else (text, "")
            rows, number = self._records(text, number)
            yield from self._samples(rows, block.open_line)
        if rest:
            rows, _ = self._records(rest, number)
            yield from self._samples(rows, None)
        if self._table is not None:
            yield from self._table.rest()
        elif not self._notes.problem_count:
            raise InputError("has a header and nothing else" if self._header else "is empty", where=self._notes.name)

    def _after_preface(self, block: LineBlock) -> LineBlock:
        first = block.head(_PREFACE_LINES)
        return block.after(len(first) - len(after_preface(first, self._options.aliases)))

    def _without_header(self, block: LineBlock) -> LineBlock:
        """Remove the header from the first block, if it is one line."""
        if self._header or self._options.fields:
            return block
        lines = block.head(_PREFACE_LINES)
        start = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
        if start + 1 >= len(lines) or lines[start].count('"') % 2:
            return block
        rows, _ = self._records(lines[start] + "\n", block.first + start)
        if not rows:
            return block
        self._with_header(rows)
        return block.after(start + 1)

    def _split(self, block: LineBlock) -> tuple[pl.DataFrame, list[tuple[int, list[str]]]] | None:
        """Return the cells of the rows with a cell per column, and the other rows, without headers.

        None if the lines must be parsed one by one.
        """
        split = split_lines(block, self._delimiter, len(self._header)) if self._header else None
        if split is None:
            return None
        fitting: list[tuple[int, list[str]]] = []
        misfits: list[tuple[int, list[str]]] = []
        for number, line in split.other_lines:
            cells = next(csv.reader([line], delimiter=self._delimiter, skipinitialspace=True), [])
            if not any(cell.strip() for cell in cells):
                continue
            if self._is_header(cells):
                if not self._is_same(cells):
                    return None
            elif len(cells) == len(self._header):
                fitting.append((number, cells))
            else:
                misfits.append((number, cells))
        frames = [split.cells, *([_frame(fitting)] if fitting else [])]
        return (pl.concat(frames).sort("number") if fitting else split.cells), misfits

    def _records(self, text: str, first: int) -> tuple[list[tuple[int, list[str]]], int]:
        """Return the records with the numbers of their first lines, and the number of the next line."""
        if not self._header:
            self._delimiter = "," if self._dialect.log else delimiter_of(_first_line(text))
        reader = csv.reader(io.StringIO(text), delimiter=self._delimiter, skipinitialspace=True)
        rows: list[tuple[int, list[str]]] = []
        before = 0
        try:
            for cells in reader:
                if cells and any(cell.strip() for cell in cells):
                    rows.append((first + before, cells))
                before = reader.line_num
        except csv.Error as error:
            raise InputError(f"cannot be read as CSV: {error}", where=f"{self._notes.name}:{first + before}") from error
        return rows, first + text.count("\n")

    def _samples(self, rows: list[tuple[int, list[str]]], open_line: int | None) -> Iterator[pl.DataFrame]:
        if not rows:
            return
        if not self._header:
            rows = self._with_header(rows)
        good: list[tuple[int, list[str]]] = []
        for number, cells in rows:
            if self._is_header(cells):
                if not self._is_same(cells):
                    # The logger was restarted with other columns, or another table was appended.
                    yield from self._rows_of(_frame(good))
                    if self._table is not None:
                        yield from self._table.rest()
                    good, self._header, self._table = [], [cell.strip() for cell in cells], None
            elif len(cells) == len(self._header):
                good.append((number, cells))
            else:
                self._misfit(number, cells, last=number == open_line)
        yield from self._rows_of(_frame(good))

    def _is_same(self, names: list[str]) -> bool:
        """Return whether a header has the same columns as the last one."""
        return [folded(name) for name in names] == [folded(name) for name in self._header]

    def _is_header(self, cells: list[str]) -> bool:
        """Return whether a row is a header: the last one again, or several known names with a metric or value."""
        if any(cell[:1].isdigit() for cell in cells):
            return False
        names = [cell.strip() for cell in cells]
        if names[0] == self._header[0] and self._is_same(names):
            return True
        aliases_known = [alias for name in names if (alias := self._options.aliases.column(name)) is not None]
        return len(aliases_known) > 1 and any(alias.field in _TELLING for alias in aliases_known)

    def _rows_of(self, good: pl.DataFrame) -> Iterator[pl.DataFrame]:
        if good.is_empty():
            return
        if self._table is None:
            # If numbers have a decimal comma, the delimiter is a semicolon.
            comma = self._delimiter == ";"
            if not self._dialect.log:
                self._check_names()
            self._table = TableReader(self._header, self._notes, self._options, self._node, decimal_comma=comma)
        yield from self._table.rows(good)

    def _check_names(self) -> None:
        """Raise ``InputError`` if several columns have the name of a field: it is ambiguous which of them to read."""
        count = Counter(name.lower() for name in self._header)
        for name in self._header:
            if count[name.lower()] > 1 and self._options.aliases.column(name) is not None:
                raise InputError(
                    f"has {count[name.lower()]} columns called {name}",
                    where=self._notes.name,
                    hint="a row is of one GPU (or MIG instance) at one time: give each column a name of its own",
                )

    def _with_header(self, rows: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
        """Remove the header; with ``--fields``, a first line that is no header is the first row."""
        first = [cell.strip() for cell in rows[0][1]]
        if self._options.fields:
            self._header = [name.strip() for name in self._options.fields]
            same = [folded(cell) for cell in first] == [folded(name) for name in self._header]
            rows = rows[1:] if same else rows
            if rows and len(rows[0][1]) != len(self._header):
                raise InputError(
                    f"has {len(rows[0][1])} columns, --fields names {len(self._header)}", where=self._notes.name
                )
            return rows
        if self._dialect.log and not is_smi_header(",".join(first)):
            raise InputError(
                "has no header line",
                where=self._notes.name,
                hint="give --fields with the list that --query-gpu was given, e.g. timestamp,uuid,utilization.gpu",
            )
        self._header = first
        return rows[1:]

    def _misfit(self, number: int, cells: list[str], *, last: bool) -> None:
        reason = f"has {len(cells)} columns, the header has {len(self._header)}"
        if last and len(cells) < len(self._header):
            if not self._dialect.log:
                raise InputError(
                    "is cut off in its last line",
                    where=f"{self._notes.name}:{number}",
                    hint="copy the file again; nothing of it was ingested",
                )
            reason = "the last line is unfinished (still being written, or cut off)"
        self._notes.problem(number, reason, strict=self._options.strict)


def _frame(rows: list[tuple[int, list[str]]]) -> pl.DataFrame:
    """Convert rows to columns ``c0``, ``c1``, ... and ``number``."""
    columns = {
        f"c{index}": list(column) for index, column in enumerate(zip(*(cells for _, cells in rows), strict=True))
    }
    frame = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String()))
    return frame.with_columns(pl.Series("number", [number for number, _ in rows], pl.Int64))


def _first_line(text: str) -> str:
    return next((line for line in text.split("\n") if line.strip()), "")


def _whole_records(text: str) -> tuple[str, str]:
    """Split before a record with open quotes; a single quote more than 64 KiB back is ignored."""
    if text.count('"') % 2 == 0:
        return text, ""
    position = text.rfind("\n", 0, text.rfind('"')) + 1
    return (text[:position], text[position:]) if len(text) - position < 64 * 1024 else (text, "")
