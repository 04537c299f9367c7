"""Figures of a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_affinode.whatif.simulation import Floats, Ints, Workload

SLOWDOWN_BOUND_S = 10
"""Run times below this count as this much (Feitelson et al., *Theory and Practice in Parallel Job
Scheduling*, 1997)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a schedule; times in seconds."""

    jobs: int
    mean_wait_s: float
    median_wait_s: float
    p95_wait_s: float
    mean_jct_s: float
    """Mean time from submission to end."""
    mean_bounded_slowdown: float
    """Mean of max(1, (wait + run) / max(run, 10 s))."""
    utilization: float
    """Time of the jobs, of the time of all units from the first submission to the last end."""
    makespan_s: int
    """From the first submission to the last end."""
    total_completion_s: int
    """Sum of the times from submission to end."""
    max_stretch: float
    """Largest (wait + run) / run of a job."""


def figures(jobs: Workload, starts: Ints, capacity: int) -> Figures:
    """Return the figures of at least one job with these starts."""
    wait = starts - jobs.submit
    whole = int((starts + jobs.run).max() - jobs.submit.min())
    return Figures(
        jobs=len(jobs),
        mean_wait_s=float(wait.mean()),
        median_wait_s=float(np.median(wait)),
        p95_wait_s=float(np.percentile(wait, 95)),
        mean_jct_s=float((wait + jobs.run).mean()),
        mean_bounded_slowdown=float(bounded_slowdown(wait, jobs.run).mean()),
        utilization=float((jobs.run.astype(np.float64) * jobs.units).sum() / (float(whole) * capacity)),
        makespan_s=whole,
        total_completion_s=int((wait + jobs.run).sum()),
        max_stretch=float(((wait + jobs.run) / jobs.run).max()),
    )


def head_of_line_wait(jobs: Workload, starts: Ints, capacity: int) -> Ints:
    """Return for how long each job waited although as many units as it needs were free, s.

    It was behind a job that did not fit, or others had reservations. Start and end of jobs are taken as they ran.
    """
    return blocked_s((jobs.submit, starts, jobs.units), (starts, starts + jobs.run, jobs.units), capacity)


def blocked_s(waits: tuple[Ints, Ints, Ints], held_units: tuple[Ints, Ints, Ints], capacity: int) -> Ints:
    """Return for how long of each wait as many units as it is for were free, s.

    ``waits`` and ``held_units``: begin, end and units of each interval.
    """
    begin, end, units = held_units
    edges = np.concatenate([begin, end])
    order = np.argsort(edges, kind="stable")
    times = edges[order]
    free = capacity - np.cumsum(np.concatenate([units, -units])[order])
    spans = np.diff(times, append=times[-1:])
    blocked = np.zeros(len(waits[0]), np.int64)
    first, last, size = waits
    waited = last > first
    for needed in np.unique(size[waited]):
        rows = np.flatnonzero(waited & (size == needed))
        fits = free >= needed
        sums = np.concatenate([[0], np.cumsum(np.where(fits, spans, 0))])
        for moments, sign in ((last[rows], 1), (first[rows], -1)):
            index = np.searchsorted(times, moments, side="right") - 1
            begun = np.maximum(index, 0)
            within = np.where(fits[begun], moments - times[begun], 0)
            blocked[rows] += sign * np.where(index >= 0, sums[begun] + within, moments - times[0])
    return blocked


def bounded_slowdown(wait: Ints, run: Ints) -> Floats:
    """Return the bounded slowdown of each job."""
    slowdown: Floats = np.maximum(1.0, (wait + run) / np.maximum(run, SLOWDOWN_BOUND_S))
    return slowdown
