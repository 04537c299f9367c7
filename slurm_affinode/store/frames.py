"""Between frames and rows: the form in which the databases hold a frame, and back.

Stored form: times are UTC seconds (``Int64``), booleans 0 or 1, texts without NUL (PostgreSQL has no such character),
floats without NaN. Everything else is as in the schema.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from slurm_affinode.errors import InputError
from slurm_affinode.slurm.schema import conform
from slurm_affinode.store.tables import KEY_LENGTHS

Schema = Mapping[str, pl.DataType]


def stored_dtype(dtype: pl.DataType) -> pl.DataType:
    """How a column of ``dtype`` is held."""
    if isinstance(dtype, pl.Datetime):
        return pl.Int64()
    return pl.Int8() if isinstance(dtype, pl.Boolean) else dtype


def to_stored(frame: pl.DataFrame, schema: dict[str, pl.DataType], key: Sequence[str]) -> pl.DataFrame:
    """``frame`` in stored form, with exactly the columns of ``schema``.

    Raises ``InputError`` for a record whose key is incomplete or too long: no database could find it again.
    """
    stored = conform(frame, schema).select(_to_stored(name, dtype) for name, dtype in schema.items())
    for name in key:
        if stored.get_column(name).null_count():
            row = stored.filter(pl.col(name).is_null()).row(0, named=True)
            raise InputError(f"a record has no {name}: {_identity(row, key)}")
        limit = KEY_LENGTHS.get(name)
        if limit is not None and (stored.get_column(name).str.len_chars().max() or 0) > limit:  # type: ignore[operator]
            row = stored.filter(pl.col(name).str.len_chars() > limit).row(0, named=True)
            raise InputError(f"{name} is longer than {limit} characters: {_identity(row, key)}")
    return stored


def _to_stored(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if isinstance(dtype, pl.Datetime):
        return column.dt.epoch("s")
    if isinstance(dtype, pl.Boolean):
        return column.cast(pl.Int8)
    if isinstance(dtype, pl.Float64):
        return column.fill_nan(None)
    if isinstance(dtype, pl.String):
        return column.str.replace_all("\0", "\N{REPLACEMENT CHARACTER}", literal=True)
    return column


def _identity(row: Mapping[str, Any], key: Sequence[str]) -> str:
    return ", ".join(f"{name} {str(row[name])[:40]}" for name in key if row[name] is not None)


def from_rows(rows: Iterable[Sequence[Any]], schema: Schema) -> pl.DataFrame:
    """A frame in stored form of ``rows`` (tuples in the order of ``schema``) as a driver fetched them."""
    # Thousands of tuples at once make the collector of cyclic garbage run again and again, to no avail.
    collecting = gc.isenabled()
    gc.disable()
    try:
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    finally:
        if collecting:
            gc.enable()
    return pl.DataFrame(
        [
            pl.Series(name, values, dtype=stored_dtype(dtype))
            for (name, dtype), values in zip(schema.items(), columns, strict=True)
        ]
    )


def from_stored(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """``frame`` with the types of ``schema`` again."""
    return frame.select(_from_stored(name, dtype) for name, dtype in schema.items())


def _from_stored(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if isinstance(dtype, pl.Datetime):
        return pl.from_epoch(column, time_unit="s").cast(pl.Datetime("ms")).dt.replace_time_zone("UTC").alias(name)
    return column.cast(dtype)
