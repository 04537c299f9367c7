"""Numba compilation of the join's functions (extra ``fast``), and little-endian integers for compiled loops."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    # Untyped on purpose: type checking must not depend on whether Numba is installed.
    numba: Any = importlib.import_module("numba")
except ImportError:  # pragma: no cover - depends on what is installed
    numba = None


def compiled(function: Callable[..., Any], *, inline: bool = False) -> Callable[..., Any]:
    """Return ``function``, compiled on its first call if Numba is installed. Compiled code does not check bounds.

    Machine code is cached by the file of ``function``, so the functions that it calls must be in the same file, or
    changes to them go unnoticed. The integer functions below are the exception: remove ``__pycache__`` after a change.
    """
    if numba is None:  # pragma: no cover - depends on what is installed
        return function
    # Sums may be reordered, but NaN must keep its meaning.
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
    """Compile ``function`` inline into its callers: passing arrays would cost more than the function itself."""
    return compiled(function, inline=True)


Bytes = npt.NDArray[np.uint8]
Int = Any
"""A 64-bit integer: one type to Numba, sometimes a NumPy scalar to Python."""


@inlined
def varint(data: Bytes, at: Int, stop: Int) -> tuple[Int, Int]:
    """Decode an unsigned varint (ULEB128) to an integer with the same 64 bits; return it and its end, or -1."""
    value, shift = np.uint64(0), np.uint64(0)
    behind = -1
    while at < stop and shift < np.uint64(64):
        byte = data[at]
        value |= np.uint64(byte & np.uint8(127)) << shift
        shift += np.uint64(7)
        at += 1
        if byte < 128:
            behind = at
            break
    return np.int64(value), behind


@inlined
def zigzag(value: Int) -> Int:
    """Decode a zigzag-encoded signed integer (sign in the lowest bit)."""
    bits = np.uint64(value)
    return np.int64(bits >> np.uint64(1)) ^ -np.int64(bits & np.uint64(1))


@inlined
def load_eight(data: Bytes, at: np.uint64) -> np.uint64:
    """Load eight bytes as a little-endian number. The compiler turns this into a single load."""
    value = np.uint64(0)
    for k in range(np.uint64(8)):
        value |= np.uint64(data[at + k]) << (k * np.uint64(8))
    return value


@inlined
def word(data: Bytes, at: Int) -> np.uint64:
    """Load up to eight bytes as a little-endian number; bytes beyond the end count as 0."""
    value, start = np.uint64(0), np.uint64(at)
    if at + 8 <= len(data):
        value = load_eight(data, start)
    else:
        for k in range(np.uint64(len(data) - at)):
            value |= np.uint64(data[start + k]) << (k * np.uint64(8))
    return value
