"""The compiled library of conservative backfill: ``profile.c``, built with the package (``hatch_build.py``)."""

from __future__ import annotations

import ctypes
from ctypes import byref
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from slurm_affinode.base import compiled

LIBRARY = Path(__file__).with_name(compiled.LIBRARIES["whatif/profile"])
_NEVER = (1 << 63) - 1
Ints = npt.NDArray[np.int64]


class ProfileRecord(ctypes.Structure):
    """``struct profile``: its fields in the same order."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64), ("at", ctypes.c_void_p), ("waiting", ctypes.c_int64), ("queue", ctypes.c_void_p),
        ("start", ctypes.c_void_p), ("span", ctypes.c_void_p), ("units", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Load the library. Raises ``UnreachableError``. Its functions run without the interpreter lock."""
    loaded = compiled.load(LIBRARY, "conservative backfill")
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, parameters in {
        "advance": (pointer, integer),
        "add": (pointer, integer, integer, integer),
        "reserve": (pointer, integer, integer, integer),
        "reserve_all": (pointer,),
        "move_forward": (pointer,),
        "take_due": (pointer, integer, pointer, pointer),
    }.items():
        getattr(loaded, name).argtypes = parameters
        getattr(loaded, name).restype = None
    loaded.take_due.restype = integer
    return loaded


class Profile:
    """Free units over time, and the queue of waiting jobs, each with a reservation. Times are in seconds."""

    def __init__(self, units: Ints, capacity: int) -> None:
        """``units``: of each job, at most ``capacity``. Raises ``UnreachableError`` without the library."""
        self._library = library()
        # Memory that is not used is not occupied.
        self._breakpoints = np.empty((2 * len(units) + 5, 2), np.int64)
        self._queue, self._start, self._span, self._positions = (np.empty(len(units), np.int64) for _ in range(4))
        self._units = np.ascontiguousarray(units, np.int64)
        self._capacity = capacity
        self._record = ProfileRecord(
            0, self._breakpoints.ctypes.data, 0, self._queue.ctypes.data, self._start.ctypes.data,
            self._span.ctypes.data, self._units.ctypes.data,
        )  # fmt: skip
        self._address = ctypes.addressof(self._record)
        self._place = self._positions.ctypes.data
        self._next = ctypes.c_int64()
        self.clear(0)

    def clear(self, now: int) -> None:
        """Free all units from ``now`` on. The reservations of waiting jobs are made again with ``reserve_all``."""
        self._record.count = 1
        self._breakpoints[0] = now, self._capacity
        self._breakpoints[1] = _NEVER, 0

    def advance(self, now: int) -> None:
        """Discard what was before ``now``."""
        self._library.advance(self._address, now)

    def add(self, start: int, end: int, units: int) -> None:
        """Add ``units`` (negative: subtract) from ``start``, at or after the present time, to ``end``."""
        self._library.add(self._address, start, end, units)

    def reserve(self, position: int, job: int, span: int) -> None:
        """Insert a job into the queue at ``position``; reserve its units from the earliest time at which it fits."""
        self._library.reserve(self._address, position, job, span)

    def reserve_all(self) -> None:
        """Give each waiting job, in order, the earliest time at which it fits."""
        self._library.reserve_all(self._address)

    def move_forward(self) -> None:
        """Give each waiting job, in order, an earlier reservation if there is one."""
        self._library.move_forward(self._address)

    def take_due(self, now: int) -> tuple[list[int], int]:
        """Remove the jobs whose reservation has begun from the queue.

        Return their positions before that, ascending, and when the next reservation begins; without any, 2**63 - 1.
        """
        count = self._library.take_due(self._address, now, self._place, byref(self._next))
        return self._positions[:count].tolist() if count else [], self._next.value
