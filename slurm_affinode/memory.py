"""Memory that is freed and taken again."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of ``malloc.h`` in glibc."""
_ARRAY = 32 << 20
"""Larger ones are given back at once as before. The most that glibc before 2.35 takes (``HEAP_MAX_SIZE / 2``)."""
_KEPT = 512 << 20


@cache
def keep_freed() -> None:
    """Have this process keep memory that it frees, some hundred MiB, rather than give it back to the kernel.

    For work on many arrays of some MiB each: with glibc's defaults each of them is new pages, and to have these made
    costs as much time as what is computed in them. Elsewhere than with glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Set alone, the second would keep the first from growing with what is freed.
        if mallopt(_M_MMAP_THRESHOLD, _ARRAY):
            mallopt(_M_TRIM_THRESHOLD, _KEPT)
