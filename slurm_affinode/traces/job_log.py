"""A log of jobs as a queue simulation needs it, and what of it could not be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import tzinfo

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import counted

Ints = npt.NDArray[np.int64]

UNKNOWN = -1
"""Value of an unknown time or size."""
MOST_LEFT_OUT = 0.1
"""Share of the jobs, and of their time, that may be missing without ``--partial``."""
MOST_S = 2**31
"""Largest time that is read, in seconds: later ones would not fit into the keys of events."""
MOST_UNITS = 2**31
"""Largest size of a job that is read."""
JOBS: dict[str, pl.DataType] = {
    "number": pl.Int64(),  # of the job in the log, for messages
    "submit_s": pl.Int64(),
    "run_s": pl.Int64(),  # at least 1
    "units": pl.Int64(),  # processors or GPUs, at least 1
    "request_s": pl.Int64(),  # the requested time; UNKNOWN: none
    "user": pl.Int64(),  # UNKNOWN: none
    "wait_s": pl.Int64(),  # as recorded; UNKNOWN: not recorded
    "user_mean_s": pl.Float64(),  # mean run time of the user over the whole log; NaN: unknown user
}
"""Columns of a log, in the order of the file."""


DESCRIBED: dict[str, pl.DataType] = {
    "memory_kb": pl.Float64(),  # used by each processor
    "requested_kb": pl.Float64(),  # requested for each processor
    "group": pl.String(),
    "executable": pl.String(),
    "queue": pl.String(),
}
"""Further columns of a log about its jobs; null is unknown."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Jobs of a log that are not simulated."""

    reason: str
    """Why, as a noun phrase: ``without a run time``."""
    jobs: int
    unit_hours: float
    """Their processor- or GPU-hours, as far as known."""
    share: float
    """``unit_hours`` of those of the whole log."""
    examples: tuple[str, ...] = ()
    """Their first lines (``FILE:LINE``) or numbers."""


@dataclass(frozen=True, slots=True)
class JobLog:
    """The usable jobs of one log."""

    name: str
    unit: str
    """Name of what a job holds, in the singular: ``processor`` or ``GPU``."""
    jobs: pl.DataFrame
    """Schema ``JOBS``."""
    left_out: tuple[LeftOut, ...]
    capacity: int | None
    """Units of the machine by the header of the log; ``None``: not given."""
    epoch_s: int | None = None
    """The second 0 of ``submit_s`` in seconds since 1970 (UTC); ``None``: not given."""
    zone: tzinfo | None = None
    """Time zone of the machine; ``None``: the log names none, and its times are taken as they are."""
    cluster: str | None = None
    """The cluster, of a trace of several; ``None``: the trace has one, or the log does not say which."""
    jobs_without_units: int | None = None
    """Jobs of the log that request no unit and are not in ``jobs``; ``None``: the log has no such jobs."""
    final_states: pl.Series | None = None
    """``completed``, ``canceled``, ``failed`` or ``other`` of each job; ``None``: not in the log."""
    described: pl.DataFrame | None = None
    """``DESCRIBED`` of each job; ``None``: not in the log."""
    recorded_run_s: pl.Series | None = None
    """Run time of each job by a column of the log; ``None``: the log has none beside start and end."""
    parts: int = 1
    """Parts of a GPU: ``units`` of ``jobs`` counts parts where jobs hold less than a GPU. ``capacity`` counts GPUs."""
    names: pl.Series | None = None
    """Name of each job, which repeated jobs share; ``None``: not in the log."""
    idle_pct: pl.Series | None = None
    """Share of the run time in which all GPUs of the job were idle, in percent; null is unknown. ``None``: not in the
    log."""
    priorities: pl.Series | None = None
    """Priority of each job, the highest first; null is unknown. ``None``: not in the log."""

    @property
    def rows(self) -> int:
        """Return the number of jobs, left out or not."""
        return self.jobs.height + sum(group.jobs for group in self.left_out)


EXAMPLES = 3
_TOO_LARGE = "beyond what a log can hold"
_LARGEST = 2.0**53
FINEST = 1000
"""Parts of a GPU in a log with jobs that hold less than one: thousandths, as Alibaba's traces have them."""


def divide(
    rows: pl.DataFrame, reasons: Mapping[str, pl.Expr], where: str, parts: int = 1
) -> tuple[pl.DataFrame, list[LeftOut]]:
    """Return the usable rows, and the others by the first reason that holds.

    ``rows`` has ``units`` (``parts`` of a GPU each) and ``run_s``, unknown or below 1 where the log has nothing, and
    ``line``, ``submit_s`` and perhaps ``wait_s`` and ``request_s``. The last reason is a time or a size beyond
    ``MOST_S`` and ``MOST_UNITS``, or a submission before the second 0.
    """
    times = [pl.col(name) >= MOST_S for name in ("submit_s", "wait_s", "run_s", "request_s") if name in rows.columns]
    large = pl.any_horizontal(*times, pl.col("units") >= MOST_UNITS, pl.col("submit_s") < 0)
    reasons = {**reasons, _TOO_LARGE: large}
    reason = pl.coalesce(*(pl.when(test).then(pl.lit(text)) for text, test in reasons.items()))
    rows = rows.with_columns(
        reason.alias("reason"),
        (pl.max_horizontal("units", 0) * pl.max_horizontal("run_s", 0) / 3600 / parts).alias("hours"),
    )
    whole = float(rows["hours"].sum())
    left_out = []
    for text in reasons:
        some = rows.filter(pl.col("reason") == text)
        if some.height:
            hours = float(some["hours"].sum())
            places = tuple(f"{where}:{line}" for line in some["line"].head(EXAMPLES))
            left_out.append(LeftOut(text, some.height, hours, hours / whole if whole else 0.0, places))
    return rows.filter(pl.col("reason").is_null()).drop("reason", "hours"), left_out


def check_complete(log: JobLog, left_out: Iterable[LeftOut], *, partial: bool) -> None:
    """Raise ``InputError`` if no job is left, or more than ``MOST_LEFT_OUT`` is left out and not ``partial``."""
    left_out = tuple(left_out)
    jobs, share = sum(group.jobs for group in left_out), sum(group.share for group in left_out)
    detail = "; ".join(
        f"{counted(group.jobs, 'job')} {group.reason}" + (f" ({', '.join(group.examples)})" if group.examples else "")
        for group in left_out
    )
    if log.jobs.is_empty():
        raise InputError(f"no usable job: {detail or 'the log is empty'}", where=log.name)
    if not partial and (jobs > MOST_LEFT_OUT * log.rows or share > MOST_LEFT_OUT):
        raise InputError(
            f"{jobs:,} of {log.rows:,} jobs, with {share:.1%} of the {log.unit}-hours, are left out: {detail}",
            where=log.name, hint="--partial simulates the others",
        )  # fmt: skip


def in_parts(gpus: pl.Series) -> tuple[pl.Series, int]:
    """Return sizes in GPUs as whole numbers of parts, at least 1, and the parts of a GPU.

    A GPU is one part if all sizes are whole; otherwise it has ``FINEST`` parts, and sizes are rounded to them.
    """
    counts = gpus.drop_nulls()
    parts = 1 if (counts == counts.round()).all() else FINEST
    return (gpus * parts).round().clip(1, _LARGEST).cast(pl.Int64).alias("units"), parts


def with_user_means(rows: pl.DataFrame) -> pl.DataFrame:
    """Return ``rows`` with ``user_mean_s``: the mean of ``run_s`` over all rows of the user."""
    mean = pl.col("run_s").mean().over("user")
    return rows.with_columns(pl.when(pl.col("user") != UNKNOWN).then(mean).otherwise(float("nan")).alias("user_mean_s"))
