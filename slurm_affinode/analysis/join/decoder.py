"""Decoder of Parquet column chunks: page headers, LZ4, definition levels, floats, packed deltas.

Sources: https://parquet.apache.org/docs/file-format/, ``parquet.thrift`` (``PageHeader``), Thrift's compact protocol,
and https://parquet.apache.org/docs/file-format/data-pages/encodings/ for RLE (3), PLAIN (0), RLE_DICTIONARY (8) and
DELTA_BINARY_PACKED (5). Numbers are little-endian.

Compiled code does not check bounds, and a damaged file may contain anything. Checks before each loop keep it within its
arrays; on a violation the function returns ``MALFORMED``. One call decodes a row group, because each change between
Python and compiled code contends for the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.block import Float32s
from slurm_affinode.analysis.join.compilation import compiled, inlined
from slurm_affinode.analysis.segments import Ints

Bytes = npt.NDArray[np.uint8]
Int = Any
"""A 64-bit integer: one type to Numba, sometimes a NumPy scalar to Python."""

MALFORMED = -1
BEGIN, PACKED, LARGEST, OPTIONAL, CHUNK_WIDTH = range(5)
"""Columns of a table of chunks: first byte; size in bytes, including page headers (0: no chunk); size unpacked; whether
values may be missing, so that definition levels precede the values of each page."""
CHUNK, DICTIONARY, VALUES, ENCODING, START, STOP, UNPACKED, PAGE_WIDTH = range(8)
"""Columns of a table of pages: number of the chunk; 1 for a dictionary page; number of rows, including those without a
value, or of dictionary entries; encoding; first byte after the header; byte after the last; size unpacked, bytes."""

_TYPE, _SIZE, _PACKED_SIZE, _CRC = 1, 2, 3, 4
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_HEADER, _DICTIONARY_HEADER = 0, 2, 5, 7
_INNER = 8
"""Number of header fields, by field number. The fields of the nested data-page or dictionary-page header follow."""
_VALUES, _ENCODING, _LEVEL_ENCODING = _INNER + 1, _INNER + 2, _INNER + 3
_RLE = 3
_NUMBERS = 16
"""Offset, after the fields, of the last field number of each open struct."""
_DEEPEST = 4
FIELDS = _NUMBERS + _DEEPEST
_TRUE, _FALSE, _BYTE, _I16, _I64, _BINARY, _STRUCT = 1, 2, 3, 4, 6, 8, 12
_ABSENT = -1
_MOST = 1 << 31


@inlined
def varint(data: Bytes, at: Int, stop: Int) -> tuple[Int, Int]:
    """Decode an unsigned varint (ULEB128) to an integer with the same 64 bits; return it and its end, or -1."""
    value, shift = np.uint64(0), np.uint64(0)
    behind = -1
    while at < stop and shift < np.uint64(64):
        byte = data[at]
        value |= np.uint64(byte & np.uint8(127)) << shift
        shift += np.uint64(7)
        at += 1
        if byte < 128:
            behind = at
            break
    return np.int64(value), behind


@inlined
def zigzag(value: Int) -> Int:
    """Decode a zigzag-encoded signed integer (sign in the lowest bit)."""
    bits = np.uint64(value)
    return np.int64(bits >> np.uint64(1)) ^ -np.int64(bits & np.uint64(1))


@inlined
def load_eight(data: Bytes, at: np.uint64) -> np.uint64:
    """Load eight bytes as a little-endian number. The compiler turns this into a single load."""
    value = np.uint64(0)
    for k in range(np.uint64(8)):
        value |= np.uint64(data[at + k]) << (k * np.uint64(8))
    return value


@inlined
def word(data: Bytes, at: Int) -> np.uint64:
    """Load up to eight bytes as a little-endian number; bytes beyond the end count as 0."""
    value, start = np.uint64(0), np.uint64(at)
    if at + 8 <= len(data):
        value = load_eight(data, start)
    else:
        for k in range(np.uint64(len(data) - at)):
            value |= np.uint64(data[start + k]) << (k * np.uint64(8))
    return value


@compiled
def header(content: Bytes, at: Int, stop: Int, fields: Ints) -> Int:
    """Read the integers of the page header at byte ``at`` into ``fields``; return its end, or ``MALFORMED``.

    Strings and deeper structs are skipped.
    """
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
    """Fill ``pages`` with the pages of ``chunks``, in order; return their number, or ``MALFORMED``.

    Chunks must lie within ``content``. Malformed: a header is not supported, a length in it exceeds the chunk, or there
    are more pages than rows in ``pages``. ``fields``: buffer of ``FIELDS`` numbers.
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


_PLAIN, _PLAIN_DICTIONARY, _DELTA_BINARY_PACKED, _RLE_DICTIONARY = 0, 2, 5, 8
_NAN = np.float32(np.nan)


@inlined
def copy_eight(source: Bytes, at: np.uint64, out: Bytes, to: np.uint64) -> None:
    """Copy eight bytes at once."""
    value = load_eight(source, at)
    for k in range(np.uint64(8)):
        out[to + k] = np.uint8(value >> (k * np.uint64(8)))


@inlined
def lengthened(length: np.uint64, data: Bytes, at: np.uint64, stop: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Read the rest of an LZ4 length (if it is 15, further bytes are added); return it and the position after it."""
    more = np.uint64(255) if length == 15 else np.uint64(0)
    while more == 255 and at < stop:
        more = np.uint64(data[at])
        length += more
        at += np.uint64(1)
    return length, at


@compiled
def unpack(data: Bytes, out: Bytes) -> Any:
    """Decompress an LZ4 block that fills ``out``; return False if it is malformed or does not fill it.

    Format (``lz4_Block_format.md`` of LZ4): sequences of literals and a match, a copy of earlier output.
    """
    one, two, eight, near, three = np.uint64(1), np.uint64(2), np.uint64(8), np.uint64(64), np.uint64(3)
    at, stop, done, size = np.uint64(0), np.uint64(len(data)), np.uint64(0), np.uint64(len(out))
    while at < stop:
        token = data[at]
        at += one
        length, at = lengthened(np.uint64(token >> 4), data, at, stop)
        if length > stop - at or length > size - done:
            return False
        if length <= near and stop - at >= near and size - done >= near:
            # Copies up to seven bytes too many, which later output overwrites.
            for k in range((length + eight - one) >> three):
                copy_eight(data, at + k * eight, out, done + k * eight)
        else:
            for j in range(length):
                out[done + j] = data[at + j]
        at += length
        done += length
        if at == stop:
            # The last sequence has no match.
            return done == size
        if stop - at < two:
            return False
        distance = np.uint64(data[at]) | (np.uint64(data[at + one]) << eight)
        at += two
        length, at = lengthened(np.uint64(token & 15), data, at, stop)
        length += np.uint64(4)
        if distance == 0 or distance > done or length > size - done:
            return False
        first = done - distance
        if distance >= eight and length <= near and size - done >= near:
            for k in range((length + eight - one) >> three):
                copy_eight(out, first + k * eight, out, done + k * eight)
            done += length
        else:
            # The match may overlap its own output: the length that can be copied at once doubles each round.
            while length > 0:
                n = min(length, done - first)
                for j in range(n):
                    out[done + j] = out[first + j]
                done += n
                length -= n
    return False


@compiled
def count_known(data: Bytes, at: Int, stop: Int, rows: Int) -> Int:
    """Return the number of rows with a value, or ``MALFORMED``. Definition levels: bytes ``at`` to ``stop``."""
    done: Int = 0
    known: Int = 0
    while done < rows:
        header, at = varint(data, at, stop)
        if at < 0 or at >= stop or header < 2:
            return MALFORMED
        length = header >> 1
        if header & 1:
            if length > stop - at:
                return MALFORMED
            n = min(length * 8, rows - done)
            for j in range(n):
                known += (data[at + (j >> 3)] >> np.uint8(j & 7)) & np.uint8(1)
            at += length
        else:
            n = min(length, rows - done)
            level = data[at]
            if level > 1:
                return MALFORMED
            known += n * np.int64(level)
            at += 1
        done += n
    return known


@compiled
def spread(data: Bytes, at: Int, stop: Int, values: Float32s, out: Float32s) -> None:
    """Distribute ``values`` to the rows that have one, by the definition levels; the other rows become NaN.

    The levels are not checked again: ``count_known`` must have counted ``len(values)`` in them.
    """
    done, first, rows = np.uint64(0), np.uint64(0), np.uint64(len(out))
    while done < rows:
        header, at = varint(data, at, stop)
        length = np.uint64(header) >> np.uint64(1)
        if header & 1:
            n = min(length * np.uint64(8), rows - done)
            for j in range(n):
                if (data[np.uint64(at) + (j >> np.uint64(3))] >> np.uint8(j & np.uint64(7))) & np.uint8(1):
                    out[done + j] = values[first]
                    first += np.uint64(1)
                else:
                    out[done + j] = _NAN
            at += np.int64(length)
        else:
            n = min(length, rows - done)
            if data[at]:
                # Unsigned, because support for negative indices would prevent vectorization.
                for j in range(n):
                    out[done + j] = values[first + j]
                first += n
            else:
                out[done : done + n] = _NAN
            at += 1
        done += n


@compiled
def look_up(data: Bytes, at: Int, dictionary: Float32s, out: Float32s) -> Int:
    """Fill ``out`` with dictionary entries; return the number of rows, or ``MALFORMED``.

    At byte ``at``: the bit width of the indices, then the indices (RLE and bit-packed).
    """
    stop, rows, entries = len(data), len(out), len(dictionary)
    if rows == 0:
        return 0
    if at >= stop or data[at] > 32 or entries == 0:
        return MALFORMED
    width = np.int64(data[at])
    at += 1
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    last, largest = np.uint64(entries - 1), np.uint64(0)
    done = 0
    while done < rows:
        header, at = varint(data, at, stop)
        if at < 0 or header < 2:
            return MALFORMED
        length = header >> 1
        if header & 1:
            # Each group of eight indices takes ``width`` bytes.
            length = min(length, ((rows - done) + 7) >> 3)
            if length * width > stop - at:
                return MALFORMED
            n = min(length * 8, rows - done)
            whole = n >> 3 if width <= 8 else 0
            step, base = np.uint64(width), np.uint64(done)
            for g in range(whole):
                eight = word(data, at + g * width)
                for j in range(np.uint64(8)):
                    number = (eight >> (j * step)) & mask
                    largest = max(largest, number)
                    out[base + j] = dictionary[min(number, last)]
                base += np.uint64(8)
            for j in range(whole * 8, n):
                bit = j * width
                number = (word(data, at + (bit >> 3)) >> np.uint64(bit & 7)) & mask
                largest = max(largest, number)
                out[done + j] = dictionary[min(number, last)]
            at += length * width
        else:
            size = (width + 7) >> 3
            if size > stop - at:
                return MALFORMED
            n = min(length, rows - done)
            number = word(data, at) & ((np.uint64(1) << np.uint64(8 * size)) - np.uint64(1))
            largest = max(largest, number)
            out[done : done + n] = dictionary[min(number, last)]
            at += size
        done += n
    return rows if largest <= last else MALFORMED


@compiled
def deltas(data: Bytes, at: Int, rows: Int, out: Ints) -> Int:
    """Fill ``out`` with the first of ``rows`` numbers (DELTA_BINARY_PACKED) at byte ``at``.

    Return ``rows``, or ``MALFORMED``.
    """
    stop = len(data)
    block, at = varint(data, at, stop)
    minis, at = varint(data, at, stop if at >= 0 else -1)
    total, at = varint(data, at, stop if at >= 0 else -1)
    value, at = varint(data, at, stop if at >= 0 else -1)
    if at < 0 or not (0 < block <= 1 << 16 and 0 < minis <= block) or total != rows or len(out) > rows:
        return MALFORMED
    per = block // minis
    if per * minis != block or per & 7:
        return MALFORMED
    wanted, last, done = len(out), zigzag(value), 0
    if wanted:
        out[0] = last
        done = 1
    while done < wanted:
        value, at = varint(data, at, stop)
        if at < 0 or minis > stop - at:
            return MALFORMED
        least, widths = zigzag(value), at
        at += minis
        for m in range(minis):
            if done == wanted:
                break
            width = np.int64(data[widths + m])
            size = (per >> 3) * width
            if width > 64 or size > stop - at:
                return MALFORMED
            n = min(per, wanted - done)
            if width == 0:
                base = np.uint64(done)
                for j in range(np.uint64(n)):
                    out[base + j] = last + np.int64(j + np.uint64(1)) * least
                last += n * least
            else:
                mask = ~np.uint64(0) >> np.uint64(64 - width)
                for j in range(n):
                    bit = j * width
                    first, shift = at + (bit >> 3), np.uint64(bit & 7)
                    delta = word(data, first) >> shift
                    if width + (bit & 7) > 64:
                        delta |= np.uint64(data[first + 8]) << (np.uint64(64) - shift)
                    last += least + np.int64(delta & mask)
                    out[done + j] = last
            at += size
            done += n
    return total


@compiled
def levels_end(data: Bytes, optional: bool) -> Int:
    """Return the end of a page's definition levels, which begin with a four-byte length, or ``MALFORMED``."""
    if not optional:
        return 0
    end = 4 + np.int64(word(data, 0) & np.uint64(0xFFFFFFFF))
    return end if len(data) >= 4 and end <= len(data) else MALFORMED


@inlined
def copy(data: Bytes, at: Int, out: Float32s) -> None:
    """Fill ``out`` with plain floats from byte ``at`` on; any alignment."""
    target, start = out.view(np.uint8), np.uint64(at)
    for j in range(np.uint64(4) * np.uint64(len(out))):
        target[j] = data[start + j]


@compiled
def times(packed: Bytes, pages: Ints, optional: bool, unpacked: Bytes, out: Ints) -> Int:
    """Decode a column chunk of times up to the length of ``out``; return their number, or ``MALFORMED``.

    No time may be missing. ``pages``: rows of ``find``, which must lie within ``packed`` and, unpacked, fit into the
    buffer ``unpacked``. ``optional``: definition levels precede the values.
    """
    done = 0
    for p in range(len(pages)):
        if done == len(out):
            break
        rows = pages[p, VALUES]
        data = unpacked[: pages[p, UNPACKED]]
        if pages[p, DICTIONARY] or pages[p, ENCODING] != _DELTA_BINARY_PACKED:
            return MALFORMED
        if not unpack(packed[pages[p, START] : pages[p, STOP]], data):
            return MALFORMED
        at = levels_end(data, optional)
        if at < 0 or (optional and count_known(data, 4, at, rows) != rows):
            return MALFORMED
        n = min(rows, len(out) - done)
        if deltas(data, at, rows, out[done : done + n]) < 0:
            return MALFORMED
        done += n
    return done


@compiled
def floats(  # noqa: PLR0917
    packed: Bytes, pages: Ints, optional: bool, unpacked: Bytes, dictionary: Float32s, dense: Float32s, out: Float32s
) -> tuple[Int, Int]:
    """Decode a column chunk of ``len(out)`` floats; return the number of present values, or ``MALFORMED``, and -1.

    A single page of plain, aligned values, none missing, is left in ``unpacked``; its first byte is returned instead of
    -1. Other parameters are as in ``times``. ``dictionary`` and ``dense`` are buffers: a quarter of the length of
    ``unpacked``, and the length of ``out``.
    """
    done, known, entries = 0, 0, 0
    for p in range(len(pages)):
        rows, encoding = pages[p, VALUES], pages[p, ENCODING]
        data = unpacked[: pages[p, UNPACKED]]
        if not unpack(packed[pages[p, START] : pages[p, STOP]], data):
            return MALFORMED, -1
        if pages[p, DICTIONARY]:
            if encoding not in (_PLAIN, _PLAIN_DICTIONARY) or rows > len(data) >> 2:
                return MALFORMED, -1
            entries = rows
            copy(data, 0, dictionary[:entries])
            continue
        at = levels_end(data, optional)
        if at < 0 or rows > len(out) - done:
            return MALFORMED, -1
        here = count_known(data, 4, at, rows) if optional else rows
        if here < 0:
            return MALFORMED, -1
        target = out[done : done + rows]
        values = target if here == rows else dense[:here]
        if encoding == _PLAIN:
            if here > (len(data) - at) >> 2:
                return MALFORMED, -1
            if here == len(out) and at & 3 == 0:
                return here, at
            copy(data, at, values)
        elif encoding in (_RLE_DICTIONARY, _PLAIN_DICTIONARY):
            if look_up(data, at, dictionary[:entries], values) < 0:
                return MALFORMED, -1
        else:
            return MALFORMED, -1
        if here < rows:
            spread(data, 4, at, values, target)
        done += rows
        known += here
    return (known if done == len(out) else MALFORMED), -1


@compiled
def row_group(  # noqa: PLR0917
    packed: Bytes,
    chunks: Ints,
    pages: Ints,
    unpacked: Any,
    dictionary: Float32s,
    dense: Float32s,
    time: Ints,
    values: Float32s,
    following: Ints,
    found: Ints,
) -> bool:
    """Decode the column chunks of a row group; return False if one is malformed.

    ``chunks``, ``pages``: as in ``find``. The first chunk contains times; the last one the times of the next row group,
    of which ``following`` receives the first. In between there is one chunk of floats per row of ``values``; ``found``
    receives the results of ``floats``. Chunks of 0 bytes are skipped. Each chunk has one row of ``unpacked`` as buffer.
    """
    page, rows, last = 0, len(time), len(chunks) - 1
    for k in range(len(chunks)):
        if chunks[k, PACKED] == 0:
            continue
        first = page
        while page < len(pages) and pages[page, CHUNK] == k:
            page += 1
        mine, optional = pages[first:page], chunks[k, OPTIONAL] != 0
        if k == 0:
            if times(packed, mine, optional, unpacked[k], time) != rows:
                return False
        elif k == last:
            if times(packed, mine, optional, unpacked[k], following) != len(following):
                return False
        else:
            known, start = floats(packed, mine, optional, unpacked[k], dictionary, dense[:rows], values[k - 1][:rows])
            if known < 0:
                return False
            found[k - 1, 0], found[k - 1, 1] = known, start
    return True
