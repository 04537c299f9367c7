"""The jobs of a log that are simulated: selection, sample, arrivals."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import counted
from slurm_affinode.traces.job_log import EXAMPLES, UNKNOWN, Ints, JobLog, LeftOut, check_complete
from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.simulation import Workload

READ_AHEAD = 10
"""A sample of N jobs is drawn from the first 10 N + 1 jobs of a log, as PAI's simulator does."""
_MINUTE_S = 60
_TOO_LARGE = "larger than the capacity"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which jobs of a log are simulated, and when they arrive."""

    longest_s: float | None = None
    """Longest run time; ``None``: any."""
    sample: int | None = None
    """Number of jobs to draw; ``None``: all."""
    seed: int = 42
    arrivals: int | None = None
    """Jobs that arrive per minute; ``None``: when they were submitted."""


@dataclass(frozen=True, slots=True)
class PreparedLog:
    """Jobs to simulate."""

    workload: Workload
    number: Ints
    """Their numbers in the log."""
    recorded_wait: Ints
    """Their recorded waits, s; -1: not recorded."""
    left_out: tuple[LeftOut, ...]
    """Jobs that cannot be simulated."""
    excluded: tuple[LeftOut, ...]
    """Jobs that were excluded on request."""
    sampled_from: int | None
    """Number of jobs from which the sample was drawn."""
    capacity: int
    """Of the pool, in the units of the workload."""


def prepare(
    log: JobLog, capacity: int, policy: SchedulingPolicy, selection: Selection, *, partial: bool = False
) -> PreparedLog:
    """Return the jobs of ``log`` to simulate. Jobs that need more than ``capacity`` are left out after the sample.

    ``capacity``: GPUs or processors. Raises ``InputError`` if too much is left out and not ``partial``, if the sample
    is larger than the log, if the policy needs priorities that the log does not have, and if no job remains.
    """
    jobs, left_out = log.jobs.with_row_index("row"), list(log.left_out)
    excluded: list[LeftOut] = []
    if policy.order == "priority" and log.priorities is None:
        raise InputError("no job has a priority, which --order priority needs", where=log.name)
    if policy.order == "priority" and log.priorities is not None:
        jobs, without = _without(jobs.with_columns(log.priorities.alias("priority")), pl.col("priority").is_null(),
                                 "without a priority", log.parts)  # fmt: skip
        left_out += without
    if policy.requests:
        if not jobs.is_empty() and (jobs["request_s"] == UNKNOWN).all():
            raise InputError(
                f"no job has a requested time, which --times {policy.times} needs", where=log.name,
                hint="--times actual simulates with the actual run times",
            )  # fmt: skip
        jobs, without = _without(jobs, pl.col("request_s") == UNKNOWN, "without a requested time", log.parts)
        left_out += without
    check_complete(log, left_out, partial=partial)
    if selection.longest_s is not None:
        text = f"with a run time above {selection.longest_s:,.0f} s"
        jobs, excluded = _without(jobs, pl.col("run_s") > selection.longest_s, text, log.parts)
    sampled_from = None
    if selection.sample is not None:
        jobs, sampled_from = _sample(jobs, selection.sample, selection.seed, log.name)
    jobs = jobs.sort("submit_s", "row")
    if selection.arrivals is not None:
        minute = pl.int_range(pl.len()) // selection.arrivals * _MINUTE_S
        # Within a minute, PAI's simulator has the order of the log.
        jobs = jobs.with_columns(minute.alias("submit_s")).sort("submit_s", "row")
    jobs, large = _without(jobs, pl.col("units") > capacity * log.parts, _TOO_LARGE, log.parts)
    left_out += large
    if jobs.is_empty():
        if large:
            raise InputError(f"no job fits on {counted(capacity, log.unit)}", where=log.name)
        excluded_jobs = "".join(f" without {counted(part.jobs, 'job')} {part.reason}" for part in excluded)
        raise InputError(
            f"no job is left{excluded_jobs}", where=log.name, hint="choose a larger --max-run" if excluded else None
        )
    return PreparedLog(
        _workload(jobs), jobs["number"].to_numpy(), jobs["wait_s"].to_numpy(), tuple(left_out),
        tuple(excluded), sampled_from, capacity * log.parts,
    )  # fmt: skip


def _workload(jobs: pl.DataFrame) -> Workload:
    """Return jobs with the columns of ``JOBS``, ``row`` and perhaps ``priority``, sorted by submission.

    Run times are cut at the requested time.
    """
    request = jobs["request_s"].to_numpy()
    run = jobs["run_s"].to_numpy()
    run = np.where(request == UNKNOWN, run, np.minimum(run, request))
    priority = None if "priority" not in jobs.columns else jobs["priority"].to_numpy()
    return Workload(
        jobs["submit_s"].to_numpy(), run, jobs["units"].to_numpy(), request, jobs["user"].to_numpy(),
        jobs["user_mean_s"].to_numpy(), jobs["row"].to_numpy().astype(np.int64), priority=priority,
    )  # fmt: skip


def _without(jobs: pl.DataFrame, test: pl.Expr, reason: str, parts: int) -> tuple[pl.DataFrame, list[LeftOut]]:
    some = jobs.filter(test)
    if some.is_empty():
        return jobs, []
    hours, whole = (float((frame["run_s"] * frame["units"]).sum()) / 3600 / parts for frame in (some, jobs))
    examples = tuple(f"job {number}" for number in some["number"].head(EXAMPLES))
    return jobs.filter(~test), [LeftOut(reason, some.height, hours, hours / whole, examples)]


def _sample(jobs: pl.DataFrame, count: int, seed: int, where: str) -> tuple[pl.DataFrame, int]:
    if count > jobs.height:
        raise InputError(
            f"a sample of {count:,} jobs is larger than the log, which has {jobs.height:,} usable ones", where=where
        )
    among = min(jobs.height, READ_AHEAD * count + 1)
    rows = list(range(among))
    random.Random(seed).shuffle(rows)  # noqa: S311 - a sample, not a secret
    return jobs[rows[:count]], among
