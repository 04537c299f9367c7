"""Idle windows, followed from block to block by loops that Numba compiles where it is installed.

By the same rules as ``windows``; ``scalar.fold`` finds the idle time.
"""

from __future__ import annotations

from slurm_affinode.analysis.compiled import compiled, inlined
from slurm_affinode.analysis.scalararrays import (
    COUNTED,
    LONGEST,
    OPEN_BEGIN,
    OPEN_END,
    OWNER_START,
    WINDOWS,
    Open,
    Timeline,
)
from slurm_affinode.analysis.segments import Ints


@inlined
def end_window(allocation: int, o: Open) -> None:
    """Count the open idle window of ``allocation``."""
    length = o.rows[allocation, OPEN_END] - o.rows[allocation, OPEN_BEGIN]
    if length > 0:
        o.rows[allocation, WINDOWS] += 1
        o.rows[allocation, LONGEST] = max(o.rows[allocation, LONGEST], length)
        if o.rows[allocation, COUNTED]:
            at = 0
            for bound in o.bounds:
                at += length >= bound
            o.bin_counts[at] += 1
            o.bin_share[at] += o.share[allocation]


@compiled
def give_idle(idle: Ints, line: Timeline, o: Open) -> None:
    """Give idle time, in the order of the rows, to the owners of its cell that held the device early enough: the time
    goes on with their open windows, or ends them and begins new ones."""
    for e in range(len(idle)):
        cell, begin, end, taken = idle[e, 0], idle[e, 1], idle[e, 2], idle[e, 3]
        low, high = line.owner_offset[cell], line.owner_offset[cell + 1]
        for n in range(low, high):
            a = line.owners[n]
            if o.rows[a, OWNER_START] > taken:
                continue
            if o.rows[a, OPEN_END] == begin:
                o.share[a] += (end - begin) / (high - low)
            else:
                end_window(a, o)
                o.rows[a, OPEN_BEGIN] = begin
                o.share[a] = (end - begin) / (high - low)
            o.rows[a, OPEN_END] = end


@compiled
def end_all_windows(o: Open) -> None:
    """Count the idle windows that are open when all blocks are done."""
    for allocation in range(len(o.rows)):
        end_window(allocation, o)
