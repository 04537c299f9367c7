"""The join of samples and cells: threads fold blocks, and idle windows are tracked in row order.

The loops are those of ``fold.c``.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref
from dataclasses import dataclass

import numpy as np

from slurm_affinode.analysis import samples
from slurm_affinode.analysis.block import (
    FB,
    FRACTIONS,
    POWER,
    UTIL,
    Block,
    BlockColumn,
    Int32s,
    OutOfOrderError,
    Pieces,
)
from slurm_affinode.analysis.join import native
from slurm_affinode.analysis.result import BOUNDS_S, SUMS, Thresholds, Totals
from slurm_affinode.analysis.segments import Allocations, Cells, Floats, Ints

MOST_WORKERS = 16
"""Each thread has sums of its own, and the thread that tracks idle windows keeps up with about as many."""
_AHEAD = 1
_SIGNALS = (UTIL, *FRACTIONS)
_FIELDS = {
    "util": UTIL, **dict(zip(("engine", "sm", "tensor", "dram"), FRACTIONS, strict=True)), "fb": FB, "power": POWER
}  # fmt: skip


def run_all(
    index: samples.Index,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold all samples of ``index``, as in ``run``. Raises ``UnreachableError`` with the name of a damaged file."""
    try:
        return run(samples.blocks(index), index.pieces, allocations, cells, thresholds, advance)
    except OutOfOrderError as error:
        raise samples.damaged(index.where(error.row), "times of its samples are not in order") from error


def run(  # noqa: PLR0917
    blocks: Iterable[Block],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    advance: Callable[[int], None] | None = None,
    *,
    chunk: int = native.CHUNK,
) -> Totals:
    """Fold every block, in row order, and return the totals.

    ``advance`` is called with the number of rows of each finished block. ``chunk``: number of samples that are
    processed at once. Raises ``OutOfOrderError`` if the times of a block contradict ``pieces``.
    """
    code = native.library()
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    stretches, limits = _pieces_record(pieces), _limits(thresholds, chunk)
    line, windows = _timeline(cells), _Windows(allocations)
    everyone: list[_Worker] = []
    at_rest: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def work(block: Block) -> Ints:
        try:
            worker = at_rest.get_nowait()
        except queue.Empty:
            # Created with the first block of each thread: they are large, and few blocks need few of them.
            worker = _Worker(cells)
            everyone.append(worker)
        try:
            return worker.fold(block, stretches, line, limits)
        finally:
            at_rest.put(worker)

    waiting: deque[tuple[int, Future[Ints]]] = deque()

    def take() -> None:
        rows, future = waiting.popleft()
        idle = future.result()
        code.give_idle(idle.ctypes.data, len(idle), byref(line), byref(windows.record))
        if advance is not None:
            advance(rows)

    with ThreadPoolExecutor(workers, thread_name_prefix="join") as pool:
        for block in blocks:
            waiting.append((len(block), pool.submit(work, block)))
            # Bounded, so that memory does not grow with the number of samples.
            if len(waiting) > workers + _AHEAD:
                take()
        while waiting:
            take()
    code.end_all_windows(byref(line), byref(windows.record))
    return _totals([worker.state for worker in everyone] or [_State(cells)], windows)


@dataclass(frozen=True, slots=True)
class Folded:
    """The sums of some pieces, and their idle time. ``total`` adds those of all pieces."""

    cell: Ints
    """The cells with samples, ascending."""
    sums: Floats
    """A row for each of these cells: ``SUMS``."""
    peak: Int32s
    """Bits of 32-bit floats; -1 without a value."""
    partly_cell: Ints
    partly_sums: Floats
    partly_time: Ints
    idle: Ints
    """Rows of ``events`` in ``fold.c``."""
    gap_ms: int
    gaps: int
    samples: int


def fold(blocks: Iterable[Block], pieces: Pieces, cells: Cells, thresholds: Thresholds) -> Folded:
    """Fold blocks of whole pieces in this thread. Raises ``OutOfOrderError`` if their times contradict ``pieces``."""
    stretches, limits, line = _pieces_record(pieces), _limits(thresholds, native.CHUNK), _timeline(cells)
    worker = _Worker(cells)
    idle = [worker.fold(block, stretches, line, limits) for block in blocks]
    state = worker.state
    cell = np.flatnonzero(state.sums.any(axis=1) | (state.peak >= 0))
    partly = state.record.partly
    return Folded(
        cell=cell,
        sums=state.sums[cell],
        peak=state.peak[cell],
        partly_cell=state.partly_cell[:partly],
        partly_sums=state.partly_sums[:partly],
        partly_time=state.partly_time[:partly],
        idle=np.concatenate([np.empty((0, 4), np.int64), *idle]),
        gap_ms=state.record.gap_ms,
        gaps=state.record.gaps,
        samples=state.record.samples,
    )


def total(folded: Iterable[Folded], allocations: Allocations, cells: Cells) -> Totals:
    """Add the sums of all pieces; ``folded`` is in row order. The result is that of ``run`` to the last bit.

    Sums are exact (``fold.c``), and idle time is attributed in row order.
    """
    code, line, windows, whole = native.library(), _timeline(cells), _Windows(allocations), _State(cells)
    for part in folded:
        whole.sums[part.cell] += part.sums
        whole.peak[part.cell] = np.maximum(whole.peak[part.cell], part.peak)
        for name in ("gap_ms", "gaps", "samples"):
            setattr(whole.record, name, getattr(whole.record, name) + getattr(part, name))
        idle = np.ascontiguousarray(part.idle)
        code.give_idle(idle.ctypes.data, len(idle), byref(line), byref(windows.record))
        begin = whole.record.partly
        whole.record.partly += len(part.partly_cell)
        for name in ("partly_cell", "partly_sums", "partly_time"):
            getattr(whole, name)[begin : whole.record.partly] = getattr(part, name)
    code.end_all_windows(byref(line), byref(windows.record))
    return _totals([whole], windows)


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
class FoldInput:
    """Parameters that all ranges of an index share."""

    stored: samples.StoredSamples
    pieces: Pieces
    cells: Cells
    thresholds: Thresholds


def ranges_of(index: samples.Index, *, most_rows: int = MOST_ROWS) -> Iterator[RowRange]:
    """Yield all rows of ``index`` in order, in ranges of at most ``most_rows`` rows or of one longer piece."""
    pieces = index.pieces
    for source in index.sources:
        low, high = np.searchsorted(pieces.row, (source.row, source.row + source.rows))
        if low < high:
            for row, end in samples.joined(pieces.row[low:high], pieces.end[low:high], most_rows):
                yield RowRange(source, row, end)


def fold_range(rows: RowRange, fold_input: FoldInput) -> Folded:
    """Fold a range. Raises ``UnreachableError`` for a damaged file or a missing store."""
    with samples.store_of_task(fold_input.stored) as store:
        try:
            blocks = samples.blocks_between(store, rows.source, rows.row, rows.end)
            return fold(blocks, fold_input.pieces, fold_input.cells, fold_input.thresholds)
        except OutOfOrderError as error:
            raise samples.damaged(rows.source.path or store.root, "times of its samples are not in order") from error


class _Worker:
    """State of one thread: its sums, and memory that is reused for every block."""

    def __init__(self, cells: Cells) -> None:
        self._code = native.library()
        self.state = _State(cells)
        self._cells = len(cells)
        self._idle = np.empty((0, 4), np.int64)

    def fold(
        self,
        block: Block,
        stretches: native.PiecesRecord,
        line: native.TimelineRecord,
        limits: native.LimitsRecord,
    ) -> Ints:
        """Add a block. Return the idle time in it (rows of ``events`` in ``fold.c``)."""
        values = _block_record(block)
        room = len(block) + self._cells + 1
        if len(self._idle) < room:
            # Untouched memory gets no pages from the system.
            self._idle = np.empty((room, 4), np.int64)
        count = self._code.fold(
            byref(values), byref(stretches), byref(line), byref(limits), byref(self.state.record),
            self._idle.ctypes.data, len(self._idle),
        )  # fmt: skip
        if count > len(self._idle):
            raise OutOfOrderError(block.row)
        return self._idle[:count].copy()


def _block_record(block: Block) -> native.BlockRecord:
    return native.record(
        native.BlockRecord, count=len(block), row=block.row, next_time=block.next_time, time=block.time,
        **{field: _column_record(block.columns.get(name)) for field, name in _FIELDS.items()},
    )  # fmt: skip


def _column_record(column: BlockColumn | None) -> native.ColumnRecord:
    if column is None:
        return native.record(native.ColumnRecord, present=native.MISSING, values=None, valid=None, bit=0)
    present = native.COMPLETE if column.complete else native.PARTIAL
    stored = np.ascontiguousarray(column.stored)
    return native.record(native.ColumnRecord, present=present, values=stored, valid=column.valid, bit=column.bit)


def _totals(states: list[_State], windows: _Windows) -> Totals:
    sums, peak = states[0].sums, states[0].peak
    for state in states[1:]:
        sums += state.sums
        np.maximum(peak, state.peak, out=peak)
    counted = [state.record for state in states]
    partly_cell, partly_sums, partly_time = (
        np.concatenate([getattr(state, name)[: state.record.partly] for state in states])
        for name in ("partly_cell", "partly_sums", "partly_time")
    )
    order = np.argsort(partly_cell)  # a cell has at most one of these rows
    return Totals(
        sums=sums,
        fb_peak=np.where(peak < 0, np.nan, peak.view(np.float32)),
        partly_cell=partly_cell[order],
        partly_sums=partly_sums[order],
        partly_time=partly_time[order],
        windows=windows.windows,
        longest_ms=windows.longest,
        window_counts=windows.bin_counts,
        window_share_ms=windows.bin_share,
        gap_ms=sum(state.gap_ms for state in counted),
        gaps=sum(state.gaps for state in counted),
        samples=sum(state.samples for state in counted),
    )


def _pieces_record(pieces: Pieces) -> native.PiecesRecord:
    return native.record(
        native.PiecesRecord, count=len(pieces), device=pieces.device, end=pieces.end, step=pieces.step,
        limit=pieces.limit, next_time=pieces.next_time, first_time=pieces.first_time, reach=pieces.reach,
    )  # fmt: skip


def _limits(thresholds: Thresholds, chunk: int) -> native.LimitsRecord:
    return native.record(
        native.LimitsRecord, floors=np.array([thresholds.floor(name) for name in _SIGNALS], np.float32),
        idle_pct=thresholds.idle_pct, low_pct=thresholds.low_pct, chunk=min(chunk, native.CHUNK),
    )  # fmt: skip


def _timeline(cells: Cells) -> native.TimelineRecord:
    devices = int(cells.device[-1]) + 1 if len(cells) else 0
    return native.record(
        native.TimelineRecord,
        offset=np.searchsorted(cells.device, np.arange(devices + 1)),
        start=cells.start,
        end=cells.end,
        earliest=cells.earliest_start,
        latest=cells.latest_start,
        inside=cells.inside,
        held=cells.is_held,
        owner_offset=cells.owner_offset,
        owners=cells.owners,
    )


class _State:
    """Sums of one thread."""

    def __init__(self, cells: Cells) -> None:
        # At most one sample extends across the start of a cell.
        partly = int(np.count_nonzero(cells.earliest_start < cells.latest_start))
        self.sums = np.zeros((len(cells), len(SUMS)))
        self.peak = np.full(len(cells), -1, np.int32)
        self.partly_cell, self.partly_time = np.zeros(partly, np.int64), np.zeros(partly, np.int64)
        self.partly_sums = np.zeros((partly, len(SUMS)))
        self.record = native.record(
            native.SumsRecord, sums=self.sums, peak=self.peak, partly_cell=self.partly_cell,
            partly_time=self.partly_time, partly_sums=self.partly_sums, partly_room=partly, partly=0, gaps=0, gap_ms=0,
            samples=0,
        )  # fmt: skip


class _Windows:
    """Open idle windows, and counts of closed ones."""

    def __init__(self, allocations: Allocations) -> None:
        count = len(allocations)
        self.begin, self.end = np.full(count, -1), np.full(count, -1)
        self.windows, self.longest = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.bin_counts = np.zeros(len(BOUNDS_S) + 1, np.int64)
        self.bin_share = np.zeros(len(BOUNDS_S) + 1)
        self.record = native.record(
            native.WindowsRecord, count=count, owner_start=allocations.start, counted=allocations.counted,
            begin=self.begin, end=self.end, share=np.zeros(count), windows=self.windows, longest=self.longest,
            bounds_count=len(BOUNDS_S), bounds=np.array(BOUNDS_S, np.int64) * 1000, bin_counts=self.bin_counts,
            bin_share=self.bin_share, last=np.full(4, -1),
        )  # fmt: skip
