"""The join with the compiled loops of ``loops``. Two threads process blocks; idle windows are tracked in row order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from slurm_affinode.analysis.block import FB, FRACTIONS, POWER, UTIL, Block, OutOfOrderError, Pieces
from slurm_affinode.analysis.join import loops, row_groups
from slurm_affinode.analysis.join.row_groups import Decoder, RowGroup
from slurm_affinode.analysis.result import BOUNDS_S, SUMS, Thresholds, Totals
from slurm_affinode.analysis.segments import Allocations, Cells, Ints, build

WORKERS = 2
_AHEAD = 1
Number = TypeVar("Number", np.int64, np.float32)
_SIGNALS = (UTIL, *FRACTIONS)
_METRICS = (*_SIGNALS, FB, POWER)


class _Worker:
    """State of one thread: its sums, and buffers that are reused for every block."""

    def __init__(self, cells: Cells) -> None:
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
        self._decoder = Decoder()

    def fold(
        self,
        rows: Block | RowGroup,
        stretches: loops.Stretches,
        line: loops.Timeline,
        thresholds: Thresholds,
    ) -> Ints:
        """Add a block, after reading it if necessary. Return the idle time in it (rows of ``Chunk.idle``)."""
        block = rows if isinstance(rows, Block) else rows.read(self._decoder)
        values = self._values(block)
        if not loops.in_order(values.time, block.row, stretches.end):
            raise OutOfOrderError(block.row)
        room = len(block) + self._cells + 1
        if len(self._chunk.idle) < room:
            # Untouched memory gets no pages from the system.
            self._chunk = self._chunk._replace(idle=np.empty((room, 4), np.int64))
        found = loops.fold(
            block.row, block.next_time, values, stretches, line,
            np.float32(thresholds.idle_pct), np.float32(thresholds.low_pct),
            np.array([thresholds.floor(name) for name in _SIGNALS], np.float32), self.state, self._chunk,
        )  # fmt: skip
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


def run(
    blocks: Iterable[Block | RowGroup],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    *,
    workers: int = WORKERS,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold every block, in row order, and return the totals.

    ``advance`` is called with the number of rows of each finished block.
    """
    stretches = loops.Stretches(pieces.device, pieces.row, pieces.end, pieces.step, pieces.limit, pieces.next_time)
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
        loops.give_idle(future.result(), line, still_open)
        if advance is not None:
            advance(rows)

    with ThreadPoolExecutor(workers, thread_name_prefix="join") as pool:
        # Created in parallel: they are large, and allocating their memory takes time.
        made = [pool.submit(_Worker, cells) for _ in range(workers)]
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
    loops.end_all_windows(still_open)
    return _totals([worker.state for worker in everyone], still_open)


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


def warm_up() -> None:
    """Compile the loops (some seconds, the first time) or load their machine code (half a second)."""
    row_groups.warm_up()
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    allocations = Allocations.of(none, none, none, one)
    cells = build(allocations, taking_part=np.ones(1, np.bool_), since=0, until=1)
    pieces = Pieces(none, none, one, one, np.ones(1), one, none, one)
    run([Block(0, none, {}, 0)], pieces, allocations, cells, Thresholds(), workers=1)
