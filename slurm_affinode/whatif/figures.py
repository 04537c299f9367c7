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


def bounded_slowdown(wait: Ints, run: Ints) -> Floats:
    """Return the bounded slowdown of each job."""
    slowdown: Floats = np.maximum(1.0, (wait + run) / np.maximum(run, SLOWDOWN_BOUND_S))
    return slowdown
