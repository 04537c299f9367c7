"""Advice on limits."""

from __future__ import annotations

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.prediction import features, model_file, quantile_model
from slurm_affinode.prediction.advice import advise, rounded_up
from slurm_affinode.prediction.evaluation import prepare, targets
from slurm_affinode.prediction.model_file import ModelFile

from .synthetic import DAY_S, submissions

ROWS = submissions()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    monkeypatch.setattr(quantile_model, "available", lambda: False)
    trained = tuple(model_file.target_model(prepare(ROWS, target, tested=False)) for target in targets(ROWS, "log"))
    return ModelFile(features.VERSION, features.NAMES, "", "test", 0, 1, trained)


def test_suggestion_is_the_upper_bound_of_repeated_jobs(model: ModelFile) -> None:
    """Jobs n1 of u3 run for 4800 s in the median, and 5 % of them for more than about 7900 s; they request 400,000."""
    advice = advise(ROWS, model, "u3", "n1", moment_s=70 * DAY_S)
    run, memory = advice.targets
    assert run.predicted == pytest.approx(4800, rel=0.15)
    assert run.low is not None
    assert run.high is not None
    assert run.low < run.predicted < run.high
    assert 6000 < run.high < 10_000
    assert run.suggested == rounded_up(run.high, "s")
    assert run.requested == 400_000
    assert memory.predicted == 4 * 2.0**30
    assert run.similar_jobs > 20


def test_jobs_that_had_not_ended_are_not_used(model: ModelFile) -> None:
    early = advise(ROWS, model, "u3", None, moment_s=10 * DAY_S)
    assert early.targets[0].similar_jobs < advise(ROWS, model, "u3", None, moment_s=70 * DAY_S).targets[0].similar_jobs


def test_unknown_user_or_name_is_an_error_that_names_others(model: ModelFile) -> None:
    with pytest.raises(InputError, match="there is no job of eve"):
        advise(ROWS, model, "eve", None, moment_s=0)
    with pytest.raises(InputError, match="u3 has no job named x") as error:
        advise(ROWS, model, "u3", "x", moment_s=0)
    assert error.value.hint is not None
    assert "n1" in error.value.hint


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(61, "s", 120), (3601, "s", 3900), (7 * 3600, "s", 7 * 3600), (100_000, "s", 28 * 3600), (1, "bytes", 2.0**30)],
)
def test_suggestions_are_rounded_up(value: float, unit: str, expected: float) -> None:
    assert rounded_up(value, unit) == expected
