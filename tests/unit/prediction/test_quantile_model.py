"""Quantile models of LightGBM."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.prediction import quantile_model
from slurm_affinode.prediction.features import TARGETS, build
from slurm_affinode.prediction.quantile_model import PredictExtraMissingError

from .synthetic import submissions


def test_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *args: Any) -> Any:
        if name == "lightgbm":
            raise ModuleNotFoundError(name=name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(PredictExtraMissingError, match="there is no module lightgbm") as error:
        quantile_model.predict((), build(submissions(10), TARGETS[0]))
    assert error.value.hint == "pip install 'slurm-affinode[predict]'"


def test_model_is_the_same_again_and_its_quantiles_ascend() -> None:
    pytest.importorskip("lightgbm", reason="the extra predict is not installed")
    table = build(submissions(), TARGETS[0])
    models = quantile_model.train(table, np.arange(1500))
    assert models == quantile_model.train(table, np.arange(1500))
    prediction = quantile_model.predict(models, table)
    assert (np.diff(prediction, axis=0) >= 0).all()
    assert (prediction <= table.limit).all()
    assert 0.8 < ((table.actual >= prediction[0]) & (table.actual <= prediction[2]))[1500:].mean() < 0.97


def test_text_that_is_no_model_is_an_error() -> None:
    pytest.importorskip("lightgbm", reason="the extra predict is not installed")
    with pytest.raises(InputError, match="LightGBM cannot read the model"):
        quantile_model.predict(("nothing", "", ""), build(submissions(10), TARGETS[0]))
