"""Inputs and results of tasks as bytes: equal values have equal bytes in every process, and bytes can name no program.

Sets are sorted, mappings keep their order. A dataclass is its name and its fields. Results are read back from files
that others may have written: only numbers, texts, times, arrays, tables and the dataclasses of the caller are made.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta, tzinfo
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import polars as pl

DIGEST_BYTES = 16
_Sink = Callable[[Any], object]
_NUMBER = struct.Struct("<cq")
_FLOAT = struct.Struct("<cd")
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_ARRAY_TYPE = re.compile(r"\|b1|\|[iu]1|[<>][iuf][248]")
_TYPES: dict[str, Any] = {
    str(kind): kind
    for kind in (
        pl.Boolean(), pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16(), pl.UInt32(), pl.UInt64(),
        pl.Float32(), pl.Float64(), pl.Date(),
        *(pl.Duration(unit) for unit in ("ms", "us", "ns")),
        *(pl.Datetime(unit, zone) for unit in ("ms", "us", "ns") for zone in (None, "UTC")),
    )
}  # fmt: skip
"""Types of columns that are stored as numbers, by their text."""
_TEXT = str(pl.String())


def digest(*values: Any) -> str:
    """Return a digest of values that is the same in every process. Raises ``TypeError`` for one without bytes."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        _put(value, hasher.update)
    return hasher.hexdigest()


def encoded(value: Any) -> bytes:
    """Return a value as bytes. Raises ``TypeError`` for functions, queries and others that are not data."""
    pieces: list[Any] = []
    _put(value, pieces.append)
    return b"".join(pieces)


def decoded(content: bytes, classes: Sequence[type]) -> Any:
    """Return the value that ``encoded`` made; dataclasses are those of ``classes``. Raises ``ValueError``.

    Arrays are read-only.
    """
    reader = _Reader(content, {_name(kind): kind for kind in classes})
    try:
        value = reader.value()
    except (struct.error, RecursionError, TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"the value is damaged: {error}") from None
    if reader.unread_bytes:
        raise ValueError("bytes follow the value")
    return value


def _put(value: Any, sink: _Sink) -> None:
    put = _PUT.get(type(value))
    if put is None:
        put = next((put for kind, put in _PUT_BY_BASE.items() if isinstance(value, kind)), None)
    if put is not None:
        put(value, sink)
    elif is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        names = _fields(kind)
        _put_head(b"O", len(names), sink)
        _put_bytes(_name(kind).encode(), sink)
        for name in names:
            _put(getattr(value, name), sink)
    else:
        raise TypeError(f"{type(value).__name__} cannot be the input or the result of a task")


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _put_head(tag: bytes, count: int, sink: _Sink) -> None:
    sink(_NUMBER.pack(tag, count))


def _put_bytes(content: bytes, sink: _Sink) -> None:
    _put_head(b"b", len(content), sink)
    sink(content)


def _put_text(tag: bytes, text: str, sink: _Sink) -> None:
    content = text.encode("utf-8", "surrogatepass")
    _put_head(tag, len(content), sink)
    sink(content)


def _put_int(value: int, sink: _Sink) -> None:
    if _SMALLEST <= value <= _LARGEST:
        sink(_NUMBER.pack(b"i", value))
    else:
        _put_text(b"I", str(value), sink)


def _put_items(tag: bytes, items: Any, sink: _Sink) -> None:
    _put_head(tag, len(items), sink)
    for item in items:
        _put(item, sink)


def _put_mapping(items: Mapping[Any, Any], sink: _Sink) -> None:
    _put_head(b"{", len(items), sink)
    for key, value in items.items():
        _put(key, sink)
        _put(value, sink)


def _put_set(items: Any, sink: _Sink) -> None:
    _put_head(b"<", len(items), sink)
    for content in sorted(map(encoded, items)):
        sink(content)


def _put_array(array: np.ndarray[Any, Any], sink: _Sink) -> None:
    if not _ARRAY_TYPE.fullmatch(array.dtype.str):
        raise TypeError(f"an array of {array.dtype} cannot be the input or the result of a task")
    _put_items(b"A", array.shape, sink)
    _put_text(b"s", array.dtype.str, sink)
    sink(np.ascontiguousarray(array).tobytes())


def _put_scalar(value: np.generic, sink: _Sink) -> None:
    sink(b"g")
    _put_array(np.asarray(value), sink)


def _put_frame(frame: pl.DataFrame, sink: _Sink) -> None:
    _put_items(b"F", frame.get_columns(), sink)


def _put_series(series: pl.Series, sink: _Sink) -> None:
    sink(b"S")
    _put_text(b"s", series.name, sink)
    _put_text(b"s", str(series.dtype), sink)
    present = series.is_not_null()
    _put(None if present.all() else np.packbits(present.to_numpy()), sink)
    if series.dtype == pl.String():
        lengths = series.str.len_bytes().fill_null(0).cast(pl.Int64)
        _put_array(lengths.to_numpy(), sink)
        _put_bytes("".join(series.fill_null("").to_list()).encode(), sink)
    elif str(series.dtype) in _TYPES:
        plain = series.to_physical()
        _put_array(plain.fill_null(value=False if plain.dtype == pl.Boolean() else 0).to_numpy(), sink)
    else:
        raise TypeError(f"a column of {series.dtype} cannot be the input or the result of a task")


def _put_query(query: pl.LazyFrame, sink: _Sink) -> None:
    content = query.serialize()
    _put_head(b"L", len(content), sink)
    sink(content)


def _put_function(function: FunctionType, sink: _Sink) -> None:
    _put_text(b"c", _name(function), sink)


def _put_partial(function: partial[Any], sink: _Sink) -> None:
    _put_items(b"C", (function.func, function.args, function.keywords), sink)


_PUT: dict[type, Callable[[Any, _Sink], object]] = {
    type(None): lambda _, sink: sink(b"N"),
    bool: lambda value, sink: sink(b"T" if value else b"U"),
    int: _put_int,
    float: lambda value, sink: sink(_FLOAT.pack(b"d", value)),
    str: lambda value, sink: _put_text(b"s", value, sink),
    bytes: _put_bytes,
    tuple: lambda value, sink: _put_items(b"(", value, sink),
    list: lambda value, sink: _put_items(b"[", value, sink),
    dict: _put_mapping,
    set: _put_set,
    frozenset: _put_set,
    datetime: lambda value, sink: _put_text(b"D", value.isoformat(), sink),
    date: lambda value, sink: _put_text(b"E", value.isoformat(), sink),
    timedelta: lambda value, sink: _put_items(b"t", (value.days, value.seconds, value.microseconds), sink),
    np.ndarray: _put_array,
    pl.DataFrame: _put_frame,
    pl.Series: _put_series,
    pl.LazyFrame: _put_query,
    FunctionType: _put_function,
    partial: _put_partial,
}
_PUT_BY_BASE: dict[type, Callable[[Any, _Sink], object]] = {
    np.generic: _put_scalar,
    Path: lambda value, sink: _put_text(b"p", str(value), sink),
    tzinfo: lambda value, sink: _put_text(b"z", repr(value), sink),
    Mapping: _put_mapping,
}
"""Types with subclasses."""


class _Reader:
    """Reads values from bytes that may be wrong: no length is trusted."""

    def __init__(self, content: bytes, classes: Mapping[str, type]) -> None:
        self._content, self._position, self._classes = content, 0, classes

    @property
    def unread_bytes(self) -> int:
        """Bytes that were not read."""
        return len(self._content) - self._position

    def value(self) -> Any:
        """Read a value. Raises ``ValueError`` and errors of constructors."""
        tag = self._take(1)
        read = _READ.get(tag)
        if read is None:
            raise ValueError(f"{tag!r} is not the begin of a value")
        return read(self)

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= self.unread_bytes:
            raise ValueError("the value is cut off")
        begin = self._position
        self._position += count
        return self._content[begin : self._position]

    def number(self) -> int:
        number: int = struct.unpack("<q", self._take(8))[0]
        return number

    def real(self) -> float:
        number: float = struct.unpack("<d", self._take(8))[0]
        return number

    def blob(self) -> bytes:
        return self._take(self.number())

    def text(self) -> str:
        return self.blob().decode("utf-8", "surrogatepass")

    def items(self) -> list[Any]:
        count = self.number()
        if not 0 <= count <= self.unread_bytes:  # each item has a byte
            raise ValueError("the value is cut off")
        return [self.value() for _ in range(count)]

    def mapping(self) -> dict[Any, Any]:
        count = self.number()
        if not 0 <= count <= self.unread_bytes:
            raise ValueError("the value is cut off")
        return {self.value(): self.value() for _ in range(count)}

    def array(self) -> np.ndarray[Any, Any]:
        shape, name = self.items(), self._typed(str)
        if not _ARRAY_TYPE.fullmatch(name) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("the type or the shape of an array is wrong")
        kind = np.dtype(name)
        content = self._take(math.prod(shape) * kind.itemsize)
        return np.frombuffer(content, kind).reshape(shape)

    def _typed(self, *kinds: type) -> Any:
        value = self.value()
        if type(value) not in kinds:
            raise ValueError("a value has the wrong type")
        return value

    def scalar(self) -> Any:
        return self._typed(np.ndarray)[()]

    def frame(self) -> pl.DataFrame:
        columns = self.items()
        if any(type(column) is not pl.Series for column in columns):
            raise ValueError("a column has the wrong type")
        return pl.DataFrame(columns)

    def series(self) -> pl.Series:
        name, kind = self._typed(str), self._typed(str)
        validity, values = self._typed(type(None), np.ndarray), self._typed(np.ndarray)
        if values.ndim != 1:
            raise ValueError("a column has the wrong shape")
        if kind == _TEXT:
            series = pl.Series(name, self._texts(values), pl.String())
        elif kind in _TYPES:
            series = pl.Series(name, values).cast(_TYPES[kind])
        else:
            raise ValueError("a column has the wrong type")
        if validity is None:
            return series
        if validity.dtype != np.uint8 or len(validity) != (len(series) + 7) // 8:
            raise ValueError("a column has the wrong length")
        mask = pl.Series("known", np.unpackbits(validity, count=len(series)).astype(np.bool_))
        return pl.select(pl.when(mask).then(series).alias(name)).to_series()

    def _texts(self, lengths: np.ndarray[Any, Any]) -> list[str]:
        content = self._typed(bytes)
        whole = len(content)
        if lengths.dtype != np.int64 or not ((lengths >= 0) & (lengths <= whole)).all() or lengths.sum() != whole:
            raise ValueError("a column has the wrong length")
        ends = np.cumsum(lengths).tolist()
        return [content[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]

    def record(self) -> Any:
        count, name = self.number(), self._typed(bytes).decode()
        kind: Any = self._classes.get(name)
        if kind is None or count != len(_fields(kind)):
            raise ValueError(f"{name:.100} is not the result of a task")
        return kind(**{field: self.value() for field in _fields(kind)})


_READ: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda _: None,
    b"T": lambda _: True,
    b"U": lambda _: False,
    b"i": _Reader.number,
    b"I": lambda reader: int(reader.text()),
    b"d": _Reader.real,
    b"s": _Reader.text,
    b"b": _Reader.blob,
    b"(": lambda reader: tuple(reader.items()),
    b"[": _Reader.items,
    b"{": _Reader.mapping,
    b"<": lambda reader: frozenset(reader.items()),
    b"D": lambda reader: datetime.fromisoformat(reader.text()),
    b"E": lambda reader: date.fromisoformat(reader.text()),
    b"t": lambda reader: timedelta(*reader.items()),
    b"A": _Reader.array,
    b"g": _Reader.scalar,
    b"F": _Reader.frame,
    b"S": _Reader.series,
    b"p": lambda reader: Path(reader.text()),
    b"O": _Reader.record,
}
"""Tag -> how its value is read. Functions, queries and time zones are inputs only."""
