"""Features and baselines of submissions, for one target; both use only jobs that had ended before the submission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.prediction.history import Floats, History, Ints

VERSION = 1
"""Of the features: a model of another version is rejected."""
LEVELS = (0.05, 0.5, 0.95)
"""Quantiles of every prediction: lower bound, median, upper bound."""
WINDOW = 16
"""Jobs of which a quantile is taken: the last ones of the key that have ended."""
_FEW = 2
"""Jobs below which the quantile of a wider key counts."""
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class PredictionTarget:
    """A quantity to predict."""

    name: str
    """Column of ``SUBMISSIONS``."""
    limit: str | None
    """Column of its request; ``None``: it is not requested."""
    unit: str
    most: float | None = None
    """Largest possible value; ``None``: there is none."""


TARGETS = (
    PredictionTarget("run_s", "request_s", "s"),
    PredictionTarget("mem_bytes", "request_mem_bytes", "bytes"),
    PredictionTarget("gpu_mem_bytes", None, "bytes"),
    PredictionTarget("idle_pct", None, "%", 100.0),
)
FEW_WITHOUT = 0.1
"""Share of submissions without a request up to which the request is a predictor."""
LEAST = 1.0
"""Smallest prediction, in the unit of the target."""

KEYS: dict[str, tuple[str, ...]] = {
    "similar": ("user", "job", "units", "request_s"),
    "job": ("user", "job"),
    "user": ("user",),
    "queue": ("queue",),
    "account": ("account",),
}
"""Key -> columns that its jobs share, from narrow to wide; the first of them must be known."""
NAMES = (
    "limit", "request_s", "request_mem_bytes", "units",
    *(f"{key}_{what}" for key in ("similar", "job", "user") for what in ("last", "low", "median", "high", "count")),
    "user_second", "user_third", "queue_median", "account_median", "user_active", "user_gap", "hour", "weekday",
)  # fmt: skip
"""Columns of the matrix."""
_LINEAR = {"units", "user_active", "hour", "weekday"} | {name for name in NAMES if name.endswith("_count")}


@dataclass(frozen=True, slots=True)
class FeatureTable:
    """Submissions of one target; one element or column per submission, in their order."""

    target: PredictionTarget
    submit: Ints
    end: Ints
    """-1: it has not ended."""
    actual: Floats
    """NaN: unknown."""
    limit: Floats
    """NaN: unknown."""
    matrix: npt.NDArray[np.float32]
    """Columns ``NAMES``; times and sizes as logarithms. NaN: unknown."""
    baselines: Mapping[str, Floats]
    """Name -> predictions, one row for each of ``LEVELS``; NaN: it has none."""

    def __len__(self) -> int:
        return len(self.submit)


def build(submissions: pl.DataFrame, target: PredictionTarget, *, cut: bool = True) -> FeatureTable:
    """Return features and baselines of ``submissions`` (schema ``SUBMISSIONS``, in the order of submission).

    ``cut``: whether predictions are at most the request. Otherwise the table has no limits; the features have them.
    """
    submit = submissions["submit_s"].to_numpy()
    end = submissions["end_s"].fill_null(-1).to_numpy()
    actual = _floats(submissions[target.name])
    limit = np.full(len(submit), np.nan) if target.limit is None else _floats(submissions[target.limit])
    codes = {name: key_codes(submissions, columns) for name, columns in KEYS.items()}
    columns: dict[str, Floats] = {
        "limit": limit,
        "request_s": _floats(submissions["request_s"]),
        "request_mem_bytes": _floats(submissions["request_mem_bytes"]),
        "units": _floats(submissions["units"]),
        "hour": (submit % _DAY_S) / 3600,
        "weekday": (submit // _DAY_S % 7).astype(np.float64),
    }
    quantiles: dict[str, Floats] = {}
    for key in ("similar", "job", "user"):
        earlier = History(codes[key], end, actual).before(codes[key], submit)
        quantiles[key] = earlier.quantiles(WINDOW, LEVELS)
        columns[f"{key}_count"] = earlier.count().astype(np.float64)
        columns[f"{key}_last"] = earlier.last(1)
        for name, values in zip(("low", "median", "high"), quantiles[key], strict=True):
            columns[f"{key}_{name}"] = values
        if key == "user":
            columns["user_second"], columns["user_third"] = (earlier.last(back) for back in (2, 3))
    for key in ("queue", "account"):
        earlier = History(codes[key], end, actual).before(codes[key], submit)
        columns[f"{key}_median"] = earlier.quantiles(WINDOW, (0.5,))[0]
    users = codes["user"]
    submitted = History(users, submit, submit.astype(np.float64)).before(users, submit)
    columns["user_gap"] = submit - submitted.last(1)
    ended = History(users, end, np.zeros(len(end))).before(users, submit)
    columns["user_active"] = (submitted.count() - ended.count()).astype(np.float64)
    overall = np.full((len(LEVELS), len(submit)), np.nan)
    # Only jobs without a request whose user has fewer than two ended jobs have the quantiles of all jobs.
    rows = np.flatnonzero(np.isnan(limit) & np.isnan(columns["user_second"]))
    all_jobs = History(np.zeros(len(submit), np.int64), end, actual)
    overall[:, rows] = all_jobs.before(np.zeros(len(rows), np.int64), submit[rows]).quantiles(8 * WINDOW, LEVELS)
    matrix = np.empty((len(submit), len(NAMES)), np.float32)
    for number, name in enumerate(NAMES):
        values = columns[name]
        matrix[:, number] = values if name in _LINEAR else np.log(np.maximum(values, LEAST))
    baselines = _baselines(limit, columns, quantiles, overall)
    most = limit if cut else np.full(len(submit), np.nan)
    if target.most is not None:
        most = np.fmin(most, target.most)
    baselines = {name: within(values, most) for name, values in baselines.items()}
    return FeatureTable(target, submit, end, actual, most, matrix, baselines)


def key_codes(submissions: pl.DataFrame, columns: Sequence[str]) -> Ints:
    """Return a number for each combination of ``columns``; -1 where the first of them is null."""
    code = pl.struct(columns).rank("dense").cast(pl.Int64)
    codes: Ints = (
        submissions.select(pl.when(pl.col(columns[0]).is_null()).then(-1).otherwise(code)).to_series().to_numpy()
    )
    return codes


def _floats(values: pl.Series) -> Floats:
    floats: Floats = values.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    return floats


def _baselines(
    limit: Floats, columns: Mapping[str, Floats], quantiles: Mapping[str, Floats], overall: Floats
) -> dict[str, Floats]:
    """Return the predictions without a model.

    limit: the request. last-two: the mean of the user's last two jobs, else the request. median: of the last jobs of
    the user with the same job and request, else the same job, else any job of the user, else the request. Without a
    request, the last resort is the median of all jobs.
    """
    requested = np.broadcast_to(limit, (len(LEVELS), len(limit)))
    last_two = np.broadcast_to((columns["user_last"] + columns["user_second"]) / 2, requested.shape)
    narrow = np.where(columns["similar_count"] >= _FEW, quantiles["similar"], np.nan)
    same = np.where(columns["job_count"] >= _FEW, quantiles["job"], np.nan)
    baselines = {
        "last-two": first_known(last_two, requested, overall),
        "median": first_known(narrow, same, quantiles["user"], requested, overall),
    }
    if np.isnan(limit).mean() <= FEW_WITHOUT:
        baselines = {"limit": requested, **baselines}
    return baselines


def first_known(*choices: Floats) -> Floats:
    """Return for each element the first of ``choices`` that is not NaN."""
    filled = choices[-1]
    for values in reversed(choices[:-1]):
        filled = np.where(np.isnan(values), filled, values)
    return filled


def within(values: Floats, limit: Floats) -> Floats:
    """Return ``values`` from ``LEAST`` to ``limit``, where this is known."""
    limited: Floats = np.fmin(np.maximum(values, LEAST), limit)  # fmin: NaN counts as missing
    return np.where(np.isnan(values), np.nan, limited)
