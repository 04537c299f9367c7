"""Retention: which images stay in which tier, and how a full tier gets room.

A copy leaves a tier, wholly or in part, only if a complete one is in a slower durable tier and it is not in use.
``core/retention.py`` decides which one; its inputs are recorded here: the read rates of the tiers, and the images whose
jobs still wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from slurm_affinode.base import text
from slurm_affinode.checkpoint.image import digest
from slurm_affinode.checkpoint.interface import CheckpointError, Image, NoRoom
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.core.retention import Cut, TierImage, make_room
from slurm_affinode.model.suspension import JobKey, Manifest


@dataclass(frozen=True, slots=True)
class Tier:
    """Host memory, the node's own disk, or the shared file system."""

    name: str
    """``memory``, ``disk`` or ``shared``."""
    store: DirectoryStore
    durable: bool = True
    shared: bool = False
    """Visible to every node."""
    direct: bool = False
    """Whether it is written past the page cache."""
    level: int = 0
    """zstd level for copies to this tier; 0: not compressed."""
    available_bytes: Callable[[], int | None] = lambda: None
    """Bytes available beyond the limits of the store (host memory); ``None``: no other limit."""

    def room(self) -> int:
        """Return the bytes available for images; negative if the tier is over its limit."""
        room, free = self.store.room(), self.available_bytes()
        return room if free is None else min(room, free - self.store.budget.promised)


@dataclass(frozen=True, slots=True)
class Copy:
    """A complete copy of a checkpoint image."""

    image: Image
    tier: Tier

    @property
    def id(self) -> tuple[str, int]:
        """Job and sequence number of the image: the same for all its copies."""
        return self.image.job, self.image.manifest.seq

    def is_sound(self) -> bool:
        """Return whether the copy is readable and verified."""
        with suppress(CheckpointError, OSError):
            self.tier.store.verify(self.image)
            return True
        return False


LOG = logging.getLogger("slurm_affinode.agent")
_FIRST_SPEED = {"memory": 4e9, "disk": 1e9, "shared": 3e8}
"""Assumed read rate of a tier, in bytes per second, until it is measured."""
_SPEED_WEIGHT = 0.3


class Retention:
    """Retention in the tiers of one node, fastest first. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier], now: Callable[[], float]) -> None:
        """``now``: seconds since the epoch."""
        self.tiers = tuple(tiers)
        self._now = now
        self._speeds = dict(_FIRST_SPEED)
        self._jobs_lock = threading.RLock()
        """Guards the two fields below. ``_lock`` may be held for seconds by an eviction."""
        self._waiting: frozenset[tuple[str, int]] = frozenset()
        self._restored: dict[str, int] = {}
        """Name of a job -> the highest sequence number of an image from which it was restored."""
        self._pins: dict[tuple[str, int], int] = {}
        self._relieved = False
        self._lock = threading.RLock()

    # --- room

    def may_take(self, tier: Tier, count: int) -> bool:
        """Return whether there is room for this many bytes, or room can be made."""
        room = tier.room()
        return room >= count or room + self._freeable(tier) >= count

    def check_room(self, tier: Tier, uid: int, count: int) -> None:
        """Check that a tier takes a user's image of this size, including room that can be made. Raises ``NoRoom``."""
        tier.store.check_room(uid, count, freeable=0 if tier.room() >= count else self._freeable(tier))

    def _freeable(self, tier: Tier) -> int:
        return sum(candidate.held_bytes for candidate, _ in self._candidates(tier))

    def make_room_for_new(self, tier: Tier, key: JobKey, size: int) -> None:
        """Make room for a new image. Raises ``NoRoom``."""
        load_s = size / self._speed(self._below(tier))
        self._make_room(tier, TierImage(f"{key.name}/new", size, 0, load_s, waited_s=0.0), key.name)

    def make_room_for(self, tier: Tier, incoming: TierImage) -> None:
        """Make room for a copy. Raises ``NoRoom`` if the images there are worth more or cannot be evicted."""
        self._make_room(tier, incoming, incoming.name)

    def _make_room(self, tier: Tier, incoming: TierImage, name: str) -> None:
        with self._lock:
            room = tier.room()
            need = incoming.size - incoming.held_bytes
            if room >= need or tier.shared:
                return
            candidates = self._candidates(tier, replaced=name if incoming.name != name else None)
            plan = make_room([candidate for candidate, _ in candidates], incoming, room, grain=digest.BLOCK)
            if plan.room < need:
                raise NoRoom(f"{tier.store.path}: {text.size(max(0, room))} free, {text.size(need)} needed")
            self._cut(tier, plan.cuts, candidates)

    def relieve(self) -> None:
        """Free host memory if the node is short of it; on the first call, also enforce a reduced budget."""
        with self._lock:
            for tier in self.tiers:
                lack = 0 if tier.shared else self._lack(tier)
                if lack > 0:
                    candidates = self._candidates(tier)
                    incoming = TierImage("", lack, 0, 0.0)
                    images = [candidate for candidate, _ in candidates]
                    plan = make_room(images, incoming, 0, grain=digest.BLOCK, must=True)
                    self._cut(tier, plan.cuts, candidates)
            self._relieved = True

    def _lack(self, tier: Tier) -> int:
        """Return the bytes that must be freed."""
        free = tier.available_bytes()
        lack = 0 if free is None or free > 0 else digest.BLOCK - free
        if not self._relieved:
            with suppress(CheckpointError):  # the store cannot be read
                lack = max(lack, -tier.store.room())
        return lack

    def _candidates(self, tier: Tier, replaced: str | None = None) -> list[tuple[TierImage, Image]]:
        """Return the images that may be evicted from a tier: complete in a slower durable tier, and not in use.

        No job waits for an image that is not its newest one. ``replaced``: a job with a newest image that is about to
        be superseded.
        """
        slower = [slower_tier for slower_tier in self.tiers[self.tiers.index(tier) + 1 :] if slower_tier.durable]
        candidates = []
        with suppress(CheckpointError, OSError):
            whole = [(image.manifest, image.manifest.size) for image in tier.store.images() if isinstance(image, Image)]
            entries = [*whole, *tier.store.begun()]
            newest: dict[str, int] = {}
            for facts, _ in entries:
                newest[facts.key.name] = max(facts.seq, newest.get(facts.key.name, 0))
            for facts, held_bytes in entries:
                name = facts.key.name
                if (name, facts.seq) in self._pins:
                    continue
                waited_s = self._waited_s(facts)
                if facts.seq < newest[name] or name == replaced:
                    name, waited_s = f"{name}/{facts.seq}", None
                where = next((tier for tier in slower if _has(tier, facts)), None)
                if where is not None:
                    present = TierImage(name, facts.size, held_bytes, facts.size / self._speed(where), waited_s)
                    candidates.append((present, Image(facts, str(tier.store.path))))
        return candidates

    @staticmethod
    def _cut(tier: Tier, cuts: Sequence[Cut], candidates: Sequence[tuple[TierImage, Image]]) -> None:
        for cut in cuts:
            for tier_image, image in candidates:
                if tier_image.name == cut.name:
                    with suppress(CheckpointError, OSError):
                        tier.store.cut(image, cut.keep)
                        kept_text, whole = text.size(cut.keep), text.size(tier_image.size)
                        LOG.info("%s: %s of %s left in the tier %s", cut.name, kept_text, whole, tier.name)

    # --- which jobs wait

    def waiting(self, images: Collection[tuple[str, int]]) -> None:
        """Set the images, by job and sequence number, whose suspended jobs wait; earlier ones of the set were restored.

        An image that was never in the set is not known to have been restored.
        """
        with self._jobs_lock:
            for name, seq in self._waiting.difference(images):
                self.restored(name, seq)
            self._waiting = frozenset(images)

    def restored(self, name: str, seq: int) -> None:
        """Record that a job was restored from an image: it is needed only if the attempt is lost. Idempotent."""
        with self._jobs_lock:
            self._restored[name] = max(seq, self._restored.get(name, 0))

    def keep(self, names: Collection[str]) -> None:
        """Forget all other jobs: they have ended. Idempotent."""
        with self._jobs_lock:
            self._restored = {name: seq for name, seq in self._restored.items() if name in names}

    def _waited_s(self, facts: Manifest) -> float | None:
        """Return ``TierImage.waited_s`` of an image."""
        name = facts.key.name
        with self._jobs_lock:
            over = facts.seq <= self._restored.get(name, 0) and (name, facts.seq) not in self._waiting
        return None if over else max(0.0, self._now() - facts.dumped_epoch)

    # --- what is known of the tiers

    def describe_copy(self, copy: Copy, tier: Tier, *, expected_s: float | None = None) -> TierImage:
        """Describe an image to be copied to a tier, with the bytes already there.

        ``expected_s``: seconds until it is needed.
        """
        facts = copy.image.manifest
        held_bytes = 0
        with suppress(CheckpointError, OSError):
            held_bytes = next((image_bytes for begun, image_bytes in tier.store.begun() if begun == facts), 0)
        # A copy to a slower tier is rated like a new image: its present tier may be volatile, or not of this node.
        out = self.tiers.index(copy.tier) < self.tiers.index(tier)
        load_s = facts.size / self._speed(self._below(tier) if out else copy.tier)
        return TierImage(facts.key.name, facts.size, held_bytes, load_s, self._waited_s(facts), expected_s)

    def measured(self, tier: Tier, size: int, took_s: float) -> None:
        """Update the read rate of a tier with a measurement."""
        if size >= digest.BLOCK and took_s > 0:
            before = self._speed(tier)
            self._speeds[tier.name] = before + _SPEED_WEIGHT * (size / took_s - before)

    def _below(self, tier: Tier) -> Tier:
        """Return the next slower tier, from which images missing in this one are loaded."""
        after = self.tiers[self.tiers.index(tier) + 1 :]
        return after[0] if after else tier

    def _speed(self, tier: Tier) -> float:
        return self._speeds.get(tier.name, 1e9)

    @contextmanager
    def pinned(self, copy: Copy) -> Iterator[None]:
        """Keep a copy from eviction while it is in use."""
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
