"""Waiting jobs, by size and in order, so that no event scans the whole queue.

An entry is one integer, ``key << JOB_BITS | job``: entries compare by key, then by the order of submission.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush

JOB_BITS = 32
JOB_MASK = (1 << JOB_BITS) - 1
NONE = 1 << 200
"""An entry after all others."""
_ANY = NONE - 1
"""At least as long as every estimate."""


class SizeClasses:
    """Waiting jobs by size; for each size a heap of entries."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: of every job, waiting or not."""
        self._levels = sorted(set(sizes))
        level = {size: at for at, size in enumerate(self._levels)}
        self._level = [level[size] for size in sizes]
        self._heaps: list[list[int]] = [[] for _ in self._levels]
        self._heads = [NONE] * (len(self._levels) + 1)
        """First entries; before them ``NONE``, which is the first of no size."""
        self._waiting = bytearray(len(sizes))

    def add(self, job: int, key: int) -> None:
        """Add a job."""
        level = self._level[job]
        heap = self._heaps[level]
        heappush(heap, key << JOB_BITS | job)
        self._heads[level + 1] = heap[0]
        self._waiting[job] = 1

    def remove(self, job: int) -> None:
        """Remove a waiting job."""
        self._waiting[job] = 0
        level = self._level[job]
        heap, waiting = self._heaps[level], self._waiting
        while heap and not waiting[heap[0] & JOB_MASK]:
            heappop(heap)
        self._heads[level + 1] = heap[0] if heap else NONE

    def first(self, units: int) -> int:
        """Return the first entry of a job that needs at most ``units``; ``NONE`` if there is none."""
        return min(self._heads[: bisect_right(self._levels, units) + 1])


class OrderedJobs:
    """Waiting jobs in a fixed order; for each size a tree over its jobs with the shortest estimate below each node."""

    def __init__(self, positions: Sequence[int], sizes: Sequence[int], estimates: Sequence[int]) -> None:
        """``positions``: place of every job in the order; ``estimates``: run times, known once a job is added."""
        self._estimates = estimates
        ordered = [0] * len(positions)
        for job, position in enumerate(positions):
            ordered[position] = job
        members: dict[int, list[int]] = {size: [] for size in sorted(set(sizes))}
        for job in ordered:
            members[sizes[job]].append(job)
        self._positions = positions
        self._levels = list(members)
        self._members = list(members.values())
        level = {size: at for at, size in enumerate(self._levels)}
        self._level = [level[size] for size in sizes]
        self._leaf = [0] * len(positions)
        self._trees: list[list[int]] = []
        for jobs in self._members:
            leaves = 1 << (len(jobs) - 1).bit_length()
            self._trees.append([NONE] * (2 * leaves))
            for at, job in enumerate(jobs):
                self._leaf[job] = leaves + at

    def add(self, job: int) -> None:
        """Add a job, whose estimate is known."""
        tree, node, estimate = self._trees[self._level[job]], self._leaf[job], self._estimates[job]
        while node and tree[node] > estimate:
            tree[node] = estimate
            node >>= 1

    def remove(self, job: int) -> None:
        """Remove a waiting job."""
        tree, node, estimate = self._trees[self._level[job]], self._leaf[job], self._estimates[job]
        shortest = NONE
        while node and tree[node] == estimate != shortest:
            tree[node] = shortest
            shortest = min(tree[node ^ 1], shortest)
            node >>= 1

    def first(self, units: int, spare: int, window: int) -> int:
        """Return the first job of at most ``units`` that ends within ``window`` or needs at most ``spare``; else -1."""
        positions = self._positions
        job, place = -1, len(positions)
        for at in range(bisect_right(self._levels, units)):
            tree = self._trees[at]
            longest = _ANY if self._levels[at] <= spare else window
            if tree[1] > longest:
                continue
            node, leaves = 1, len(tree) >> 1
            while node < leaves:
                node <<= 1
                if tree[node] > longest:
                    node += 1
            other = self._members[at][node - leaves]
            if positions[other] < place:
                job, place = other, positions[other]
        return job
