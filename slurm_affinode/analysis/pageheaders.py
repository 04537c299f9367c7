"""The pages of Parquet column chunks, found by a compiled loop: each page begins with a header that gives its length.

Sources: the Parquet format, https://parquet.apache.org/docs/file-format/ and ``parquet.thrift`` there (``PageHeader``),
and the compact protocol of Thrift, in which page headers are written.
"""

from __future__ import annotations

import numpy as np

from slurm_affinode.analysis.bits import Bytes, Int, varint, zigzag
from slurm_affinode.analysis.compiled import compiled
from slurm_affinode.analysis.segments import Ints

MALFORMED = -1
BEGIN, PACKED, LARGEST, OPTIONAL, CHUNK_WIDTH = range(5)
"""Columns of a table of chunks: first byte; bytes, headers of pages included, 0: not there; bytes unpacked; whether
values may be missing, so that definition levels precede those of each page."""
CHUNK, DICTIONARY, VALUES, ENCODING, START, STOP, UNPACKED, PAGE_WIDTH = range(8)
"""Columns of a table of pages: number of the chunk; 1 where the page holds the dictionary rather than rows; rows, those
without a value included, or entries of the dictionary; encoding; first byte behind the header; byte behind the last;
bytes unpacked."""

_TYPE, _SIZE, _PACKED_SIZE, _CRC = 1, 2, 3, 4
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_HEADER, _DICTIONARY_HEADER = 0, 2, 5, 7
_INNER = 8
"""Fields of the header by their number; behind these, those of the struct in it that says more."""
_VALUES, _ENCODING, _LEVEL_ENCODING = _INNER + 1, _INNER + 2, _INNER + 3
_RLE = 3
_NUMBERS = 16
"""Behind the fields, the number of the last field of each struct that is open."""
_DEEPEST = 4
FIELDS = _NUMBERS + _DEEPEST
_TRUE, _FALSE, _BYTE, _I16, _I64, _BINARY, _STRUCT = 1, 2, 3, 4, 6, 8, 12
_ABSENT = -1
_MOST = 1 << 31


@compiled
def header(content: Bytes, at: Int, stop: Int, fields: Ints) -> Int:
    """Read the integers of a page header, which begins at byte ``at``, into ``fields``; where it ends, or
    ``MALFORMED``. Texts and what lies deeper are skipped."""
    fields[:_NUMBERS] = _ABSENT
    fields[_NUMBERS] = 0
    depth = 0
    while depth >= 0:
        if at >= stop:
            return MALFORMED
        head = np.int64(content[at])
        at += 1
        if head == 0:
            depth -= 1
            continue
        kind, number = head & 15, fields[_NUMBERS + depth] + (head >> 4)
        if head < 16:
            value, at = varint(content, at, stop)
            number = zigzag(value)
        if at < 0:
            return MALFORMED
        fields[_NUMBERS + depth] = number
        if _I16 <= kind <= _I64:
            value, at = varint(content, at, stop)
            if at < 0:
                return MALFORMED
            outer = fields[_NUMBERS]
            if depth == 0 and 0 <= number < _INNER:
                fields[number] = zigzag(value)
            elif depth == 1 and 0 <= number < _INNER and outer in (_DATA_HEADER, _DICTIONARY_HEADER):
                fields[_INNER + number] = zigzag(value)
        elif kind == _STRUCT:
            depth += 1
            if depth == _DEEPEST:
                return MALFORMED
            fields[_NUMBERS + depth] = 0
        elif kind == _BINARY:
            length, at = varint(content, at, stop)
            if at < 0 or length < 0 or length > stop - at:
                return MALFORMED
            at += length
        elif kind == _BYTE:
            at += 1
        elif kind not in (_TRUE, _FALSE):
            return MALFORMED
    return at


@compiled
def find(content: Bytes, chunks: Ints, pages: Ints, fields: Ints) -> Int:
    """Fill ``pages`` with the pages of ``chunks``, which lie within ``content``, in their order; return their number.

    ``MALFORMED`` where a header is not understood, a length in it leads outside of the chunk, or there are more than
    ``pages`` has rows. ``fields``: memory for ``FIELDS`` numbers.
    """
    count = 0
    for k in range(len(chunks)):
        at = chunks[k, BEGIN]
        stop = at + chunks[k, PACKED]
        while at < stop:
            at = header(content, at, stop, fields)
            if at < 0 or count == len(pages) or fields[_CRC] != _ABSENT:
                return MALFORMED
            dictionary = fields[_TYPE] == _DICTIONARY_PAGE
            if not dictionary and (fields[_TYPE] != _DATA_PAGE or fields[_LEVEL_ENCODING] != _RLE):
                return MALFORMED
            rows, encoding = fields[_VALUES], fields[_ENCODING]
            length, unpacked = fields[_PACKED_SIZE], fields[_SIZE]
            if min(rows, encoding, length, unpacked) < 0 or max(rows, encoding) >= _MOST:
                return MALFORMED
            if length > stop - at or unpacked > chunks[k, LARGEST]:
                return MALFORMED
            page = pages[count]
            page[CHUNK], page[DICTIONARY], page[VALUES], page[ENCODING] = k, dictionary, rows, encoding
            page[START], page[STOP], page[UNPACKED] = at, at + length, unpacked
            count += 1
            at += length
    return count
