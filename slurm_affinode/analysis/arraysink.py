"""The join by array operations on two threads: blocks are folded side by side, what they give is added up here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from slurm_affinode.analysis import windows
from slurm_affinode.analysis.block import Block, Pieces, Scratch
from slurm_affinode.analysis.join import SUMS, Folded, fold
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.analysis.segments import Allocations, Cells
from slurm_affinode.analysis.totals import Totals
from slurm_affinode.analysis.windows import Windows

WORKERS = 2
_AHEAD = 2 * WORKERS


class _Sink:
    """Adds up what blocks gave; safe for several threads."""

    def __init__(self, allocations: Allocations, cells: int) -> None:
        self._counted = allocations.counted
        self._lock = threading.Lock()
        self._sums = np.zeros((cells, len(SUMS)))
        self._peak = np.full(cells, np.nan)
        self._partly: list[Folded] = []
        self._open: list[Windows] = []
        self._windows = np.zeros(len(allocations), np.int64)
        self._longest = np.zeros(len(allocations), np.int64)
        self._counts = np.zeros(len(windows.BOUNDS_S) + 1, np.int64)
        self._share = np.zeros(len(windows.BOUNDS_S) + 1)
        self._gap_ms = 0
        self._gaps = 0
        self._samples = 0

    def add(self, folded: Folded) -> None:
        with self._lock:
            # A cell occurs twice only where a block has a device twice, that is, at the turn of a day.
            full = folded.cell[folded.full]
            if len(np.unique(folded.cell)) == len(folded.cell):
                self._sums[folded.cell] += folded.sums
                self._peak[full] = np.fmax(self._peak[full], folded.fb_peak)
            else:
                np.add.at(self._sums, folded.cell, folded.sums)
                np.fmax.at(self._peak, full, folded.fb_peak)
            if len(folded.shared_cell):
                self._partly.append(folded)
            self._close(folded.windows)
            if len(folded.open_windows):
                self._open.append(folded.open_windows)
            self._gap_ms += folded.gap_ms
            self._gaps += folded.gaps
            self._samples += folded.samples

    def _close(self, closed: Windows) -> None:
        if not len(closed):
            return
        length = closed.end - closed.start
        np.add.at(self._windows, closed.allocation, 1)
        np.maximum.at(self._longest, closed.allocation, length)
        counted = self._counted[closed.allocation]
        bins = windows.bins(length[counted])
        size = len(self._counts)
        self._counts += np.bincount(bins, minlength=size)
        self._share += np.bincount(bins, weights=closed.share[counted], minlength=size)

    def finish(self) -> Totals:
        self._close(windows.stitch(self._open))
        partly = self._partly
        return Totals(
            sums=self._sums,
            fb_peak=self._peak,
            partly_cell=np.concatenate([np.empty(0, np.int64), *(f.shared_cell for f in partly)]),
            partly_sums=np.concatenate([np.empty((0, len(SUMS))), *(f.shared_sums for f in partly)]),
            partly_time=np.concatenate([np.empty(0, np.int64), *(f.shared_time for f in partly)]),
            windows=self._windows,
            longest_ms=self._longest,
            window_counts=self._counts,
            window_share_ms=self._share,
            gap_ms=self._gap_ms,
            gaps=self._gaps,
            samples=self._samples,
        )


def run(
    blocks: Iterable[Block],
    pieces: Pieces,
    allocations: Allocations,
    cells: Cells,
    thresholds: Thresholds,
    *,
    workers: int = WORKERS,
    advance: Callable[[int], None] | None = None,
) -> Totals:
    """Fold every block and add up. ``advance`` is told the number of rows of each block that is done."""
    sink = _Sink(allocations, len(cells))

    local = threading.local()

    def work(block: Block) -> int:
        if not hasattr(local, "scratch"):
            local.scratch = Scratch()
        sink.add(fold(block, pieces, allocations, cells, thresholds, local.scratch))
        return len(block.time)

    waiting: deque[Future[int]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="join") as pool:
        for block in blocks:
            waiting.append(pool.submit(work, block))
            # Bounded, so that memory is that of a few blocks however long the history is.
            if len(waiting) > _AHEAD:
                _done(waiting.popleft(), advance)
        while waiting:
            _done(waiting.popleft(), advance)
    return sink.finish()


def _done(future: Future[int], advance: Callable[[int], None] | None) -> None:
    rows = future.result()
    if advance is not None:
        advance(rows)
