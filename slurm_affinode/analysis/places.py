"""Where the cells of the devices lie in the rows of a block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_affinode.analysis.block import Block, OutOfOrderError, Pieces
from slurm_affinode.analysis.segments import Cells, Flags, Floats, Ints, ranges


@dataclass(frozen=True, slots=True)
class Rows:
    """The pieces of a block, in rows of the block."""

    device: Ints
    first: Ints
    last: Ints
    step: Ints
    limit: Floats
    following: Ints
    """Time of the device's next sample behind the block or the piece; ``FAR`` where there is none."""
    goes_on: Flags
    """Whether that sample follows without a gap."""
    reach: Ints
    """Time up to which the last sample counts."""

    @classmethod
    def of(cls, block: Block, pieces: Pieces) -> Rows:
        """The pieces that lie in ``block``, in part or whole, cut to its rows. Raises ``UnreachableError`` where
        times are not theirs."""
        behind = block.row + len(block)
        here = slice(
            int(np.searchsorted(pieces.end, block.row, side="right")),
            int(np.searchsorted(pieces.row, behind, side="left")),
        )
        if here.start >= here.stop or pieces.end[here][-1] < behind:
            raise OutOfOrderError(block.row)
        following = pieces.next_time[here]
        if pieces.end[here][-1] > behind:
            following = np.append(following[:-1], block.next_time)
        step, limit = pieces.step[here], pieces.limit[here]
        last = np.minimum(pieces.end[here], behind) - block.row - 1
        last_time = block.time[last]
        first = np.maximum(pieces.row[here] - block.row, 0)
        if (block.time[first] < pieces.first_time[here]).any() or (last_time >= pieces.reach[here]).any():
            raise OutOfOrderError(block.row)
        goes_on = following - last_time <= limit
        return cls(
            device=pieces.device[here],
            first=first,
            last=last,
            step=step,
            limit=limit,
            following=following,
            goes_on=goes_on,
            reach=np.where(goes_on, following, last_time + step),
        )


@dataclass(frozen=True, slots=True)
class Places:
    """One element per piece and cell that its samples lie in or reach, in order."""

    piece: Ints
    cell: Ints
    low: Ints
    """First row of the piece in the cell; where the cell has none, the row where it would be."""
    begins: Flags
    """Whether the element is the first of its piece."""
    full: Ints
    """Elements that have rows."""
    start: Ints
    """The first row of each of those. Their rows are all rows, in order."""
    end: Ints
    """The row behind their last."""

    def __len__(self) -> int:
        return len(self.cell)

    @classmethod
    def find(cls, time: Ints, rows: Rows, cells: Cells) -> Places:
        """Search the cells in the samples."""
        begin = cells.locate(rows.device, time[rows.first])
        count = np.searchsorted(cells.key, cells.keys(rows.device, rows.reach), side="left") - begin
        # A sample that counts for no time reaches no cell, but it lies in one.
        np.maximum(count, 1, out=count)
        cell = ranges(begin, count)
        low = _first_at_or_after(time, cells.start[cell], rows, count)
        begins = np.zeros(len(cell), np.bool_)
        begins[np.cumsum(count) - count] = True
        # The rows of a place end where the next place begins: the first of a piece begins with the piece.
        high = np.append(low[1:], len(time))
        full = np.flatnonzero(high > low)
        piece = np.repeat(np.arange(len(count), dtype=np.int64), count)
        return cls(piece, cell, low, begins, full, low[full], high[full])


def _first_at_or_after(time: Ints, wanted: Ints, rows: Rows, count: Ints) -> Ints:
    """For each element, the first row of its piece with ``time[row] >= wanted``, else the row behind the piece.

    ``count``: elements per piece. Samples are almost evenly spaced: the row that this suggests is right for most, the
    others are searched.
    """
    begin = time[rows.first]
    per_ms = (rows.last - rows.first) / np.maximum(time[rows.last] - begin, 1)
    first, end = np.repeat(rows.first, count), np.repeat(rows.last + 1, count)
    into = np.maximum(wanted - np.repeat(begin, count), 0) * np.repeat(per_ms, count)
    guess: Ints = first + np.ceil(np.minimum(into, end - first)).astype(np.int64)
    wrong = (guess > first) & (time[guess - 1] >= wanted)
    wrong |= (guess < end) & (time[np.minimum(guess, len(time) - 1)] < wanted)
    searched = np.flatnonzero(wrong)
    if len(searched):
        guess[searched] = _bisect(time, wanted[searched], first[searched], end[searched])
    return guess


def _bisect(time: Ints, wanted: Ints, low: Ints, high: Ints) -> Ints:
    while (searching := low < high).any():
        middle = (low + high) >> 1
        before = searching & (time[np.minimum(middle, len(time) - 1)] < wanted)
        np.copyto(low, middle + 1, where=before)
        np.copyto(high, middle, where=searching & ~before)
    return low
