"""Which checkpoint images to keep in a fast tier of bounded size, and which a sweep may remove. Pure.

The value of an image is the load time that it is expected to save, per second and byte:

    density = 1 / expected seconds until it is read x seconds to load from the next tier / bytes

The image of a suspended job is read once: when the job is restored. After that, it is needed only if the attempt is
lost with its node, and counts nothing. A job that has waited for some time is expected to wait as long again, as the
waits of queues and the pauses of users are heavy-tailed (``benchmarks/eviction.py`` compares policies on both). Parts
of an image may be evicted; filling a store with parts in order of density solves the relaxed knapsack problem
(Dantzig 1957).

A sweep removes the images of jobs that Slurm reports as ended. A job unknown to Slurm may have ended long ago, or
slurmctld may have lost its state: its images are kept for ``suspend.keep_unknown``. If a sweep would remove most images
of a store for this reason alone, it stops and waits for an administrator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from slurm_affinode.core.suspension import of_this_run, owns
from slurm_affinode.model.suspension import LiveRun, Manifest

_SHORTEST_S = 1.0
"""Shortest expected time: younger images do not differ."""


@dataclass(frozen=True, slots=True)
class TierImage:
    """An image that is in the tier, wholly or in part, or could be."""

    name: str
    size: int
    """Total bytes."""
    held_bytes: int
    """Bytes in the tier."""
    load_s: float
    """Seconds to load all of it from another tier."""
    waited_s: float | None = None
    """Seconds since the image was written, if its job still waits for its restore; ``None``: it does not."""
    expected_s: float | None = None
    """Seconds until it is known to be needed; ``None``: unknown."""

    @property
    def rate(self) -> float:
        """Expected reads per second; 0 if none is expected."""
        times = [max(_SHORTEST_S, time_s) for time_s in (self.waited_s, self.expected_s) if time_s is not None]
        return 1.0 / min(times) if times else 0.0

    @property
    def density(self) -> float:
        """Load time, in seconds per second, that is expected to be saved by keeping one byte of the image."""
        return self.rate * self.load_s / max(1, self.size)


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


def make_room(
    images: Iterable[TierImage],
    incoming: TierImage,
    free: int,
    *,
    grain: int = 1,
    must: bool = False,
) -> EvictionPlan:
    """Plan room for the missing bytes of ``incoming``: ``free`` bytes, and images of less value.

    A negative ``free`` is an excess over the limit, which is removed as well. ``images``: images that may be cut; a
    complete copy of each is elsewhere. The part of an image that is kept is a multiple of ``grain`` bytes. ``must``:
    also cut images of more value if there is not enough else.
    """
    excess = max(0, -free)
    need = incoming.size - incoming.held_bytes + excess
    freed = min(need, max(0, free))
    if freed == need:
        return EvictionPlan((), need)
    limit = math.inf if must else incoming.density
    candidates = [image for image in images if image.held_bytes > 0 and image.name != incoming.name]
    cuts = []
    for image in sorted(candidates, key=lambda image: (image.density, image.name)):
        if image.density >= limit or freed >= need:
            break
        take = min(image.held_bytes, -(-(need - freed) // grain) * grain)
        # The kept part consists of whole grains from the beginning.
        keep = (image.held_bytes - take) // grain * grain
        freed += image.held_bytes - keep
        cuts.append(Cut(image.name, keep))
    return EvictionPlan(tuple(cuts), max(0, min(need, freed) - excess))


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
