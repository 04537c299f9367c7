"""Waiting jobs, by size and in order, so that no event scans the whole queue.

An entry is one integer, ``key << JOB_BITS | job``: entries compare by key, then by the order of submission.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush

JOB_BITS = 32
JOB_MASK = (1 << JOB_BITS) - 1
NONE = 1 << 200
"""An entry after all others."""
_BLOCK_BITS = 9


class SizeClasses:
    """Waiting jobs by size; for each size a heap of entries."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: of every job, waiting or not."""
        self._levels = sorted(set(sizes))
        level = {size: at for at, size in enumerate(self._levels)}
        self._level = [level[size] for size in sizes]
        self._heaps: list[list[int]] = [[] for _ in self._levels]
        self._heads = [NONE] * len(self._levels)
        self._waiting = bytearray(len(sizes))

    def add(self, job: int, key: int) -> None:
        """Add a job."""
        level = self._level[job]
        heap = self._heaps[level]
        heappush(heap, key << JOB_BITS | job)
        self._heads[level] = heap[0]
        self._waiting[job] = 1

    def remove(self, job: int) -> None:
        """Remove a waiting job."""
        self._waiting[job] = 0
        level = self._level[job]
        heap, waiting = self._heaps[level], self._waiting
        while heap and not waiting[heap[0] & JOB_MASK]:
            heappop(heap)
        self._heads[level] = heap[0] if heap else NONE

    def first(self, units: int) -> int:
        """Return the first entry of a job that needs at most ``units``; ``NONE`` if there is none."""
        return min(self._heads[: bisect_right(self._levels, units)], default=NONE)


class OrderedJobs:
    """Waiting jobs in a fixed order, in blocks; a block knows which sizes and estimates it has."""

    def __init__(self, positions: Sequence[int], sizes: Sequence[int], estimates: Sequence[int]) -> None:
        """``positions``: place of every job in the order; ``estimates``: run times, known once a job is added."""
        self._positions, self._sizes, self._estimates = positions, sizes, estimates
        self._jobs = [0] * len(positions)
        for job, position in enumerate(positions):
            self._jobs[position] = job
        blocks = (len(positions) >> _BLOCK_BITS) + 1
        self._blocks: list[list[int]] = [[] for _ in range(blocks)]
        self._fronts: list[tuple[list[int], list[int]] | None] = [None] * blocks
        self._low, self._high = blocks, -1

    def add(self, job: int) -> None:
        """Add a job, whose estimate is known."""
        position = self._positions[job]
        block = position >> _BLOCK_BITS
        insort(self._blocks[block], position)
        self._fronts[block] = None
        self._low, self._high = min(self._low, block), max(self._high, block)

    def remove(self, job: int) -> None:
        """Remove a waiting job."""
        position = self._positions[job]
        block = position >> _BLOCK_BITS
        self._blocks[block].remove(position)
        self._fronts[block] = None
        while self._low < self._high and not self._blocks[self._low]:
            self._low += 1

    def first(self, units: int, spare: int, window: int) -> int:
        """Return the first job of at most ``units`` that ends within ``window`` or needs at most ``spare``; else -1."""
        sizes, estimates, jobs = self._sizes, self._estimates, self._jobs
        for block in range(self._low, self._high + 1):
            positions = self._blocks[block]
            if not positions:
                continue
            front = self._fronts[block]
            if front is not None:
                at = bisect_right(front[0], units) - 1
                if at < 0 or (front[1][at] > window and front[0][0] > spare):
                    continue
            for position in positions:
                job = jobs[position]
                size = sizes[job]
                if size <= units and (size <= spare or estimates[job] <= window):
                    return job
            self._fronts[block] = self._front(positions)
        return -1

    def _front(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return sizes, ascending, and for each the shortest estimate of the jobs up to this size."""
        pairs = sorted((self._sizes[self._jobs[one]], self._estimates[self._jobs[one]]) for one in positions)
        sizes, shortest = [pairs[0][0]], [pairs[0][1]]
        for size, estimate in pairs:
            if estimate < shortest[-1]:
                sizes.append(size)
                shortest.append(estimate)
        return sizes, shortest
