"""The queueing model of an engine: small cases by hand, and a recorded engine under overload."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.traces.engine_model import EngineModel, dealt, simulate, split

PLAIN = EngineModel(
    kv_tokens=100, max_running=4, base_s=1.0, per_request_s=0.0, per_prefill_token_s=0.0, block_size=1,
    max_batched_tokens=1000,
)  # fmt: skip


def test_one_request_takes_an_iteration_per_token() -> None:
    simulation = simulate([5.0], [10], [3], PLAIN)
    assert (simulation.ttft_s[0], simulation.e2e_s[0], simulation.token_s[0]) == (1.0, 3.0, 1.0)
    assert (simulation.iterations, simulation.busy_s, simulation.preemptions.sum()) == (3, 3.0, 0)


def test_batch_is_limited_and_the_rest_waits() -> None:
    simulation = simulate([0.0] * 5, [1] * 5, [2] * 5, PLAIN)
    assert simulation.e2e_s.tolist() == [2.0, 2.0, 2.0, 2.0, 4.0]
    assert simulation.waiting_max == 1


def test_full_cache_preempts_the_request_admitted_last() -> None:
    engine = EngineModel(kv_tokens=12, max_running=4, base_s=1.0, per_request_s=0.0, block_size=1)
    simulation = simulate([0.0, 0.0], [4, 4], [6, 6], engine)
    assert simulation.preemptions.tolist() == [0, 1]
    assert simulation.e2e_s[0] == pytest.approx(6.0, rel=0.01)
    assert np.isfinite(simulation.e2e_s).all()
    assert simulation.kv_full_s > 0


def test_request_larger_than_the_cache_is_excluded() -> None:
    simulation = simulate([0.0, 0.0], [200, 5], [1, 1], PLAIN)
    assert simulation.never_fits == 1
    assert np.isnan(simulation.e2e_s[0])
    assert simulation.e2e_s[1] == 1.0


def test_prefill_delays_decoding_unless_it_is_split() -> None:
    engine = EngineModel(kv_tokens=10**6, base_s=0.01, per_request_s=0.0, per_prefill_token_s=0.001)
    arrival = np.array([0.0, 0.05, 0.1, 0.15])
    prompt, answer = np.array([1, 500, 500, 500]), np.array([40, 2, 2, 2])
    together = simulate(arrival, prompt, answer, engine)
    apart = split(arrival, prompt, answer, engine, prefill_engines=1, decode_engines=1)
    assert together.token_s[0] > 3 * apart.token_s[0]
    assert apart.token_s[0] == pytest.approx(0.01)
    assert apart.waiting_max == 2


def test_answer_of_one_token_ends_with_prefill() -> None:
    engine = EngineModel(base_s=0.01, per_request_s=0.0, per_prefill_token_s=0.001)
    parts = split(np.array([0.0]), np.array([90]), np.array([1]), engine, prefill_engines=1, decode_engines=1)
    assert parts.e2e_s[0] == parts.ttft_s[0] == pytest.approx(0.1)
    assert np.isnan(parts.token_s[0])


def test_several_engines_share_the_requests() -> None:
    item = dealt(np.zeros(8), np.ones(8, int), np.full(8, 5), PLAIN, 1)
    two = dealt(np.zeros(8), np.ones(8, int), np.full(8, 5), PLAIN, 2)
    assert item.e2e_s.max() == 10.0
    assert two.e2e_s.max() == 5.0
    assert len(dealt(np.zeros(0), np.zeros(0, int), np.zeros(0, int), PLAIN, 2).e2e_s) == 0


def test_model_predicts_a_recorded_overload(shared_data: Path) -> None:
    """Fitted to the four phases below saturation of a real vLLM, the model predicts preemptions, queue and latency of
    the phase above it. The token times are the fit; nothing of the overloaded phase enters it."""
    lines = gzip.decompress(
        (shared_data / "serving/vllm-0.32-cpu-episode-short-prompts.requests.jsonl.gz").read_bytes()
    )
    rows = [json.loads(line) for line in lines.splitlines()]
    sent = sorted((row for row in rows if row.get("status") == 200), key=lambda row: row["start_ms"])
    arrival = np.array([row["start_ms"] for row in sent]) / 1e3
    prompt, answer = np.array([row["prompt"] for row in sent]), np.array([row["tokens"] for row in sent])
    took, phase = np.array([row["e2e_s"] for row in sent]), np.array([row["phase"] for row in sent])

    def error(base_s: float, per_request_s: float) -> float:
        below = phase < 4
        simulation = simulate(arrival[below], prompt[below], answer[below], engine(base_s, per_request_s))
        medians = [np.median(simulation.e2e_s[phase[below] == n]) / np.median(took[phase == n]) for n in range(4)]
        return float(np.abs(np.log(medians)).sum())

    def engine(base_s: float, per_request_s: float) -> EngineModel:
        return EngineModel(
            kv_tokens=1280, max_running=16, base_s=base_s, per_request_s=per_request_s, per_prefill_token_s=5e-6,
            block_size=32, max_batched_tokens=2048,
        )  # fmt: skip

    grid = [(base, per) for base in (0.0017, 0.0019, 0.0021) for per in (0.0001, 0.00015, 0.0002)]
    fitted = engine(*min(grid, key=lambda item: error(*item)))
    result = simulate(arrival - arrival[0], prompt, answer, fitted)
    assert result.preemptions.sum() == pytest.approx(1881, rel=0.15)
    assert result.waiting_max == pytest.approx(312, rel=0.25)
    assert np.median(result.e2e_s[phase == 4]) == pytest.approx(np.median(took[phase == 4]), rel=0.3)


def test_model_predicts_a_recorded_queue_of_another_engine(shared_data: Path) -> None:
    """Fitted to the first two phases of a real llama.cpp with four slots, the model predicts queue and latency of its
    overload."""
    lines = gzip.decompress((shared_data / "serving/llamacpp-episode.requests.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in lines.splitlines()]
    sent = sorted((row for row in rows if row.get("status") == 200), key=lambda row: row["start_ms"])
    arrival = np.array([row["start_ms"] for row in sent]) / 1e3
    prompt, answer = np.array([row["prompt"] for row in sent]), np.array([row["tokens"] for row in sent])
    took, phase = np.array([row["e2e_s"] for row in sent]), np.array([row["phase"] for row in sent])

    def engine(base_s: float, per_request_s: float) -> EngineModel:
        return EngineModel(
            kv_tokens=2048, max_running=4, base_s=base_s, per_request_s=per_request_s, per_prefill_token_s=5e-6,
            block_size=1, max_batched_tokens=2048,
        )  # fmt: skip

    def error(base_s: float, per_request_s: float) -> float:
        below = phase < 2
        simulation = simulate(arrival[below], prompt[below], answer[below], engine(base_s, per_request_s))
        medians = [np.median(simulation.e2e_s[phase[below] == n]) / np.median(took[phase == n]) for n in range(2)]
        return float(np.abs(np.log(medians)).sum())

    grid = [(base, per) for base in (0.0001, 0.0002, 0.0003) for per in (0.0001, 0.0002, 0.00025, 0.0003)]
    result = simulate(arrival - arrival[0], prompt, answer, engine(*min(grid, key=lambda item: error(*item))))
    assert result.waiting_max == pytest.approx(459, rel=0.15)
    assert np.median(result.e2e_s[phase == 3]) == pytest.approx(np.median(took[phase == 3]), rel=0.15)


@settings(max_examples=50)
@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12))
def test_requests_that_never_fit_change_nothing_for_others(rows: list[tuple[int, int, int]]) -> None:
    """One arrives in each iteration, so that iterations which are otherwise simulated together are interrupted."""
    engine = EngineModel(
        kv_tokens=160, max_running=4, base_s=0.5, per_request_s=0.25, per_prefill_token_s=0.125, block_size=16
    )
    rows = sorted(rows)
    # One in each iteration: the shortest one takes 0.75 s.
    both = sorted([*rows, *((at / 2, 1000, 1) for at in range(2000))], key=lambda row: row[0])
    ours = np.array([row[1] < 1000 for row in both])
    alone, together = (
        simulate(*(np.array(column) for column in zip(*some, strict=True)), engine)  # type: ignore[arg-type]
        for some in (rows, both)
    )
    assert together.ttft_s[ours] == pytest.approx(alone.ttft_s, nan_ok=True)
    assert together.e2e_s[ours] == pytest.approx(alone.e2e_s, nan_ok=True)
    assert together.preemptions[ours].tolist() == alone.preemptions.tolist()
    assert (together.iterations, together.busy_s, together.kv_mean, together.waiting_max) == pytest.approx(
        (alone.iterations, alone.busy_s, alone.kv_mean, alone.waiting_max)
    )
