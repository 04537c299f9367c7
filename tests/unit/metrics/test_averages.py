"""Averages of runs become samples from which the analysis gets the same averages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.metrics.averages import AVERAGES, STEPS_S, allocation_gpus, samples
from slurm_affinode.metrics.schema import SAMPLES

T0 = datetime(2026, 3, 1, tzinfo=UTC)


def run(job: int, start_s: int, end_s: int, util: float | None = 50.0, **more: Any) -> dict[str, Any]:
    identity = {"cluster": "c", "node": "n1", "index": 0}
    at = {"start": T0 + timedelta(seconds=start_s), "end": T0 + timedelta(seconds=end_s)}
    return {"job_id": job, **at, "util_pct": util, **identity, **more}


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=AVERAGES, orient="row", infer_schema_length=None)


def laid_out(*rows: dict[str, Any]) -> list[tuple[float, float | None]]:
    result = samples(frame(*rows))
    seconds = (result["time"] - T0).dt.total_milliseconds() / 1000
    return list(zip(seconds.to_list(), result["util_pct"].to_list(), strict=True))


def test_run_is_sampled_until_its_end() -> None:
    """Equal samples one interval apart; the first at or after the end has no value: the time after it is unknown."""
    assert laid_out(run(1, 0, 1500)) == [(0, 50.0), (600, 50.0), (1200, 50.0), (1800, None)]
    assert laid_out(run(1, 0, 1200)) == [(0, 50.0), (600, 50.0), (1200, None)]
    assert samples(frame(run(1, 0, 1))).schema == pl.Schema(SAMPLES)


def test_sampling_interval_fits_between_close_runs() -> None:
    """The interval is the same for all runs of the GPU, so that the inferred interval is correct."""
    result = laid_out(run(1, 0, 30, 10.0), run(2, 40, 200, 20.0))
    assert result == [
        (0, 10.0), (30, None), (40, 20.0), (70, 20.0), (100, 20.0), (130, 20.0), (160, 20.0), (190, 20.0), (220, None),
    ]  # fmt: skip


def test_run_of_zero_length_gives_no_samples() -> None:
    """The run ended in the second in which it started."""
    assert laid_out(run(1, 5, 5)) == []
    assert samples(frame()).height == 0


def test_later_of_overlapping_runs_takes_precedence() -> None:
    """On a shared GPU the average of the run that started later applies for its duration."""
    result = dict(laid_out(run(1, 0, 3000, 10.0), run(2, 900, 1900, 80.0)))
    assert result[0] == 10.0
    assert result[900] == 80.0
    assert result[2400] == 10.0
    assert all(result[t] != 10.0 for t in result if 900 <= t < 1900)


def test_missing_average_is_unknown_and_zero_is_idle() -> None:
    """A GPU without an average has samples without activity, so its time is unknown."""
    assert laid_out(run(1, 0, 60, None)) == [(0, None), (600, None)]
    assert laid_out(run(1, 0, 60, 0.0))[0] == (0, 0.0)


def test_allocation_gpus_prefer_uuid_then_pci_then_index() -> None:
    """Each GPU occurs once per run."""
    result = allocation_gpus(
        frame(run(1, 0, 9), run(1, 0, 9), run(2, 10, 20, pci="00000000:E1:00.0"), run(3, 20, 30, uuid="GPU-1", pci="x"))
    )
    assert result["gpu"].to_list() == ["0", "00000000:E1:00.0", "GPU-1"]


lengths = st.lists(st.tuples(st.integers(0, 2000), st.integers(10, 5000)), min_size=1, max_size=8)


@given(lengths)
def test_samples_cover_every_run_completely(gaps: list[tuple[int, int]]) -> None:
    """Read by the rule for samples (until the next one, at most three median intervals), each consecutive run has its
    full length at its own average.
    """
    rows, at = [], 0
    for i, (gap, length) in enumerate(gaps):
        rows.append(run(i, at + gap, at + gap + length, float(i + 1)))
        at += gap + length
    points = laid_out(*rows)
    distances = sorted(b[0] - a[0] for a, b in pairwise(points))
    step = distances[len(distances) // 2] if distances else STEPS_S[0]
    for row in rows:
        start, end = ((row[key] - T0).total_seconds() for key in ("start", "end"))
        covered = 0.0
        for i, (time, util) in enumerate(points):
            if start <= time < end:
                following = points[i + 1][0] if i + 1 < len(points) else None
                reach = step if following is None or following - time > 3 * step else following - time
                assert util == row["util_pct"]
                covered += min(time + reach, end) - time
        assert covered == end - start
