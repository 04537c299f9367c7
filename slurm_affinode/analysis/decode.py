"""Column chunks of Parquet, decoded: LZ4, definition levels, plain and dictionary-coded floats, packed deltas.

The layouts are those of https://parquet.apache.org/docs/file-format/data-pages/encodings/: the hybrid of runs and
bit-packed groups (RLE = 3), PLAIN (0), RLE_DICTIONARY (8), DELTA_BINARY_PACKED (5). Numbers are little-endian.

Compiled code does not check bounds, and a damaged file may say anything: each loop is preceded by the checks that keep
it within its arrays. What they reject makes the function return ``MALFORMED``.

A row group is one call: each change between Python and compiled code is a change of the thread that holds Python's
lock, and two threads that change often wait for one another more than they work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slurm_affinode.analysis import pageheaders
from slurm_affinode.analysis.bits import Bytes, Int, load_eight, varint, word, zigzag
from slurm_affinode.analysis.block import Float32s
from slurm_affinode.analysis.compiled import compiled, inlined
from slurm_affinode.analysis.pageheaders import MALFORMED
from slurm_affinode.analysis.segments import Ints

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
    """A length of LZ4, to which further bytes add where it is 15, and the byte behind them, ``stop`` at most."""
    more = np.uint64(255) if length == 15 else np.uint64(0)
    while more == 255 and at < stop:
        more = np.uint64(data[at])
        length += more
        at += np.uint64(1)
    return length, at


@compiled
def unpack(data: Bytes, out: Bytes) -> Any:
    """Decompress an LZ4 block that fills ``out``; False where it is malformed or does not.

    Layout: ``lz4_Block_format.md`` of LZ4: in turn bytes as they are, and a match, bytes that were there before.
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
            # Up to seven bytes more than are asked for, which what follows overwrites.
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
            # What is repeated may reach into what is written: each round doubles what can be copied at once.
            while length > 0:
                n = min(length, done - first)
                for j in range(n):
                    out[done + j] = out[first + j]
                done += n
                length -= n
    return False


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
def levels_end(data: Bytes, optional: bool) -> Int:
    """Where the definition levels of a page end, which begin with four bytes of their length; or ``MALFORMED``."""
    if not optional:
        return 0
    end = 4 + np.int64(word(data, 0) & np.uint64(0xFFFFFFFF))
    return end if len(data) >= 4 and end <= len(data) else MALFORMED


@inlined
def copy(data: Bytes, at: Int, out: Float32s) -> None:
    """Fill ``out`` with floats as they are, from byte ``at`` on, which may be any."""
    target, start = out.view(np.uint8), np.uint64(at)
    for j in range(np.uint64(4) * np.uint64(len(out))):
        target[j] = data[start + j]


@compiled
def times(packed: Bytes, pages: Ints, optional: bool, unpacked: Bytes, out: Ints) -> Int:
    """Decode a column chunk of times, none of which is missing, as far as ``out`` takes them; their number.

    ``pages``: rows of ``pageheaders.find``; their lengths lie within ``packed``, and those unpacked within
    ``unpacked``, which is memory to work in. ``optional``: definition levels precede the values.
    """
    done = 0
    for p in range(len(pages)):
        if done == len(out):
            break
        rows = pages[p, pageheaders.VALUES]
        data = unpacked[: pages[p, pageheaders.UNPACKED]]
        if pages[p, pageheaders.DICTIONARY] or pages[p, pageheaders.ENCODING] != _DELTA_BINARY_PACKED:
            return MALFORMED
        if not unpack(packed[pages[p, pageheaders.START] : pages[p, pageheaders.STOP]], data):
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
    """Decode a column chunk of as many floats as ``out`` has; return the number of those that are not missing.

    Where it is one page of plain values, they stay in ``unpacked`` and the byte at which they begin is returned too,
    else -1. As with ``times``; ``dictionary`` and ``dense`` are memory to work in: of a quarter of the length of
    ``unpacked``, and of that of ``out``.
    """
    done, known, entries = 0, 0, 0
    for p in range(len(pages)):
        rows, encoding = pages[p, pageheaders.VALUES], pages[p, pageheaders.ENCODING]
        data = unpacked[: pages[p, pageheaders.UNPACKED]]
        if not unpack(packed[pages[p, pageheaders.START] : pages[p, pageheaders.STOP]], data):
            return MALFORMED, -1
        if pages[p, pageheaders.DICTIONARY]:
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
    """Decode the column chunks of a row group; False where one is malformed.

    ``chunks``, ``pages``: those of ``pageheaders.find``. The first chunk is of times, the last of the times of the row
    group behind, of which ``following`` takes the first; between them one of floats for each row of ``values``, of
    which ``found`` takes what ``floats`` returns. Chunks of no bytes are passed over. A row of ``unpacked`` is the
    memory of one chunk.
    """
    page, rows, last = 0, len(time), len(chunks) - 1
    for k in range(len(chunks)):
        if chunks[k, pageheaders.PACKED] == 0:
            continue
        first = page
        while page < len(pages) and pages[page, pageheaders.CHUNK] == k:
            page += 1
        mine, optional = pages[first:page], chunks[k, pageheaders.OPTIONAL] != 0
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
