"""Python's collection of cyclic garbage, around work that creates many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: thousands of new objects would start it repeatedly, and none of them is garbage.

    As a context, or as a decorator of a function.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
