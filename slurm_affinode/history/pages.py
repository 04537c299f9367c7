"""Where the values of a Parquet column lie in its file: column chunks, and the pages in them.

For a reader that decodes the parts of a history itself, with less work than a general library since they are all
written alike: ``parts`` writes them. What is not as it expects raises ``LayoutError``; then a general library reads.

Sources: the Parquet format, https://parquet.apache.org/docs/file-format/ and ``parquet.thrift`` there (``PageHeader``),
and the compact protocol of Thrift, in which page headers are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

_RLE = 3
"""``Encoding`` of ``parquet.thrift``."""

MOST_BYTES = 64 << 20
"""Chunks that take more, packed or unpacked, are left to a general library: lengths in a damaged file may be any."""

_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_DATA_HEADER, _DICTIONARY_HEADER = 5, 7
_TYPE, _SIZE, _PACKED_SIZE, _CRC = 1, 2, 3, 4
_VALUES, _ENCODING, _LEVEL_ENCODING = 1, 2, 3
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
_DEEPEST = 4


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


class Page(NamedTuple):
    """One page of a chunk, as integers throughout: a list of them is an array."""

    dictionary: int
    """1 where it holds the dictionary rather than rows."""
    values: int
    """Rows, those without a value included; of a dictionary, entries."""
    encoding: int
    start: int
    """Its first byte in the chunk, behind its header."""
    stop: int
    unpacked: int
    """Bytes when decompressed."""


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
    """A column of a row group; None where it has no value, by its statistics."""
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


def pages(content: Sequence[int], chunk: Chunk) -> Iterator[Page]:
    """The pages of a chunk, in order. Raises ``LayoutError``."""
    at = 0
    while at < chunk.packed:
        try:
            header, start = _struct(content, at, _DEEPEST)
            page = _page(header, start)
        except (IndexError, KeyError, TypeError) as error:
            raise LayoutError("a page header") from error
        # Integers of 32 bits, of which none is negative.
        sound = min(page) >= 0 and max(page) < 1 << 31
        if not (sound and page.unpacked <= chunk.unpacked and page.start <= page.stop <= chunk.packed):
            raise LayoutError("lengths in a page header")
        yield page
        at = page.stop


def _page(header: dict[int, Any], start: int) -> Page:
    dictionary = header[_TYPE] == _DICTIONARY_PAGE
    inner = header[_DICTIONARY_HEADER if dictionary else _DATA_HEADER]
    known = dictionary or (header[_TYPE] == _DATA_PAGE and inner[_LEVEL_ENCODING] == _RLE)
    if not known or _CRC in header:
        raise LayoutError("a page of another type")
    return Page(int(dictionary), inner[_VALUES], inner[_ENCODING], start, start + header[_PACKED_SIZE], header[_SIZE])


def _struct(content: Sequence[int], at: int, deepest: int) -> tuple[dict[int, Any], int]:
    """A struct in Thrift's compact protocol: integers and structs by the number of their field; where it ends.

    Of what the headers of pages may have otherwise, texts are skipped.
    """
    if not deepest:
        raise LayoutError("a page header")
    fields: dict[int, Any] = {}
    number = 0
    while head := content[at]:
        kind, at = head & 15, at + 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(content, at)
        if kind in {_I16, _I32, _I64}:
            fields[number], at = _integer(content, at)
        elif kind == _STRUCT:
            fields[number], at = _struct(content, at, deepest - 1)
        elif kind == _BINARY:
            length, at = _unsigned(content, at)
            at += length
        elif kind == _BYTE:
            at += 1
        elif kind not in {_TRUE, _FALSE}:
            raise LayoutError("a page header")
    return fields, at + 1


def _integer(content: Sequence[int], at: int) -> tuple[int, int]:
    value, at = _unsigned(content, at)
    return (value >> 1) ^ -(value & 1), at


def _unsigned(content: Sequence[int], at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise LayoutError("a number in a page header")
