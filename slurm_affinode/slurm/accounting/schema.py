"""Columns of accounting frames, and the result of reading accounting: frames and problems.

Times are UTC in whole seconds. ``None`` is unknown; 0 is a measurement. One row of ``JOBS`` is one run (attempt) of a
job; the runs of a requeued job differ in ``submit``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import polars as pl

from slurm_affinode.base.times import utc


@dataclass(frozen=True, slots=True)
class Problem:
    """A record or field of the input that could not be used."""

    line: int | None
    """Line of the file, from 1; for JSON the number of the job, from 1."""
    job: str | None
    """The job or step ID as printed, if it was readable."""
    field: str | None
    """The column that caused the problem, if it was a single one."""
    reason: str
    dropped: bool = True
    """Whether the record was dropped; otherwise only this field is unknown."""

    def __str__(self) -> str:
        who = f"job {self.job}: " if self.job else ""
        what = f"{self.field}: " if self.field else ""
        return f"{who}{what}{self.reason}"


@dataclass(frozen=True, slots=True)
class TimeDecision:
    """The reading chosen for a local time that exists twice or never."""

    line: int | None
    job: str
    field: str
    """``submit``, ``eligible``, ``start`` or ``end``."""
    local: datetime
    """As written, naive."""
    chosen: datetime
    """UTC."""
    exists: bool
    """False: the clocks never showed this time; True: they showed it twice."""

    def __str__(self) -> str:
        reading = "exists twice" if self.exists else "does not exist"
        return f"job {self.job}: {self.field} {self.local.isoformat()} {reading}: taken as {utc(self.chosen)}"


@dataclass(frozen=True, slots=True)
class Accounting:
    """Result of reading one input."""

    jobs: pl.DataFrame
    """Schema ``JOBS``: one row per run."""
    steps: pl.DataFrame
    """Schema ``STEPS``."""
    records: int = 0
    """Number of records in the input, good and bad."""
    problems: tuple[Problem, ...] = ()
    decisions: tuple[TimeDecision, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks about this input for the user, one sentence each."""
    unit: str = "line"
    """The unit of ``Problem.line``: ``"line"`` or ``"record"``."""
    gpu_clusters: frozenset[str] = field(default_factory=frozenset)
    """Clusters whose GPUs appear in this input (see ``records.Divided``)."""

    @property
    def bad_records(self) -> int:
        """Number of dropped records."""
        return sum(problem.dropped for problem in self.problems)


TIME = pl.Datetime("ms", "UTC")

JOBS: dict[str, pl.DataType] = {
    # identity: the key is (cluster, job_id, submit)
    "cluster": pl.String(),
    "job_id": pl.Int64(),  # the raw ID: unique also among array tasks and heterogeneous components
    "submit": TIME,  # if sacct did not print it: eligible, else start, else the epoch
    "array_job_id": pl.Int64(),
    "array_task_id": pl.Int64(),
    "array_spec": pl.String(),  # "1-9%2" of the record shared by the pending tasks of an array
    "het_job_id": pl.Int64(),
    "het_offset": pl.Int64(),
    # owner and queue
    "job_name": pl.String(),
    "user": pl.String(),
    "uid": pl.Int64(),
    "account": pl.String(),
    "partition": pl.String(),
    "qos": pl.String(),
    "priority": pl.Int64(),  # as accounting has recorded it last; 0: held
    # state and times
    "state": pl.String(),  # the canonical long word, e.g. CANCELLED, OUT_OF_MEMORY
    "cancelled_by": pl.String(),  # uid or name after "CANCELLED by"
    "exit_code": pl.Int64(),
    "exit_signal": pl.Int64(),
    "reason": pl.String(),
    "eligible": TIME,
    "start": TIME,
    "end": TIME,  # None while the job runs
    "elapsed_s": pl.Int64(),  # without the time for which Slurm had suspended the job
    "suspended_s": pl.Int64(),  # that time; when it was is not known
    "time_doubt_s": pl.Int64(),  # start and end may be later by this: they are in a repeated hour; None: not recorded
    "timelimit_s": pl.Int64(),  # None: unknown or UNLIMITED
    "timelimit_unlimited": pl.Boolean(),
    # resources
    "nodes": pl.Int64(),
    "node_list": pl.String(),  # compressed hostlist as Slurm prints it
    "cpus": pl.Int64(),
    "req_mem_bytes": pl.Int64(),  # for the whole job
    "alloc_mem_bytes": pl.Int64(),
    "req_tres": pl.String(),
    "alloc_tres": pl.String(),
    "gpus": pl.Int64(),  # allocated; None if accounting does not track gres/gpu, 0 if it does and there are none
    "req_gpus": pl.Int64(),
    "gpu_type": pl.String(),  # of typed GRES, "a100"; several joined by "+"
    # usage
    "total_cpu_s": pl.Float64(),
    "max_rss_bytes": pl.Int64(),  # of the largest step, filled from the steps
    "energy_j": pl.Float64(),
    # texts
    "comment": pl.String(),
    "admin_comment": pl.String(),
    "constraints": pl.String(),
    "work_dir": pl.String(),
    "submit_line": pl.String(),
}
JOB_KEY = ("cluster", "job_id", "submit")

STEPS: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "submit": TIME,  # of the step's run, not of the step
    "step_id": pl.String(),  # batch, extern, interactive, 0, 1, ... ; 0+1 in a heterogeneous step
    "step_name": pl.String(),
    "state": pl.String(),
    "cancelled_by": pl.String(),
    "exit_code": pl.Int64(),
    "exit_signal": pl.Int64(),
    "start": TIME,
    "end": TIME,
    "elapsed_s": pl.Int64(),
    "nodes": pl.Int64(),
    "node_list": pl.String(),
    "tasks": pl.Int64(),
    "cpus": pl.Int64(),
    "alloc_tres": pl.String(),
    "gpus": pl.Int64(),
    "total_cpu_s": pl.Float64(),
    "max_rss_bytes": pl.Int64(),
    "gpu_util_max_pct": pl.Float64(),  # gres/gpuutil of TRESUsageInMax: a high-water mark, not a mean
    "gpu_mem_max_bytes": pl.Int64(),  # gres/gpumem of TRESUsageInMax: likewise
    "energy_j": pl.Float64(),
    "submit_line": pl.String(),
}
STEP_KEY = ("cluster", "job_id", "submit", "step_id")

ALLOCATION_GPUS: dict[str, pl.DataType] = {
    # GPUs allocated to a run, as recorded by a prolog, scontrol, ClusterCockpit or jobstats.
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "start": TIME,  # start of the run; None: the source does not have it
    "node": pl.String(),
    "gpu": pl.String(),  # a GPU UUID, a PCI address or an index on the node, as a string
}

RECORDED_GPUS: dict[str, pl.DataType] = {
    **ALLOCATION_GPUS,
    "attempts": pl.Int64(),  # runs of the job in accounting, at any time; None: not counted
}


def empty(schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """Return an empty frame with ``schema``."""
    return pl.DataFrame(schema=schema)


def conform(frame: pl.DataFrame, schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """Return ``frame`` with exactly the columns of ``schema``, in order; absent ones are null."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )
