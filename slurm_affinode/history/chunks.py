"""Where the values of a Parquet column lie in its file: its column chunks.

For a reader that decodes the parts of a history itself, with less work than a general library since they are all
written alike: ``parts`` writes them. What is not as it expects raises ``LayoutError``; then a general library reads.

Source: the Parquet format, https://parquet.apache.org/docs/file-format/.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

MOST_BYTES = 64 << 20
"""Chunks that take more, packed or unpacked, are left to a general library: lengths in a damaged file may be any."""


class LayoutError(Exception):
    """The file holds something that is read otherwise, or is damaged."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of a row group."""

    start: int
    """Its first byte in the file."""
    packed: int
    """Bytes in the file, headers of pages included."""
    unpacked: int
    optional: bool
    """Whether values may be missing: then definition levels precede those of each page."""


def columns(metadata: pq.FileMetaData, wanted: dict[str, pa.DataType]) -> dict[str, int]:
    """The numbers of the columns ``wanted``. Raises ``LayoutError`` where one is not there with that type."""
    schema = metadata.schema
    types = schema.to_arrow_schema()
    numbers = {schema.column(number).path: number for number in range(len(schema))}
    for name, kind in wanted.items():
        if name not in numbers or types.field(name).type != kind:
            raise LayoutError(f"no column {name} of type {kind}")
    return {name: numbers[name] for name in wanted}


def chunk(metadata: pq.FileMetaData, row_group: int, column: int) -> Chunk | None:
    """A column of a row group; None where it has no value, by its statistics. Raises ``LayoutError``."""
    rows = metadata.row_group(row_group).num_rows
    found = metadata.row_group(row_group).column(column)
    statistics = found.statistics
    if statistics is not None and statistics.has_null_count and statistics.null_count == rows:
        return None
    described = metadata.schema.column(column)
    start = found.data_page_offset if found.dictionary_page_offset is None else found.dictionary_page_offset
    packed, unpacked = found.total_compressed_size, found.total_uncompressed_size
    if (
        found.compression != "LZ4"
        or described.max_repetition_level
        or described.max_definition_level > 1
        or start < 0
        or not (0 < packed <= MOST_BYTES and 0 < unpacked <= MOST_BYTES)
    ):
        raise LayoutError(f"column {found.path_in_schema}")
    return Chunk(start, packed, unpacked, optional=described.max_definition_level == 1)
