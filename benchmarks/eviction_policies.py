"""Eviction policies, replayed over a trace of requests, and a bound for all of them. For ``eviction.py``.

**Bound.** A lower bound on the load time of any policy, including clairvoyant ones, those that keep parts of images,
and those that do not admit images: the linear relaxation of offline caching (Berger, Beckmann & Harchol-Balter 2018,
"Practical Bounds on Optimal Caching with Variable Object Sizes"), by Lagrangian duality. Every price per byte and slot
gives a valid bound; the best of 1,200 steps is used. Images requested before the second half may be in the tier at its
beginning at no cost. ``belady`` is a clairvoyant policy: it drops the image that saves the fewest seconds per byte and
time until its next request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slurm_affinode.core.retention import Demand, TierImage, Turnover, make_room

PLANNED_S = 600.0
"""Time before a start at which the product uses Slurm's plan (``suspend.tiers.prefetch``)."""


@dataclass(frozen=True)
class Replay:
    """Requests as image numbers, with load times in seconds and sizes in MB."""

    name: str
    events: np.ndarray
    times: np.ndarray
    cost: np.ndarray
    size: np.ndarray

    @property
    def start(self) -> int:
        """Return the request at which the measurement begins."""
        return len(self.events) // 2

    def first_half(self) -> Replay:
        """For tuning."""
        return Replay(self.name, self.events[: self.start], self.times[: self.start], self.cost, self.size)

    def first_loads(self) -> float:
        """Return the seconds of first loads in the second half, which no policy avoids."""
        new = np.setdiff1d(self.events[self.start :], self.events[: self.start])
        return float(self.cost[new].sum())

    def frequencies(self) -> np.ndarray:
        """Return requests per second of each image in the second half."""
        counts = np.bincount(self.events[self.start :], minlength=len(self.cost))
        return counts / float(self.times[-1] - self.times[self.start])

    def following(self, values: np.ndarray) -> np.ndarray:
        """Return for each request the value (time, number) of the next one for the same image; 1e18: none."""
        found, seen = np.full(len(self.events), 1e18), np.full(len(self.cost), 1e18)
        for number in range(len(self.events) - 1, -1, -1):
            found[number] = seen[self.events[number]]
            seen[self.events[number]] = values[number]
        return found


# --- policies: load time in the second half in seconds, for a tier of this size in MB


def ours(data: Replay, capacity: int, *, whole: bool = False, planned_s: float = 0.0, known: float = 0.0) -> float:
    """The policy of the product.

    ``whole``: parts of images are not kept. ``planned_s``: requests are known this many seconds before. ``known``: the
    frequency of each image in the second half is known, and this share of it is added to the expected one.
    """
    demand, held, free, total = Demand(), dict[int, int](), capacity, 0.0
    turnover = Turnover(float(data.times[0]))
    names = [str(number) for number in range(len(data.cost))]
    coming = data.following(data.times).tolist() if planned_s else []
    due = [math.inf] * len(names)
    sizes, costs = data.size.tolist(), data.cost.tolist()
    grain = 1 << 40 if whole else 1
    frequency = known * data.frequencies()
    for number, (image, at) in enumerate(zip(data.events.tolist(), data.times.tolist(), strict=True)):
        demand.requested(names[image], at)
        if planned_s:
            due[image] = coming[number]
        size, have = sizes[image], held.get(image, 0)
        if have == size:
            continue
        if number >= data.start:
            total += costs[image] * (size - have) / size

        def expected_s(one: int, at: float = at) -> float | None:
            return due[one] - at if due[one] - at <= planned_s else None

        wanted = TierImage(names[image], size, have, costs[image], expected_s(image))
        there, rates = [], {}
        if free < size - have:
            there = [TierImage(names[one], sizes[one], part, costs[one], expected_s(one)) for one, part in held.items()]
            horizon_s = turnover.horizon_s(capacity, at)
            rates = demand.rates([names[image], *(one.name for one in there)], at, horizon_s)
            if known:
                rates = {name: rate + frequency[int(name)] for name, rate in rates.items()}
        plan = make_room(there, wanted, free, rates, grain=grain)
        if whole and plan.room < size:
            continue
        for cut in plan.cuts:
            one = int(cut.name)
            free += held[one] - cut.keep
            held[one] = cut.keep
            if not cut.keep:
                del held[one]
        if plan.room:
            held[image] = have + plan.room
            free -= plan.room
            turnover.took(plan.room, capacity, at)
    return total


def ranked(data: Replay, capacity: int, priority: Callable[[int, int, bool, float], float]) -> float:
    """Evict whole images, in order of priority; loaded images are always admitted.

    ``priority`` of (image, number of the request, whether it was in the tier, priority of the last evicted image).
    """
    held: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    free, total, level = capacity, 0.0, 0.0
    for number, image in enumerate(data.events.tolist()):
        hit = image in held
        if not hit and number >= data.start:
            total += data.cost[image]
        rank = priority(image, number, hit, level)
        if data.size[image] > capacity:
            continue
        while not hit and free < data.size[image]:
            worth, one = heapq.heappop(heap)
            if held.get(one) == worth:
                del held[one]
                free += int(data.size[one])
                level = max(level, worth)
        if not hit:
            free -= int(data.size[image])
        held[image] = rank
        heapq.heappush(heap, (rank, image))
    return total


def lru(data: Replay, capacity: int) -> float:
    """Evict the least recently used image."""
    return ranked(data, capacity, lambda image, number, hit, level: float(number))


def lfu(data: Replay, capacity: int) -> float:
    """Evict the least frequently used image, counted from the beginning."""
    count = np.zeros(len(data.cost))

    def priority(image: int, number: int, hit: bool, level: float) -> float:
        count[image] += 1
        return float(count[image] + number * 1e-9)

    return ranked(data, capacity, priority)


def gdsf(data: Replay, capacity: int) -> float:
    """GreedyDual-Size-Frequency (Cherkasova 1998): frequency x cost / size, plus the level of the last eviction."""
    count = np.zeros(len(data.cost))

    def priority(image: int, number: int, hit: bool, level: float) -> float:
        count[image] = count[image] + 1 if hit else 1
        return float(level + count[image] * data.cost[image] / data.size[image])

    return ranked(data, capacity, priority)


def belady(data: Replay, capacity: int) -> float:
    """Clairvoyant: evict the image that saves least per byte and time until its next request, even one just loaded."""
    following = data.following(np.arange(len(data.events)))
    held: dict[int, float] = {}
    free, total = capacity, 0.0
    for number, image in enumerate(data.events.tolist()):
        hit = image in held
        if hit:
            held[image] = float(following[number])
            continue
        if number >= data.start:
            total += data.cost[image]
        worth = {
            one: data.cost[one] / data.size[one] / (at - number)
            for one, at in ((*held.items(), (image, following[number])))
        }
        need, goes, lost = int(data.size[image]) - free, [], 0.0
        for one in sorted(held, key=worth.__getitem__):
            if need <= 0:
                break
            goes.append(one)
            need -= int(data.size[one])
            lost += worth[one] * data.size[one]
        if need > 0 or (goes and lost > worth[image] * data.size[image]):
            continue
        for one in goes:
            del held[one]
            free += int(data.size[one])
        held[image] = float(following[number])
        free -= int(data.size[image])
    return total


def bound(data: Replay, capacity: int, steps: int = 1200) -> float:
    """Return the lower bound; see the module's docstring."""
    events = data.events[data.start :]
    last = dict.fromkeys(data.events[: data.start].tolist(), -1)
    begin, end, image = [], [], []
    for number, one in enumerate(events.tolist()):
        if one in last:
            begin.append(last[one] + 1)
            end.append(number)
            image.append(one)
        last[one] = number
    total = float(data.cost[events].sum())
    a, b, which = np.array(begin), np.array(end), np.array(image)
    cost, size = data.cost[which], data.size[which].astype(float)
    free = a == b  # no time between two requests of it
    total -= float(cost[free].sum())
    a, b, cost, size = a[~free], b[~free], cost[~free], size[~free]
    slots = len(events)
    unit = cost.sum() / slots / capacity
    price, mean, square, best = np.full(slots, unit / 2), np.zeros(slots), np.zeros(slots), np.inf
    for step in range(steps):
        smooth = max(0.002, 0.2 * 0.5 ** (8 * step / steps))
        sums = np.concatenate(([0.0], np.cumsum(price)))
        gain = cost - size * (sums[b] - sums[a])
        best = min(best, capacity * sums[-1] + float(np.maximum(gain, 0).sum()))
        kept = size / (1 + np.exp(-np.clip(gain / (smooth * cost), -40, 40)))
        use = np.cumsum(np.bincount(a, kept, slots + 1) - np.bincount(b, kept, slots + 1))[:slots]
        slope = 1 - use / capacity
        mean, square = 0.9 * mean + 0.1 * slope, 0.99 * square + 0.01 * slope**2
        price = np.maximum(0, price - 0.3 * unit * 0.5 ** (7 * step / steps) * mean / (np.sqrt(square) + 1e-3))
    return total - best


POLICIES: dict[str, Callable[[Replay, int], float]] = {
    "lru": lru, "lfu": lfu, "gdsf": gdsf, "ours": ours,
    "whole": lambda data, capacity: ours(data, capacity, whole=True),
    "planned": lambda data, capacity: ours(data, capacity, planned_s=PLANNED_S), "belady": belady, "bound": bound,
}  # fmt: skip
