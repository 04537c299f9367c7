"""The join of samples and cells: blocks are folded by threads, and idle windows are tracked in row order.

The loops of ``loops`` are compiled for many samples. Then each thread also decodes the rows that it folds.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis import samples
from slurm_affinode.analysis.block import FB, FRACTIONS, POWER, UTIL, Block, OutOfOrderError, Pieces
from slurm_affinode.analysis.join import loops, row_groups
from slurm_affinode.analysis.join.compilation import machine_code
from slurm_affinode.analysis.join.row_groups import Decoder, RowGroup
from slurm_affinode.analysis.result import BOUNDS_S, SUMS, Thresholds, Totals
from slurm_affinode.analysis.segments import Allocations, Cells, Ints

COMPILED_FROM_ROWS = 10_000_000
"""With fewer samples, compiled loops save less time than it takes to load Numba and their machine code."""
WORKERS = 2
_AHEAD = 1
Number = TypeVar("Number", np.int64, np.float32)
_SIGNALS = (UTIL, *FRACTIONS)
_METRICS = (*_SIGNALS, FB, POWER)


def compiled(rows: int) -> bool:
    """Return whether compiling the loops pays off for ``rows`` samples."""
    return rows >= COMPILED_FROM_ROWS


def run_all(
    index: samples.Index,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold all samples of ``index``, as in ``run``. Raises ``UnreachableError`` with the name of a damaged file."""
    blocks = row_groups.row_groups(index) if compiled(index.rows) else samples.blocks(index)
    try:
        return run(blocks, index.pieces, allocations, cells, thresholds, advance)
    except OutOfOrderError as error:
        raise samples.damaged(index.where(error.row), "times of its samples are not in order") from error


def run(  # noqa: PLR0917
    blocks: Iterable[Block | RowGroup],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold every block, in row order, and return the totals.

    ``advance`` is called with the number of rows of each finished block. Raises ``OutOfOrderError`` if the times of a
    block contradict ``pieces``.
    """
    many = compiled(int(pieces.end[-1]) if len(pieces) else 0)
    # Python code holds the interpreter lock: a second thread would only wait for it.
    return fold(
        blocks, pieces, allocations, cells, thresholds, machine_code(loops) if many else loops,
        workers=WORKERS if many else 1, advance=advance,
    )  # fmt: skip


def fold(  # noqa: PLR0917
    blocks: Iterable[Block | RowGroup],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    code: Any,
    *,
    workers: int = WORKERS,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold blocks as in ``run``, with ``code``: the module ``loops``, or its functions built in another way."""
    stretches = loops.Stretches(
        pieces.device, pieces.row, pieces.end, pieces.step, pieces.limit, pieces.next_time, pieces.first_time,
        pieces.reach,
    )  # fmt: skip
    everyone: list[_Worker] = []
    at_rest: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def work(block: Block | RowGroup) -> Ints:
        worker = at_rest.get()
        try:
            return worker.fold(block, stretches, line, thresholds)
        finally:
            at_rest.put(worker)

    waiting: deque[tuple[int, Future[Ints]]] = deque()

    def take() -> None:
        rows, future = waiting.popleft()
        code.give_idle(future.result(), line, still_open)
        if advance is not None:
            advance(rows)

    with ThreadPoolExecutor(workers, thread_name_prefix="join") as pool:
        # Created in parallel: they are large, and allocating their memory takes time.
        made = [pool.submit(_Worker, cells, code) for _ in range(workers)]
        line, still_open = _timeline(cells), _open(allocations)
        for worker in made:
            everyone.append(worker.result())
            at_rest.put(everyone[-1])
        for block in blocks:
            waiting.append((len(block), pool.submit(work, block)))
            # Bounded, so that memory does not grow with the number of samples.
            if len(waiting) > workers + _AHEAD:
                take()
        while waiting:
            take()
    code.end_all_windows(still_open)
    return _totals([worker.state for worker in everyone], still_open)


class _Worker:
    """State of one thread: its sums, and buffers that are reused for every block."""

    def __init__(self, cells: Cells, code: Any) -> None:
        self._code = code
        self.state = _state(cells)
        self._cells = len(cells)
        activity = np.zeros(loops.CHUNK, np.uint8)
        self._chunk = loops.LoopBuffers(
            weight=np.empty(loops.CHUNK, np.int32),
            activity=activity,
            words=activity.view(np.uint64),
            idle=np.empty((0, 4), np.int64),
        )
        self._nothing = np.empty(0, np.float32)
        self._decoder: Decoder | None = None

    def fold(
        self,
        rows: Block | RowGroup,
        stretches: loops.Stretches,
        line: loops.Timeline,
        thresholds: Thresholds,
    ) -> Ints:
        """Add a block, after reading it if necessary. Return the idle time in it (rows of ``Chunk.idle``)."""
        if isinstance(rows, RowGroup):
            self._decoder = self._decoder or Decoder()
            block = rows.read(self._decoder)
        else:
            block = rows
        values = self._values(block)
        if not self._code.in_order(values.time, block.row, stretches):
            raise OutOfOrderError(block.row)
        room = len(block) + self._cells + 1
        if len(self._chunk.idle) < room:
            # Untouched memory gets no pages from the system.
            self._chunk = self._chunk._replace(idle=np.empty((room, 4), np.int64))
        floors = np.array([thresholds.floor(name) for name in _SIGNALS], np.float32)
        limits = np.float32(thresholds.idle_pct), np.float32(thresholds.low_pct), floors
        # A damaged file may contain values whose products or sums exceed any number.
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._code.fold(
                block.row, block.next_time, values, stretches, line, *limits, self.state, self._chunk
            )
        return self._chunk.idle[:found].copy()

    def _values(self, block: Block) -> loops.Values:
        count = len(block)
        if len(self._nothing) < count:
            self._nothing = np.full(count, np.nan, np.float32)
        nothing = self._nothing[:count]
        present = np.array(
            [1 + block.columns[name].complete if name in block.columns else 0 for name in (UTIL, FB, POWER)], np.int64
        )
        values = (block.columns[name].values if name in block.columns else nothing for name in _METRICS)
        return loops.Values(_constant(block.time), present, *map(_constant, values))


def _constant(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return a read-only view. Numba compiles the loops again for each combination of read-only and writable arrays."""
    view = values[:]
    view.flags.writeable = False
    return view


def _totals(states: list[loops.LoopSums], ended: loops.Open) -> Totals:
    sums, peak = states[0].sums, states[0].peak
    for state in states[1:]:
        sums += state.sums
        np.maximum(peak, state.peak, out=peak)
    counters = np.array([state.counters for state in states])
    partly = [slice(0, count) for count in counters[:, 0].tolist()]
    gaps, gap_ms, samples = counters[:, 1:].sum(axis=0).tolist()
    return Totals(
        sums=sums,
        fb_peak=np.where(peak < 0, np.nan, peak.view(np.float32)),
        partly_cell=np.concatenate([s.partly_cell[rows] for s, rows in zip(states, partly, strict=True)]),
        partly_sums=np.concatenate([s.partly_sums[rows] for s, rows in zip(states, partly, strict=True)]),
        partly_time=np.concatenate([s.partly_time[rows] for s, rows in zip(states, partly, strict=True)]),
        windows=ended.windows,
        longest_ms=ended.longest,
        window_counts=ended.bin_counts,
        window_share_ms=ended.bin_share,
        gap_ms=gap_ms,
        gaps=gaps,
        samples=samples,
    )


def _timeline(cells: Cells) -> loops.Timeline:
    devices = int(cells.device[-1]) + 1 if len(cells) else 0
    return loops.Timeline(
        offset=np.searchsorted(cells.device, np.arange(devices + 1)),
        start=cells.start,
        end=cells.end,
        earliest=cells.earliest_start,
        latest=cells.latest_start,
        inside=cells.inside,
        held=cells.held,
        owner_offset=cells.owner_offset,
        owners=cells.owners,
    )


def _state(cells: Cells) -> loops.LoopSums:
    # At most one sample extends across the start of a cell.
    partly = int(np.count_nonzero(cells.earliest_start < cells.latest_start))
    return loops.LoopSums(
        sums=np.zeros((len(cells), len(SUMS))),
        peak=np.full(len(cells), -1, np.int32),
        partly_cell=np.zeros(partly, np.int64),
        partly_sums=np.zeros((partly, len(SUMS))),
        partly_time=np.zeros(partly, np.int64),
        counters=np.zeros(4, np.int64),
    )


def _open(allocations: Allocations) -> loops.Open:
    count = len(allocations)
    return loops.Open(
        owner_start=allocations.start,
        counted=allocations.counted,
        begin=np.full(count, -1),
        end=np.full(count, -1),
        share=np.zeros(count),
        windows=np.zeros(count, np.int64),
        longest=np.zeros(count, np.int64),
        bin_counts=np.zeros(len(BOUNDS_S) + 1, np.int64),
        bin_share=np.zeros(len(BOUNDS_S) + 1),
        bounds=np.array(BOUNDS_S, np.int64) * 1000,
    )
