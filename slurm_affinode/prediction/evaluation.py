"""Split by time, selection of a predictor per target, and its figures on later jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from slurm_affinode.analysis.bootstrap import day_of, interval
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import counted
from slurm_affinode.prediction import quantile_model
from slurm_affinode.prediction.features import LEVELS, TARGETS, FeatureTable, PredictionTarget, build
from slurm_affinode.prediction.history import Floats, Ints
from slurm_affinode.prediction.intervals import calibrated

MODEL = "lightgbm"
FITTED, SELECTED = 0.5, 0.7
"""Of the submissions in their order: models are trained with the first half; the predictor is selected with those up to
``SELECTED``; the figures are those of the others."""
LEAST_JOBS = 100
"""Jobs with a known value below which a target is not predicted."""
MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class Choice:
    """The predictor that is used for a target, and why."""

    predictor: str
    reason: str
    losses: Mapping[str, float]
    """Predictor -> pinball loss of the median on the jobs of the selection."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of a predictor on the jobs of the test, in the unit of the target."""

    predictor: str
    jobs: int
    pinball: float
    """Mean pinball loss of the median: half the mean absolute error."""
    pinball_low: float | None
    pinball_high: float | None
    """Mean pinball losses of the calibrated bounds; ``None``: no interval."""
    coverage: float | None
    """Share of the jobs inside the calibrated interval; 0.9 is intended. ``None``: no interval."""
    over_requested: float
    """Prediction beyond the actual value, summed, of the sum of the actual values."""
    under_requested: float
    """Share of the jobs above their prediction."""
    upper_over_requested: float | None
    """As ``over_requested``, if the upper bound were requested."""
    upper_under_requested: float | None


@dataclass(frozen=True, slots=True)
class TargetEvaluation:
    """A target: the choice, and the figures of all predictors."""

    target: str
    unit: str
    fitted_jobs: int
    selected_jobs: int
    choice: Choice
    qualities: tuple[Quality, ...]
    model_beats_median: bool | None
    """On the jobs of the test; ``None``: there is no model."""


@dataclass(frozen=True, slots=True)
class PreparedTarget:
    """A target with the predictions of all predictors, for all submissions."""

    table: FeatureTable
    predictions: Mapping[str, Floats]
    """Predictor -> one row for each of ``LEVELS``; of a model, NaN before ``fitted``."""
    choice: Choice
    models: tuple[str, ...]
    """Texts of the trained models; empty: none."""
    fitted: int
    """Row of the first submission that no model was trained with."""
    selected: int
    """Row of the first submission of the test."""

    def calibrated(self, predictor: str) -> Floats:
        """Return the calibrated bounds of a predictor."""
        first = self.fitted if predictor == MODEL else 0
        return calibrated(self.table, self.predictions[predictor], first)


def targets(submissions: pl.DataFrame, where: str) -> list[PredictionTarget]:
    """Return the targets that enough of the submissions have. Raises ``InputError`` if there is none.

    ``where``: name of the log.
    """
    usable = [target for target in TARGETS if submissions[target.name].count() >= LEAST_JOBS]
    if not usable:
        ended = submissions["run_s"].count()
        raise InputError(
            f"{counted(ended, 'job')} {'has' if ended == 1 else 'have'} ended, fewer than the {LEAST_JOBS} that a "
            "prediction needs", where=where, hint="choose a longer interval or log",
        )  # fmt: skip
    return usable


def prepare(submissions: pl.DataFrame, target: PredictionTarget, *, tested: bool = True) -> PreparedTarget:
    """Compute all predictions of a target, and select a predictor.

    ``tested``: whether the last submissions are kept for a test; otherwise they serve the selection too.
    """
    table = build(submissions, target)
    fitted = int(FITTED * len(table) / (1 if tested else SELECTED))
    selected = int(SELECTED * len(table)) if tested else len(table)
    predictions = dict(table.baselines)
    models: tuple[str, ...] = ()
    moment = table.submit[min(fitted, len(table) - 1)]
    # A model has only seen jobs that had ended when it was trained.
    past_rows = np.flatnonzero((np.arange(len(table)) < fitted) & (table.end >= 0) & (table.end < moment)
                           & ~np.isnan(table.actual))  # fmt: skip
    if quantile_model.available() and len(past_rows) >= quantile_model.LEAST_ROWS:
        models = quantile_model.train(table, past_rows)
        predictions[MODEL] = quantile_model.predict(models, table, first=fitted)
    compared = np.arange(fitted, selected)
    if tested and selected < len(table):  # the choice is that of the first submission of the test
        compared = compared[(table.end[compared] >= 0) & (table.end[compared] < table.submit[selected])]
    choice = _choose(table, predictions, compared, len(past_rows))
    return PreparedTarget(table, predictions, choice, models, fitted, selected)


def evaluate(prepared: PreparedTarget) -> TargetEvaluation | None:
    """Return the figures of all predictors on the jobs of the test; ``None`` if none of these has a known value."""
    table = prepared.table
    rows = _comparable(table, prepared.predictions, np.arange(prepared.selected, len(table)))
    if not len(rows):
        return None
    qualities = tuple(
        _quality(name, table.actual[rows], values[:, rows], prepared.calibrated(name)[:, rows])
        for name, values in prepared.predictions.items()
    )
    loss = {quality.predictor: quality.pinball for quality in qualities}
    return TargetEvaluation(
        table.target.name, table.target.unit, int(np.count_nonzero(~np.isnan(table.actual[: prepared.fitted]))),
        int(np.count_nonzero(~np.isnan(table.actual[prepared.fitted : prepared.selected]))), prepared.choice, qualities,
        loss[MODEL] < loss["median"] if MODEL in loss else None,
    )  # fmt: skip


def pinball(actual: Floats, predicted: Floats, level: float) -> Floats:
    """Return the pinball loss of each prediction of a quantile (R. Koenker, G. Bassett, Econometrica 1978)."""
    missed = actual - predicted
    loss: Floats = np.maximum(level * missed, (level - 1) * missed)
    return loss


def _comparable(table: FeatureTable, predictions: Mapping[str, Floats], rows: Ints) -> Ints:
    """Return those of ``rows`` that have an actual value and all predictions."""
    complete = ~np.isnan(table.actual[rows])
    for values in predictions.values():
        complete &= ~np.isnan(values[:, rows]).any(axis=0)
    return rows[complete]


def _choose(table: FeatureTable, predictions: Mapping[str, Floats], rows: Ints, fitted_jobs: int) -> Choice:
    rows = _comparable(table, predictions, rows)
    actual = table.actual[rows]
    losses = {name: pinball(actual, values[MEDIAN, rows], 0.5) for name, values in predictions.items()}
    if not len(rows):
        return Choice("median", "no job is left for a comparison", {})
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min((name for name in means if name != MODEL), key=lambda name: means[name])
    if MODEL not in losses:
        why = (
            f"too few jobs for a model ({fitted_jobs:,}; {quantile_model.LEAST_ROWS:,} are needed)"
            if quantile_model.available() else f"LightGBM is not installed: {quantile_model.INSTALL}"
        )  # fmt: skip
        return Choice(best, f"the smallest loss of the baselines; {why}", means)
    saved = losses[best] - losses[MODEL]
    if not means[best]:
        return Choice(best, f"the model is not used: {best} is exact", means)
    likely = interval(day_of(table.submit[rows]), saved, mean=True)
    change = f"{abs(saved.mean()) / means[best]:.1%}"
    if saved.mean() <= 0:
        return Choice(best, f"the model is not used: its loss is {change} above that of {best}", means)
    if likely is None or likely[0] <= 0:
        text = f"the model is not used: its loss is {change} below that of {best}, which may be chance"
        return Choice(best, text, means)
    return Choice(MODEL, f"its loss is {change} below that of {best}, the best baseline", means)


def _quality(name: str, actual: Floats, values: Floats, bounds: Floats) -> Quality:
    median = values[MEDIAN]
    low, high = bounds
    has_quantiles = ~np.isnan(low)
    whole = float(actual.sum())
    inside = (actual >= low) & (actual <= high)

    def mean(numbers: Floats) -> float | None:
        return float(numbers.mean()) if len(numbers) else None

    return Quality(
        predictor=name,
        jobs=len(actual),
        pinball=float(pinball(actual, median, 0.5).mean()),
        pinball_low=mean(pinball(actual[has_quantiles], low[has_quantiles], LEVELS[0])),
        pinball_high=mean(pinball(actual[has_quantiles], high[has_quantiles], LEVELS[-1])),
        coverage=float(inside[has_quantiles].mean()) if has_quantiles.any() else None,
        over_requested=float(np.maximum(median - actual, 0).sum()) / whole if whole else 0.0,
        under_requested=float((actual > median).mean()),
        upper_over_requested=float(np.maximum(high - actual, 0)[has_quantiles].sum())
        / float(actual[has_quantiles].sum()) if has_quantiles.any() else None,
        upper_under_requested=float((actual > high)[has_quantiles].mean()) if has_quantiles.any() else None,
    )  # fmt: skip
