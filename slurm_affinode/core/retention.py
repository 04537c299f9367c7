"""Which checkpoint images to keep in a fast tier of bounded size, and which a sweep may remove. Pure.

The value of an image is the load time that it is expected to save, per second and byte:

    density = expected requests per second x seconds to load from the next tier / bytes

The expectation is that of a self-exciting point process (Hawkes 1971, Biometrika 58:83): each request of an image makes
further requests more likely, for seconds and for weeks. Kernels are exponentials of fixed half-lives; their weights are
the same for all images and learned online by expectation-maximization (Veen & Schoenberg 2008, J. Am. Stat. Assoc.
103:614). An image that is requested in bursts and one that is requested daily compare in the same unit, without a
parameter for recency or frequency. Parts of an image may be evicted; filling a store with parts in order of density
solves the relaxed knapsack problem (Dantzig 1957).

A sweep removes the images of jobs that Slurm reports as ended. A job unknown to Slurm may have ended long ago, or
slurmctld may have lost its state: its images are kept for ``suspend.keep_unknown``. If a sweep would remove most images
of a store for this reason alone, it stops and waits for an administrator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import mul
from typing import Any, Self

from slurm_affinode.core.suspension import of_this_run, owns
from slurm_affinode.model.suspension import LiveRun, Manifest

HALF_LIVES_S = tuple(3.0 * 10 ** (k / 2) for k in range(13))
"""From 3 s to 35 days."""
HORIZON_TURNS = 0.3
"""Expected requests are averaged over this fraction of the tier's turnover time (``Turnover``): a prediction for the
next moments is useless in a tier that keeps images far longer. Results hardly differ from 0.2 to 0.5."""
_SHORTEST_S, _LONGEST_S = 3.0, 30 * 86400.0
_TURNS_KEPT = 8
_PRIOR = 50.0
_MEMORY = 100_000.0
_LARGEST, _MOST_CAUSED = 1e240, 1e12
"""Limits of a loaded state: products of its values remain finite."""
_REBASE = 500.0
_SET_BACK_S = 60.0


@dataclass(frozen=True, slots=True)
class TierImage:
    """An image that is in the tier, wholly or in part, or could be."""

    name: str
    size: int
    """Total bytes."""
    held: int
    """Bytes in the tier."""
    load_s: float
    """Seconds to load all of it from another tier."""
    expected_s: float | None = None
    """Seconds until it is known to be needed; ``None``: unknown."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Keep ``keep`` bytes of an image in the tier; 0: none."""

    name: str
    keep: int


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """How to make room."""

    cuts: tuple[Cut, ...]
    room: int
    """Bytes of room after the cuts, at most the number requested."""


class Demand:
    """Expected requests of each image.

    Times are seconds of any clock. If the clock is set back, earlier times are shifted with it.
    """

    def __init__(self, *, half_lives_s: tuple[float, ...] = HALF_LIVES_S) -> None:
        """``half_lives_s``: half-lives of the kernels."""
        self._decay = tuple(math.log(2) / one for one in half_lives_s)
        self._caused = [_PRIOR / len(half_lives_s)] * len(half_lives_s)
        self._events = _PRIOR
        self._open = [0.0] * len(half_lives_s)
        self._base_s: float | None = None
        self._now_s = 0.0
        self._marks: dict[str, list[float]] = {}
        """Name -> for each kernel, the sum of exp(decay x (time of request - base)) over the requests."""

    def requested(self, name: str, now_s: float) -> None:
        """Record a request of an image."""
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
        if self._events > _MEMORY:  # older events count half
            self._events /= 2
            self._caused = [one / 2 for one in self._caused]
            self._open = [one / 2 for one in self._open]

    def weights(self) -> list[float]:
        """Return, for each kernel, the number of requests that one request triggers through it."""
        faded, _ = self._factors(self._now_s)
        return [
            caused / max(1.0, self._events - left * fade)
            for caused, left, fade in zip(self._caused, self._open, faded, strict=True)
        ]

    def rates(self, names: Iterable[str], now_s: float, horizon_s: float = _SHORTEST_S) -> dict[str, float]:
        """Return the expected requests per second within the horizon; 0 for images that were never requested."""
        faded, _ = self._factors(now_s)
        # The share of a kernel's mass within the horizon, per second.
        share = (-math.expm1(-beta * horizon_s) / horizon_s for beta in self._decay)
        row = [w * f * s for w, f, s in zip(self.weights(), faded, share, strict=True)]
        nothing = [0.0] * len(row)
        return {name: sum(map(mul, row, self._marks.get(name, nothing))) for name in names}

    def forget(self, name: str) -> None:
        """Forget an image that will not be requested again."""
        self._marks.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other images."""
        self._marks = {name: marks for name, marks in self._marks.items() if name in names}

    def _factors(self, now_s: float) -> tuple[list[float], list[float]]:
        """Return exp(-decay x time since base) and its inverse; move the base before they grow too large."""
        if self._base_s is None:
            self._base_s = now_s
        elif now_s < self._now_s - _SET_BACK_S:  # the clock was wrong until now: keep the elapsed time
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
        """Return the state as JSON-compatible values."""
        return {
            "half_lives_s": [math.log(2) / beta for beta in self._decay], "caused": list(self._caused),
            "open": list(self._open), "events": self._events, "base_s": self._base_s, "now_s": self._now_s,
            "marks": {name: list(marks) for name, marks in self._marks.items()},
        }  # fmt: skip

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Create it from ``state``. Raises ``ValueError`` if that is invalid."""
        try:
            made = cls(half_lives_s=tuple(_numbers(state["half_lives_s"])))
            count = len(made._decay)
            made._caused = _numbers(state["caused"], count, most=_MOST_CAUSED)
            made._open = _numbers(state["open"], count)
            made._events, made._now_s = _numbers([state["events"], state["now_s"]])
            # The base may be negative after the clock was set back.
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
    """Measures how long a tier takes to receive as many bytes as it holds."""

    def __init__(self, now_s: float) -> None:
        """``now_s``: as for ``Demand``."""
        self._since_s = now_s
        self._taken = 0.0

    def took(self, count: int, capacity: int, now_s: float) -> None:
        """Record this many received bytes. Older bytes count half."""
        self._since_s = min(self._since_s, now_s)
        self._taken += count
        if self._taken > _TURNS_KEPT * max(1, capacity):
            self._taken /= 2
            self._since_s = now_s - (now_s - self._since_s) / 2

    def horizon_s(self, capacity: int, now_s: float) -> float:
        """Return the seconds that a tier of ``capacity`` bytes has to look ahead: ``horizon_s`` of ``Demand.rates``."""
        turn_s = max(0.0, now_s - self._since_s) * min(1.0, capacity / max(1.0, self._taken))
        return min(_LONGEST_S, max(_SHORTEST_S, HORIZON_TURNS * turn_s))


def density(image: TierImage, rate: float) -> float:
    """Return the load time, in seconds per second, that is expected to be saved by keeping one byte of the image."""
    if image.expected_s is not None:
        rate = max(rate, 1.0 / max(image.expected_s, 1.0))
    return rate * image.load_s / max(1, image.size)


def make_room(
    there: Iterable[TierImage],
    incoming: TierImage,
    free: int,
    rates: Mapping[str, float],
    *,
    grain: int = 1,
    must: bool = False,
) -> EvictionPlan:
    """Plan room for the missing bytes of ``incoming``: ``free`` bytes, and images of less value.

    A negative ``free`` is an excess over the limit, which is removed as well. ``there``: images that may be cut; a
    complete copy of each is elsewhere. The part of an image that is kept is a multiple of ``grain`` bytes. ``must``:
    also cut images of more value if there is not enough else.
    """
    excess = max(0, -free)
    need = incoming.size - incoming.held + excess
    found = min(need, max(0, free))
    if found == need:
        return EvictionPlan((), need)
    limit = math.inf if must else density(incoming, rates.get(incoming.name, 0.0))
    ranked = sorted(
        (density(one, rates.get(one.name, 0.0)), one.name, one)
        for one in there
        if one.held > 0 and one.name != incoming.name
    )
    cuts = []
    for worth, name, one in ranked:
        if worth >= limit or found >= need:
            break
        take = min(one.held, -(-(need - found) // grain) * grain)
        # The kept part consists of whole grains from the beginning.
        keep = (one.held - take) // grain * grain
        found += one.held - keep
        cuts.append(Cut(name, keep))
    return EvictionPlan(tuple(cuts), max(0, min(need, found) - excess))


HANDFUL = 5
"""A sweep may always remove this many images of a store."""
SHARE = 0.5
"""A sweep never removes more than this share of a store's images because Slurm does not know their jobs."""


class Fate(StrEnum):
    """The fate of an image."""

    NEEDED = "needed"
    """Its job is running or pending."""
    OVER = "over"
    """Slurm reports that its job has ended."""
    UNKNOWN = "unknown"
    """Slurm does not list its job, or its job ID belongs to another job."""


def fate(manifest: Manifest, live: Collection[LiveRun], ended: Collection[LiveRun]) -> Fate:
    """Return the fate of an image. ``live``, ``ended``: the attempts that Slurm lists under its job ID."""
    if any(owns(manifest, run) or of_this_run(manifest, run) for run in live):
        return Fate.NEEDED
    if any(owns(manifest, run) or of_this_run(manifest, run) for run in ended):
        return Fate.OVER
    return Fate.UNKNOWN


def too_many(going: int, present: int) -> bool:
    """Return whether removing ``going`` of ``present`` images of unknown jobs is too many for one sweep."""
    return going > HANDFUL and going > SHARE * present
