"""Calibrated intervals."""

from __future__ import annotations

import numpy as np

from slurm_affinode.prediction.features import TARGETS, build
from slurm_affinode.prediction.intervals import LEAST_JOBS, calibrated, last_factors

from .synthetic import submissions


def test_share_inside_the_interval_is_the_intended_one() -> None:
    """Also for a predictor without an interval of its own, and one whose interval is far too narrow."""
    table = build(submissions(6000, noise=0.8), TARGETS[0])
    for name in ("last-two", "median"):
        low, high = calibrated(table, table.baselines[name], 0)
        inside = (table.actual >= low) & (table.actual <= high)
        assert 0.87 < inside[3000:].mean() < 0.93


def test_interval_follows_a_change_of_the_jobs() -> None:
    rows = submissions(9000, noise=0.2)
    changed = rows.with_columns((rows["run_s"] * np.where(np.arange(9000) < 4500, 1, np.random.default_rng(1).choice(
        [0.2, 1.0, 5.0], 9000))).round().alias("run_s"))  # fmt: skip
    table = build(changed, TARGETS[0])
    low, high = calibrated(table, table.baselines["median"], 0)
    inside = (table.actual >= low) & (table.actual <= high)
    assert 0.85 < inside[7000:].mean() < 0.95


def test_no_interval_before_enough_jobs_have_ended() -> None:
    table = build(submissions(LEAST_JOBS - 1), TARGETS[0])
    assert np.isnan(calibrated(table, table.baselines["median"], 0)).all()
    assert last_factors(table, table.baselines["median"], 0) is None
