"""Features and baselines of submissions."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from slurm_affinode.prediction.features import NAMES, TARGETS, build
from slurm_affinode.prediction.submissions import conform

from .synthetic import submissions

RUN = TARGETS[0]


def jobs(*rows: tuple[int, int, int, float, float | None]) -> pl.DataFrame:
    """Return jobs of a user: submission, end, run time, request, units."""
    return conform(pl.DataFrame(
        [{"number": number, "submit_s": submit, "end_s": end, "user": "ann", "job": "j", "units": units,
          "run_s": run, "request_s": request} for number, (submit, end, run, request, units) in enumerate(rows)],
        infer_schema_length=None,
    ))  # fmt: skip


def test_last_two_waits_for_two_jobs_that_have_ended() -> None:
    table = build(jobs((0, 10, 10, 100, 1), (5, 30, 20, 100, 1), (20, 25, 5, 100, 1), (31, 40, 9, 8, 1)), RUN)
    assert table.baselines["last-two"][1].tolist() == [100, 100, 100, 8]  # at most the request
    assert table.baselines["limit"][1].tolist() == [100, 100, 100, 8]


def test_median_prefers_jobs_with_the_same_request() -> None:
    rows = [(at, at + 1, 10, 50, 1) for at in (0, 10)] + [(at, at + 1, 40, 60, 1) for at in (20, 30, 40)]
    table = build(jobs(*rows, (50, 60, 10, 50, 1), (70, 80, 10, 70, 1)), RUN)
    assert table.baselines["median"][1, 5] == 10
    assert table.baselines["median"][1, 6] == 25  # of all jobs with this name


def test_feature_of_a_submission_does_not_change_with_later_ends() -> None:
    """Jobs that had not ended are unknown: shifting ends of running jobs and values of later ones changes nothing."""
    rows = submissions(300)
    moment = rows["submit_s"][200]
    later = (pl.col("end_s") >= moment) | (pl.col("submit_s") >= moment)
    changed = rows.with_columns(
        pl.when(later).then(pl.col("run_s") * 3).otherwise("run_s").alias("run_s"),
        pl.when(later).then(pl.col("end_s") + 999).otherwise("end_s").alias("end_s"),
    )
    before, after = build(rows, RUN), build(changed, RUN)
    assert np.array_equal(before.matrix[:201], after.matrix[:201], equal_nan=True)
    for name, values in before.baselines.items():
        assert np.array_equal(values[:, :201], after.baselines[name][:, :201], equal_nan=True), name


def test_unknown_user_has_no_history() -> None:
    rows = submissions(50).with_columns(pl.lit(None, pl.String).alias("user"))
    table = build(rows, RUN)
    assert (table.matrix[:, NAMES.index("user_count")] == 0).all()
    assert table.baselines["median"][1].tolist() == rows["request_s"].to_list()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_log_without_requests_has_no_baseline_of_the_limit(target: object) -> None:
    rows = submissions(50).with_columns(pl.lit(None, pl.Float64).alias(n) for n in ("request_s", "request_mem_bytes"))
    assert "limit" not in build(rows, target).baselines  # type: ignore[arg-type]
