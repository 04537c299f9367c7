"""Idle windows, followed from block to block by loops that Numba compiles where it is installed.

By the same rules as ``windows``; ``scalar.fold`` finds the idle time.
"""

from __future__ import annotations

from slurm_affinode.analysis.compiled import compiled, inlined
from slurm_affinode.analysis.scalararrays import Open, Timeline
from slurm_affinode.analysis.segments import Ints


@inlined
def end_window(allocation: int, o: Open) -> None:
    """Count the open idle window of ``allocation``."""
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
    """Give idle time, in the order of the rows, to the owners of its cell that held the device early enough: the time
    goes on with their open windows, or ends them and begins new ones."""
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
    """Count the idle windows that are open when all blocks are done."""
    for allocation in range(len(o.begin)):
        end_window(allocation, o)
