"""What stays in which tier, and how room is made in one that is full.

A copy leaves a tier, wholly or in part, only where a whole one is in a slower durable tier, and while nobody uses it.
Which one goes is decided by ``core/eviction.py``; what it has to know of the tiers is measured here: how fast they are
read, and how long it takes until all that a tier holds has been replaced.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from slurm_affinode.checkpoint import digest
from slurm_affinode.checkpoint.demand import SharedDemand
from slurm_affinode.checkpoint.interface import CheckpointError, Image, NoRoom
from slurm_affinode.checkpoint.tier import Copy, Tier
from slurm_affinode.core.eviction import Cut, Held, Turnover, make_room
from slurm_affinode.model.suspension import JobKey, Manifest
from slurm_affinode.sizes import size as gib

LOG = logging.getLogger("slurm_affinode.agent")
_FIRST_SPEED = {"memory": 4e9, "disk": 1e9, "shared": 3e8}
"""Bytes per second that a tier is read at, until it was measured."""
_KNOWN = 0.3


class Retention:
    """Of the tiers of one node, fastest first. May be used by several threads."""

    def __init__(self, tiers: Sequence[Tier], demand: SharedDemand, now: Callable[[], float]) -> None:
        self.tiers = tuple(tiers)
        self.demand = demand
        self._now = now
        self._speeds = dict(_FIRST_SPEED)
        self._turnover = {tier.name: Turnover(now()) for tier in tiers}
        self._pins: dict[tuple[str, int], int] = {}
        self._relieved = False
        self._lock = threading.RLock()

    # --- room

    def may_take(self, tier: Tier, count: int) -> bool:
        """Whether there is room for so many bytes, or could be made."""
        room = tier.room()
        return room >= count or room + self._freeable(tier) >= count

    def check_room(self, tier: Tier, uid: int, count: int) -> None:
        """That a tier takes a user's image of so many bytes, also where room has to be made. Raises ``NoRoom``."""
        tier.store.check_room(uid, count, freeable=0 if tier.room() >= count else self._freeable(tier))

    def _freeable(self, tier: Tier) -> int:
        return sum(one.held for one, _ in self._candidates(tier))

    def make_room_for_new(self, tier: Tier, key: JobKey, size: int) -> None:
        """For an image that is about to be written. Raises ``NoRoom``."""
        self._make_room(tier, Held(f"{key.name}/new", size, 0, size / self._speed(self._below(tier))), key.name)

    def make_room_for(self, tier: Tier, held: Held) -> None:
        """For a copy. Raises ``NoRoom`` where what is there is worth more, or has to stay."""
        self._make_room(tier, held, held.name)

    def _make_room(self, tier: Tier, wanted: Held, name: str) -> None:
        with self._lock:
            room = tier.room()
            need = wanted.size - wanted.held
            if room >= need or tier.shared:
                return
            candidates = self._candidates(tier, replaced=name if wanted.name != name else None)
            rates = self._rates(tier, [name, *(one.name for one, _ in candidates)])
            rates[wanted.name] = rates[name]
            plan = make_room([one for one, _ in candidates], wanted, room, rates, grain=digest.BLOCK)
            if plan.room < need:
                raise NoRoom(f"{tier.store.path}: {gib(max(0, room))} free, {gib(need)} needed")
            self._cut(tier, plan.cuts, candidates)

    def relieve(self) -> None:
        """Give host memory back where the node is short of it; at first, also what is above a new, smaller budget."""
        with self._lock:
            for tier in self.tiers:
                lack = 0 if tier.shared else self._lack(tier)
                if lack > 0:
                    candidates = self._candidates(tier)
                    rates = self._rates(tier, [one.name for one, _ in candidates])
                    wanted = Held("", lack, 0, 0.0)
                    plan = make_room([one for one, _ in candidates], wanted, 0, rates, grain=digest.BLOCK, must=True)
                    self._cut(tier, plan.cuts, candidates)
            self._relieved = True

    def _lack(self, tier: Tier) -> int:
        """Bytes that have to go."""
        left = tier.left()
        lack = 0 if left is None or left > 0 else digest.BLOCK - left
        if not self._relieved:
            with suppress(CheckpointError):  # it cannot be read
                lack = max(lack, -tier.store.room())
        return lack

    def _candidates(self, tier: Tier, replaced: str | None = None) -> list[tuple[Held, Image]]:
        """What may go from a tier: what is wholly in a slower durable one, and not in use.

        A job has the demand of its newest image; older ones go by names that nobody asks for. ``replaced``: the newest
        of this job is about to be older.
        """
        slower = [one for one in self.tiers[self.tiers.index(tier) + 1 :] if one.durable]
        found = []
        with suppress(CheckpointError, OSError):
            whole = [(one.manifest, one.manifest.size) for one in tier.store.images() if isinstance(one, Image)]
            there = [*whole, *tier.store.begun()]
            newest: dict[str, int] = {}
            for facts, _ in there:
                newest[facts.key.name] = max(facts.seq, newest.get(facts.key.name, 0))
            for facts, held in there:
                name = facts.key.name
                if (name, facts.seq) in self._pins:
                    continue
                if facts.seq < newest[name] or name == replaced:
                    name = f"{name}/{facts.seq}"
                where = next((one for one in slower if _has(one, facts)), None)
                if where is not None:
                    load_s = facts.size / self._speed(where)
                    found.append((Held(name, facts.size, held, load_s), Image(facts, str(tier.store.path))))
        return found

    @staticmethod
    def _cut(tier: Tier, cuts: Sequence[Cut], candidates: Sequence[tuple[Held, Image]]) -> None:
        for cut in cuts:
            for held, image in candidates:
                if held.name == cut.name:
                    with suppress(CheckpointError, OSError):
                        tier.store.cut(image, cut.keep)
                        LOG.info("%s: %s of %s left in the tier %s", cut.name, gib(cut.keep), gib(held.size), tier.name)

    def _rates(self, tier: Tier, names: Sequence[str]) -> dict[str, float]:
        now = self._now()
        return self.demand.rates(names, now, self._turnover[tier.name].horizon_s(_capacity(tier), now))

    # --- what is known of the tiers

    def held(self, copy: Copy, tier: Tier, *, expected_s: float | None = None) -> Held:
        """What a tier has of an image that would be copied there; ``expected_s``: it is wanted in so many seconds."""
        facts = copy.image.manifest
        there = 0
        with suppress(CheckpointError, OSError):
            there = next((held for begun, held in tier.store.begun() if begun == facts), 0)
        # On its way out it is worth what a new one is: the tier that it is in may not last, or not be of this node.
        out = self.tiers.index(copy.tier) < self.tiers.index(tier)
        load_s = facts.size / self._speed(self._below(tier) if out else copy.tier)
        return Held(facts.key.name, facts.size, there, load_s, expected_s)

    def took(self, tier: Tier, count: int) -> None:
        """A tier took in so many bytes."""
        self._turnover[tier.name].took(count, _capacity(tier), self._now())

    def measured(self, tier: Tier, size: int, took_s: float) -> None:
        """So many bytes were read from a tier in so many seconds."""
        if size >= digest.BLOCK and took_s > 0:
            before = self._speed(tier)
            self._speeds[tier.name] = before + _KNOWN * (size / took_s - before)

    def _below(self, tier: Tier) -> Tier:
        """The next slower tier: what is not in this one is loaded from there."""
        after = self.tiers[self.tiers.index(tier) + 1 :]
        return after[0] if after else tier

    def _speed(self, tier: Tier) -> float:
        return self._speeds.get(tier.name, 1e9)

    @contextmanager
    def pinned(self, copy: Copy) -> Iterator[None]:
        """While a copy is in use."""
        with self._lock:
            self._pins[copy.id] = self._pins.get(copy.id, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[copy.id] -= 1
                if not self._pins[copy.id]:
                    del self._pins[copy.id]


def _has(tier: Tier, facts: Manifest) -> bool:
    try:
        return tier.store.get(facts.key.name, facts.seq).manifest == facts
    except (CheckpointError, OSError):
        return False


def _capacity(tier: Tier) -> int:
    usage = tier.store.usage()
    return usage.used + usage.free if usage.quota is None else min(usage.quota, usage.used + usage.free)
