"""Closing descriptors that a user has handed over.

Of a file on a file system that does not answer, as a user's own FUSE may choose to, that takes until it does: whoever
waits for it would do nothing else any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence


def close(fds: Sequence[int]) -> None:
    """Close them; does not wait."""
    if fds:
        threading.Thread(target=_close, args=(tuple(fds),), name="close", daemon=True).start()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # it could not be written back; closed it is
            os.close(fd)
