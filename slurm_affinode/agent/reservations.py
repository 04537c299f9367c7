"""Host memory that suspensions under way are about to take: two that begin at once must not count on the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Reservations:
    """Of one node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        """Job -> bytes, in the order in which they came."""

    @contextmanager
    def of(self, job_id: int, count: int) -> Iterator[None]:
        """While this lasts a job takes so many bytes, in its turn."""
        with self._lock:
            self._held[job_id] = count
        try:
            yield
        finally:
            with self._lock:
                self._held.pop(job_id, None)

    def moved(self, job_id: int) -> None:
        """The node's free memory tells of it now."""
        with self._lock:
            self._held.pop(job_id, None)

    def before(self, job_id: int) -> int:
        """Bytes of those that came before this job; of all others where it has not come itself.

        While a job's memory moves it is counted here and is missing from the node's free memory: on the safe side.
        """
        with self._lock:
            found = 0
            for other, count in self._held.items():
                if other == job_id:
                    break
                found += count
            return found
