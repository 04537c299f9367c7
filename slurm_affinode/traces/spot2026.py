"""Alibaba's spot GPU trace of 2026 (``cluster-trace-v2026-spot-gpu``): the GPUs there are against those requested.

``node_info_df.csv`` has the nodes, ``job_info_df.csv`` the jobs: GPUs of a worker, workers, submission (seconds from
the first job) and duration. Neither waits nor preemptions are recorded. The demand of a job is ``gpu_request`` x
``worker_num`` from its submission for its duration, as if it had started at once: what a cluster without a limit would
run. The file of the jobs is not in the repository; without it the demand is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.model.finding import plain
from slurm_affinode.traces import csv_columns
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog, divide, in_parts, with_user_means

NODES, JOBS_FILE = "node_info_df.csv", "job_info_df.csv"
TYPES = ("HP", "Spot")
"""High priority, and spot."""
POINTS = 150
"""Points of the curves over time."""
_TRACE = "the spot GPU trace of 2026"
_NODE_TYPES = {"gpu_model": pl.String(), "gpu_capacity_num": pl.Float64()}
_JOB_NUMBERS = ("gpu_request", "worker_num", "submit_time", "duration")
_JOB_TYPES = {
    **dict.fromkeys(("organization", "gpu_model", "job_type"), pl.String()),
    **dict.fromkeys(_JOB_NUMBERS, pl.Float64()),
}


@dataclass(frozen=True, slots=True)
class SpotTrace:
    """The tables of the trace."""

    name: str
    nodes: pl.DataFrame
    """``gpu_model``, ``gpu_capacity_num``."""
    jobs: pl.DataFrame | None
    """Columns of ``job_info_df.csv``, ``line``, and ``gpus``; ``None``: the file is missing."""


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """GPUs of a model, and the demand for them between the first and the last submission."""

    nodes: int
    gpus: int
    jobs: int | None
    demand_mean_gpus: float | None
    """Mean over time."""
    demand_peak_gpus: float | None
    demand_share: float | None
    """``demand_mean_gpus`` of ``gpus``."""
    high_priority_share: float | None
    """The same, of the jobs with high priority alone."""
    above_capacity_time_share: float | None
    """Share of the time in which the demand exceeds the GPUs."""


@dataclass(frozen=True, slots=True)
class SpotSummary:
    """Figures of the trace. ``None``: unknown, because the jobs are missing."""

    nodes: int
    gpu_models: int
    gpus: int
    jobs: int | None
    spot_jobs: int | None
    organizations: int | None
    span_s: float | None
    """First to last submission."""
    gpu_hours: float | None
    """Demand x duration of all jobs."""
    spot_gpu_hours_share: float | None
    total: ModelDemand
    models: Mapping[str, ModelDemand]
    """By the number of GPUs, descending."""
    jobs_without_nodes: int | None
    """Jobs that request a model of which the list has no node."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        row: dict[str, Any] = plain(self)
        return row


@dataclass(frozen=True, slots=True)
class SpotResult:
    """The figures, and the curves of the demand."""

    summary: SpotSummary
    over_time: pl.DataFrame
    """``day``, and for each model the demand by the GPUs of the model; without rows if the jobs are missing."""


def read(path: Path) -> SpotTrace:
    """Read the directory of the trace, or its list of jobs with the list of nodes beside it.

    Raises ``InputError`` if there is no list of nodes, or a file is not of this trace.
    """
    directory = path if path.is_dir() else path.parent
    node_file = csv_columns.inside(directory, NODES)
    if node_file is None:
        raise InputError(f"has no {NODES}, the nodes of {_TRACE}", where=str(directory))
    nodes = csv_columns.read(node_file, _NODE_TYPES, trace=_TRACE)
    job_file = path if not path.is_dir() and path != node_file else csv_columns.inside(directory, JOBS_FILE)
    return SpotTrace(str(path), nodes, None if job_file is None else _jobs(job_file))


def _jobs(file: Path) -> pl.DataFrame:
    rows = csv_columns.read(file, _JOB_TYPES, trace=_TRACE)
    kind = pl.col("job_type")
    for problem, test in (
        ("job_type is neither HP nor Spot", ~kind.is_in(TYPES) | kind.is_null()),
        ("has no number of GPUs or workers", pl.any_horizontal(pl.col("gpu_request", "worker_num").is_null())),
        ("has no time of submission or duration", pl.any_horizontal(pl.col("submit_time", "duration").is_null())),
        ("has a negative number", pl.any_horizontal(pl.col(*_JOB_NUMBERS) < 0)),
    ):
        bad = rows.filter(test)
        if bad.height:
            raise InputError(one_line(problem, 80), where=f"{file}:{bad['line'][0]}")
    return rows.with_columns((pl.col("gpu_request") * pl.col("worker_num")).alias("gpus"))


def analyse(trace: SpotTrace) -> SpotResult:
    """Return the figures of the trace."""
    jobs = trace.jobs
    with_gpus = trace.nodes.filter(pl.col("gpu_capacity_num") > 0)
    capacity = (
        with_gpus.group_by("gpu_model")
        .agg(pl.len().alias("nodes"), pl.col("gpu_capacity_num").sum().cast(pl.Int64).alias("gpus"))
        .sort("gpus", "gpu_model", descending=[True, False])
    )
    window = None if jobs is None else (_bound(jobs["submit_time"].min()), _bound(jobs["submit_time"].max()))
    models: dict[str, ModelDemand] = {}
    curves: dict[str, pl.DataFrame] = {}
    for model, nodes, gpus in capacity.iter_rows():
        some = None if jobs is None else jobs.filter(pl.col("gpu_model") == model)
        models[model], curves[model] = _demand(some, nodes, gpus, window)
    gpus, nodes = int(capacity["gpus"].sum()), int(capacity["nodes"].sum())
    hours = None if jobs is None else jobs.select(pl.col("gpus") * pl.col("duration") / 3600, "job_type")
    whole = None if hours is None else float(hours["gpus"].sum())
    spot = None if hours is None else float(hours.filter(pl.col("job_type") == "Spot")["gpus"].sum())
    summary = SpotSummary(
        nodes=trace.nodes.height,
        gpu_models=capacity.height,
        gpus=gpus,
        jobs=None if jobs is None else jobs.height,
        spot_jobs=None if jobs is None else jobs.filter(pl.col("job_type") == "Spot").height,
        organizations=None if jobs is None else jobs["organization"].drop_nulls().n_unique(),
        span_s=None if window is None else window[1] - window[0],
        gpu_hours=whole,
        spot_gpu_hours_share=spot / whole if spot is not None and whole else None,
        total=_demand(jobs, nodes, gpus, window)[0],
        models=models,
        jobs_without_nodes=None if jobs is None else jobs.filter(~pl.col("gpu_model").is_in(list(models))).height,
    )
    return SpotResult(summary, _sampled(curves, {name: model.gpus for name, model in models.items()}, window))


def _bound(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _demand(
    jobs: pl.DataFrame | None, nodes: int, gpus: int, window: tuple[float, float] | None
) -> tuple[ModelDemand, pl.DataFrame]:
    """Return the figures of a model, and its curve (``at``, ``gpus`` from then on, up to the end of the window)."""
    if jobs is None or window is None:
        return ModelDemand(nodes, gpus, None, None, None, None, None, None), pl.DataFrame()
    curve = _curve(jobs, window)
    mean, peak = _mean(curve, window), float(curve["gpus"].max() or 0.0)  # type: ignore[arg-type]
    high = _mean(_curve(jobs.filter(pl.col("job_type") == "HP"), window), window)
    span = window[1] - window[0]
    above = float(curve.filter(pl.col("gpus") > gpus)["lasts"].sum())
    demand = ModelDemand(
        nodes=nodes,
        gpus=gpus,
        jobs=jobs.height,
        demand_mean_gpus=mean,
        demand_peak_gpus=peak,
        demand_share=mean / gpus,
        high_priority_share=high / gpus,
        above_capacity_time_share=above / span if span else None,
    )
    return demand, curve


def _curve(jobs: pl.DataFrame, window: tuple[float, float]) -> pl.DataFrame:
    """Return ``at``, ``gpus`` requested from then on, and how long it ``lasts``, within the window."""
    first, last = window
    begin = jobs.select(at=pl.col("submit_time"), gpus=pl.col("gpus"))
    end = jobs.select(at=pl.col("submit_time") + pl.col("duration"), gpus=-pl.col("gpus"))
    changes = pl.concat([pl.DataFrame({"at": [first], "gpus": [0.0]}), begin, end]).filter(pl.col("at") <= last)
    curve = changes.group_by("at").agg(pl.col("gpus").sum()).sort("at").with_columns(pl.col("gpus").cum_sum().round(6))
    return curve.with_columns((pl.col("at").shift(-1, fill_value=last) - pl.col("at")).alias("lasts"))


def _mean(curve: pl.DataFrame, window: tuple[float, float]) -> float:
    span = window[1] - window[0]
    return float((curve["gpus"] * curve["lasts"]).sum()) / span if span else float(curve["gpus"][-1])


def _sampled(
    curves: Mapping[str, pl.DataFrame], gpus: Mapping[str, int], window: tuple[float, float] | None
) -> pl.DataFrame:
    """Return the curves at equal steps, by the GPUs of the model."""
    if window is None:
        return pl.DataFrame(schema={"day": pl.Float64(), **dict.fromkeys(curves, pl.Float64())})
    first, last = window
    days = pl.DataFrame({"at": [first + (last - first) * step / POINTS for step in range(POINTS)]})
    frame = days.select(day=(pl.col("at") - first) / 86400)
    for name, curve in curves.items():
        joined = days.join_asof(curve, on="at")
        frame = frame.hstack(joined.select((pl.col("gpus").fill_null(0.0) / gpus[name]).alias(name)))
    return frame


def job_log(trace: SpotTrace) -> JobLog:
    """Return the jobs as a queue simulation needs them: organizations are users, spot jobs have a lower priority.

    Raises ``InputError`` if the list of jobs is missing.
    """
    if trace.jobs is None:
        raise InputError(f"has no {JOBS_FILE}: without the jobs nothing can be simulated", where=trace.name)
    with_gpus = trace.jobs.filter(pl.col("gpus") > 0)
    units, parts = in_parts(with_gpus["gpus"])
    rows = with_gpus.with_columns(
        units,
        pl.col("line").alias("number"),
        pl.col("submit_time").cast(pl.Int64).alias("submit_s"),
        pl.col("duration").cast(pl.Int64).alias("run_s"),
        pl.col("organization").rank("dense").cast(pl.Int64).fill_null(UNKNOWN).alias("user"),
        pl.lit(UNKNOWN).alias("request_s"),
        pl.lit(UNKNOWN).alias("wait_s"),
    )
    usable, left_out = divide(rows, {"without a run time": pl.col("run_s") < 1}, trace.name, parts)
    usable = with_user_means(usable)
    return JobLog(
        trace.name, "GPU", usable.select(*JOBS).cast(JOBS), tuple(left_out), analyse(trace).summary.gpus,  # type: ignore[arg-type]
        jobs_without_units=trace.jobs.height - with_gpus.height, parts=parts,
        priorities=(usable["job_type"] == TYPES[0]).cast(pl.Int64),
    )  # fmt: skip
