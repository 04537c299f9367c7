"""Input of the join: samples as blocks of plain arrays, and the pieces that assign rows to devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.segments import Floats, Ints
from slurm_affinode.base.errors import UnreachableError

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Classes = npt.NDArray[np.uint8]

BUSY, LOW, IDLE, UNKNOWN = 0, 1, 2, 3
"""Codes of the activity classes."""

PERCENT = ("util_pct",)
FRACTIONS = ("engine_active", "sm_active", "tensor_active", "dram_active")
UTIL, FB, POWER = "util_pct", "fb_used_mib", "power_w"
COLUMNS = ("time", *PERCENT, *FRACTIONS, FB, POWER)
"""Columns of a sample that the join reads."""


@dataclass(frozen=True, slots=True)
class BlockColumn:
    """Values of one metric, NaN if missing. A metric without any value in the block has no column."""

    stored: Float32s
    """The values, any number where ``valid`` says that the value is missing."""
    complete: bool
    """True if no value is missing."""
    valid: Bytes | None = None
    """Bitmap of Arrow: a bit for each value, from the lowest of a byte on. None: a missing value is stored as NaN."""
    bit: int = 0
    """Position of the first value's bit in ``valid``."""

    @property
    def values(self) -> Float32s:
        """Return the values, NaN if missing."""
        if self.valid is None:
            return self.stored
        count = self.bit + len(self.stored)
        bits = np.unpackbits(self.valid, count=count, bitorder="little")[self.bit :]
        return np.where(bits, self.stored, np.float32(math.nan))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ranges of rows, one per device and part, as columns, in row order. Together they cover all rows."""

    device: Ints
    row: Ints
    """First row."""
    end: Ints
    """Row after the last."""
    step: Ints
    """Sampling interval, ms."""
    limit: Floats
    """Longest distance between two samples that is not a gap, ms."""
    next_time: Ints
    """Time of the device's first sample after this piece; ``FAR`` if there is none."""
    first_time: Ints
    reach: Ints
    """Time of the last sample plus the longest time that it can count."""

    def __len__(self) -> int:
        return len(self.device)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows."""

    row: int
    """Number of the first row."""
    time: Ints
    columns: Mapping[str, BlockColumn]
    next_time: int
    """Time of the row after the block. Defined only if that row belongs to the same piece."""

    def __len__(self) -> int:
        return len(self.time)


class OutOfOrderError(UnreachableError):
    """The samples of a block contradict its pieces: a file is damaged."""

    def __init__(self, row: int) -> None:
        """``row``: the number of the first row of the block."""
        super().__init__(
            f"the GPU metrics are damaged: sample times are not in order from sample {row:,} on",
            hint="remove the directory of the damaged day and take its files in again",
        )
        self.row = row
