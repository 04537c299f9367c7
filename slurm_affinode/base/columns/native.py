"""Splitting of lines and conversion of columns of text by the compiled library ``columns.c``.

The library converts the simple forms that nearly all cells have. Each function returns None if there is no library:
the callers then convert all cells as they convert the odd ones, with the same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from slurm_affinode.base import compiled

LIBRARY = Path(__file__).with_name(compiled.LIBRARIES["base/columns"])
_NEWEST = pl.CompatLevel.newest()
Ints = npt.NDArray[np.int64]


class TextColumn(ctypes.Structure):
    """A column of text."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64), ("views", ctypes.c_void_p), ("valid", ctypes.c_void_p), ("bit", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
    ]  # fmt: skip
    kept: Any


class Converted(ctypes.Structure):
    """Values of a column; ``odd``: rows with a text that is not simple."""

    _fields_: ClassVar = [
        ("values", ctypes.c_void_p), ("valid", ctypes.c_void_p), ("odd", ctypes.c_void_p), ("nulls", ctypes.c_int64),
        ("odds", ctypes.c_int64),
    ]  # fmt: skip
    kept: Any


@cache
def library() -> ctypes.CDLL | None:
    """Load the library; None if it is missing or of other sources. Its functions run without the interpreter lock."""
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        current = compiled.is_current(loaded, Path(__file__).parent)
    except OSError:
        return None
    if not current:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, parameters in {
        "split": (ctypes.c_char_p, integer, ctypes.c_char, ctypes.c_char, integer, pointer, integer, integer, pointer),
        "decimals": (pointer, pointer, ctypes.c_char_p, integer),
        "clocks": (pointer, pointer, pointer),
    }.items():
        getattr(loaded, name).argtypes = parameters
        getattr(loaded, name).restype = None
    loaded.split.restype = integer
    return loaded


def split(
    text: bytes, delimiter: str, names: Sequence[str], lines: int, *, end: str = "\n", skip_spaces: bool = False
) -> tuple[pl.DataFrame, int] | None:
    """Split ``text`` of ``lines`` lines into columns; return them and the size of the longest cell in bytes.

    ``delimiter`` and ``end`` are one ASCII character each. None if a line has more or fewer cells, or a part of the
    text is not UTF-8. No text is copied.
    """
    if (code := library()) is None or not names or not _is_utf8(text):
        return None
    views = [np.empty((lines, 2), np.int64) for _ in names]
    places = (ctypes.c_void_p * len(names))(*(column.ctypes.data for column in views))
    longest = ctypes.c_int64()
    count = code.split(
        text, len(text), delimiter.encode(), end.encode(), len(names), places, lines, skip_spaces, byref(longest)
    )  # fmt: skip
    if count != lines:
        return None
    buffer = pa.py_buffer(text)
    columns = [_text(column, count, buffer).alias(name) for name, column in zip(names, views, strict=True)]
    return pl.DataFrame(columns), longest.value


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
    column.kept = array, places
    return column


@dataclass(frozen=True, slots=True)
class Quick:
    """Values of a column."""

    values: pl.Series
    """Null of an empty, missing or odd cell."""
    odd: Ints
    """Rows of cells that are not simple."""


def _result(count: int, dtype: npt.DTypeLike) -> Converted:
    values, odd = np.empty(count, dtype), np.empty(count, np.int64)
    valid = np.zeros((count + 7) // 8, np.uint8)
    result = Converted(values.ctypes.data, valid.ctypes.data, odd.ctypes.data)
    result.kept = values, valid, odd
    return result


def _series(result: Converted, name: str, kind: pa.DataType) -> pl.Series:
    values, valid, _ = result.kept
    buffers = [pa.py_buffer(valid) if result.nulls else None, pa.py_buffer(values)]
    return pl.Series(name, pl.from_arrow(pa.Array.from_buffers(kind, len(values), buffers, result.nulls)))


def _quick(function: str, cells: pl.Series, kind: pa.DataType, *arguments: object) -> Quick | None:
    if (code := library()) is None or cells.dtype != pl.String:
        return None
    column, result = _column(cells), _result(len(cells), np.float64 if kind == pa.float64() else np.int64)
    getattr(code, function)(byref(column), byref(result), *arguments)
    return Quick(_series(result, cells.name, kind), result.kept[2][: result.odds])


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
