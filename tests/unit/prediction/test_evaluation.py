"""Selection of predictors, and their figures."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.prediction import quantile_model
from slurm_affinode.prediction.evaluation import MODEL, evaluate, pinball, prepare, targets
from slurm_affinode.prediction.features import TARGETS, FeatureTable
from slurm_affinode.prediction.history import Floats

from .synthetic import submissions

RUN = TARGETS[0]


def test_pinball_loss_is_the_one_of_the_definition() -> None:
    actual, predicted = np.array([10.0, 10.0]), np.array([4.0, 14.0])
    assert pinball(actual, predicted, 0.9) == pytest.approx([0.9 * 6, 0.1 * 4])


def test_best_baseline_with_its_reason_is_used_without_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile_model, "available", lambda: False)
    prepared = prepare(submissions(), RUN)
    assert prepared.choice.predictor == "median"
    assert "LightGBM is not installed" in prepared.choice.reason
    evaluation = evaluate(prepared)
    assert evaluation is not None
    assert [item.predictor for item in evaluation.qualities] == ["limit", "last-two", "median"]
    assert evaluation.model_beats_median is None
    limit, _, median = evaluation.qualities
    assert limit.under_requested == 0
    assert median.pinball < limit.pinball / 10
    assert median.coverage == pytest.approx(0.9, abs=0.05)


def test_few_jobs_get_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile_model, "available", lambda: True)
    choice = prepare(submissions(quantile_model.LEAST_ROWS), RUN).choice
    assert "too few jobs for a model" in choice.reason


def test_model_that_does_not_win_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that predicts the double of the median of similar jobs is computed, compared, and rejected."""
    monkeypatch.setattr(quantile_model, "available", lambda: True)
    monkeypatch.setattr(quantile_model, "train", lambda table, rows: ("text",))
    monkeypatch.setattr(quantile_model, "predict", lambda models, table, first: 2 * table.baselines["median"])
    prepared = prepare(submissions(), RUN)
    assert prepared.choice.predictor == "median"
    assert "the model is not used: its loss is" in prepared.choice.reason
    evaluation = evaluate(prepared)
    assert evaluation is not None
    assert evaluation.model_beats_median is False


def test_model_is_trained_with_jobs_that_had_ended_before_the_first_it_predicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}
    monkeypatch.setattr(quantile_model, "available", lambda: True)
    monkeypatch.setattr(quantile_model, "train", lambda table, rows: seen.setdefault("rows", rows) is None or ("text",))
    monkeypatch.setattr(quantile_model, "predict", lambda models, table, first: table.baselines["median"])
    prepared = prepare(submissions(), RUN)
    assert len(seen["rows"]) > 900
    assert prepared.table.end[seen["rows"]].max() < prepared.table.submit[prepared.fitted]


def test_model_wins_where_run_times_depend_on_what_it_alone_has() -> None:
    pytest.importorskip("lightgbm", reason="the extra predict is not installed")
    rows = submissions(4000, noise=0.05)
    hours = rows["submit_s"] % 86_400 // 3600  # long at night: no baseline has the hour
    prepared = prepare(rows.with_columns((rows["run_s"] * (1 + 9 * (hours < 8).cast(pl.Int64))).alias("run_s")), RUN)
    assert prepared.choice.predictor == MODEL
    evaluation = evaluate(prepared)
    assert evaluation is not None
    assert evaluation.model_beats_median is True
    assert next(item for item in evaluation.qualities if item.predictor == MODEL).coverage == pytest.approx(
        0.9, abs=0.05
    )


def test_predictor_is_selected_by_jobs_that_had_ended_before_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of the selection that end during the test would favor the model, which predicts these exactly."""
    monkeypatch.setattr(quantile_model, "available", lambda: True)
    monkeypatch.setattr(quantile_model, "train", lambda table, rows: ("text",))
    rows = submissions()
    at, test_s = pl.int_range(pl.len()), rows["submit_s"][int(0.7 * rows.height)]
    late = (at >= 0.5 * rows.height) & (at < 0.7 * rows.height) & (at % 2 == 0)
    rows = rows.with_columns(
        pl.when(late).then(test_s + 1).otherwise("end_s").alias("end_s"),
        pl.when(late).then(9e6).otherwise("run_s").alias("run_s"), pl.lit(9.9e6).alias("request_s"),
    )  # fmt: skip

    def predict(models: object, table: FeatureTable, first: int) -> Floats:
        return np.where(table.actual == 9e6, table.actual, 3 * table.baselines["median"])

    monkeypatch.setattr(quantile_model, "predict", predict)
    assert prepare(rows, RUN).choice.predictor == "median"


def test_exact_baseline_is_preferred_to_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs run for the same time, so that the loss of the baselines is 0."""
    monkeypatch.setattr(quantile_model, "available", lambda: True)
    monkeypatch.setattr(quantile_model, "train", lambda table, rows: ("text",))
    monkeypatch.setattr(quantile_model, "predict", lambda models, table, first: table.baselines["median"] + 1)
    rows = submissions().with_columns(pl.lit(60.0).alias("run_s"))
    choice = prepare(rows, RUN).choice
    assert (choice.predictor, choice.reason) == ("last-two", "the model is not used: last-two is exact")


def test_target_that_is_unknown_in_the_test_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile_model, "available", lambda: False)
    rows = submissions()
    early = pl.int_range(pl.len()) < 900
    prepared = prepare(rows.with_columns(pl.when(early).then("mem_bytes").alias("mem_bytes")), TARGETS[1])
    assert evaluate(prepared) is None
    assert prepared.choice.losses == {}
    assert "no job is left for a comparison" in prepared.choice.reason


def test_target_without_values_is_left_out() -> None:
    assert [target.name for target in targets(submissions(), "log")] == ["run_s", "mem_bytes"]
    with pytest.raises(InputError, match="log: 0 jobs have ended, fewer than the 100"):
        targets(submissions().with_columns(pl.lit(None, pl.Float64).alias(n) for n in ("run_s", "mem_bytes")), "log")
