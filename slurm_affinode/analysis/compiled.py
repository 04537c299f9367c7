"""Functions that Numba compiles, where it is installed (the extra ``fast``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

try:
    # Untyped on purpose: type checks must not depend on whether it is installed.
    numba: Any = importlib.import_module("numba")
except ImportError:  # pragma: no cover - depends on what is installed
    numba = None


def compiled(function: Callable[..., Any], *, inline: bool = False) -> Callable[..., Any]:
    """``function``, compiled on its first call where Numba is there; the machine code is kept where it can be.

    What is kept is found by the file of ``function`` alone: functions that it calls belong in the same file, or a
    change of theirs goes unnoticed (but for those of ``bits``, after a change of which ``__pycache__`` has to go).
    There are no checks of bounds.
    """
    if numba is None:  # pragma: no cover - depends on what is installed
        return function
    # Sums may be taken in any order; NaN must go on meaning what it means.
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    result: Callable[..., Any]
    if inline:
        result = numba.njit(inline="always", **options)(function)
        return result
    try:
        result = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # pragma: no cover - nowhere to keep it
        result = numba.njit(**options)(function)
    return result


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, made part of each function that calls it: handing arrays over costs more than these do."""
    return compiled(function, inline=True)
