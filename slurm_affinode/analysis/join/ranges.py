"""Ranges of rows that are folded on their own, also on other machines: ``kernel.total`` adds their sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_affinode.analysis import samples
from slurm_affinode.analysis.block import OutOfOrderError, Pieces
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.join.kernel import Folded
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.segments import Cells
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.metrics.parquet.store import SampleStore

MOST_ROWS = 2 << 20
"""Rows of a range, but for a longer piece. It takes a tenth of a second to fold them."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Whole pieces of one source."""

    source: samples.Source
    row: int
    """Number of the first row."""
    end: int
    """Number of the row after the last one."""


@dataclass(frozen=True, slots=True)
class Input:
    """What all ranges of an index are folded with."""

    root: Path
    """Root of the sample store."""
    pieces: Pieces
    cells: Cells
    thresholds: Thresholds


def of_index(index: samples.Index, *, most_rows: int = MOST_ROWS) -> Iterator[RowRange]:
    """Yield all rows of ``index`` in order, in ranges of at most ``most_rows`` rows or of one longer piece."""
    pieces = index.pieces
    for source in index.sources:
        low, high = np.searchsorted(pieces.row, (source.row, source.row + source.rows))
        if low < high:
            for row, end in samples.joined(pieces.row[low:high], pieces.end[low:high], most_rows):
                yield RowRange(source, row, end)


def fold(rows: RowRange, given: Input) -> Folded:
    """Fold a range. Raises ``UnreachableError`` for a damaged file or a missing store."""
    if not given.root.is_dir():
        raise UnreachableError(
            f"{given.root}: no such directory", hint="workers need the GPU metrics at the same path as this machine"
        )
    with closing(SampleStore(given.root)) as store:
        try:
            blocks = samples.blocks_between(store, rows.source, rows.row, rows.end)
            return kernel.fold(blocks, given.pieces, given.cells, given.thresholds)
        except OutOfOrderError as error:
            raise samples.damaged(rows.source.path or given.root, "times of its samples are not in order") from error
