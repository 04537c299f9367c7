"""The common part of the Python programs in this directory: see ``README.md``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

END = Path(os.environ["END"])


def run(check: Callable[[], object], finally_check: Callable[[], object] = lambda: None) -> None:
    """Say that the program has started, and call ``check`` until the file ``END`` exists, then ``finally_check``.

    Both raise an exception if anything differs from before; then the program ends with status 1. What reads ``/proc``
    belongs into the latter: a job with a file of ``/proc/PID`` open is not suspended at that moment.
    """
    check()
    finally_check()
    say("started")
    count = 0
    while not END.exists():
        check()
        count += 1
        time.sleep(0.1)
    finally_check()
    say(f"checked {count} times")


def say(text: str) -> None:
    """Write a line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def require(right: object, what: str) -> None:
    """End the program with a message if something is not as it was."""
    if not right:
        sys.exit(f"changed: {what}")


def same(now: object, before: object, what: str) -> None:
    """End the program with both values if they differ."""
    require(now == before, f"{what} is {now!r:.300}, was {before!r:.300}")
