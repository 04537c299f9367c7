"""Slots for work that takes minutes, shared fairly among users: no user's stalled work keeps that of others waiting."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

Call = Callable[[], None]


class Slots:
    """Runs calls in threads of their own. Thread-safe.

    ``total`` run at once, ``each`` of one user. A user of whom nothing runs does not wait for others: the first call
    has a slot beyond ``total`` where need be, up to ``most`` in all. Free slots go round among the users that wait.
    """

    def __init__(self, total: int, each: int, most: int, name: str) -> None:
        """``name``: of the threads."""
        self._total, self._each, self._most, self._name = total, each, most, name
        self._running: Counter[int] = Counter()
        self._waiting: dict[int, deque[Call]] = {}
        """In the order of whose turn is next."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, uid: int, call: Call) -> None:
        """Run a call of a user as soon as there is a slot. Raises ``RuntimeError`` after ``close``."""
        with self._lock:
            if self._closed:
                raise RuntimeError("no work is taken any more")
            self._waiting.setdefault(uid, deque()).append(call)
            self._start()

    def close(self) -> None:
        """Drop what waits, and take nothing more."""
        with self._lock:
            self._closed = True
            self._waiting.clear()

    def _start(self) -> None:
        """Start what may start. Under the lock."""
        while (uid := next(filter(self._may, self._waiting), None)) is not None:
            calls = self._waiting.pop(uid)
            call = calls.popleft()
            if calls:  # behind the others
                self._waiting[uid] = calls
            self._running[uid] += 1
            threading.Thread(target=self._run, args=(uid, call), name=self._name).start()

    def _may(self, uid: int) -> bool:
        mine, all_ = self._running[uid], self._running.total()
        return (mine < self._each and all_ < self._total) or (mine == 0 and all_ < self._most)

    def _run(self, uid: int, call: Call) -> None:
        try:
            call()
        finally:
            with self._lock:
                self._running[uid] -= 1
                if not self._running[uid]:
                    del self._running[uid]
                self._start()
