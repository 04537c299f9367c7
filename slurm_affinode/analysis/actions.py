"""Actions against idle GPU-hours, and their gain: one row per owner and cause. Pure.

The hours are lower bounds of what following the advice would have returned, from the idle time of the runs themselves:

- ``empty``: no activity in a run that is measured nearly completely, and hardly any GPU memory in use: its idle time;
- ``unused``: GPUs that were never active in a run that was active on others: their idle time;
- ``loaded``: no activity, but GPU memory in use: its idle time without the first ``AFTER_S`` on each GPU;
- ``interactive`` and ``pauses``: active at times, or loaded and interactive, and idle on a GPU for ``LONG_S`` or
  longer: the longest time of each run in which all of its GPUs were idle, without its first ``AFTER_S``. A job is only
  suspended while all of its GPUs are idle, and interactive jobs are not suspended at all;
- ``slight``: GPU memory in use, never idle for ``LONG_S``, and a mean utilization of at most ``SLIGHT_PCT``: work that
  only keeps the GPU from being idle. Its idle and low time.

``oversized`` returns no hours, but moves them to other GPUs: a mean utilization of at most ``SMALL_PCT``, and at most
``SMALL_SHARE`` of the GPU's memory in use, on GPUs of one model, where the cluster has a smaller model with enough
memory (``_with_smaller_gpus``): the allocated time of the larger one. A program that reserves memory in advance is not
found. Such actions come after all that return hours: a moved hour occupies another GPU, so the two do not compare.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import polars as pl

from slurm_affinode.analysis.measures import COMPLETE, GPU_MEMORY
from slurm_affinode.analysis.result import BOUNDS_S, WasteResult
from slurm_affinode.base.resources import asset_dir

AFTER_S = BOUNDS_S[1]
"""Idle time after which a job is suspended, in seconds: 15 minutes, the window of the documents' example."""
LONG_S = 3600
"""Idle time of one GPU from which a pause is worth an advice, in seconds."""
EMPTY_GIB = 1.0
"""Peak of GPU memory up to which a GPU holds no more than the context of a process, in GiB."""
SLIGHT_PCT = 3.0
"""Mean utilization up to which a GPU does hardly any work, in percent."""
SMALL_SHARE = 0.25
"""Peak of GPU memory up to which a GPU is larger than needed, as a share of its memory."""
SMALL_PCT = 15.0
"""Mean utilization up to which a GPU is larger than needed, in percent: as ``zombies.misfits.small_util_pct``."""
HALF = 0.5
"""Memory of a smaller GPU model at most, as a share of that of the larger one."""
ROOM = 1.25
"""Memory that a smaller GPU needs, in measured peaks: samples miss short peaks."""
_LEAST_HOURS = 0.01


@dataclass(frozen=True, slots=True)
class ReturnAction:
    """Action of one owner. Hours are GPU-hours."""

    kind: str
    """``empty``, ``unused``, ``loaded``, ``interactive``, ``pauses``, ``slight`` or ``oversized``."""
    cluster: str | None
    user: str | None
    runs: int
    hours_idle: float
    hours_returned: float
    """Lower bound of what following the advice would have returned."""
    hours_moved: float
    """``oversized``: allocated hours of ``gpu_model`` that the runs would have had on smaller GPUs; else 0."""
    memory_gib: float | None
    """Peak on one GPU; ``None`` if unknown."""
    longest_s: float | None
    """Longest idle time of one GPU."""
    gpus: int | None
    """Allocated GPUs of the runs, and those that were never active; ``None`` if unknown for each of them."""
    gpus_unused: int | None
    utilization_pct: float | None
    """Highest mean utilization of a run; ``None`` if unknown."""
    gpu_model: str | None
    """``oversized``: the model, its memory, and the smallest model of the cluster that has enough; else ``None``."""
    model_gib: float | None
    smaller_model: str | None
    smaller_gib: float | None
    job_id: int
    """The run with most hours."""
    array_job_id: int | None
    array_task_id: int | None


@dataclass(frozen=True, slots=True)
class SuspensionBound:
    """Upper bound of what suspensions after ``AFTER_S`` would have returned."""

    windows: int
    """Idle windows of that length or longer."""
    gpu_hours: float
    """Their GPU-hours without the first ``AFTER_S`` of each. Of a job with several GPUs, idle windows of single GPUs
    count too, although it is suspended only while all of them are idle. On a shared GPU, a window's time is divided
    among the jobs, and the first ``AFTER_S`` are deducted for each of them."""


@dataclass(frozen=True, slots=True)
class ActionText:
    """The texts of a kind of action."""

    title: str
    evidence: str
    advice: str
    returned: str


@functools.cache
def texts() -> Mapping[str, ActionText]:
    """Return the texts by kind, in the order of ``reports/actions.toml``."""
    table = tomllib.loads((asset_dir("reports") / "actions.toml").read_text(encoding="utf-8"))
    return MappingProxyType({kind: ActionText(**row) for kind, row in table.items()})


def suspension_bound(result: WasteResult) -> SuspensionBound | None:
    """Return the bound for all jobs of the interval; ``None`` if nothing was measured."""
    long = result.window_histogram.filter(pl.col("lower_s") >= AFTER_S)
    if long["windows"].null_count() or long.is_empty():
        return None
    windows, hours = int(long["windows"].sum()), float(long["gpu_hours"].sum())
    return SuspensionBound(windows, max(0.0, hours - windows * AFTER_S / 3600))


def actions(result: WasteResult, top: int = 5) -> tuple[ReturnAction, ...]:
    """Return the first ``top`` actions: those that would have returned most GPU-hours, then those that would have moved
    most.
    """
    if result.jobs.is_empty():
        return ()
    active = pl.col("gpu_hours_busy") + pl.col("gpu_hours_low")
    complete = pl.col("gpu_hours_measured") >= COMPLETE * pl.col("gpu_hours_allocated")
    still, memory = complete & (active == 0), pl.col("fb_peak_gib") > EMPTY_GIB
    interactive = (pl.col("submission") == "interactive").fill_null(value=False)
    long, idle = pl.col("longest_idle_s") >= LONG_S, pl.col("gpu_hours_idle")
    slight = complete & (active > 0) & memory & (pl.col("util_mean_pct") <= SLIGHT_PCT)
    gpus = pl.col("gpus").fill_null(1)
    kinds = _with_smaller_gpus(result).with_columns(
        pl.when(still & ~memory).then(pl.lit("empty"))
        .when((pl.col("gpus_unused") > 0) & (active > 0)).then(pl.lit("unused"))
        .when(interactive & long & (memory | (active > 0))).then(pl.lit("interactive"))
        .when(still & memory).then(pl.lit("loaded"))
        .when((active > 0) & long).then(pl.lit("pauses"))
        .when(slight).then(pl.lit("slight"))
        .when(complete & pl.col("smaller_gib").is_not_null()).then(pl.lit("oversized"))
        .alias("kind")
    ).filter(pl.col("kind").is_not_null())  # fmt: skip
    oversized = pl.col("kind") == "oversized"
    hours = pl.max_horizontal("returned", "moved")
    rows = kinds.with_columns(
        pl.when(oversized).then(0.0)
        .when(pl.col("kind") == "empty").then(idle)
        .when(pl.col("kind") == "unused").then("gpu_hours_unused")
        .when(pl.col("kind") == "loaded").then(pl.max_horizontal(idle - gpus * (AFTER_S / 3600), 0.0))
        .when(pl.col("kind") == "slight").then(idle + pl.col("gpu_hours_low"))
        .when(pl.col("all_idle_s").is_not_null())
        .then(pl.min_horizontal(idle, gpus * (pl.col("all_idle_s") - AFTER_S).clip(0) / 3600))
        .alias("returned"),
        pl.when(oversized).then("gpu_hours_allocated").otherwise(0.0).alias("moved"),
        *(pl.when(oversized).then(name).alias(name) for name in ("gpu_model", "model_gib")),
    ).sort(hours, descending=True, nulls_last=True, maintain_order=True)  # fmt: skip
    groups = rows.group_by("cluster", "user", "kind", "gpu_model", "model_gib", maintain_order=True).agg(
        pl.len().alias("runs"), idle.sum().alias("hours_idle"),
        pl.col("returned").sum().alias("hours_returned"), pl.col("moved").sum().alias("hours_moved"),
        pl.col("fb_peak_gib").max().alias("memory_gib"),
        pl.col("longest_idle_s").max().alias("longest_s"), pl.col("gpus", "gpus_unused").sum(),
        pl.col("util_mean_pct").max().alias("utilization_pct"),
        # Of the smallest models with enough memory for each run, the largest one has enough for all of them.
        pl.col("smaller_model").sort_by("smaller_gib").last(), pl.col("smaller_gib").max(),
        pl.col("job_id", "array_job_id", "array_task_id").first(),
    )  # fmt: skip
    groups = groups.with_columns(
        pl.when(pl.col("kind") == "oversized").then(name).alias(name) for name in ("smaller_model", "smaller_gib")
    )
    hours = pl.max_horizontal("hours_returned", "hours_moved")
    order = [pl.col("kind") != "oversized", hours]
    first = groups.filter(hours >= _LEAST_HOURS).sort(order, descending=True, maintain_order=True).head(top)
    return tuple(ReturnAction(**row) for row in first.iter_rows(named=True))


def _with_smaller_gpus(result: WasteResult) -> pl.DataFrame:
    """Return the jobs with ``model_gib``, ``smaller_model`` and ``smaller_gib`` of runs on GPUs larger than needed.

    They are None for other runs: where memory or utilization is unknown, with averages as GPU metrics, which do not
    have the peak, and where the cluster has no GPU model with at most ``HALF`` of the memory and room for the peak.
    """
    jobs = result.jobs.with_row_index("row")
    models = result.gpu_memory
    if models is None or result.averaged:
        models = pl.DataFrame(schema=GPU_MEMORY)
    small = (
        jobs.filter(
            pl.col("gpus") > 0, pl.col("gpus_memory_measured") >= pl.col("gpus"), pl.col("util_mean_pct") <= SMALL_PCT
        )
        .join(models.rename({"memory_gib": "model_gib"}), on=["cluster", "gpu_model"], nulls_equal=True)
        .filter(pl.col("fb_peak_gib") <= SMALL_SHARE * pl.col("model_gib"))
        .select("row", "cluster", "fb_peak_gib", "model_gib")
        .join(
            models.rename({"gpu_model": "smaller_model", "memory_gib": "smaller_gib"}), on="cluster", nulls_equal=True
        )
        .filter(
            pl.col("smaller_gib") <= HALF * pl.col("model_gib"), pl.col("smaller_gib") >= ROOM * pl.col("fb_peak_gib")
        )
        .sort("row", "smaller_gib", "smaller_model")
        .unique("row", keep="first")
        .select("row", "model_gib", "smaller_model", "smaller_gib")
    )
    return jobs.join(small, on="row", how="left", maintain_order="left").drop("row")
