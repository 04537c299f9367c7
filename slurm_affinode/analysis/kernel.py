"""Which implementation of the join does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from slurm_affinode.analysis import arraysink, samples
from slurm_affinode.analysis.block import Block, OutOfOrderError, Pieces
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.segments import Allocations, Cells
from slurm_affinode.analysis.totals import Totals

COMPILED_FROM_ROWS = 50_000_000
"""Below, compiled loops save less time than it takes to load their machine code."""


def compiled(rows: int) -> bool:
    """Whether a history of ``rows`` samples is worth the compiled loops, and Numba (the extra ``fast``) is there."""
    return rows >= COMPILED_FROM_ROWS and find_spec("numba") is not None


def run(  # noqa: PLR0917
    blocks: Iterable[Block],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold blocks, in the order of the rows, and add up.

    ``advance`` is told the number of rows of each block that is done. Array operations do the work, or compiled loops
    where that pays; the results are the same.
    """
    if not compiled(int(pieces.end[-1]) if len(pieces) else 0):
        return arraysink.run(blocks, pieces, allocations, cells, thresholds, advance=advance)
    from slurm_affinode.analysis import scalarsink  # noqa: PLC0415 - Numba takes half a second to import

    return scalarsink.run(blocks, pieces, allocations, cells, thresholds, advance=advance)


def run_all(
    index: samples.Index,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """The same with all samples: where the loops are compiled, each thread also reads what it folds.

    Raises ``UnreachableError``, with the file that is damaged.
    """
    try:
        if not compiled(index.rows):
            return run(samples.blocks(index), index.pieces, allocations, cells, thresholds, advance)
        from slurm_affinode.analysis import rowgroups, scalarsink  # noqa: PLC0415

        groups = rowgroups.row_groups(index)
        return scalarsink.run(groups, index.pieces, allocations, cells, thresholds, advance=advance)
    except OutOfOrderError as error:
        raise samples.damaged(index.where(error.row), "times of its samples are not in order") from error
