"""Figures of request traces, by hand and of the published trace."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from slurm_affinode.traces import azure_llm, requests_page
from slurm_affinode.traces.engine_model import EngineModel
from slurm_affinode.traces.requests import EDGES, analyse, binned

START = datetime(2026, 1, 1, tzinfo=UTC)


def requests(*rows: tuple[float, int, int], images: list[int] | None = None) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "time": [START + timedelta(seconds=row[0]) for row in rows],
            "context": [row[1] for row in rows],
            "generated": [row[2] for row in rows],
            "images": images or [None] * len(rows),
        },
        schema=azure_llm.REQUESTS,
    )


def test_figures_by_hand() -> None:
    s = analyse("t", requests((0, 10, 2), (30, 20, 4), (90, 30, 6)), EngineModel()).summary
    assert (s.requests, s.span_s, s.arrivals.busiest_minute) == (3, 90.0, 2)
    assert s.arrivals.per_s == pytest.approx(2 / 90)
    assert s.arrivals.gap_cv == pytest.approx(15 / 45)
    assert (s.context.sum, s.context.mean, s.context.percentiles["p50"]) == (60, 20.0, 20.0)
    assert s.context.variance == pytest.approx(200 / 3)
    assert (s.work.prefill_tokens, s.work.decode_tokens) == (60, 12)
    assert s.work.prefill_share == pytest.approx(60 / 72)
    assert s.work.kv_token_steps == (2 * 10 + 3) + (4 * 20 + 10) + (6 * 30 + 21)
    assert s.correlation == pytest.approx(1.0)
    assert s.images is None
    assert s.modeled.monolithic.completed == 3


def test_single_request_has_no_rate() -> None:
    s = analyse("t", requests((0, 10, 2)), EngineModel()).summary
    assert (s.arrivals.per_s, s.arrivals.gap_mean_s, s.correlation) == (None, None, None)
    json.dumps(s.as_dict(), allow_nan=False)


def test_images_are_counted() -> None:
    s = analyse("t", requests((0, 1, 1), (1, 1, 1), images=[0, 3]), EngineModel()).summary
    assert s.images is not None
    assert (s.with_images, s.images.sum) == (1, 3)


def test_load_names_the_engines_that_are_needed() -> None:
    """120 requests in a minute, each 1,000 prompt tokens at 1 ms: prefill alone takes two engines."""
    rows = [(index * 0.5, 1000, 1) for index in range(120)]
    engine = EngineModel(kv_tokens=10**9, per_prefill_token_s=0.001)
    load = analyse("t", requests(*rows), engine).summary.modeled.load
    assert load.prefill_peak == pytest.approx(2.0)
    assert (load.engines_needed, load.overloaded_share) == (3, 1.0)


def test_longer_trace_is_modeled_over_its_busiest_hour() -> None:
    rows = [(hour * 3600 + n * 60, 10, 5 if hour == 3 else 1) for hour in range(6) for n in range(60)]
    modeled = analyse("t", requests(*rows), EngineModel()).summary.modeled
    assert modeled.since == START + timedelta(hours=3)
    assert modeled.requests == 60


def test_dispersion_counts_minutes_without_requests() -> None:
    """Requests per minute: 1, [2, 0, 4], 1; the first and last minute are not whole."""
    rows = [(second, 1, 1) for second in (30, 60, 61, 180, 181, 182, 183, 240)]
    arrivals = analyse("t", requests(*rows), EngineModel()).summary.arrivals
    assert arrivals.dispersion == pytest.approx(np.var([2, 0, 4]) / 2)


def test_wrong_time_costs_no_memory_and_no_bars() -> None:
    """A request in 2999 makes a trace of 500 million minutes, nearly all of them empty."""
    rows = requests(*((float(second), 10, 5) for second in range(100)))
    late = rows[-1:].with_columns(time=pl.lit(datetime(2999, 1, 1, tzinfo=UTC)).cast(pl.Datetime("us", "UTC")))
    result = analyse("t", pl.concat([rows, late]), EngineModel())
    assert result.minutes.height == 3
    assert result.summary.modeled.requests == 100
    assert requests_page.html([result], ()).count("<rect") < 300


def test_modeled_figures_are_rounded_like_all_others() -> None:
    row = analyse("t", requests((0, 10, 7), (1 / 3, 10, 7)), EngineModel()).summary.as_dict()
    for name, value in row["modeled"]["monolithic"]["e2e_s"].items():
        assert value == round(value, 6), name
    assert json.dumps(row["context"]["percentiles"]["p50"]) == "10"


def test_week_is_drawn_in_steps_of_two_hours() -> None:
    """The weekly traces have a daily pattern, which steps of six hours would hide."""
    result = analyse("t", requests(*((hour * 3600.0, 10, 5) for hour in range(7 * 24))), EngineModel())
    assert "in a step of 2h" in requests_page.html([result], ())


def test_bins_count_every_request() -> None:
    draw = np.random.default_rng(1).integers(0, 40000, 500)
    result = binned(pl.Series(draw))
    assert sum(result) == 500
    assert result[0] == int((draw < EDGES[1]).sum())
    assert result[-1] == int((draw >= EDGES[-1]).sum())


def test_published_trace(shared_data: Path) -> None:
    """Independent figures, by numpy."""
    result = azure_llm.read(shared_data / "azure" / "AzureLLMInferenceTrace_code.csv")
    s = analyse(result.name, result.requests, EngineModel()).summary
    path = shared_data / "azure" / "AzureLLMInferenceTrace_code.csv"
    prompt, answer = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2), unpack=True, ndmin=2)
    assert s.requests == 8819
    assert s.context.sum == int(prompt.sum())
    assert s.generated.variance == pytest.approx(answer.var())
    assert s.context.percentiles["p99"] == np.quantile(prompt, 0.99, method="nearest")
    assert s.correlation == pytest.approx(float(np.corrcoef(prompt, answer)[0, 1]))
    assert s.work.kv_token_steps == pytest.approx((answer * prompt + answer * (answer + 1) / 2).sum())
    assert s.modeled.phase_split is not None
    assert s.modeled.phase_split.token_s["p99"] < s.modeled.monolithic.token_s["p99"]  # type: ignore[operator]
