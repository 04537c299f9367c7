"""Samples as the join takes them: blocks of rows as plain arrays, and the pieces that say whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.segments import Flags, Floats, Ints
from slurm_affinode.errors import UnreachableError

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Classes = npt.NDArray[np.uint8]

BUSY, LOW, IDLE, UNKNOWN = 0, 1, 2, 3
"""Classes of activity, as codes."""

PERCENT = ("util_pct",)
FRACTIONS = ("engine_active", "sm_active", "tensor_active", "dram_active")
UTIL, FB, POWER = "util_pct", "fb_used_mib", "power_w"
COLUMNS = ("time", *PERCENT, *FRACTIONS, FB, POWER)
"""What the join reads of a sample."""


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one metric; NaN where missing. A metric that is missing in the whole block has no column."""

    values: Float32s
    complete: bool
    """Whether no value is missing."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The rows of one device in one part, as columns; in the order of the rows, which they cover without a hole."""

    device: Ints
    row: Ints
    """First row."""
    end: Ints
    """Row behind the last."""
    step: Ints
    """Sampling step, ms."""
    limit: Floats
    """Longest distance of two samples that is no gap, ms."""
    next_time: Ints
    """Time of the device's first sample behind this piece; ``FAR`` where there is none."""
    first_time: Ints
    reach: Ints
    """Time of the last sample plus the longest that it can count."""

    def __len__(self) -> int:
        return len(self.device)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows."""

    row: int
    """Number of the first."""
    time: Ints
    columns: Mapping[str, Column]
    next_time: int
    """Time of the row behind the block, where that belongs to the same piece; else of no meaning."""

    def __len__(self) -> int:
        return len(self.time)


class OutOfOrderError(UnreachableError):
    """The samples of a block are not as its pieces say: a file is damaged."""

    def __init__(self, row: int) -> None:
        """``row``: the number of the first row of the block."""
        super().__init__(
            f"the GPU history is damaged: times of the samples from number {row:,} on are not in order",
            hint="remove the directory of the damaged day and take its files in again",
        )
        self.row = row


class Scratch:
    """Memory for values per sample that is used again block after block; for one thread.

    Memory that is given back to the system and taken again costs more than what is computed in it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[np.generic]] = {}

    def floats(self, name: str, count: int) -> Float32s:
        """An array of ``count`` 32-bit floats, of any content."""
        return self._array(name, count, np.float32)  # type: ignore[return-value]

    def ints(self, name: str, count: int) -> Int32s:
        """An array of ``count`` 32-bit integers, of any content."""
        return self._array(name, count, np.int32)  # type: ignore[return-value]

    def flags(self, name: str, count: int) -> Flags:
        """An array of ``count`` truth values, of any content."""
        return self._array(name, count, np.bool_)  # type: ignore[return-value]

    def _array(self, name: str, count: int, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        held = self._arrays.get(name)
        if held is None or len(held) < count:
            self._arrays[name] = held = np.empty(count, dtype)
        return held[:count]
