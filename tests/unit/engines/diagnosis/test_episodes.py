"""Episodes in which a condition holds most of the time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.engines.diagnosis.episodes import ENTER, LEAVE, WINDOW, lasting
from slurm_affinode.engines.diagnosis.series import EngineSeries
from slurm_affinode.model.serving import EngineKey

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
STEP_S = 15


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(0, 80))
def test_episode_begins_and_ends_with_the_condition(held: list[bool], gap_at: int) -> None:
    """As by its definition, sample by sample; a long gap separates episodes."""
    late = [3600 if place >= gap_at else 0 for place in range(len(held))]
    times = [BEGIN + timedelta(seconds=place * STEP_S + more) for place, more in enumerate(late)]
    samples = pl.DataFrame({"time": pl.Series(times).dt.cast_time_unit("ms"), "running": [1.0] * len(held)})
    series = EngineSeries(EngineKey("c", "n", "a", "vllm", "m"), samples)
    expected = []
    for first, end in series.segments:
        shares = [
            float(np.mean(held[max(first, at - WINDOW // 2) : min(end, at + WINDOW // 2)])) for at in range(first, end)
        ]
        episode: list[int] = []
        for at in range(first, end + 1):
            if at < end and shares[at - first] >= LEAVE:
                episode.append(at)
                continue
            inside = [item for item in episode if held[item]]
            if len(inside) >= 2 and max(shares[item - first] for item in episode) >= ENTER:
                expected.append((inside[0], inside[-1]))
            episode = []
    assert lasting(series, np.array(held)) == expected
