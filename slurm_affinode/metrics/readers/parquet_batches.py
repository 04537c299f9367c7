"""Batches of rows of a Parquet file from elsewhere, with bounded memory.

A small file may hold a billion rows, or one long text that every row repeats. Columns of text therefore stay encoded
with their dictionaries until a slice of limited size is expanded, and a file may not hold more than its size explains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.limits import DOCUMENT_BYTES, NAME_BYTES, UNPACKED_RATIO, most_unpacked
from slurm_affinode.base.text import one_line

SLICE_BYTES = 64 << 20
"""Maximum size of the text of one batch, unless one row has more."""
FEW_VALUES = 10_000_000
"""A file of any size may have as many values in a column; a larger one ``UNPACKED_RATIO`` for each byte."""
_TEXTS = ("STRING", "NONE", "JSON", "ENUM")
"""Logical types of byte arrays that Arrow reads with their dictionaries."""


@contextmanager
def opened(path: Path, where: str) -> Iterator[pq.ParquetFile]:
    """Open a file, the text of which stays encoded.

    Raises ``InputError`` for the file ``where`` if it declares more values or data than its size explains,
    ``pyarrow.ArrowException`` if it is not Parquet, and ``OSError``.
    """
    with path.open("rb") as source:
        columns = _checked(pq.ParquetFile(source), os.fstat(source.fileno()).st_size, where)
        yield pq.ParquetFile(source, read_dictionary=[
            column.path for column in columns
            if column.physical_type == "BYTE_ARRAY" and column.logical_type.type in _TEXTS
        ])  # fmt: skip


def _checked(file: pq.ParquetFile, size: int, where: str) -> list[pq.ColumnSchema]:
    """Return the columns of a file. Raises ``InputError`` if it is larger than its size explains."""
    metadata, columns = file.metadata, [file.schema.column(column) for column in range(len(file.schema))]
    groups = [metadata.row_group(row_group) for row_group in range(metadata.num_row_groups)]
    count, most = metadata.num_rows, max(FEW_VALUES, UNPACKED_RATIO * size)
    unpacked = 0
    for position in range(len(columns)):
        chunks = [group.column(position) for group in groups]
        count = max(count, sum(chunk.num_values for chunk in chunks))
        unpacked += sum(chunk.total_uncompressed_size for chunk in chunks)
    if count > most:
        raise InputError(f"has {count:,} values in a column, at most {most:,} fit in a file of its size", where=where)
    if unpacked > most_unpacked(size):
        raise InputError(f"unpacks to {unpacked:,} bytes, at most {most_unpacked(size):,} fit", where=where)
    if wide := [column.name for column in columns if column.length > NAME_BYTES]:
        name = one_line(wide[0], 80)
        raise InputError(f"has values of a fixed size above {NAME_BYTES:,} bytes in column {name}", where=where)
    return columns


def batches(file: pq.ParquetFile, rows: int, columns: Sequence[str], where: str) -> Iterator[pa.RecordBatch]:
    """Yield the columns of a file from ``opened``, at most ``rows`` and about ``SLICE_BYTES`` of text at once.

    Raises ``InputError`` for the file ``where`` if its text is more than ``NAME_BYTES`` a row on average, and
    ``pyarrow.ArrowException`` if it is damaged.
    """
    for name in columns:
        if not _is_known(file.schema_arrow.field(name).type):
            what = f"has a type in column {one_line(name, 80)} that is not read: only values, lists and structs are"
            raise InputError(what, where=where)
    expanded, read = 0, 0
    for batch in file.iter_batches(rows, columns=list(columns)):
        # A damaged file may have offsets and texts on which libraries crash without validation.
        batch.validate(full=True)
        sizes = sum((_sizes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
        expanded, read = expanded + int(sizes.sum()), read + len(batch)
        if expanded > (most := max(DOCUMENT_BYTES, NAME_BYTES * read)):
            raise InputError(
                f"unpacks to {expanded:,} bytes of text in {read:,} rows, at most {most:,} fit", where=where
            )
        ends = np.cumsum(sizes)
        first = 0
        while first < len(batch):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + SLICE_BYTES, side="right")))
            yield _plain(batch.slice(first, last - first))
            first = last


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_known(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return _is_known(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_known(field.type) for field in kind)
    return not pa.types.is_nested(kind)


def _sizes(column: pa.Array) -> NDArray[np.int64]:
    """Return the bytes of text in each row of a column."""
    none = np.zeros(len(column), np.int64)
    if pa.types.is_dictionary(column.type):
        lengths = pc.fill_null(pc.take(pc.binary_length(column.dictionary), column.indices), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    if _is_list(column.type):
        ends = np.concatenate([[0], np.cumsum(_sizes(column.values))])
        offsets = column.offsets.to_numpy()
        return np.asarray(ends[offsets[1:]] - ends[offsets[:-1]], np.int64)
    if pa.types.is_struct(column.type):
        return sum((_sizes(field) for field in column.flatten()), none)
    return none


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [column.cast(_without_dictionary(column.type)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    if _is_list(kind):
        of = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return of(_without_dictionary(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _without_dictionary(field.type)) for field in kind])
    return kind.value_type if pa.types.is_dictionary(kind) else kind
