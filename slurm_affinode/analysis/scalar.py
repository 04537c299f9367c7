"""The join as loops over the samples, written to be compiled by Numba where that is installed.

It computes what ``join`` computes with array operations, from the same arrays and by the same rules: device by device,
cell by cell. As Python it is slow; compiled, it takes a fraction of the time that reading the samples does. The loops
over the samples of a cell are kept so simple, on slices that begin at 0, that the compiler turns them into vector
instructions; measured, that is worth a factor of five.

All functions here stay within what Numba compiles.
"""

from __future__ import annotations

import numpy as np

from slurm_affinode.analysis.block import IDLE, Classes, Float32s, Int32s
from slurm_affinode.analysis.compiled import compiled, inlined
from slurm_affinode.analysis.scalararrays import (
    FB,
    POWER,
    UTIL,
    Chunk,
    State,
    Stretches,
    Timeline,
    Values,
    Words,
)
from slurm_affinode.analysis.segments import FAR, Floats, Ints

CHUNK = 4096
"""Samples of a cell that are worked on at once."""
_FAR = int(FAR)
_IDLE = IDLE
_INFINITY = np.int32(0x7F800000)
"""The bits of a 32-bit float."""


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


# Each of these loops makes its own slices: they begin at 0, which lets the compiler use vector instructions, and a
# slice that lives in one function alone costs nothing.


@compiled
def weigh(times: Ints, first: int, size: int, out: Int32s) -> np.int32:
    """Distance of each of ``size`` times to the following; return the largest."""
    time, following, weight = times[first : first + size], times[first + 1 : first + size + 1], out[:size]
    most = np.int32(0)
    for j in range(len(weight)):
        distance = np.int32(following[j] - time[j])
        weight[j] = distance
        most = max(most, distance)
    return most


@compiled
def classify(  # noqa: PLR0917
    v: Values, first: int, size: int, idle_pct: float, low_pct: float, floors: Float32s, out: Classes
) -> None:
    """The class of each sample: 0 busy, 1 low, 2 idle, 3 unknown. ``floors``: of the activity columns."""
    util, engine, sm = v.util[first : first + size], v.engine[first : first + size], v.sm[first : first + size]
    tensor, dram, kind = v.tensor[first : first + size], v.dram[first : first + size], out[:size]
    util_floor, engine_floor, sm_floor, tensor_floor, dram_floor = floors[0], floors[1], floors[2], floors[3], floors[4]
    none, zero = np.float32(-1), np.float32(0)
    for j in range(len(kind)):
        # A comparison with NaN is false: what is missing takes no part. What is at or below its floor is 0.
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
    """Add value x time, time with a value and value x time while idle of the rows ``low`` to ``high`` of a chunk, which
    begins at the row ``offset``, to three columns of a row of sums."""
    total, known, while_idle = 0.0, 0, 0.0
    # Unsigned, so that no index can count from the end: that, too, would stand in the way of vector instructions.
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
    """The same where no value is missing: the time with a value is all time, which the caller knows."""
    total, while_idle = 0.0, 0.0
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        product = np.float64(values[base + j]) * weights[j]
        total += product
        while_idle += product if kinds[j] & 127 == 2 else 0.0
    sums[cell, column] += total
    sums[cell, column + 2] += while_idle


@inlined
def sum_plainly(  # noqa: PLR0917
    values: Float32s, low: int, high: int, offset: int, weights: Int32s, sums: Floats, cell: int
) -> None:
    """Add utilization x time, where no value is missing."""
    total = 0.0
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        total += np.float64(values[base + j]) * weights[j]
    sums[cell, UTIL] += total


@inlined
def sum_known(  # noqa: PLR0917
    values: Float32s, low: int, high: int, offset: int, weights: Int32s, sums: Floats, cell: int
) -> None:
    """Add utilization x time, and time with a value."""
    total, known = 0.0, 0
    base = np.uint64(offset)
    for j in range(np.uint64(low), np.uint64(high)):
        value = values[base + j]
        there = value >= 0
        total += np.float64(value) * weights[j] if there else 0.0
        known += weights[j] if there else 0
    sums[cell, UTIL] += total
    sums[cell, UTIL + 1] += known


@inlined
def raise_peak(bits: Int32s, first: int, last: int, peaks: Int32s, cell: int) -> None:
    """Raise the peak of ``cell`` to the largest of the values in the rows ``first`` to ``last``.

    ``bits`` and ``peaks`` are the memory of 32-bit floats read as integers: of floats that are not negative the larger
    is the larger integer, what is missing lies above infinity, and integers the compiler compares many at a time,
    ten times as fast.
    """
    most = np.int32(-1)
    for row in range(np.uint64(first), np.uint64(last)):
        most = max(most, bits[row] if bits[row] <= _INFINITY else np.int32(-1))
    peaks[cell] = max(peaks[cell], most)


@inlined
def change(kinds: Classes, words: Words, at: int, high: int) -> np.int64:
    """The first row behind ``at - 1``, before ``high``, of another class than that row, else ``high``."""
    j, end, kind = np.uint64(at), np.uint64(high), kinds[at - 1]
    eight = np.uint64(kind) * np.uint64(0x0101010101010101)
    one, step, rest, by_eight = np.uint64(1), np.uint64(8), np.uint64(7), np.uint64(3)
    while j < end and kinds[j] == kind:
        # ``words`` is the same memory, eight classes at a time.
        if j & rest == np.uint64(0) and j + step <= end and words[j >> by_eight] == eight:
            j += step
        else:
            j += one
    return np.int64(j)


@compiled
def first_cell(starts: Ints, low: int, high: int, time: int) -> int:
    """The cell in which ``time`` lies, of the cells ``low`` to ``high``."""
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= time:
            low = middle
        else:
            high = middle
    return low


@compiled
def behind(time: Ints, first: int, stop: int, end: int, step: int) -> int:
    """The first row of ``first < row < stop`` with ``time[row] >= end``, else ``stop``."""
    if stop == first or time[stop - 1] < end:
        return stop
    # Samples are almost evenly spaced: begin where that suggests, widen until the row is enclosed, then halve.
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
    """Note idle time, unless it has no length; return the number of notes."""
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
    s: State,
    chunk: Chunk,
) -> int:
    """Add the rows of a block, of which the first has number ``row`` and the one behind the last, where it belongs to
    the same piece, has the time ``next_time``. Return the number of rows of ``chunk.idle`` that are filled; there
    must be room for as many as the block has rows and the timeline has cells.

    One function for all that is done per cell: a call that hands over the tuples costs more than the work.
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
                for j in range(size):
                    after = times[begin + j + 1] if j + 1 < size else after_last
                    if after - times[begin + j] > limit:
                        weights[j] = step
                        kinds[j] += 128
            low = 0
            while low < size:
                # The rows of the chunk in one cell.
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
                    # A run begins, or the gap behind a row ends one.
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
                        # The time in the gap for which a run that counts held the device.
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
                # All time of these rows, the last sample's not cut yet, as in the sums of values.
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
                    # The sums of values have all of the last sample, the time only what lies in the cell.
                    sums[cell, run_class] += reach - end
                    add(sums, cell, end - reach, run_class, util[last], fb[last], power[last])
                while ends[c] < reach:
                    # The rest is for the cells behind, as far as their owners held the device when it was taken.
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
