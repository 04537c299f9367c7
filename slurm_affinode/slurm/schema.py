"""Columns of accounting frames: what ``slurm.sacct`` produces, the store keeps and the analysis reads.

Times are UTC, whole seconds. ``None`` is unknown; 0 is a measurement. One row of ``JOBS`` is one run of a job:
a requeued job has several, told apart by ``submit``.
"""

from __future__ import annotations

import polars as pl

TIME = pl.Datetime("ms", "UTC")

JOBS: dict[str, pl.DataType] = {
    # identity: the key is (cluster, job_id, submit)
    "cluster": pl.String(),
    "job_id": pl.Int64(),  # the raw id: unique also among array tasks and heterogeneous components
    "submit": TIME,  # where sacct did not print it: eligible, else start, else the epoch
    "array_job_id": pl.Int64(),
    "array_task_id": pl.Int64(),
    "array_spec": pl.String(),  # "1-9%2" of an array record whose tasks are still pending together
    "het_job_id": pl.Int64(),
    "het_offset": pl.Int64(),
    # who and what
    "job_name": pl.String(),
    "user": pl.String(),
    "uid": pl.Int64(),
    "account": pl.String(),
    "partition": pl.String(),
    "qos": pl.String(),
    # how it went
    "state": pl.String(),  # the canonical long word, e.g. CANCELLED, OUT_OF_MEMORY
    "cancelled_by": pl.String(),  # uid or name after "CANCELLED by"
    "exit_code": pl.Int64(),
    "exit_signal": pl.Int64(),
    "reason": pl.String(),
    "eligible": TIME,
    "start": TIME,
    "end": TIME,  # None while the job runs
    "elapsed_s": pl.Int64(),
    "timelimit_s": pl.Int64(),  # None: unknown or UNLIMITED
    "timelimit_unlimited": pl.Boolean(),
    # what it had
    "nodes": pl.Int64(),
    "node_list": pl.String(),  # compressed hostlist as Slurm prints it
    "cpus": pl.Int64(),
    "req_mem_bytes": pl.Int64(),  # for the whole job
    "alloc_mem_bytes": pl.Int64(),
    "req_tres": pl.String(),
    "alloc_tres": pl.String(),
    "gpus": pl.Int64(),  # allocated; None where accounting does not track gres/gpu, 0 where it does and there are none
    "req_gpus": pl.Int64(),
    "gpu_type": pl.String(),  # of typed GRES, "a100"; several joined by "+"
    # what it used
    "total_cpu_s": pl.Float64(),
    "max_rss_bytes": pl.Int64(),  # of the largest step, filled from its steps
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
    "submit": TIME,  # of the run the step belongs to, not the step's own
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
    # Which GPU a run had, as recorded by a prolog, scontrol, ClusterCockpit or jobstats.
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "start": TIME,  # start of the run, where the source knows it; None: every run of the job
    "node": pl.String(),
    "gpu": pl.String(),  # a GPU UUID, a PCI address or an index on the node, as a string
}


def empty(schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """An empty frame of ``schema``."""
    return pl.DataFrame(schema=schema)


def conform(frame: pl.DataFrame, schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """``frame`` with exactly the columns of ``schema``, in order; absent ones are null."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )
