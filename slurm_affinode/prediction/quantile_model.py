"""Gradient-boosted quantile models of LightGBM, as text: one model per quantile, of the square root of the target.

Quantiles do not depend on a monotone scale, the errors of a model do: with the logarithm the longest jobs count little,
with the plain value the others do.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.prediction.features import LEVELS, NAMES, FeatureTable, within
from slurm_affinode.prediction.history import Floats, Ints

MOST_ROWS = 300_000
"""Most jobs of which a model is trained: the last ones. More take time and change little."""
LEAST_ROWS = 500
"""With fewer jobs no model is trained."""
_TREES = 200
_SETTINGS = {
    "objective": "quantile", "learning_rate": 0.05, "num_leaves": 15, "min_data_in_leaf": 40, "feature_fraction": 0.8,
    "bagging_fraction": 0.8, "bagging_freq": 1, "seed": 0, "deterministic": True, "force_row_wise": True, "verbose": -1,
    "num_threads": 1,  # threads of OpenMP that wait for each other take many times as long on a busy machine
}  # fmt: skip
INSTALL = "pip install 'slurm-affinode[predict]'"


class PredictExtraMissingError(AffinodeError):
    """The extra ``predict`` is not installed."""


def available() -> bool:
    """Return whether LightGBM is installed."""
    return find_spec("lightgbm") is not None


def train(table: FeatureTable, rows: Ints) -> tuple[str, ...]:
    """Return a model for each of ``LEVELS``, trained with the last of ``rows``, whose actual values are known."""
    library = _library()
    rows = rows[-MOST_ROWS:]
    data = library.Dataset(
        table.matrix[rows], np.sqrt(table.actual[rows]), feature_name=list(NAMES), free_raw_data=False
    )
    return tuple(
        library.train({**_SETTINGS, "alpha": level}, data, _TREES).model_to_string(num_iteration=-1) for level in LEVELS
    )


def predict(models: tuple[str, ...], table: FeatureTable, *, first: int = 0) -> Floats:
    """Return the predictions, one row for each of ``LEVELS``, ascending and at most the request; NaN before ``first``.

    Raises ``PredictExtraMissingError``, and ``InputError`` if a model cannot be read.
    """
    library = _library()
    quantiles = np.full((len(LEVELS), len(table)), np.nan)
    for number, text in enumerate(models):
        try:
            model = library.Booster(model_str=text)
        except library.basic.LightGBMError as error:
            raise InputError(f"LightGBM cannot read the model: {one_line(error, 120)}") from error
        if first < len(table):
            quantiles[number, first:] = model.predict(table.matrix[first:], num_threads=1)
    quantiles.sort(axis=0)  # quantiles of separate models may cross
    return within(np.maximum(quantiles, 0.0) ** 2, table.limit)


def _library() -> Any:
    try:
        import lightgbm  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise PredictExtraMissingError("there is no module lightgbm", hint=INSTALL) from None
    except OSError as error:  # its library needs libgomp
        raise PredictExtraMissingError(f"LightGBM cannot be loaded: {error}", hint="install libgomp1") from error
    return lightgbm
