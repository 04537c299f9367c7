"""Reading ahead: threads produce the items of the next sources while those of the first one are consumed, in order."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
_QUEUE_SIZE = 2
"""Items of a source that wait to be consumed."""
_WAIT_S = 0.2
_END_S = 2.0
"""For the threads to end: the items that they read meanwhile take less."""


@dataclass(frozen=True, slots=True)
class ItemSource(Generic[Item]):
    """Items that are produced in order."""

    produce: Callable[[], Generator[Item, None, None]]
    """Called by the thread of the source."""
    cost: int
    """The memory that it needs, roughly."""


def read_ahead(
    sources: Iterable[ItemSource[Item]], *, workers: int, budget: int, idle: Callable[[], None] = lambda: None
) -> Generator[Iterator[Item], None, None]:
    """Yield the items of each source, in the order of ``sources``; each is to be consumed before the next one.

    At most ``workers`` sources are read at the same time, and their cost is at most ``budget`` unless one alone has
    more. ``idle`` is called several times a second while an item is awaited. What a source raises is raised where its
    items are consumed. When the result is closed, all threads end, except one that waits for a file
    system that does not respond: it ends with the process.
    """
    waiting = deque[tuple[_Reading[Item], int]]()
    source_iterator = iter(sources)
    following = next(source_iterator, None)
    bytes_in_memory = 0
    try:
        while following is not None or waiting:
            while following is not None and (
                not waiting or (len(waiting) < workers and bytes_in_memory + following.cost <= budget)
            ):  # fmt: skip
                waiting.append((_Reading(following.produce), following.cost))
                bytes_in_memory += following.cost
                following = next(source_iterator, None)
            yield waiting[0][0].items(idle)
            _, cost = waiting.popleft()
            bytes_in_memory -= cost
    finally:
        for reading, _ in waiting:
            reading.stop()
        until = time.monotonic() + _END_S
        for reading, _ in waiting:
            reading.join(max(0.0, until - time.monotonic()))


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class _End:
    pass


class _Reading(Generic[Item]):
    """A source that a thread reads."""

    def __init__(self, produce: Callable[[], Generator[Item, None, None]]) -> None:
        self._items: queue.Queue[Item | _Failure | _End] = queue.Queue(_QUEUE_SIZE)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(produce,), daemon=True)
        self._thread.start()

    def _run(self, produce: Callable[[], Generator[Item, None, None]]) -> None:
        last: _Failure | _End = _End()
        try:
            with closing(produce()) as items:
                for item in items:
                    if not self._put(item):
                        return
        except BaseException as error:  # raised again by the consumer
            last = _Failure(error)
        self._put(last)

    def _put(self, item: Item | _Failure | _End) -> bool:
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=_WAIT_S)
            except queue.Full:
                continue
            return True
        return False

    def items(self, idle: Callable[[], None]) -> Iterator[Item]:
        """Yield the items."""
        while True:
            try:
                item = self._items.get(timeout=_WAIT_S)
            except queue.Empty:
                idle()
                continue
            if isinstance(item, _End):
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def stop(self) -> None:
        """End the thread at the next item."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)
