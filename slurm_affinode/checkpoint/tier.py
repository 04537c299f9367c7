"""One of the places for images on a node, and a copy in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import CheckpointError, Image


@dataclass(frozen=True, slots=True)
class Tier:
    """Host memory, the node's own disk, or the shared file system."""

    name: str
    """``memory``, ``disk`` or ``shared``."""
    store: DirectoryStore
    durable: bool = True
    shared: bool = False
    """Every node sees it."""
    direct: bool = False
    """Written past the page cache."""
    level: int = 0
    """What is copied here is compressed by zstd at this level; 0: it is not."""
    left: Callable[[], int | None] = lambda: None
    """Bytes that may be taken beside what its store says (host memory); ``None``: no other limit."""

    def room(self) -> int:
        """Bytes that an image may still have here; below 0: there are so many more than there may be."""
        room, left = self.store.room(), self.left()
        return room if left is None else min(room, left - self.store.budget.promised)


@dataclass(frozen=True, slots=True)
class Copy:
    """A complete copy of an image."""

    image: Image
    tier: Tier

    @property
    def id(self) -> tuple[str, int]:
        """Job and sequence number of the image: the same for all its copies."""
        return self.image.job, self.image.manifest.seq

    def is_sound(self) -> bool:
        """Whether all of it can be read, and is what it was."""
        with suppress(CheckpointError, OSError):
            self.tier.store.verify(self.image)
            return True
        return False
