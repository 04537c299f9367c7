"""Parquet files of GPU samples: columns of the sample schema, or names in the alias table or the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers import parquet_batches
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.lines import reading
from slurm_affinode.metrics.readers.local_time import POSSIBLE
from slurm_affinode.metrics.readers.tables import Layout, TableReader, layout

ROWS_AT_ONCE = 500_000
_DAYS = 366 * 10_000
_UNITS_A_DAY = {"ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def read(path: Path, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None) -> Iterator[pl.DataFrame]:
    """Yield the samples of one file. Raises ``InputError`` if it is not Parquet or has no metric."""
    try:
        with reading(notes.name), parquet_batches.opened(path, notes.name) as file:
            header = file.schema_arrow.names
            places = layout(header, notes, options)
            if not file.metadata.num_rows:
                raise InputError("has columns and no rows", where=notes.name)
            indexes = (places.time, places.metric, places.value, *places.parts.values())
            expected = sorted(
                {*(index for index, _ in places.values.values()), *(index for index in indexes if index is not None)}
            )
            quiet = ReadingNotes(notes.name, notes.problems, notes.problem_count, decisions=notes.decisions)
            columns = [header[index] for index in expected]
            table = TableReader(columns, quiet, options, fallback_node)
            first = 1
            _check_names(columns, header, notes)
            for batch in parquet_batches.batches(file, ROWS_AT_ONCE, columns, notes.name):
                rows = pl.DataFrame(pl.from_arrow(_in_utc(batch)))
                yield from table.rows(_as_cells(rows, first, table.layout))
                first += len(rows)
            yield from table.rest()
            notes.problem_count = quiet.problem_count
            notes.unknown.update(quiet.unknown)
    except (pa.ArrowException, pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise InputError(f"is damaged or not a Parquet file: {one_line(error, 200)}", where=notes.name) from error


_EXACT = (pl.Float64, pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
"""Types of numbers that are the same as text: the digits of a Float32 are another Float64."""


def _is_plain_time(times: pl.Series) -> bool:
    """Return whether all ``times`` are possible, with a zone and in whole milliseconds."""
    dtype = times.dtype
    if not isinstance(dtype, pl.Datetime) or dtype.time_zone is None or times.has_nulls():
        return False
    whole = (times.to_physical() % (_UNITS_A_DAY[dtype.time_unit] // _UNITS_A_DAY["ms"]) == 0).all()
    return whole and times.is_between(*POSSIBLE).all()


def _check_names(expected: Sequence[str], header: Sequence[str], notes: ReadingNotes) -> None:
    """Raise ``InputError`` if several columns have the name of a column to be read."""
    count = Counter(header)
    if twice := [name for name in expected if count[name] > 1]:
        raise InputError(f"has {count[twice[0]]} columns called {twice[0]}", where=notes.name)


def _in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert times with a zone to UTC: Polars does not support zones such as ``+01:00``, which pandas writes."""
    columns = [
        column.cast(pa.timestamp(column.type.unit, "UTC"))
        if pa.types.is_timestamp(column.type) and column.type.tz is not None
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _as_cells(rows: pl.DataFrame, first: int, fields: Layout) -> pl.DataFrame:
    """Return the columns as read by ``TableReader``: as text, unless it reads them as they are; times in ISO 8601."""
    values = {fields.value, *(column for column, _ in fields.values.values())}
    columns = []
    for position, name in enumerate(rows.columns):
        if (position in values and rows.schema[name] in _EXACT) or (
            position == fields.time and _is_plain_time(rows[name])
        ):
            columns.append(pl.col(name).alias(f"c{position}"))
            continue
        dtype = rows.schema[name]
        column = pl.col(name)
        if dtype == pl.Date:
            dtype = pl.Datetime("ms")
            column = column.cast(dtype)
        if isinstance(dtype, pl.Datetime):
            # Polars panics on times outside of its calendar.
            far = _UNITS_A_DAY[dtype.time_unit] * _DAYS
            column = pl.when(column.cast(pl.Int64).is_between(-far, far)).then(column)
            if dtype.time_zone is not None:
                column = column.dt.convert_time_zone("UTC").dt.to_string("%Y-%m-%dT%H:%M:%S%.6fZ")
            else:
                column = column.dt.to_string("%Y-%m-%dT%H:%M:%S%.6f")
        elif isinstance(dtype, pl.List):
            column = column.cast(pl.List(pl.String)).list.join(",")
        columns.append(column.cast(pl.String, strict=False).alias(f"c{position}"))
    return rows.select(columns).with_columns(pl.int_range(first, first + len(rows)).alias("number"))
