"""Splitting of lines and conversion of columns of text by the compiled library ``columns.c``.

The library converts the simple forms that nearly all cells have. Each function returns None if there is no library:
the callers then convert all cells as they convert the odd ones, with the same results.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from slurm_affinode.base import compiled
from slurm_affinode.base.errors import UnreachableError

LIBRARY = Path(__file__).with_name(compiled.LIBRARIES["base/columns"])
_NEWEST = pl.CompatLevel.newest()
_SEED = int.from_bytes(os.urandom(8), "little")
"""Unknown to authors of texts, who could otherwise choose those whose hashes are equal."""
_VIEW = np.dtype("V16")
Ints = npt.NDArray[np.int64]


class TextColumn(ctypes.Structure):
    """A column of text."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64), ("views", ctypes.c_void_p), ("valid", ctypes.c_void_p), ("bit", ctypes.c_int64),
        ("buffers", ctypes.c_void_p), ("offset", ctypes.c_int32),
    ]  # fmt: skip
    references: Any


class Converted(ctypes.Structure):
    """Values of a column; ``odd``: rows with a text that is not simple."""

    _fields_: ClassVar = [
        ("values", ctypes.c_void_p), ("valid", ctypes.c_void_p), ("odd", ctypes.c_void_p), ("cells", ctypes.c_void_p),
        ("nulls", ctypes.c_int64), ("odds", ctypes.c_int64), ("base", ctypes.c_int64),
    ]  # fmt: skip
    references: Any


class TextViews(ctypes.Structure):
    """TextViews of a column."""

    _fields_: ClassVar = [
        ("codes", ctypes.c_void_p), ("views", ctypes.c_void_p), ("table", ctypes.c_void_p), ("mask", ctypes.c_uint64),
        ("count", ctypes.c_int64), ("far", ctypes.c_int64), ("base", ctypes.c_int64),
    ]  # fmt: skip
    references: Any


class Plan(ctypes.Structure):
    """Conversion of a column."""

    _fields_: ClassVar = [
        ("kind", ctypes.c_int64), ("results", ctypes.c_void_p * 3), ("texts", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """Load the library; None if it is missing or of other sources. Its functions run without the interpreter lock."""
    try:
        loaded = compiled.load(LIBRARY, "the readers of text")
    except UnreachableError:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, parameters in {
        "split": (
            ctypes.c_char_p, integer, ctypes.c_char, ctypes.c_char, integer, pointer, integer, integer, pointer,
            pointer, integer,
        ),
        "decimals": (pointer, pointer, ctypes.c_char_p, integer),
        "clocks": (pointer, pointer, pointer),
        "read_table": (
            ctypes.c_char_p, integer, ctypes.c_char, ctypes.c_char, integer, pointer, integer, pointer, pointer,
            integer, ctypes.c_uint64,
        ),
        "copies": (ctypes.c_char_p, pointer, integer, pointer, pointer),
    }.items():  # fmt: skip
        getattr(loaded, name).argtypes = parameters
        getattr(loaded, name).restype = None
    loaded.split.restype = loaded.read_table.restype = loaded.copies.restype = integer
    return loaded


def split(
    text: bytes, delimiter: str, names: Sequence[str], lines: int, *, end: str = "\n", skip_spaces: bool = False
) -> pl.DataFrame | None:
    """Split ``text`` of ``lines`` lines into columns.

    ``delimiter`` and ``end`` are one ASCII character each. None if a line has more or fewer cells, or a part of the
    text is not UTF-8. No text is copied.
    """
    if (code := library()) is None or not names or not _is_utf8(text):
        return None
    views = [np.empty((lines, 2), np.int64) for _ in names]
    places = (ctypes.c_void_p * len(names))(*(column.ctypes.data for column in views))
    longest = np.zeros(len(names), np.int64)
    count = code.split(
        text, len(text), delimiter.encode(), end.encode(), len(names), places, lines, skip_spaces,
        longest.ctypes.data, None, 0,
    )  # fmt: skip
    if count != lines:
        return None
    buffer = pa.py_buffer(text)
    return pl.DataFrame([_text(column, count, buffer).alias(name) for name, column in zip(names, views, strict=True)])


def _short_view(word: str) -> bytes:
    text = word.encode()
    return len(text).to_bytes(4, "little") + text.ljust(12, b"\0")


def _is_utf8(text: bytes) -> bool:
    bounds = np.array([0, len(text)], np.int64)
    whole = pa.Array.from_buffers(pa.large_string(), 1, [None, pa.py_buffer(bounds), pa.py_buffer(text)])
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _text(views: npt.NDArray[Any], count: int, *buffers: pa.Buffer) -> pl.Series:
    array = pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(views), *buffers])
    return pl.Series(pl.from_arrow(array))


def _column(cells: pl.Series) -> TextColumn:
    array = cells.to_arrow(compat_level=_NEWEST)
    valid, views, *buffers = array.buffers()
    places = (ctypes.c_void_p * max(1, len(buffers)))(*(buffer.address for buffer in buffers))
    column = TextColumn(
        len(array),
        0 if views is None else views.address + 16 * array.offset,
        None if valid is None else valid.address,
        array.offset,
        ctypes.cast(places, ctypes.c_void_p),
    )
    column.references = array, places
    return column


@dataclass(frozen=True, slots=True)
class Quick:
    """Values of a column."""

    values: pl.Series
    """Null of an empty, missing or odd cell."""
    odd: Ints
    """Rows of cells that are not simple."""


def _result(count: int, dtype: npt.DTypeLike, *, odd: bool = True) -> Converted:
    values, valid = np.empty(count, dtype), np.zeros((count + 7) // 8, np.uint8)
    rows, cells = (np.empty(count if odd else 0, kind) for kind in (np.int64, _VIEW))
    result = Converted(values.ctypes.data, valid.ctypes.data, rows.ctypes.data, cells.ctypes.data)
    result.references = values, valid, rows, cells
    return result


def _series(result: Converted, name: str, kind: pa.DataType, *texts: pa.Buffer) -> pl.Series:
    values, valid, *_ = result.references
    buffers = [pa.py_buffer(valid) if result.nulls else None, pa.py_buffer(values), *texts]
    return pl.Series(name, pl.from_arrow(pa.Array.from_buffers(kind, len(values), buffers, result.nulls)))


def _quick(function: str, cells: pl.Series, kind: pa.DataType, *arguments: object) -> Quick | None:
    if (code := library()) is None or cells.dtype != pl.String:
        return None
    column, result = _column(cells), _result(len(cells), np.float64 if kind == pa.float64() else np.int64)
    result.cells = None
    getattr(code, function)(byref(column), byref(result), *arguments)
    return Quick(_series(result, cells.name, kind), result.references[2][: result.odds])


def decimals(cells: pl.Series, suffix: str = "") -> Quick | None:
    """Convert numbers that ``suffix`` follows to Float64."""
    text = suffix.encode()
    return _quick("decimals", cells, pa.float64(), text, len(text))


def clocks(cells: pl.Series) -> tuple[Quick, pl.Series] | None:
    """Convert times as ``2026-11-30T12:30:00`` and ``2026/11/30 12:30:00.123Z`` to Datetime without a zone.

    Also return which of them end in ``Z``.
    """
    zones = np.zeros(len(cells), np.bool_)
    quick = _quick("clocks", cells, pa.timestamp("ms"), zones.ctypes.data)
    return None if quick is None else (quick, pl.Series(zones))


class Kind(Enum):
    """Conversions of ``read``, with their names in the library."""

    SKIPPED = 0
    """None: the cells are not read."""
    INTEGERS = 1
    """Digits to Int64."""
    SIZES = 2
    """Digits, also with a suffix K, M, G, T or P, to bytes (Int64)."""
    SPANS = 3
    """``[DAYS-]HOURS:MINUTES:SECONDS`` and ``MINUTES:SECONDS`` to seconds (Float64)."""
    CLOCKS = 4
    """``2026-11-30T12:30:00`` to Datetime without a zone."""
    USAGES = 5
    """Lists such as ``..,gres/gpumem=34908M,gres/gpuutil=92`` to the utilization and the memory in bytes (Int64)."""
    IDENTIFIERS = 6
    """``JOB[_TASK][.STEP]`` to the job ID, the task (Int64) and the step (String)."""
    TEXTS = 7
    """Distinct texts."""


_RESULTS: dict[Kind, tuple[tuple[npt.DTypeLike, pa.DataType], ...]] = {
    Kind.INTEGERS: ((np.int64, pa.int64()),),
    Kind.SIZES: ((np.int64, pa.int64()),),
    Kind.SPANS: ((np.float64, pa.float64()),),
    Kind.CLOCKS: ((np.int64, pa.timestamp("ms")),),
    Kind.USAGES: ((np.int64, pa.int64()),) * 2,
    Kind.IDENTIFIERS: ((np.int64, pa.int64()),) * 2 + ((_VIEW, pa.string_view()),),
}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A converted column."""

    name: str
    values: tuple[pl.Series, ...]
    """Null of an empty or odd cell."""
    odd: Ints
    """Rows of cells that are not simple."""
    cells: pl.Series
    """Cells of these rows; they keep the text of the table in memory."""
    texts: pl.Series | None = None
    """Cells of all rows, of identifiers; an empty cell is null."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The distinct cells of a column, in the order of their first rows."""

    name: str
    distinct: pl.Series
    """Null instead of an empty cell."""
    places: pl.Series
    """For each row the place of its cell (UInt32)."""

    def spread(self, values: pl.Series) -> pl.Series:
        """Return the values of all rows, given those of the distinct cells."""
        if len(values) == 1:
            return values.new_from_index(0, len(self.places))
        return values if len(values) == len(self.places) else values[self.places]


Column = Parsed | Encoded


def read(
    text: bytes,
    delimiter: str,
    kinds: Mapping[str, Kind],
    lines: int,
    *,
    texts_of: str = "",
    refused: Sequence[str] = (),
) -> tuple[dict[str, Column], dict[str, int]] | None:
    """Read a table of ``lines`` lines, each with an end; return its columns and the size of the longest cell of each.

    ``texts_of``: the column of identifiers of which the texts are kept. None if a line has more or fewer cells, a part
    of the text is not UTF-8, or a cell is one of ``refused`` (at most 12 bytes each).
    """
    if (code := library()) is None or not kinds or not _is_utf8(text):
        return None
    results = {
        name: tuple(_result(lines, dtype, odd=not column) for column, (dtype, _) in enumerate(_RESULTS.get(kind, ())))
        for name, kind in kinds.items()
    }
    texts = {
        name: _texts(lines, encoded=kind is Kind.TEXTS)
        for name, kind in kinds.items() if kind is Kind.TEXTS or name == texts_of
    }  # fmt: skip
    plans = (Plan * len(kinds))()
    for plan, (name, kind) in zip(plans, kinds.items(), strict=True):
        plan.kind = kind.value
        for row, result in enumerate(results[name]):
            plan.results[row] = ctypes.addressof(result)
        plan.texts = ctypes.addressof(texts[name]) if name in texts else None
    longest = np.zeros(len(kinds), np.int64)
    words = b"".join(_short_view(word) for word in refused)
    count = code.read_table(
        text, len(text), delimiter.encode(), b"\n", len(kinds), plans, lines, longest.ctypes.data, words, len(refused),
        _SEED,
    )  # fmt: skip
    if count != lines:
        return None
    buffer = pa.py_buffer(text)
    columns: dict[str, Column] = {}
    for name, kind in kinds.items():
        if kind is Kind.TEXTS:
            columns[name] = Encoded(name, _copied(code, texts[name], name, text), pl.Series(texts[name].references[0]))
        elif type_results := results[name]:
            values = tuple(
                _series(result, name, type_) for result, (_, type_) in zip(type_results, _RESULTS[kind], strict=True)
            )
            odd, views = type_results[0].references[2:]
            rows = odd[: type_results[0].odds].copy()
            cells = _text(views[: len(rows)].copy(), len(rows), buffer)
            ids = _copied(code, texts[name], name, text) if name in texts else None
            columns[name] = Parsed(name, values, rows, cells, ids)
    return columns, dict(zip(kinds, longest.tolist(), strict=True))


def _texts(count: int, *, encoded: bool) -> TextViews:
    codes, views = np.empty(count if encoded else 0, np.uint32), np.empty(count, _VIEW)
    text_views = TextViews(codes.ctypes.data if encoded else None, views.ctypes.data)
    text_views.references = codes, views
    return text_views


def _copied(code: ctypes.CDLL, texts: TextViews, name: str, text: bytes) -> pl.Series:
    count = texts.count
    result, copies = _result(count, _VIEW, odd=False), np.empty(texts.far, np.uint8)
    views = result.references[0]
    views[:] = texts.references[1][:count]
    result.nulls = code.copies(text, views.ctypes.data, count, result.valid, copies.ctypes.data)
    return _series(result, name, pa.string_view(), pa.py_buffer(copies))
