"""Eviction policies for a tier of limited size, replayed over requests of models and over images of suspended jobs.

``hawkes`` expects requests of each image as a self-exciting point process (Hawkes 1971, Biometrika 58:83): each request
makes further ones more likely, for seconds and for weeks; the weights of the kernels, exponentials of fixed half-lives,
are learned online by expectation-maximization (Veen & Schoenberg 2008, J. Am. Stat. Assoc. 103:614).

``gdsf`` is GreedyDual-Size-Frequency (Cherkasova 1998): frequency x cost / size, plus the level of the last eviction.
``belady`` is clairvoyant: it knows the time of the next request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from slurm_affinode.core.retention import TierImage

# --- requests of models


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

    def following(self) -> np.ndarray:
        """Return for each request the number of the next one for the same image; 1e18: none."""
        numbers, seen = np.full(len(self.events), 1e18), np.full(len(self.cost), 1e18)
        for number in range(len(self.events) - 1, -1, -1):
            numbers[number] = seen[self.events[number]]
            seen[self.events[number]] = number
        return numbers


Rates = Callable[[Sequence[int], float], Sequence[float]]
"""Expected requests per second of images at a time."""


def _by_rate(data: Replay, capacity: int, rates: Rates, requested: Callable[[int, float], object]) -> float:
    """Keep the images, or parts of them, that save most seconds per byte and second; do not admit others."""
    held, free, total = dict[int, int](), capacity, 0.0
    sizes, costs = data.size.tolist(), data.cost.tolist()
    for number, (image, at) in enumerate(zip(data.events.tolist(), data.times.tolist(), strict=True)):
        requested(image, at)
        size, present = sizes[image], held.get(image, 0)
        if present == size:
            continue
        if number >= data.start:
            total += costs[image] * (size - present) / size
        others = [other for other in held if other != image] if free < size - present else []
        rate = dict(zip([image, *others], rates([image, *others], at), strict=True)) if others else {image: 1.0}
        room, cuts = _room(
            [(other, sizes[other], held[other], rate[other] * costs[other]) for other in others],
            (size - present, rate[image] * costs[image] / size), free,
        )  # fmt: skip
        for other, keep in cuts:
            free += held[other] - keep
            held[other] = keep
            if not keep:
                del held[other]
        if room:
            held[image] = present + room
            free -= room
    return total


def _room(
    held: Iterable[tuple[int, int, int, float]], incoming: tuple[int, float], free: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the room for ``incoming`` (bytes, value per byte), and the bytes to keep of others with less value.

    ``held``: image, size, bytes present, value of all of it.
    """
    need, limit = incoming
    room, cuts = min(need, free), []
    for worth, image, present in sorted((value / size, image, present) for image, size, present, value in held):
        if room >= need or worth >= limit:
            break
        take = min(present, need - room)
        room += take
        cuts.append((image, present - take))
    return room, cuts


def retention_value(data: Replay, capacity: int) -> float:
    """The rule of the product: an image is expected to be needed after as long a time as it has not been."""
    last: dict[int, float] = {}
    return _by_rate(
        data, capacity, lambda images, at: [1 / max(1.0, at - last[image]) for image in images], last.__setitem__
    )


def hawkes(data: Replay, capacity: int) -> float:
    """Expect requests as a self-exciting process."""
    demand = Demand()
    horizon_s = 0.3 * float(data.times[-1] - data.times[0]) * min(1.0, capacity / float(data.size[data.events].sum()))
    return _by_rate(data, capacity, lambda images, at: demand.rates(images, at, max(3.0, horizon_s)), demand.requested)


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
            worth, other = heapq.heappop(heap)
            if held.get(other) == worth:
                del held[other]
                free += int(data.size[other])
                level = max(level, worth)
        if not hit:
            free -= int(data.size[image])
        held[image] = rank
        heapq.heappush(heap, (rank, image))
    return total


def lru(data: Replay, capacity: int) -> float:
    """Evict the least recently used image."""
    return ranked(data, capacity, lambda image, number, hit, level: float(number))


def gdsf(data: Replay, capacity: int) -> float:
    """See the head of the file."""
    count = np.zeros(len(data.cost))

    def priority(image: int, number: int, hit: bool, level: float) -> float:
        count[image] = count[image] + 1 if hit else 1
        return float(level + count[image] * data.cost[image] / data.size[image])

    return ranked(data, capacity, priority)


def belady(data: Replay, capacity: int) -> float:
    """Clairvoyant: evict the image that saves least per byte and time until its next request, even one just loaded."""
    following, due, requests = data.following().tolist(), dict[int, float](), iter(range(len(data.events)))

    def requested(image: int, at: float) -> None:
        due[image] = following[next(requests)]

    number = dict(zip(data.times.tolist(), range(len(data.events)), strict=False))
    return _by_rate(
        data, capacity, lambda images, at: [1 / max(1.0, due[image] - number[at]) for image in images], requested
    )


MODELS: dict[str, Callable[[Replay, int], float]] = {
    "lru": lru, "gdsf": gdsf, "hawkes": hawkes, "ours": retention_value, "belady": belady,
}  # fmt: skip


class Demand:
    """Expected requests of each image; see ``hawkes`` at the head of the file. Times are seconds that do not fall."""

    _DECAY = tuple(math.log(2) / (3.0 * 10 ** (k / 2)) for k in range(13))
    """Half-lives from 3 s to 35 days."""
    _REBASE = 500.0

    def __init__(self) -> None:
        count = len(self._DECAY)
        self._caused, self._events, self._open = [50.0 / count] * count, 50.0, [0.0] * count
        self._base_s: float | None = None
        self._marks: dict[object, list[float]] = {}
        """For each kernel, the sum of exp(decay x (time of request - base)) over the requests."""

    def requested(self, name: object, now_s: float) -> None:
        """Record a request of an image."""
        faded, grown = self._factors(now_s)
        marks = self._marks.get(name)
        if marks is None:
            marks = self._marks[name] = [0.0] * len(faded)
        else:
            weights = self._weights(faded)
            parts = [w * b * f * m for w, b, f, m in zip(weights, self._DECAY, faded, marks, strict=True)]
            for k, part in enumerate(parts):
                self._caused[k] += part / (sum(parts) or 1.0)
        for k, growth in enumerate(grown):
            marks[k] += growth
            self._open[k] += growth
        self._events += 1

    def rates(self, names: Iterable[object], now_s: float, horizon_s: float) -> list[float]:
        """Return the expected requests per second within the horizon."""
        faded, _ = self._factors(now_s)
        share = (-math.expm1(-beta * horizon_s) / horizon_s for beta in self._DECAY)
        row = [w * f * s for w, f, s in zip(self._weights(faded), faded, share, strict=True)]
        return [sum(map(mul, row, self._marks.get(name, [0.0]))) for name in names]

    def _weights(self, faded: Sequence[float]) -> list[float]:
        return [
            caused / max(1.0, self._events - left * fade)
            for caused, left, fade in zip(self._caused, self._open, faded, strict=True)
        ]

    def _factors(self, now_s: float) -> tuple[list[float], list[float]]:
        if self._base_s is None:
            self._base_s = now_s
        passed = now_s - self._base_s
        if passed * self._DECAY[0] > self._REBASE:
            shrink = [math.exp(-beta * passed) for beta in self._DECAY]
            for marks in self._marks.values():
                marks[:] = map(mul, marks, shrink)
            self._open = list(map(mul, self._open, shrink))
            self._base_s, passed = now_s, 0.0
        return [math.exp(-beta * passed) for beta in self._DECAY], [math.exp(beta * passed) for beta in self._DECAY]


# --- images of suspended jobs


@dataclass(frozen=True, slots=True)
class Suspension:
    """An image: written, read once when its job is restored, and then kept until the job ends or has a newer one."""

    job: str
    size: int
    """MB."""
    written_s: float
    restored_s: float
    removed_s: float


@dataclass(slots=True)
class _Tier:
    """The state of a replay."""

    images: Sequence[Suspension]
    capacity: int
    held: dict[int, int]
    uses: dict[int, int]
    """Image -> 1 until it is restored, then 2."""
    level: float = 0.0
    """Priority of the last evicted image, for GDSF."""
    rank: dict[int, float] | None = None

    def waiting(self, number: int) -> bool:
        return self.uses[number] == 1


Value = Callable[[_Tier, int, float], float]
"""Value of an image per byte at a time."""


def _last_use_s(tier: _Tier, number: int) -> float:
    image = tier.images[number]
    return image.written_s if tier.waiting(number) else image.restored_s


def _retention_value(tier: _Tier, number: int, at: float) -> float:
    image = tier.images[number]
    waited_s = at - image.written_s if tier.waiting(number) else None
    return TierImage("", image.size, 0, float(image.size), waited_s=waited_s).rate


def _clairvoyant(tier: _Tier, number: int, at: float) -> float:
    return 1 / max(1e-3, tier.images[number].restored_s - at) if tier.waiting(number) else 0.0


def _rank(tier: _Tier, number: int, at: float) -> float:
    assert tier.rank is not None
    return tier.rank[number]


_ADMIT_ALL = ("lru", "gdsf")
"""Policies that write a new image whatever is cut for it."""


def suspended(images: Sequence[Suspension], capacity: int, policy: str) -> float:
    """Return the share of the restored MB that are read from the next tier, in the second half of the images.

    Every MB takes as long to load. Images are cut only as far as needed, and a new image is written if there is room
    for all of it.
    """
    start_s = images[len(images) // 2].written_s
    demand = Demand()
    values: dict[str, Value] = {
        "lru": lambda tier, number, at: 1 + _last_use_s(tier, number),
        "newest": lambda tier, number, at: 1e12 - images[number].written_s if tier.waiting(number) else 0.0,
        "gdsf": _rank, "ours": _retention_value, "belady": _clairvoyant,
    }  # fmt: skip
    whole = sum(image.size for image in images)
    horizon_s = max(3.0, 0.3 * (images[-1].written_s - images[0].written_s) * min(1.0, capacity / whole))
    tier, free, loaded, restored = _Tier(images, capacity, {}, {}, rank={}), capacity, 0, 0
    assert tier.rank is not None
    events = sorted(
        (at, kind, number)
        for number, image in enumerate(images)
        for kind, at in ((2, image.written_s), (1, image.restored_s), (0, image.removed_s))
    )
    for at, kind, number in events:
        image = images[number]
        if kind == 0:
            free += tier.held.pop(number, 0)
            continue
        demand.requested(image.job, at)
        tier.uses[number] = tier.uses.get(number, 0) + 1
        tier.rank[number] = tier.level + tier.uses[number]
        if kind == 1:
            if at >= start_s:
                loaded += image.size - tier.held.get(number, 0)
                restored += image.size
            continue
        if image.size > capacity:
            continue
        others = list(tier.held) if image.size > free else []
        if policy == "hawkes":
            *worth, incoming = demand.rates([images[other].job for other in (*others, number)], at, horizon_s)
        else:
            *worth, incoming = [values[policy](tier, other, at) for other in (*others, number)]
        limit = math.inf if policy in _ADMIT_ALL else incoming
        cut = [pair for pair in sorted(zip(worth, others, strict=True)) if pair[0] < limit]
        if free + sum(tier.held[other] for _, other in cut) < image.size:
            continue
        for value, other in cut:
            take = min(tier.held[other], image.size - free)
            if take <= 0:
                break
            free += take
            tier.level = max(tier.level, value) if policy == "gdsf" else 0.0
            tier.held[other] -= take
            if not tier.held[other]:
                del tier.held[other]
        tier.held[number] = image.size
        free -= image.size
    return loaded / restored


IMAGES = ("lru", "gdsf", "hawkes", "newest", "ours", "belady")
