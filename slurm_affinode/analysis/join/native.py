"""The compiled library of the join: ``fold.c``, built with the package (``hatch_build.py``).

A structure of ``join.h`` has its fields here in the same order. ``record`` checks the types of arrays. Their lengths
are the callers' responsibility, but for those that depend on the contents of files: these the library checks.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from slurm_affinode.base import compiled

LIBRARY = Path(__file__).with_name(compiled.LIBRARIES["analysis/join"])
MISSING, PARTIAL, COMPLETE = 0, 1, 2
"""Whether no, some or all rows of a block have a value of a metric."""
CHUNK = 4096
"""Number of samples of a piece that are processed at once; at most that of ``join.h``."""

_I64, _I32, _F64, _F32 = (np.dtype(name) for name in ("int64", "int32", "float64", "float32"))
_U8, _FLAG = np.dtype(np.uint8), np.dtype(np.bool_)
Types = dict[str, tuple[type[Any], np.dtype[Any] | None]]
"""Field -> its type; with it, for a pointer, the type of the array."""
_INT: tuple[type[Any], None] = ctypes.c_int64, None


def _array(dtype: np.dtype[Any]) -> tuple[type[Any], np.dtype[Any]]:
    return ctypes.c_void_p, dtype


class Record(ctypes.Structure):
    """A structure whose pointers are arrays, which it keeps alive."""

    types: ClassVar[Types]
    arrays: list[npt.NDArray[Any]]


Kind = TypeVar("Kind", bound=Record)


def _fields(kind: type[Kind]) -> type[Kind]:
    kind._fields_ = [(name, c_type) for name, (c_type, _) in kind.types.items()]
    return kind


@_fields
class ColumnRecord(Record):
    """``block.BlockColumn``. ``values`` is None if the metric is missing in the block; ``valid``, if no value is."""

    types: ClassVar[Types] = {"present": _INT, "values": _array(_F32), "valid": _array(_U8), "bit": _INT}


@_fields
class BlockRecord(Record):
    """The rows of a block."""

    types: ClassVar[Types] = {
        **dict.fromkeys(("count", "row", "next_time"), _INT),
        "time": _array(_I64),
        **dict.fromkeys(("util", "engine", "sm", "tensor", "dram", "fb", "power"), (ColumnRecord, None)),
    }  # fmt: skip


@_fields
class PiecesRecord(Record):
    """``block.Pieces``."""

    types: ClassVar[Types] = {
        "count": _INT, **dict.fromkeys(("device", "end", "step"), _array(_I64)), "limit": _array(_F64),
        **dict.fromkeys(("next_time", "first_time", "reach"), _array(_I64)),
    }  # fmt: skip


@_fields
class TimelineRecord(Record):
    """``segments.Cells``. ``offset``: first cell of each device, followed by the number of cells."""

    types: ClassVar[Types] = {
        **dict.fromkeys(("offset", "start", "end", "earliest", "latest"), _array(_I64)),
        **dict.fromkeys(("inside", "held"), _array(_FLAG)),
        **dict.fromkeys(("owner_offset", "owners"), _array(_I64)),
    }  # fmt: skip


@_fields
class LimitsRecord(Record):
    """``result.Thresholds``; ``floors``: those of util, engine, sm, tensor and dram."""

    types: ClassVar[Types] = {
        "floors": _array(_F32), "idle_pct": (ctypes.c_float, None), "low_pct": (ctypes.c_float, None), "chunk": _INT,
    }  # fmt: skip


@_fields
class SumsRecord(Record):
    """Sums of one thread. ``peak``: bits of 32-bit floats, -1 if there is no value."""

    types: ClassVar[Types] = {
        "sums": _array(_F64), "peak": _array(_I32), "partly_cell": _array(_I64), "partly_time": _array(_I64),
        "partly_sums": _array(_F64), **dict.fromkeys(("partly_room", "partly", "gaps", "gap_ms", "samples"), _INT),
    }  # fmt: skip


@_fields
class WindowsRecord(Record):
    """Open idle windows and counts of closed ones, per allocation; bins of their lengths; the last idle time."""

    types: ClassVar[Types] = {
        "count": _INT, "owner_start": _array(_I64), "counted": _array(_FLAG),
        **dict.fromkeys(("begin", "end"), _array(_I64)), "share": _array(_F64),
        **dict.fromkeys(("windows", "longest"), _array(_I64)), "bounds_count": _INT,
        **dict.fromkeys(("bounds", "bin_counts"), _array(_I64)), "bin_share": _array(_F64), "last": _array(_I64),
    }  # fmt: skip


def record(kind: type[Kind], **fields: Any) -> Kind:
    """Build a structure. An array of another type than the field's, or one that is not contiguous, is an error.

    An array may be None.
    """
    plan = kind()
    plan.arrays = []
    for name, (_, dtype) in kind.types.items():
        value = fields[name]
        if isinstance(value, Record):
            plan.arrays += value.arrays
        elif dtype is not None and value is not None:
            if value.dtype != dtype or not value.flags.c_contiguous:
                raise TypeError(f"{name}: {value.dtype} instead of {dtype}, or not contiguous")
            plan.arrays.append(value)
            value = value.ctypes.data
        setattr(plan, name, value)
    return plan


@cache
def library() -> ctypes.CDLL:
    """Load the library. Raises ``UnreachableError``. Its functions run without the interpreter lock."""
    loaded = compiled.load(LIBRARY, "the reports")
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, parameters in {
        "fold": (*(pointer,) * 6, integer),
        "give_idle": (pointer, integer, pointer, pointer),
        "end_all_windows": (pointer, pointer),
    }.items():
        getattr(loaded, name).argtypes = parameters
    loaded.fold.restype = integer
    for name in ("give_idle", "end_all_windows"):
        getattr(loaded, name).restype = None
    return loaded
