"""Pages of Parquet columns, decoded: definition levels, plain and dictionary-coded floats, times as packed deltas.

The layouts are those of https://parquet.apache.org/docs/file-format/data-pages/encodings/: the hybrid of runs and
bit-packed groups (RLE = 3), PLAIN (0), RLE_DICTIONARY (8), DELTA_BINARY_PACKED (5). Numbers are little-endian.

Compiled code does not check bounds, and a damaged file may say anything: each loop is preceded by the checks that keep
it within its arrays. What they reject makes the function return ``MALFORMED``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.block import Float32s
from slurm_affinode.analysis.compiled import compiled, inlined
from slurm_affinode.analysis.segments import FAR, Ints

Bytes = npt.NDArray[np.uint8]
Int = Any
"""An integer of 64 bits: to Numba one type, to Python sometimes numpy's."""

MALFORMED = -1
_FAR = int(FAR)
_NAN = np.float32(np.nan)


@inlined
def varint(data: Bytes, at: Int, stop: Int) -> tuple[Int, Int]:
    """An unsigned number, seven bits a byte (ULEB128), as the integer of the same 64 bits; where it ends, or -1."""
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
    """A signed number whose sign is in the lowest bit."""
    bits = np.uint64(value)
    return np.int64(bits >> np.uint64(1)) ^ -np.int64(bits & np.uint64(1))


@inlined
def word(data: Bytes, at: Int) -> np.uint64:
    """Eight bytes as a number; as many as there are, before the end."""
    value, start = np.uint64(0), np.uint64(at)
    if at + 8 <= len(data):
        # The compiler makes one load of this.
        for k in range(np.uint64(8)):
            value |= np.uint64(data[start + k]) << (k * np.uint64(8))
    else:
        for k in range(np.uint64(len(data) - at)):
            value |= np.uint64(data[start + k]) << (k * np.uint64(8))
    return value


@compiled
def lz4_size(data: Bytes) -> Int:
    """The length of what an LZ4 block holds, by its sequences alone, or ``MALFORMED``.

    A decompressor that is told the length does not say when there is less. Layout: ``lz4_Block_format.md`` of LZ4.
    """
    at: Int = 0
    size: Int = 0
    stop = len(data)
    while at < stop:
        token = data[at]
        at += 1
        literals: Int = np.int64(token >> 4)
        if literals == 15:
            more: Int = 255
            while more == 255:
                if at >= stop:
                    return MALFORMED
                more = np.int64(data[at])
                literals += more
                at += 1
        at += literals
        size += literals
        if at >= stop:
            # The last sequence has no match.
            return size if at == stop else MALFORMED
        at += 2
        match: Int = np.int64(token & 15)
        if match == 15:
            more = 255
            while more == 255:
                if at >= stop:
                    return MALFORMED
                more = np.int64(data[at])
                match += more
                at += 1
        size += match + 4
    return MALFORMED


@compiled
def count_known(data: Bytes, at: Int, stop: Int, rows: Int) -> Int:
    """The number of rows that have a value, by their definition levels in the bytes ``at`` to ``stop``."""
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
    """Put ``values``, the rows that have one, where the definition levels say; NaN where there is none.

    ``count_known`` has found that many in the same levels: they are not checked again.
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
                # Unsigned, so that no index can count from the end: that would stand in the way of vector instructions.
                for j in range(n):
                    out[done + j] = values[first + j]
                first += n
            else:
                out[done : done + n] = _NAN
            at += 1
        done += n


@compiled
def look_up(data: Bytes, at: Int, dictionary: Float32s, out: Float32s) -> Int:
    """Fill ``out`` with entries of a dictionary. Their numbers begin with their width in bits at byte ``at``."""
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
            # Groups of eight take ``width`` bytes each.
            length = min(length, ((rows - done) + 7) >> 3)
            if length * width > stop - at:
                return MALFORMED
            n = min(length * 8, rows - done)
            if width <= 8:
                whole = n >> 3
                step = np.uint64(width)
                base = np.uint64(done)
                for g in range(whole):
                    eight = word(data, at + g * width)
                    for j in range(np.uint64(8)):
                        number = (eight >> (j * step)) & mask
                        largest = max(largest, number)
                        out[base + j] = dictionary[min(number, last)]
                    base += np.uint64(8)
                rest = whole * 8
            else:
                rest = 0
            for j in range(rest, n):
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
def times(data: Bytes, at: Int, rows: Int, out: Ints) -> Int:
    """Fill ``out`` with the first of ``rows`` packed deltas (DELTA_BINARY_PACKED), which begin at byte ``at``."""
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
def in_order(times: Ints, row: Int, ends: Ints) -> bool:
    """Whether the times of a block, of which the first row has number ``row``, ascend within each piece (``ends``: the
    rows behind them). The loops of ``scalar`` rely on that; a damaged file can say otherwise."""
    count, begin = len(times), 0
    piece = np.searchsorted(ends, row, side="right")
    while begin < count:
        if piece == len(ends):
            return False
        stop = min(ends[piece] - row, count)
        wrong = 0
        for j in range(np.uint64(begin), np.uint64(stop - 1)):
            wrong += times[j + np.uint64(1)] <= times[j]
        if wrong or times[begin] <= -_FAR or times[stop - 1] >= _FAR:
            return False
        begin = stop
        piece += 1
    return True
