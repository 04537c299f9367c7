"""Closing descriptors that a user has handed over.

Of a file on a file system that does not answer, as a user's own FUSE may choose to, that takes until it does: whoever
waits for it would do nothing else any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Sequence

MOST = 64
"""Closings of one user's that may be under way: each takes a thread, and descriptors."""

_lock = threading.Lock()
_under_way: Counter[int] = Counter()


def close(fds: Sequence[int], uid: int) -> None:
    """Close what a user has handed over; does not wait."""
    if fds:
        with _lock:
            _under_way[uid] += 1
        threading.Thread(target=_close, args=(tuple(fds), uid), name="close", daemon=True).start()


def stuck(uid: int) -> bool:
    """Whether so much of a user's cannot be closed that nothing more of his is to be taken."""
    with _lock:
        return _under_way[uid] >= MOST


def _close(fds: Sequence[int], uid: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # it could not be written back; closed it is
            os.close(fd)
    with _lock:
        _under_way[uid] -= 1
        if not _under_way[uid]:
            del _under_way[uid]
