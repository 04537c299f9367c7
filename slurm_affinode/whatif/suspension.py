"""Replay of a site's GPU jobs, with and without suspension of idle ones.

A job with idle periods becomes a chain of parts. It is suspended once it has been idle for ``window_s``; its GPUs are
free after the checkpoint, until the idle period ends; then it waits for GPUs in its old place in the queue, is
restored, and continues. Idle periods keep their distance from the start of the job. In place, a job keeps its GPUs
while it sleeps: only jobs that share them could use them, and the queue stays as it is, apart from the restores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from slurm_affinode.whatif.figures import blocked_s
from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.simulation import Advance, Ints, Workload, simulate

DUMP_S = 17.0
RESTORE_S = 6.0
"""Costs of a job with 16 GiB of GPU memory on an H200, image on disk: docs/hardware.md, measurements on a GPU."""


@dataclass(frozen=True, slots=True)
class GpuJob:
    """A job of the queue; times in seconds."""

    job_id: int
    partition: str | None
    submit: int
    run: int
    gpus: int
    request: int
    """Time limit; -1: unknown."""
    recorded_wait: int
    counted: bool
    """Whether its wait counts: it was submitted in the interval."""
    idle: tuple[tuple[int, int], ...] = ()
    """Idle periods, relative to the start."""
    predicted: int = -1
    """Predicted run time; -1: unknown."""
    idle_risk_pct: float | None = None
    """Predicted share of the run time in which it is idle; ``None``: unknown."""
    priority: int = 0
    """For ``order`` "priority": the highest first."""


@dataclass(frozen=True, slots=True)
class SuspensionRule:
    """When idle jobs are suspended, and what it costs."""

    window_s: float
    dump_s: float
    restore_s: float
    in_place: bool = False
    """Whether jobs keep their allocation while they are suspended."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed queue; one element per job."""

    wait: Ints
    """To the first start, s."""
    wake_wait: Ints
    """From the end of idle periods to the restore, s, summed."""
    wakes: Ints
    returned_s: Ints
    """GPU-seconds for which the job's GPUs were free while it was suspended."""
    used_s: float
    """GPU-seconds of these that others used: beyond what would have been free with all suspended jobs on their GPUs."""
    end: Ints
    """End of the job, s on the clock of the submissions."""
    blocked: Ints
    """Of ``wait``: time in which as many GPUs as the job needs were free, s."""


def replay(
    jobs: Sequence[GpuJob], capacity: int, policy: SchedulingPolicy, rule: SuspensionRule | None,
    advance: Advance = lambda count: None,
) -> Replay:  # fmt: skip
    """Replay ``jobs`` (at least one), sorted by submission; with ``rule`` idle ones are suspended."""
    of: list[int] = []
    parts: list[tuple[int, int]] = []
    """Run time of each part, and the time before its submission in which the job is suspended."""
    tails = np.zeros(len(jobs), np.int64)
    """Time for which jobs would have been suspended at their end, s."""
    in_place = np.zeros((2, len(jobs)), np.int64)
    """Time for which jobs sleep in place, s, and their wakes."""
    for number, job in enumerate(jobs):
        job_parts, tails[number] = _parts(job, rule)
        if rule is not None and rule.in_place:
            in_place[:, number] = sum(delay for _, delay in job_parts) + tails[number], len(job_parts) - 1
            job_parts, tails[number] = [(sum(map(sum, job_parts)) + int(tails[number]), 0)], 0
        of += [number] * len(job_parts)
        parts += job_parts
    owner = np.array(of, np.int64)
    first = np.append(True, owner[1:] != owner[:-1])
    last = np.append(first[1:], True)
    run, delay = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    rows = np.arange(len(owner))
    units = np.array([job.gpus for job in jobs], np.int64)[owner]
    remaining = _remaining([job.request for job in jobs], owner, run, at_least=run)
    predicted = _remaining([job.predicted for job in jobs], owner, run, at_least=np.ones_like(run))
    work = Workload(
        np.array([job.submit for job in jobs], np.int64)[owner], run, units, remaining,
        np.full(len(owner), -1), np.full(len(owner), np.nan), rows, np.where(first, -1, rows - 1), delay,
        predicted, np.array([job.priority for job in jobs], np.int64)[owner],
    )  # fmt: skip
    starts = simulate(work, capacity, policy, advance)
    ends = starts + run
    previous = np.where(first, 0, np.roll(ends, 1))
    submitted = np.where(first, work.submit, previous + delay)
    waits, asleep = starts - submitted, np.where(first, 0, starts - previous)

    def total(values: npt.NDArray[np.int64]) -> Ints:
        return np.bincount(owner, values, len(jobs)).astype(np.int64)

    gpus = units[last]
    return Replay(
        waits[first], total(np.where(first, 0, waits)), total((~first).astype(np.int64)) + in_place[1],
        total(asleep * units) + tails * gpus + in_place[0] * gpus,
        _used(starts, ends, units, np.concatenate([previous[~first], ends[last]]),
              np.concatenate([starts[~first], ends[last] + tails]), np.concatenate([units[~first], gpus]),
              capacity),
        ends[last], blocked_s((work.submit[first], starts[first], gpus), (starts, ends, units), capacity),
    )  # fmt: skip


def _parts(job: GpuJob, rule: SuspensionRule | None) -> tuple[list[tuple[int, int]], int]:
    """Return run time and preceding suspension of each part of a job, and for how long it is suspended at its end.

    A job that is idle to its end is not resumed.
    """
    if rule is None:
        return [(job.run, 0)], 0
    dump, restore, window = (max(1, round(value)) for value in (rule.dump_s, rule.restore_s, rule.window_s))
    parts: list[tuple[int, int]] = []
    position, delay, extra = 0, 0, 0
    for begin, end in job.idle:
        frozen = begin + window
        free = frozen + dump
        if free >= min(end, job.run) or begin < position:
            continue
        parts.append((free - position + extra, delay))
        if end >= job.run:
            return parts, job.run - free
        position, delay, extra = end, end - free, restore
    return [*parts, (job.run - position + extra, delay)], 0


def _remaining(whole: Sequence[int], owner: Ints, run: Ints, *, at_least: Ints) -> Ints:
    """Return the time that is left of ``whole``, by job, at the start of each part, ``at_least`` this; -1: unknown."""
    remaining = []
    current, used = -1, 0
    for number, seconds, least in zip(owner.tolist(), run.tolist(), at_least.tolist(), strict=True):
        if number != current:
            current, used = number, 0
        remaining.append(-1 if whole[number] < 0 else max(least, whole[number] - used))
        used += seconds
    return np.array(remaining, np.int64)


def _used(  # noqa: PLR0917 - the two sets of intervals
    starts: Ints, ends: Ints, units: Ints, from_: Ints, until: Ints, asleep: Ints, capacity: int
) -> float:
    """Return the GPU-seconds in use beyond the capacity without the GPUs of the suspended jobs."""
    times = np.concatenate([starts, ends, from_, until])
    changes = np.concatenate([units, -units, asleep, -asleep])
    order = np.argsort(times, kind="stable")
    times, held_units = times[order], np.cumsum(changes[order])
    return float((np.maximum(0, held_units[:-1] - capacity) * np.diff(times)).sum())


def most_concurrent(jobs: Sequence[GpuJob], starts: Sequence[int]) -> int:
    """Return the most GPUs that ``jobs``, started at ``starts``, hold at the same time."""
    edges = sorted(
        edge for job, start in zip(jobs, starts, strict=True)
        for edge in ((start, job.gpus), (start + job.run, -job.gpus))
    )  # fmt: skip
    units = most = 0
    for (time, change), (later, _) in pairwise([*edges, (2**62, 0)]):
        units += change
        if later != time:
            most = max(most, units)
    return most
