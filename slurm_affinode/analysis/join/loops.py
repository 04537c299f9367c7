"""The join of samples and cells as loops over pieces, cells and samples, written for Numba.

Samples are sorted by (device, time), and cells (``segments``) are few, so there is no hashing and no search per sample.
Values are 32-bit floats, as stored; sums are 64-bit. The time in each activity class is the length of its stretches
without a gap, exact in milliseconds.

Compiled, the loops take a fraction of the time needed to read the samples. The inner loops are simple and run on slices
that begin at 0, so that the compiler vectorizes them (a factor of five). Uncompiled, functions of ``arrays`` take the
place of the loops over samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.block import IDLE, Classes, Float32s, Int32s
from slurm_affinode.analysis.join import arrays
from slurm_affinode.analysis.join.compilation import compiled, inlined, uncompiled
from slurm_affinode.analysis.segments import FAR, Flags, Floats, Ints

_FAR = int(FAR)

UTIL, FB, POWER = 4, 6, 9
"""First column of each metric in ``result.SUMS``: value x time, then the time with a value, then (except for UTIL)
value x time while idle."""

Words = npt.NDArray[np.uint64]


class Values(NamedTuple):
    """The rows of a block. A metric that is missing in the block is all NaN."""

    time: Ints
    present: Ints
    """For ``util``, ``fb``, ``power``: 0 if missing in the whole block, 1 if some values are missing, 2 if none is."""
    util: Float32s
    engine: Float32s
    sm: Float32s
    tensor: Float32s
    dram: Float32s
    fb: Float32s
    power: Float32s


class Stretches(NamedTuple):
    """``block.Pieces``."""

    device: Ints
    row: Ints
    end: Ints
    step: Ints
    limit: Floats
    next_time: Ints
    first_time: Ints
    reach: Ints


class Timeline(NamedTuple):
    """``segments.Cells``."""

    offset: Ints
    """First cell of each device, followed by the number of cells."""
    start: Ints
    end: Ints
    earliest: Ints
    latest: Ints
    inside: Flags
    held: Flags
    owner_offset: Ints
    owners: Ints


class LoopSums(NamedTuple):
    """Sums of one thread."""

    sums: Floats
    peak: Int32s
    """Bits of 32-bit floats; -1 if there is no value."""
    partly_cell: Ints
    partly_sums: Floats
    partly_time: Ints
    counters: Ints
    """Number of ``partly_*`` rows, gaps, ms in gaps, samples within the interval."""


class Open(NamedTuple):
    """Closed and open idle windows. All fields but the last three have one element per allocation."""

    owner_start: Ints
    counted: Flags
    begin: Ints
    """Start of the open window; likewise ``end`` and ``share``."""
    end: Ints
    share: Floats
    windows: Ints
    """Number of closed windows."""
    longest: Ints
    """Length of the longest closed window."""
    bin_counts: Ints
    bin_share: Floats
    bounds: Ints
    """Bounds of the bins, ms."""


class LoopBuffers(NamedTuple):
    """Buffers of one thread for the samples being processed."""

    weight: Int32s
    activity: Classes
    words: Words
    """The memory of ``activity``, eight classes per word."""
    idle: Ints
    """Idle time: rows of cell, begin, end, and the time since which an allocation must have held the device."""


@uncompiled(arrays.ascends)
@inlined
def ascends(times: Ints, begin: int, stop: int) -> bool:
    """Return whether each time is later than the one before it, in the rows ``begin`` to ``stop``."""
    wrong = 0
    for j in range(np.uint64(begin), np.uint64(stop - 1)):
        wrong += times[j + np.uint64(1)] <= times[j]
    return wrong == 0


@compiled
def in_order(times: Ints, row: int, p: Stretches) -> bool:
    """Return whether the times of a block ascend within each piece, and lie within its interval.

    The loops of this module rely on it; a damaged file may violate it. ``row``: number of the block's first row.
    """
    count, begin = len(times), 0
    piece = np.searchsorted(p.end, row, side="right")
    while begin < count:
        if piece == len(p.end):
            return False
        stop = min(p.end[piece] - row, count)
        if not ascends(times, begin, stop) or times[begin] <= -_FAR or times[stop - 1] >= _FAR:
            return False
        if times[begin] < p.first_time[piece] or times[stop - 1] >= p.reach[piece]:
            return False
        begin = stop
        piece += 1
    return True


CHUNK = 4096
"""Number of samples of a piece that are processed at once."""

_IDLE = IDLE
_INFINITY = np.int32(0x7F800000)
"""Bits of the 32-bit float infinity."""


@inlined
def add(  # noqa: PLR0917
    sums: Floats, row: int, duration: int, activity: int, util: float, fb: float, power: float
) -> None:
    """Add ``duration`` ms of a sample to a row of sums."""
    sums[row, activity] += duration
    if util >= 0:
        sums[row, UTIL] += util * duration
        sums[row, UTIL + 1] += duration
    if fb >= 0:
        sums[row, FB] += fb * duration
        sums[row, FB + 1] += duration
        if activity == _IDLE:
            sums[row, FB + 2] += fb * duration
    if power >= 0:
        sums[row, POWER] += power * duration
        sums[row, POWER + 1] += duration
        if activity == _IDLE:
            sums[row, POWER + 2] += power * duration


# Each of these loops makes its own slices. They begin at 0, so that the compiler can vectorize the loop, and a slice
# that stays within one function costs nothing.


@uncompiled(arrays.weigh)
@compiled
def weigh(times: Ints, first: int, size: int, out: Int32s) -> np.int32:
    """Write the distance of each of ``size`` times to the next one to ``out``; return the largest."""
    time, following, weight = times[first : first + size], times[first + 1 : first + size + 1], out[:size]
    most = np.int32(0)
    for j in range(len(weight)):
        distance = np.int32(following[j] - time[j])
        weight[j] = distance
        most = max(most, distance)
    return most


@uncompiled(arrays.mark_gaps)
@compiled
def mark_gaps(  # noqa: PLR0917
    times: Ints, first: int, size: int, after_last: int, limit: float, step: int, weights: Int32s, kinds: Classes
) -> None:
    """Set the weight of each sample that is followed by a gap to ``step``, and add 128 to its class."""
    for j in range(size):
        after = times[first + j + 1] if j + 1 < size else after_last
        if after - times[first + j] > limit:
            weights[j] = step
            kinds[j] += 128


@uncompiled(arrays.classify)
@compiled
def classify(  # noqa: PLR0917
    v: Values, first: int, size: int, idle_pct: float, low_pct: float, floors: Float32s, out: Classes
) -> None:
    """Write the class of each sample to ``out``: 0 busy, 1 low, 2 idle, 3 unknown.

    ``floors``: floors of the activity columns.
    """
    util, engine, sm = v.util[first : first + size], v.engine[first : first + size], v.sm[first : first + size]
    tensor, dram, kind = v.tensor[first : first + size], v.dram[first : first + size], out[:size]
    util_floor, engine_floor, sm_floor, tensor_floor, dram_floor = floors[0], floors[1], floors[2], floors[3], floors[4]
    none, zero = np.float32(-1), np.float32(0)
    for j in range(len(kind)):
        # Comparisons with NaN are false, so missing values are ignored. Values at or below their floor are 0.
        x = engine[j] if engine[j] > engine_floor else (zero if engine[j] <= engine_floor else none)
        y = sm[j] if sm[j] > sm_floor else (zero if sm[j] <= sm_floor else none)
        x = y if y > x else x  # noqa: FURB136, PLR1730, RUF100
        y = tensor[j] if tensor[j] > tensor_floor else (zero if tensor[j] <= tensor_floor else none)
        x = y if y > x else x
        y = dram[j] if dram[j] > dram_floor else (zero if dram[j] <= dram_floor else none)
        x = y if y > x else x
        x *= np.float32(100)
        y = util[j] if util[j] > util_floor else (zero if util[j] <= util_floor else none)
        x = y if y > x else x
        kind[j] = np.uint8(x <= idle_pct) + np.uint8(x <= low_pct) + np.uint8(x < 0)


@uncompiled(arrays.sum_up)
@inlined
def sum_up(  # noqa: PLR0917
    values: Float32s,
    low: int,
    high: int,
    offset: int,
    weights: Int32s,
    kinds: Classes,
    sums: Floats,
    cell: int,
    column: int,
) -> None:
    """Add value x time, time with a value, and value x time while idle to three columns of a row of sums.

    The values are those of the rows ``low`` to ``high`` of a chunk that begins at row ``offset``.
    """
    total, known, while_idle = 0.0, 0, 0.0
    # Unsigned, because support for negative indices would also prevent vectorization.
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        value = values[base + j]
        there = value >= 0
        product = np.float64(value) * weights[j] if there else 0.0
        total += product
        known += weights[j] if there else 0
        while_idle += product if kinds[j] & 127 == 2 else 0.0
    sums[cell, column] += total
    sums[cell, column + 1] += known
    sums[cell, column + 2] += while_idle


@uncompiled(arrays.sum_complete)
@inlined
def sum_complete(  # noqa: PLR0917
    values: Float32s,
    low: int,
    high: int,
    offset: int,
    weights: Int32s,
    kinds: Classes,
    sums: Floats,
    cell: int,
    column: int,
) -> None:
    """Like ``sum_up``, if no value is missing. The caller adds the time with a value, which is all time."""
    total, while_idle = 0.0, 0.0
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        product = np.float64(values[base + j]) * weights[j]
        total += product
        while_idle += product if kinds[j] & 127 == 2 else 0.0
    sums[cell, column] += total
    sums[cell, column + 2] += while_idle


@uncompiled(arrays.sum_plainly)
@inlined
def sum_plainly(  # noqa: PLR0917
    values: Float32s, low: int, high: int, offset: int, weights: Int32s, sums: Floats, cell: int
) -> None:
    """Add utilization x time; no value is missing."""
    total = 0.0
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        total += np.float64(values[base + j]) * weights[j]
    sums[cell, UTIL] += total


@uncompiled(arrays.sum_known)
@inlined
def sum_known(  # noqa: PLR0917
    values: Float32s, low: int, high: int, offset: int, weights: Int32s, sums: Floats, cell: int
) -> None:
    """Add utilization x time, and the time with a value."""
    total, known = 0.0, 0
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        value = values[base + j]
        there = value >= 0
        total += np.float64(value) * weights[j] if there else 0.0
        known += weights[j] if there else 0
    sums[cell, UTIL] += total
    sums[cell, UTIL + 1] += known


@uncompiled(arrays.raise_peak)
@inlined
def raise_peak(bits: Int32s, first: int, last: int, peaks: Int32s, cell: int) -> None:
    """Raise the peak of ``cell`` to the largest value in the rows ``first`` to ``last``.

    ``bits`` and ``peaks`` are the bits of 32-bit floats, as integers. For non-negative floats the order is the same,
    and NaN is above infinity. The compiler vectorizes comparisons of integers, which is ten times as fast.
    """
    most = np.int32(-1)
    for row in range(np.uint64(first), np.uint64(last)):
        most = max(most, bits[row] if bits[row] <= _INFINITY else np.int32(-1))
    peaks[cell] = max(peaks[cell], most)


@uncompiled(arrays.change)
@inlined
def change(kinds: Classes, words: Words, at: int, high: int) -> np.int64:
    """Return the first row from ``at`` on, before ``high``, with another class than row ``at - 1``, else ``high``."""
    j, end, kind = np.uint64(at), np.uint64(high), kinds[at - 1]
    eight = np.uint64(kind) * np.uint64(0x0101010101010101)
    one, step, rest, by_eight = np.uint64(1), np.uint64(8), np.uint64(7), np.uint64(3)
    while j < end and kinds[j] == kind:
        # ``words`` compares eight classes at a time.
        if j & rest == np.uint64(0) and j + step <= end and words[j >> by_eight] == eight:
            j += step
        else:
            j += one
    return np.int64(j)


@compiled
def first_cell(starts: Ints, low: int, high: int, time: int) -> int:
    """Return the cell that contains ``time``, among the cells ``low`` to ``high``."""
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= time:
            low = middle
        else:
            high = middle
    return low


@compiled
def behind(time: Ints, first: int, stop: int, end: int, step: int) -> int:
    """Return the first row of ``first < row < stop`` with ``time[row] >= end``, else ``stop``."""
    if stop == first or time[stop - 1] < end:
        return stop
    # Samples are almost evenly spaced: interpolate, widen the range until it contains the row, then bisect.
    guess = min(max(first + (end - time[first]) // max(step, 1), first), stop - 1)
    low, high, reach = guess, guess, 1
    while low > first and time[low] >= end:
        low = max(low - reach, first)
        reach *= 2
    reach = 1
    while time[high] < end:
        high = min(high + reach, stop - 1)
        reach *= 2
    while high - low > 1:
        middle = (low + high) >> 1
        if time[middle] < end:
            low = middle
        else:
            high = middle
    found: int = high if time[low] < end else low
    return found


@inlined
def record(events: Ints, at: int, cell: int, begin: int, end: int, taken: int) -> int:  # noqa: PLR0917
    """Append idle time to ``events``, unless its length is 0; return the number of rows in ``events``."""
    if end <= begin:
        return at
    events[at, 0] = cell
    events[at, 1] = begin
    events[at, 2] = end
    events[at, 3] = taken
    return at + 1


@compiled
def fold(  # noqa: PLR0917, PLR0915
    row: int,
    next_time: int,
    v: Values,
    p: Stretches,
    line: Timeline,
    idle_pct: float,
    low_pct: float,
    floors: Float32s,
    s: LoopSums,
    chunk: LoopBuffers,
) -> int:
    """Add the rows of a block to ``s``, and its idle time to ``chunk.idle``; return the number of filled rows there.

    ``row``: number of the first row; ``next_time``: time of the row after the block, if it belongs to the same piece.
    ``chunk.idle`` must have as many rows as the block has rows plus the timeline has cells.

    All work per cell is in one function, because passing the tuples to another one costs more than the work.
    """
    times, ends, sums, peaks = v.time, line.end, s.sums, s.peak
    util, fb, power, weights, kinds = v.util, v.fb, v.power, chunk.weight, chunk.activity
    words, fb_bits = chunk.words, fb.view(np.int32)
    has_util, has_fb, has_power = v.present[0], v.present[1], v.present[2]
    events, event = chunk.idle, 0
    count = len(times)
    partly, gaps, gap_ms, samples = 0, 0, 0, 0
    piece = np.searchsorted(p.end, row, side="right")
    begin = 0
    while begin < count:
        stop = min(p.end[piece] - row, count)
        following = p.next_time[piece] if p.end[piece] - row <= count else next_time
        step, limit, device = p.step[piece], p.limit[piece], p.device[piece]
        cell = first_cell(line.start, line.offset[device], line.offset[device + 1], times[begin])
        while begin < stop:
            # A chunk: rows of one piece.
            behind_chunk = min(begin + len(weights), stop)
            size = behind_chunk - begin
            after_last = times[behind_chunk] if behind_chunk < stop else following
            last_weight = after_last - times[behind_chunk - 1]
            most = weigh(times, begin, size - 1, weights)
            weights[size - 1] = last_weight if last_weight <= limit else step
            classify(v, begin, size, idle_pct, low_pct, floors, kinds)
            if most > limit or last_weight > limit:
                mark_gaps(times, begin, size, after_last, limit, step, weights, kinds)
            low = 0
            while low < size:
                # Rows ``low`` to ``high`` of the chunk are in one cell.
                while times[begin + low] >= ends[cell]:
                    cell += 1
                end = ends[cell]
                high = behind(times, begin + low, behind_chunk, end, step) - begin
                if has_util == 2:
                    sum_plainly(util, low, high, begin, weights, sums, cell)
                elif has_util:
                    sum_known(util, low, high, begin, weights, sums, cell)
                if has_fb == 2:
                    sum_complete(fb, low, high, begin, weights, kinds, sums, cell, FB)
                elif has_fb:
                    sum_up(fb, low, high, begin, weights, kinds, sums, cell, FB)
                if has_fb:
                    raise_peak(fb_bits, begin + low, begin + high, peaks, cell)
                if has_power == 2:
                    sum_complete(power, low, high, begin, weights, kinds, sums, cell, POWER)
                elif has_power:
                    sum_up(power, low, high, begin, weights, kinds, sums, cell, POWER)
                if line.inside[cell]:
                    samples += high - low
                run_class, run_begin = -1, 0
                lost = 0
                j = low
                while j < high:
                    # A run begins, or the gap after a row ends one.
                    kind = kinds[j]
                    activity = kind & 127
                    if activity != run_class:
                        if run_class >= 0:
                            sums[cell, run_class] += times[begin + j] - run_begin
                            if run_class == _IDLE:
                                event = record(events, event, cell, run_begin, times[begin + j], run_begin)
                        run_class, run_begin = activity, times[begin + j]
                    if kind >= 128:
                        until = times[begin + j] + step
                        after = times[begin + j + 1] if j + 1 < size else after_last
                        # Time in the gap for which a counted run held the device.
                        held, c = 0, cell
                        while after < _FAR:
                            if line.held[c]:
                                held += max(0, min(after, ends[c]) - max(until, line.start[c]))
                            if ends[c] >= after:
                                break
                            c += 1
                        gaps += held > 0
                        gap_ms += held
                        if j + 1 < high:
                            lost += after - until
                            sums[cell, run_class] += until - run_begin
                            if run_class == _IDLE:
                                event = record(events, event, cell, run_begin, until, run_begin)
                            run_class = -1
                    j = change(kinds, words, j + 1, high) if kind < 128 else j + 1
                last = begin + high - 1
                taken = times[last]
                reach = taken + weights[high - 1]
                # Time of all these rows; as in the sums of values, the last sample is not clipped yet.
                in_all = reach - times[begin + low] - lost
                if has_util == 2:
                    sums[cell, UTIL + 1] += in_all
                if has_fb == 2:
                    sums[cell, FB + 1] += in_all
                if has_power == 2:
                    sums[cell, POWER + 1] += in_all
                sums[cell, run_class] += min(reach, end) - run_begin
                if run_class == _IDLE:
                    event = record(events, event, cell, run_begin, min(reach, end), run_begin)
                c = cell
                if reach > end:
                    # The sums of values contain the whole last sample, the time only its part in the cell.
                    sums[cell, run_class] += reach - end
                    add(sums, cell, end - reach, run_class, util[last], fb[last], power[last])
                while ends[c] < reach:
                    # The rest counts for the following cells, if their owners held the device at the sample's time.
                    c += 1
                    duration = min(reach, ends[c]) - line.start[c]
                    if taken >= line.earliest[c]:
                        if taken >= line.latest[c]:
                            add(sums, c, duration, run_class, util[last], fb[last], power[last])
                        else:
                            n = s.counters[0] + partly
                            s.partly_cell[n] = c
                            s.partly_time[n] = taken
                            add(s.partly_sums, n, duration, run_class, util[last], fb[last], power[last])
                            partly += 1
                        if run_class == _IDLE:
                            event = record(events, event, c, line.start[c], line.start[c] + duration, taken)
                low = high
            begin = behind_chunk
        piece += 1
    s.counters[0] += partly
    s.counters[1] += gaps
    s.counters[2] += gap_ms
    s.counters[3] += samples
    return event


@inlined
def end_window(allocation: int, o: Open) -> None:
    """Close and count the open idle window of ``allocation``."""
    length = o.end[allocation] - o.begin[allocation]
    if length > 0:
        o.windows[allocation] += 1
        o.longest[allocation] = max(o.longest[allocation], length)
        if o.counted[allocation]:
            at = 0
            for bound in o.bounds:
                at += length >= bound
            o.bin_counts[at] += 1
            o.bin_share[at] += o.share[allocation]


@compiled
def give_idle(idle: Ints, line: Timeline, o: Open) -> None:
    """Attribute idle time, in row order, to the owners of its cell that held the device early enough.

    The time extends their open windows, or closes them and begins new ones.
    """
    for e in range(len(idle)):
        cell, begin, end, taken = idle[e, 0], idle[e, 1], idle[e, 2], idle[e, 3]
        low, high = line.owner_offset[cell], line.owner_offset[cell + 1]
        for n in range(low, high):
            a = line.owners[n]
            if o.owner_start[a] > taken:
                continue
            if o.end[a] == begin:
                o.share[a] += (end - begin) / (high - low)
            else:
                end_window(a, o)
                o.begin[a] = begin
                o.share[a] = (end - begin) / (high - low)
            o.end[a] = end


@compiled
def end_all_windows(o: Open) -> None:
    """Close and count the idle windows that are open after the last block."""
    for allocation in range(len(o.begin)):
        end_window(allocation, o)
