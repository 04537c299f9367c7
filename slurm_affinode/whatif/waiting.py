"""Waiting jobs, by size and in order, so that no event scans a long queue.

An entry is one integer, ``key << JOB_BITS | job``: entries compare by key, then by the order of submission.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush

JOB_BITS = 32
JOB_MASK = (1 << JOB_BITS) - 1
NONE = 1 << 200
"""An entry after all others."""
_ANY = NONE - 1
"""At least as long as every estimate."""
_MANY, _FEW = 96, 48
"""Number of waiting jobs above which they are indexed by size, and below which they are a list again."""


class SizeClasses:
    """Waiting jobs by size; for each size a heap of entries."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: of every job, waiting or not."""
        self._levels = sorted(set(sizes))
        level = {size: index for index, size in enumerate(self._levels)}
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


class _OrderedJobs:
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
        level = {size: level_number for level_number, size in enumerate(self._levels)}
        self._level = [level[size] for size in sizes]
        self._leaf = [0] * len(positions)
        self._trees: list[list[int]] = []
        for jobs in self._members:
            leaves = 1 << (len(jobs) - 1).bit_length()
            self._trees.append([NONE] * (2 * leaves))
            for leaf_number, job in enumerate(jobs):
                self._leaf[job] = leaves + leaf_number

    def add(self, job: int, key: int) -> None:
        """Add a job, whose estimate is known. ``key`` is not used: the position counts."""
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

    def fits(self, units: int) -> bool:
        """Return whether a job needs at most ``units``."""
        return any(tree[1] != NONE for tree in self._trees[: bisect_right(self._levels, units)])

    def first(self, units: int, spare: int, window: int) -> int:
        """Return the first job of at most ``units`` that ends within ``window`` or needs at most ``spare``; else -1."""
        positions = self._positions
        job, place = -1, len(positions)
        for index in range(bisect_right(self._levels, units)):
            tree = self._trees[index]
            longest = _ANY if self._levels[index] <= spare else window
            if tree[1] > longest:
                continue
            node, leaves = 1, len(tree) >> 1
            while node < leaves:
                node <<= 1
                if tree[node] > longest:
                    node += 1
            candidate = self._members[index][node - leaves]
            if positions[candidate] < place:
                job, place = candidate, positions[candidate]
        return job


class _ShortestJobs:
    """Waiting jobs, the shortest estimate first."""

    def __init__(self, sizes: Sequence[int], estimates: Sequence[int]) -> None:
        self._classes = SizeClasses(sizes)
        self._estimates = estimates
        self.add, self.remove = self._classes.add, self._classes.remove

    def fits(self, units: int) -> bool:
        """Return whether a job needs at most ``units``."""
        return self._classes.first(units) != NONE

    def first(self, units: int, spare: int, window: int) -> int:
        """Return the first job of at most ``units`` that ends within ``window`` or needs at most ``spare``; else -1."""
        entry = self._classes.first(units)
        if entry != NONE and self._estimates[entry & JOB_MASK] > window:
            entry = self._classes.first(min(spare, units))
        return -1 if entry == NONE else entry & JOB_MASK


class BackfillQueue:
    """Jobs that wait behind the first one, in the order in which they are tried.

    A short queue is scanned. A long one is indexed by size.
    """

    def __init__(self, sizes: Sequence[int], estimates: Sequence[int], positions: Sequence[int] | None) -> None:
        """``sizes``: of every job; ``estimates``: run times, known once a job is added.

        ``positions``: place of every job in the order, its key; ``None``: the shortest estimate is first, and the key
        begins with it.
        """
        self._sizes, self._estimates, self._positions = sizes, estimates, positions
        self._entries: list[int] = []
        """Ascending, while the queue is short; beside it sizes and estimates of the same jobs."""
        self._entry_sizes: list[int] = []
        self._entry_estimates: list[int] = []
        self._keys: dict[int, int] = {}
        """Waiting job -> key, while the queue is long."""

    def add(self, job: int, key: int) -> None:
        """Add a job."""
        if self._keys:
            self._add_indexed(job, key)
            return
        entry = key << JOB_BITS | job
        index = bisect_left(self._entries, entry)
        self._entries.insert(index, entry)
        self._entry_sizes.insert(index, self._sizes[job])
        self._entry_estimates.insert(index, self._estimates[job])
        if len(self._entries) > _MANY:
            for waiting in self._entries:
                self._add_indexed(waiting & JOB_MASK, waiting >> JOB_BITS)
            self._entries, self._entry_sizes, self._entry_estimates = [], [], []

    def remove(self, job: int, key: int) -> None:
        """Remove a waiting job."""
        if self._keys:
            self._remove_indexed(job)
        else:
            self._remove_entry(bisect_left(self._entries, key << JOB_BITS | job))

    def fits(self, units: int) -> bool:
        """Return whether a job needs at most ``units``."""
        if self._keys:
            return self._index.fits(units)
        return bool(self._entries) and min(self._entry_sizes) <= units

    def take(self, units: int, spare: int, window: int) -> int:
        """Remove and return the first job of at most ``units`` that ends within ``window`` or needs at most ``spare``.

        -1: there is none.
        """
        if self._keys:
            job = self._index.first(units, spare, window)
            if job >= 0:
                self._remove_indexed(job)
            return job
        for index, size in enumerate(self._entry_sizes):
            if size <= units and (size <= spare or self._entry_estimates[index] <= window):
                job = self._entries[index] & JOB_MASK
                self._remove_entry(index)
                return job
        return -1

    def _remove_entry(self, index: int) -> None:
        del self._entries[index], self._entry_sizes[index], self._entry_estimates[index]

    @cached_property
    def _index(self) -> _OrderedJobs | _ShortestJobs:
        if self._positions is None:
            return _ShortestJobs(self._sizes, self._estimates)
        return _OrderedJobs(self._positions, self._sizes, self._estimates)

    def _add_indexed(self, job: int, key: int) -> None:
        self._keys[job] = key
        self._index.add(job, key)

    def _remove_indexed(self, job: int) -> None:
        self._index.remove(job)
        del self._keys[job]
        if len(self._keys) < _FEW:
            waiting, self._keys = self._keys, {}
            for pending_job, key in waiting.items():
                self._index.remove(pending_job)
                self.add(pending_job, key)
