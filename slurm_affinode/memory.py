"""Memory that is freed and taken again."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Of ``malloc.h`` in glibc."""
_ARRAYS = (64 << 20, 32 << 20)
"""Larger ones are given back at once as before. glibc before 2.35 takes no more than the second of these
(``HEAP_MAX_SIZE / 2``)."""
_KEPT = 512 << 20
_STEP = 16 << 20


@cache
def keep_freed() -> None:
    """Have this process keep memory that it frees, some hundred MiB, rather than give it back to the kernel.

    For work on many arrays of some MiB each: with glibc's defaults each of them is new pages, and to have these made
    costs as much time as what is computed in them. Elsewhere than with glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Set alone, the others would keep the first from growing with what is freed.
        if any(mallopt(_M_MMAP_THRESHOLD, size) for size in _ARRAYS):
            mallopt(_M_TRIM_THRESHOLD, _KEPT)
            mallopt(_M_TOP_PAD, _STEP)
