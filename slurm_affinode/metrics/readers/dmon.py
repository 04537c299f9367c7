"""Output of ``dcgmi dmon``: a repeated header ``#Entity  GPUTL  POWER ...``, and one line per entity and sample.

It has no node and no times: options give them, or ``ts '%Y-%m-%dT%H:%M:%S%z'`` puts a time before each line. Entities
are ``GPU 0`` and ``GPU-I 3`` (a MIG GPU instance, numbered by DCGM across the node); others are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.distinct import distinct
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.csv_table import even_cells
from slurm_affinode.metrics.readers.lines import LineBlock
from slurm_affinode.metrics.readers.tables import TableReader, Ticks

_STAMP = r"(?:\[?(\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d\S*?)\]?\s+)?"
HEADER = re.compile(rf"^\s*{_STAMP}#\s*Entity\s+(\S.*)$")
_UNITS = re.compile(rf"^\s*{_STAMP}(?:ID|Id)(?:\s|$)")
_ROW = re.compile(rf"^\s*{_STAMP}([A-Za-z][A-Za-z-]*)\s+(\d+)\s+(\S.*)$")
_PLAIN_STAMP = r"\[?(\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d[!-\\^-~]*)\]? +"
_VALUE = re.compile(r"N/A|\S+")
_APART = re.compile(r"\s{2,}")
_EMPTY_LINE = re.compile(rf"^\s*{_STAMP}(?:dmon was stopped due to receiving a signal\.)?\s*$")
"""Lines between samples; ``ts`` puts a time before these, too."""
_ENTITIES = {"GPU": "index", "GPU-I": "mig"}
_OTHER_ENTITIES = (
    "GPU-CI",
    "VGPU",
    "vGPU",
    "CPU",
    "Switch",
    "Link",
    "NvSwitch",
    "NVSwitch",
    "ConnectX",
    "Core",
    "CPU-Core",
    "CX",
)

_Row = tuple[int, list[str | None]]


class DmonReader:
    """Read one file of ``dcgmi dmon`` output."""

    def __init__(self, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None) -> None:
        self._notes = notes
        self._options = options
        self._node = fallback_node
        self._names: list[str] = []
        self._stamped = False
        self._table: TableReader | None = None
        self._ticks: Ticks | None = None

    def read(self, blocks: Iterator[LineBlock]) -> Iterator[pl.DataFrame]:
        """Yield samples."""
        for block in blocks:
            if (cells := self._even_rows(block)) is not None:
                yield from self._flush(cells, [])
                continue
            for part in self._parts(block):
                yield from self._flush(*self._rows(part, block.open_line))
        if not self._names:
            raise InputError("has no header '#Entity ...'", where=self._notes.name)

    def _even_rows(self, block: LineBlock) -> pl.DataFrame | None:
        """Return the rows of a block by columns (``_cells``), several times faster than ``_rows``.

        None if not all of its lines are plain rows without a time, lines between samples, or the same header.
        """
        text = _squeezed(block.text)
        if text is None or re.search(rb"N/A[^ \n]", text):
            return None
        squeezed = LineBlock(text, block.first)
        starts, ends = squeezed.bounds
        values = np.frombuffer(text + b"\n\n", np.uint8)
        is_row = np.logical_and.reduce([values[starts + offset] == byte for offset, byte in enumerate(b"GPU")])
        if not is_row.any():
            return None
        apart = np.flatnonzero(~is_row)
        names = self._names
        for line, number in squeezed.some(apart).unique("line", keep="first", maintain_order=True).iter_rows():
            if (header := HEADER.match(line)) is not None and header.group(1) is None:
                if names and names != _VALUE.findall(header.group(2)):
                    return None
                if not names and is_row[: number - block.first].any():
                    return None
                names = _VALUE.findall(header.group(2))
            elif not _EMPTY_LINE.match(line + " ") and not _UNITS.match(line):
                return None
        count = len(names) + 2
        rows = np.frombuffer(text, np.uint8)[np.repeat(is_row, ends + 1 - starts)].tobytes() if len(apart) else text
        cells = even_cells(rows, " ", count) if names else None
        if cells is None or set(cells["c0"].unique()) - set(_ENTITIES):
            return None
        if not all(ident.isdecimal() for ident in cells["c1"].unique()):
            return None
        self._names = names
        numbers = pl.Series("number", block.first + np.flatnonzero(is_row), pl.Int64)
        return _by_entity(cells.get_columns(), numbers)

    def _parts(self, block: LineBlock) -> Iterator[pl.DataFrame]:
        """Yield the lines below each header with other columns; the lines before it come first."""
        lines, begin = block.lines, 0
        places = lines["line"].str.contains("Entity", literal=True).arg_true()
        texts, text_of = distinct(lines.select(pl.col("line").gather(places)))
        headers = [HEADER.match(text) for text in texts["line"]]
        columns = [None if header is None else _VALUE.findall(header.group(2)) for header in headers]
        for end, text in zip(places.to_list(), text_of.to_list(), strict=True):
            if (names := columns[text]) is not None and names != self._names:
                yield lines[begin:end]
                begin, self._names, self._table = end, names, None
        yield lines[begin:]

    def _rows(self, lines: pl.DataFrame, open_line: int | None) -> tuple[pl.DataFrame, list[_Row]]:
        """Return the plain rows of lines below a header by columns (``_cells``), and the other rows."""
        plain = lines["line"].str.contains(_plain_row(len(self._names))) if self._names else pl.Series([False])
        plain &= ~lines["line"].str.contains(r"N/A[^ ]")
        irregular = lines.filter(~plain)
        texts, text_of = distinct(irregular.select("line"))
        between = [
            HEADER.match(line) or _EMPTY_LINE.match(line + " ") or _UNITS.match(line) for line in texts["line"]
        ]  # fmt: skip
        bare = pl.Series([match is not None for match in between], dtype=pl.Boolean).gather(text_of)
        rows: list[_Row] = []
        for line, number in irregular.filter(~bare).iter_rows():
            row = self._row(line, number, last=number == open_line)
            rows += [row] if row is not None else []
        return self._cells(lines.filter(plain)), rows

    def _cells(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Return ``c0`` (stamp), ``c1`` (index), ``c2`` (MIG ID), the values, and ``number`` of plain rows."""
        text = lines["line"]
        stamp = pl.Series([None], dtype=pl.String).new_from_index(0, len(text))
        if text.str.contains(r"^ *[\[0-9]").any():
            stamp = text.str.extract(rf"^ *{_PLAIN_STAMP}", 1)
            text = text.str.replace(rf"^ *{_PLAIN_STAMP}", "")
            self._stamped = self._stamped or stamp.is_not_null().any()
        text = text.str.replace_all(" +", " ").str.strip_chars(" ")
        cells = text.str.split_exact(" ", len(self._names) + 1).struct.unnest().get_columns()
        return _by_entity(cells, lines["number"], stamp)

    def _row(self, line: str, number: int, *, last: bool) -> _Row | None:
        match = _ROW.match(line)
        if match is None or not self._names:
            self._reject(number, f"is not a line of dmon: {line.strip()[:60]}", last=last)
            return None
        stamp, entity, ident, rest = match.groups()
        if entity in _OTHER_ENTITIES:
            return None
        if entity not in _ENTITIES:
            self._reject(number, f"has an unknown entity: {entity}", last=last)
            return None
        values = _VALUE.findall(rest)
        if len(values) > len(self._names):
            # A text such as the name of a GPU has spaces; columns are usually separated by more than one.
            apart = _APART.split(rest.strip())
            values = apart if all(text[0].isalpha() for text in apart if " " in text) else values
        if len(values) != len(self._names):
            self._reject(number, f"has {len(values)} values, the header has {len(self._names)}", last=last)
            return None
        self._stamped = self._stamped or stamp is not None
        index, mig = (ident, None) if entity == "GPU" else (None, ident)
        return number, [stamp, index, mig, *values]

    def _reject(self, number: int, reason: str, *, last: bool) -> None:
        if last:
            reason = "the last line is unfinished (still being written, or cut off)"
        self._notes.problem(number, reason, strict=self._options.strict)

    def _flush(self, plain: pl.DataFrame, rows: list[_Row]) -> Iterator[pl.DataFrame]:
        if plain.is_empty() and not rows:
            return
        if self._table is None:
            header = ["time" if self._stamped else "", "index", "mig", *self._names]
            if not self._stamped and self._ticks is None:
                self._ticks = Ticks(self._notes, self._options)
            self._table = TableReader(header, self._notes, self._options, self._node, self._ticks)
        if rows:
            cells = zip(*(cells for _, cells in rows), strict=True)
            columns = {f"c{index}": list(column) for index, column in enumerate(cells)}
            irregular = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String()))
            irregular = irregular.with_columns(pl.Series("number", [number for number, _ in rows], pl.Int64))
            plain = irregular if plain.is_empty() else pl.concat([plain, irregular]).sort("number")
        yield from self._table.rows(plain)


def _by_entity(cells: list[pl.Series], numbers: pl.Series, stamp: pl.Series | None = None) -> pl.DataFrame:
    """Return ``DmonReader._cells`` for the cells of plain rows: entity, number and values."""
    entity, ident, *values = cells
    missing = pl.Series([None], dtype=pl.String).new_from_index(0, len(entity))
    whole = entity == "GPU"
    columns = (missing if stamp is None else stamp, ident.zip_with(whole, missing), missing.zip_with(whole, ident))
    named = [column.alias(f"c{index}") for index, column in enumerate((*columns, *values))]
    return pl.DataFrame([*named, numbers])


def _squeezed(text: bytes) -> bytes | None:
    """Return lines with single spaces between words; None if they have other characters than printable ASCII."""
    values = np.frombuffer(text, np.uint8)
    ends = values == ord("\n")
    if (((values - ord(" ")) > ord("~") - ord(" ")) & ~ends).any():  # the difference is unsigned
        return None
    dropped = values == ord(" ")
    dropped[:-1] &= dropped[1:] | ends[1:]  # the last space of several is kept
    kept_bytes: bytes = values[~dropped].tobytes()
    return kept_bytes.replace(b"\n ", b"\n").removeprefix(b" ")


def _plain_row(values: int) -> str:
    """Return the pattern of the line of a GPU or GPU instance with that many values, in printable ASCII."""
    return rf"^ *(?:{_PLAIN_STAMP})?GPU(?:-I)? +[0-9]+(?: +[!-~]+){{{values}}} *$"
