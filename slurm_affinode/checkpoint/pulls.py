"""Who brings an image to this node: one at a time, and in no hurry until somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slurm_affinode.checkpoint.blockio import Limiter


class _Pull(Limiter):
    """A limit that is lifted when the image is wanted."""

    def __init__(self, limiter: Limiter) -> None:
        super().__init__(0)
        self._limiter = limiter
        self.wanted = threading.Event()
        self.over = threading.Event()

    def pass_(self, count: int, over: Callable[[], bool] = lambda: False) -> None:
        """See ``Limiter``."""
        if not self.wanted.is_set():
            self._limiter.pass_(count, lambda: self.wanted.is_set() or over())


class Pulls:
    """Of one node. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], _Pull] = {}

    @contextmanager
    def turn(self, image: tuple[str, int], limiter: Limiter, *, wanted: bool) -> Iterator[Limiter]:
        """Begin when nobody else brings this image; gives the limit to keep to.

        ``wanted``: somebody waits for it. Then ``limiter`` does not hold, nor for the one who has begun before.
        """
        mine = _Pull(limiter)
        while (other := self._first(image, mine)) is not mine:
            if wanted:
                other.wanted.set()
            other.over.wait()
        if wanted:
            mine.wanted.set()
        try:
            yield mine
        finally:
            with self._lock:
                del self._under_way[image]
            mine.over.set()

    def _first(self, image: tuple[str, int], mine: _Pull) -> _Pull:
        with self._lock:
            return self._under_way.setdefault(image, mine)
