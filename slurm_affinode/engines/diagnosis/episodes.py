"""Episodes: runs of samples for which a condition holds, and the rising and falling legs of a queue."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from slurm_affinode.engines.diagnosis.series import Bools, EngineSeries, Floats

CLOSE_STEPS, CLOSE_S = 6.0, 10.0
"""A condition that pauses for less (the longer of both) can be one episode."""
SHORT_STEPS = 2.5
"""A condition that pauses for less is one episode in any case."""


def close_s(series: EngineSeries) -> float:
    """Return the longest pause, in seconds, within an episode."""
    return max(CLOSE_STEPS * series.step_s, CLOSE_S)


def runs(series: EngineSeries, mask: Bools, *, close: float | None = None) -> list[tuple[int, int]]:
    """Return the episodes (first, last sample) in which ``mask`` holds, within the segments of the series.

    The condition may pause for ``close`` seconds; by default, for two samples, for ``close_s``, or for half the time of
    the parts before and after. A pause of more samples is never longer than either part: a long episode does not absorb
    single samples around it.
    """
    short = SHORT_STEPS * series.step_s if close is None else 0.0
    longest = close_s(series)
    time = series.time
    intervals: list[tuple[int, int]] = []
    for first, end in series.segments:
        part = mask[first:end]
        if not part.any():
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[0], part.astype(np.int8), [0]])))
        begins, ends = edges[::2] + first, edges[1::2] + first - 1
        columns = [column.tolist() for column in (begins, ends, time[begins], time[ends])]
        merged: list[tuple[int, int, float, float, float]] = []
        for begin, last, since, until in zip(*columns, strict=True):
            now = (begin, last, until - since + series.step_s, since, until)
            while merged:
                before = merged[-1]
                pause = now[3] - before[4] - series.step_s
                shorter = min(before[2], now[2])
                limit = max(longest, shorter / 2) if close is None else close
                if pause > max(limit, short) or (pause > short and pause > shorter):
                    break
                now = (before[0], now[1], before[2] + now[2], before[3], now[4])
                merged.pop()
            merged.append(now)
        intervals += [interval[:2] for interval in merged]
    return intervals


WINDOW = 12
"""Samples over which the share with a condition is taken."""
ENTER, LEAVE = 0.5, 0.25


def lasting(series: EngineSeries, mask: Bools) -> list[tuple[int, int]]:
    """Return the episodes (first, last sample) in which ``mask`` holds most of the time.

    An episode begins where the condition holds in half of the samples of a window, and extends to where it holds in a
    quarter, so that a condition that flickers gives one episode, and a short one none.
    """
    intervals: list[tuple[int, int]] = []
    for first, end in series.segments:
        part = mask[first:end]
        if not part.any():
            continue
        total = np.concatenate([[0], np.cumsum(part)])
        sample_numbers = np.arange(len(part))
        low, high = np.maximum(sample_numbers - WINDOW // 2, 0), np.minimum(sample_numbers + WINDOW // 2, len(part))
        share = (total[high] - total[low]) / (high - low)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], (share >= LEAVE).astype(np.int8), [0]])))
        begins, ends, occupied = edges[::2], edges[1::2], np.flatnonzero(part)
        if not len(begins):
            continue
        # Up to the next episode, the share is below that in this one.
        peak = np.maximum.reduceat(share, begins)
        low, high = np.searchsorted(occupied, begins), np.searchsorted(occupied, ends)
        long = (high - low >= 2) & (peak >= ENTER)
        pairs = zip(occupied[low[long]].tolist(), occupied[high[long] - 1].tolist(), strict=True)
        intervals += [(first + begin, first + last) for begin, last in pairs]
    return intervals


@dataclass(frozen=True, slots=True)
class Leg:
    """Part of a series between two turning points."""

    first: int
    last: int
    rise: float
    """Change from first to last; negative: the series falls."""


def legs(time: Floats, value: Floats, variance: float, share: float = 0.2) -> list[Leg]:
    """Split a series at its turning points.

    A point is a turning point if the series moves away from it by more than three standard deviations of a random walk
    with this variance per second over the time it took, by more than ``share`` of the leg before it, and by 3.
    """

    def away(distance: float, leg: float, length: float) -> bool:
        return distance > 3 and distance > share * leg and distance > 3 * math.sqrt(variance * length)

    points, level = time.tolist(), value.tolist()
    turns = [0]
    low = high = 0
    direction = 0
    for i in range(1, len(level)):
        now = level[i]
        if direction >= 0:
            if now > level[high]:
                high = i
            elif away(level[high] - now, level[high] - level[turns[-1]], points[i] - points[high]):
                if high > turns[-1]:
                    turns.append(high)
                direction, low = -1, i
                continue
        if direction <= 0:
            if now <= level[low]:
                low = i
            elif away(now - level[low], level[turns[-1]] - level[low], points[i] - points[low]):
                if low > turns[-1]:
                    turns.append(low)
                direction, high = 1, i
    if direction >= 0 and high > turns[-1]:
        turns.append(high)
    elif direction < 0 and low > turns[-1]:
        turns.append(low)
    if turns[-1] < len(level) - 1:
        turns.append(len(level) - 1)
    return [Leg(a, b, level[b] - level[a]) for a, b in itertools.pairwise(turns)]
