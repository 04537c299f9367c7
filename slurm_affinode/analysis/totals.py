"""What the samples of an interval add up to."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_affinode.analysis.segments import Floats, Ints


@dataclass(frozen=True, slots=True)
class Totals:
    """What the samples of an interval say about cells and allocations."""

    sums: Floats
    """One row per cell, the columns of ``SUMS``, for all its sharers together."""
    fb_peak: Floats
    """Per cell; NaN where there is none."""
    partly_cell: Ints
    """Cells with time that only those of their sharers get who held the device at ``partly_time``; one may occur
    several times. It is not in ``sums``. Each of these sharers gets 1 / (all sharers) of it."""
    partly_sums: Floats
    partly_time: Ints
    windows: Ints
    """Per allocation: number of idle windows."""
    longest_ms: Ints
    """Per allocation: the longest of them."""
    window_counts: Ints
    """Per bin of ``windows.BOUNDS_S`` (one more than bounds); of runs that count."""
    window_share_ms: Floats
    """Per bin: the time of the windows, shared time divided among its sharers."""
    gap_ms: int
    gaps: int
    samples: int
