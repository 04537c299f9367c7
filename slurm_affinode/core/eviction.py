"""What to keep in a fast tier of bounded size: by probability of reuse, cost to load, and size.

An image is worth keeping by the load time that it is expected to save per second and byte:

    density = requests per second expected x seconds to load it from the next tier / bytes

The expectation is that of a self-exciting point process (Hawkes 1971, Biometrika 58:83): each request of an image
makes further ones of it more likely, for seconds and for weeks at once. Kernels are exponentials of fixed half-lives;
how much each of them counts is the same for all images and learned while it runs, by expectation-maximization (Veen &
Schoenberg 2008, J. Am. Stat. Assoc. 103:614). So one image that is wanted in bursts and one that is wanted once a day
are compared in the same unit, without a parameter of recency or frequency to choose.

Parts of an image may go: what is left is a copy that was begun, and is completed when it is wanted. To fill a store
with parts in the order of their density is the solution of the knapsack problem's relaxation (Dantzig 1957).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any, Self

HALF_LIVES_S = tuple(3.0 * 10 ** (k / 2) for k in range(13))
"""From 3 s to 35 days."""
HORIZON_TURNS = 0.3
"""Expectations are means over so much of the time in which a tier takes in as much as it holds (``Turnover``): it is no
use to know that an image is wanted again at once, where another will be there as long as that. From 0.2 to 0.5 it makes
hardly a difference."""
_SHORTEST_S, _LONGEST_S = 3.0, 30 * 86400.0
_TURNS_KEPT = 8
_PRIOR = 50.0
_MEMORY = 100_000.0
_LARGEST, _MOST_CAUSED = 1e240, 1e12
"""Of a state that is read: what is multiplied with another one stays finite."""
_REBASE = 500.0
_SET_BACK_S = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """An image, wholly or in part in the tier, or one that could be."""

    name: str
    size: int
    """Bytes of all of it."""
    held: int
    """Bytes in the tier."""
    load_s: float
    """Seconds to load all of it from where else it is."""
    expected_s: float | None = None
    """It is known that it will be wanted in so many seconds."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Leave ``keep`` bytes of an image in the tier; 0: none."""

    name: str
    keep: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How room is made."""

    cuts: tuple[Cut, ...]
    room: int
    """Bytes that there is room for then, at most what was asked for."""


class Demand:
    """How often each image is expected to be wanted. Times are seconds of any clock; where it is set back, they are
    taken from there on."""

    def __init__(self, *, half_lives_s: tuple[float, ...] = HALF_LIVES_S) -> None:
        """``half_lives_s``: of the kernels."""
        self._decay = tuple(math.log(2) / one for one in half_lives_s)
        self._caused = [_PRIOR / len(half_lives_s)] * len(half_lives_s)
        self._events = _PRIOR
        self._open = [0.0] * len(half_lives_s)
        self._base_s: float | None = None
        self._now_s = 0.0
        self._marks: dict[str, list[float]] = {}
        """Name -> for each kernel, the sum over its requests of exp(decay x (time of the request - base))."""

    def requested(self, name: str, now_s: float) -> None:
        """An image is wanted now."""
        faded, grown = self._factors(now_s)
        marks = self._marks.get(name)
        if marks is None:
            marks = self._marks[name] = [0.0] * len(faded)
        else:
            weights = self.weights()
            parts = [w * b * f * m for w, b, f, m in zip(weights, self._decay, faded, marks, strict=True)]
            total = sum(parts)
            if total > 0:
                for k, part in enumerate(parts):
                    self._caused[k] += part / total
        for k, one in enumerate(grown):
            marks[k] += one
            self._open[k] += one
        self._events += 1
        if self._events > _MEMORY:  # what was long ago counts half
            self._events /= 2
            self._caused = [one / 2 for one in self._caused]
            self._open = [one / 2 for one in self._open]

    def weights(self) -> list[float]:
        """For each kernel, how many requests one request causes through it."""
        faded, _ = self._factors(self._now_s)
        return [
            caused / max(1.0, self._events - left * fade)
            for caused, left, fade in zip(self._caused, self._open, faded, strict=True)
        ]

    def rates(self, names: Iterable[str], now_s: float, horizon_s: float = _SHORTEST_S) -> dict[str, float]:
        """Requests per second that are expected of each within the horizon; 0 for one that was never wanted."""
        faded, _ = self._factors(now_s)
        # Of a kernel's mass, what falls within the horizon, per second.
        share = (-math.expm1(-beta * horizon_s) / horizon_s for beta in self._decay)
        row = [w * f * s for w, f, s in zip(self.weights(), faded, share, strict=True)]
        nothing = [0.0] * len(row)
        return {name: sum(map(mul, row, self._marks.get(name, nothing))) for name in names}

    def forget(self, name: str) -> None:
        """It will not be wanted again."""
        self._marks.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """No others will be wanted again."""
        self._marks = {name: marks for name, marks in self._marks.items() if name in names}

    def _factors(self, now_s: float) -> tuple[list[float], list[float]]:
        """exp(-decay x time since base) and its inverse; moves the base before they grow too large."""
        if self._base_s is None:
            self._base_s = now_s
        elif now_s < self._now_s - _SET_BACK_S:  # it was wrong until now: as much has passed as had by then
            self._base_s += now_s - self._now_s
            self._now_s = now_s
        now_s = self._now_s = max(now_s, self._now_s)
        passed = now_s - self._base_s
        if passed * self._decay[0] > _REBASE:
            shrink = [math.exp(-beta * passed) for beta in self._decay]
            for marks in self._marks.values():
                marks[:] = map(mul, marks, shrink)
            self._open = list(map(mul, self._open, shrink))
            self._base_s, passed = now_s, 0.0
        return [math.exp(-beta * passed) for beta in self._decay], [math.exp(beta * passed) for beta in self._decay]

    # --- across restarts

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "half_lives_s": [math.log(2) / beta for beta in self._decay], "caused": list(self._caused),
            "open": list(self._open), "events": self._events, "base_s": self._base_s, "now_s": self._now_s,
            "marks": {name: list(marks) for name, marks in self._marks.items()},
        }  # fmt: skip

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """From ``state``. Raises ``ValueError`` for anything else."""
        try:
            made = cls(half_lives_s=tuple(_numbers(state["half_lives_s"])))
            count = len(made._decay)
            made._caused = _numbers(state["caused"], count, most=_MOST_CAUSED)
            made._open = _numbers(state["open"], count)
            made._events, made._now_s = _numbers([state["events"], state["now_s"]])
            # Before all times there were, once the clock has been set back.
            made._base_s = None if state["base_s"] is None else _numbers([state["base_s"]], least=-math.inf)[0]
            made._marks = {str(name): _numbers(marks, count) for name, marks in state["marks"].items()}
            if (made._base_s or 0.0) > made._now_s or sorted(made._decay, reverse=True) != list(made._decay):
                raise ValueError("not the state of a demand: it begins after it ends, or its kernels are in no order")
        except (KeyError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
            raise ValueError(f"not the state of a demand: {type(error).__name__}: {error}") from None
        return made


def _numbers(values: Any, count: int | None = None, least: float = 0.0, most: float = _LARGEST) -> list[float]:
    found = [float(one) for one in values]
    if not all(least <= one <= most for one in found) or count not in (None, len(found)):
        raise ValueError("not the state of a demand")
    return found


class Turnover:
    """How long a tier takes to take in as much as it holds."""

    def __init__(self, now_s: float) -> None:
        """``now_s``: as for ``Demand``."""
        self._since_s = now_s
        self._taken = 0.0

    def took(self, count: int, capacity: int, now_s: float) -> None:
        """So many bytes came in. What was long ago counts half."""
        self._since_s = min(self._since_s, now_s)
        self._taken += count
        if self._taken > _TURNS_KEPT * max(1, capacity):
            self._taken /= 2
            self._since_s = now_s - (now_s - self._since_s) / 2

    def horizon_s(self, capacity: int, now_s: float) -> float:
        """Seconds for which a tier of ``capacity`` bytes has to look ahead: ``horizon_s`` of ``Demand.rates``."""
        turn_s = max(0.0, now_s - self._since_s) * min(1.0, capacity / max(1.0, self._taken))
        return min(_LONGEST_S, max(_SHORTEST_S, HORIZON_TURNS * turn_s))


def density(image: Held, rate: float) -> float:
    """Seconds of loading that keeping a byte of it is expected to save per second."""
    if image.expected_s is not None:
        rate = max(rate, 1.0 / max(image.expected_s, 1.0))
    return rate * image.load_s / max(1, image.size)


def make_room(
    there: Iterable[Held], wanted: Held, free: int, rates: Mapping[str, float], *, grain: int = 1, must: bool = False
) -> Plan:
    """Room for what ``wanted`` lacks, out of ``free`` bytes and of what is worth less than it.

    ``free`` below 0: there is more than there may be, and so much goes beside. ``there``: what may go: a copy of all of
    it is elsewhere. Cuts are of whole ``grain`` bytes. ``must``: also what is worth more may go, where there is not
    enough else.
    """
    excess = max(0, -free)
    need = wanted.size - wanted.held + excess
    found = min(need, max(0, free))
    if found == need:
        return Plan((), need)
    limit = math.inf if must else density(wanted, rates.get(wanted.name, 0.0))
    ranked = sorted(
        (density(one, rates.get(one.name, 0.0)), one.name, one)
        for one in there
        if one.held > 0 and one.name != wanted.name
    )
    cuts = []
    for worth, name, one in ranked:
        if worth >= limit or found >= need:
            break
        take = min(one.held, -(-(need - found) // grain) * grain)
        # What is left is whole grains from its beginning.
        keep = (one.held - take) // grain * grain
        found += one.held - keep
        cuts.append(Cut(name, keep))
    return Plan(tuple(cuts), max(0, min(need, found) - excess))
