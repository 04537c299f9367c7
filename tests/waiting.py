"""Waiting for expected events, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 120.0
"""Only reached by events that never happen: dozens of processes may share the machine's cores."""


def wait_until(what: str, probe: Callable[[], T], good: Callable[[T], bool] = bool) -> T:
    """Return the first result of ``probe`` that is good."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        seen = probe()
        if good(seen):
            return seen
        assert time.monotonic() < deadline, f"still not true that {what}: {seen!r}"
        time.sleep(0.01)
