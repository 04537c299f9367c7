"""Selection of the join's implementation: array operations or compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from slurm_affinode.analysis import samples
from slurm_affinode.analysis.block import Block, OutOfOrderError, Pieces
from slurm_affinode.analysis.join import array_join
from slurm_affinode.analysis.result import Thresholds, Totals
from slurm_affinode.analysis.segments import Allocations, Cells

COMPILED_FROM_ROWS = 50_000_000
"""With fewer samples, compiled loops save less time than it takes to load their machine code."""


def compiled(rows: int) -> bool:
    """Return whether compiled loops pay off for ``rows`` samples and Numba (the extra ``fast``) is installed."""
    return rows >= COMPILED_FROM_ROWS and find_spec("numba") is not None


def run(  # noqa: PLR0917
    blocks: Iterable[Block],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold blocks, in row order, and return the totals, with array operations or, if they pay off, compiled loops.

    The results are the same. ``advance`` is called with the number of rows of each finished block.
    """
    if not compiled(int(pieces.end[-1]) if len(pieces) else 0):
        return array_join.run(blocks, pieces, allocations, cells, thresholds, advance=advance)
    from slurm_affinode.analysis.join import compiled_join  # noqa: PLC0415 - Numba takes half a second to import

    return compiled_join.run(blocks, pieces, allocations, cells, thresholds, advance=advance)


def run_all(
    index: samples.Index,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold all samples of ``index``, as in ``run``. With compiled loops, each thread also reads the rows that it folds.

    Raises ``UnreachableError`` with the name of a damaged file.
    """
    try:
        if not compiled(index.rows):
            return run(samples.blocks(index), index.pieces, allocations, cells, thresholds, advance)
        from slurm_affinode.analysis.join import compiled_join, row_groups  # noqa: PLC0415

        groups = row_groups.row_groups(index)
        return compiled_join.run(groups, index.pieces, allocations, cells, thresholds, advance=advance)
    except OutOfOrderError as error:
        raise samples.damaged(index.where(error.row), "times of its samples are not in order") from error
