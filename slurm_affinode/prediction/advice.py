"""Advice on the limits of the next job of a user, from the user's ended jobs and a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.prediction import quantile_model
from slurm_affinode.prediction.evaluation import MEDIAN, MODEL
from slurm_affinode.prediction.features import KEYS, NAMES, TARGETS, build
from slurm_affinode.prediction.intervals import apply
from slurm_affinode.prediction.model_file import ModelFile, TargetModel

_STEPS_S = ((3600.0, 60.0), (6 * 3600.0, 300.0), (86_400.0, 1800.0), (math.inf, 3600.0))
"""Up to this time, limits are rounded up to a multiple of the second number."""
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class TargetAdvice:
    """The prediction of a target for the next job."""

    target: str
    unit: str
    predictor: str
    predicted: float
    low: float | None
    """Bounds of the calibrated interval; ``None``: too few jobs."""
    high: float | None
    requested: float | None
    suggested: float | None
    """The upper bound, rounded up; ``None``: there is no bound, or nothing is requested for this target."""
    similar_jobs: int
    """Ended jobs of the user with the same job and request."""


@dataclass(frozen=True, slots=True)
class JobAdvice:
    """Advice for the next job of a user."""

    user: str
    name: str | None
    """Of the job that it repeats."""
    last_number: int
    """Number of that job."""
    user_jobs: int
    targets: tuple[TargetAdvice, ...]


def advise(
    submissions: pl.DataFrame, model: ModelFile, user: str, name: str | None, *, moment_s: int,
    request_s: float | None = None, request_mem_bytes: float | None = None,
) -> JobAdvice:  # fmt: skip
    """Return advice for a job of ``user`` that repeats the last one with ``name``, submitted at ``moment_s``.

    Raises ``InputError`` if the user has no such job.
    """
    user_jobs = submissions.filter(pl.col("user") == user)
    if user_jobs.is_empty():
        raise InputError(f"there is no job of {user}", hint="choose an earlier --since, or another --user")
    same = user_jobs if name is None else user_jobs.filter(pl.col("name") == name)
    if same.is_empty():
        names = ", ".join(user_jobs["name"].drop_nulls().unique(maintain_order=True).reverse().head(5).to_list())
        raise InputError(f"{user} has no job named {name}", hint=f"the last names are {names}" if names else None)
    last = same.tail(1)
    changes = {"submit_s": moment_s, "end_s": None, "run_s": None, "mem_bytes": None, "gpu_mem_bytes": None,
               "idle_pct": None}  # fmt: skip
    if request_s is not None:
        changes["request_s"] = request_s  # type: ignore[assignment]
    if request_mem_bytes is not None:
        changes["request_mem_bytes"] = request_mem_bytes  # type: ignore[assignment]
    new = last.with_columns(pl.lit(value, submissions.schema[key]).alias(key) for key, value in changes.items())
    related = pl.any_horizontal(*(
        pl.col(column).eq_missing(pl.lit(last[column][0], pl.String)) for column in ("user", *KEYS["queue"],
                                                                                     *KEYS["account"])
    ))  # fmt: skip
    rows = pl.concat([submissions.filter(related & (pl.col("submit_s") <= moment_s)), new])
    return JobAdvice(
        user, last["name"][0], last["number"][0], user_jobs.height,
        tuple(_target(rows, new, target) for target in model.targets),
    )  # fmt: skip


def _target(rows: pl.DataFrame, new: pl.DataFrame, model: TargetModel) -> TargetAdvice:
    target = next(candidate for candidate in TARGETS if candidate.name == model.target)
    table = build(rows, target, cut=False)  # whether the request is too short is the question
    if model.predictor == MODEL:
        values = quantile_model.predict(model.models, table)[:, -1:]
    else:
        values = table.baselines.get(model.predictor, table.baselines["median"])[:, -1:]
    low = high = suggested = None
    if model.factors is not None:
        (low,), (high,) = apply(model.factors, values, np.full(1, np.nan)).tolist()
        suggested = None if target.limit is None else rounded_up(high, target.unit)
    requested = None if target.limit is None else new[target.limit][0]
    count = table.matrix[-1, NAMES.index("similar_count")]
    if math.isnan(values[MEDIAN, 0]):
        raise InputError(f"no job with a known {target.name} has ended before this one")
    return TargetAdvice(
        target.name, target.unit, model.predictor, float(values[MEDIAN, 0]), low, high,
        None if requested is None else float(requested), suggested, int(count),
    )  # fmt: skip


def rounded_up(value: float, unit: str) -> float:
    """Return a time rounded up to minutes or hours, a size to GiB."""
    step = _GIB if unit == "bytes" else next(step for most, step in _STEPS_S if value <= most)
    return math.ceil(value / step) * step
