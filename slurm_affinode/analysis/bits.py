"""Numbers in bytes, for compiled loops: of seven bits a byte, with the sign in the lowest bit, of eight bytes.

Little-endian throughout. They are parts of the functions that use them, in whatever file (``compiled``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.compiled import inlined

Bytes = npt.NDArray[np.uint8]
Int = Any
"""An integer of 64 bits: to Numba one type, to Python sometimes numpy's."""


@inlined
def varint(data: Bytes, at: Int, stop: Int) -> tuple[Int, Int]:
    """An unsigned number, seven bits a byte (ULEB128), as the integer of the same 64 bits; where it ends, or -1."""
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
    """A signed number whose sign is in the lowest bit."""
    bits = np.uint64(value)
    return np.int64(bits >> np.uint64(1)) ^ -np.int64(bits & np.uint64(1))


@inlined
def load_eight(data: Bytes, at: np.uint64) -> np.uint64:
    """Eight bytes as a number; the compiler makes one load of this."""
    value = np.uint64(0)
    for k in range(np.uint64(8)):
        value |= np.uint64(data[at + k]) << (k * np.uint64(8))
    return value


@inlined
def word(data: Bytes, at: Int) -> np.uint64:
    """Eight bytes as a number; as many as there are, before the end."""
    value, start = np.uint64(0), np.uint64(at)
    if at + 8 <= len(data):
        value = load_eight(data, start)
    else:
        for k in range(np.uint64(len(data) - at)):
            value |= np.uint64(data[start + k]) << (k * np.uint64(8))
    return value
