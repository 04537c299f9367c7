"""The queueing model of an engine: small cases by hand, and a recorded engine under overload."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_affinode.traces.engine_model import EngineModel, ModeledRequests, dealt, simulate, split

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
    fitting = np.array([row[1] < 1000 for row in both])
    alone, together = (
        simulate(*(np.array(column) for column in zip(*some, strict=True)), engine)  # type: ignore[arg-type]
        for some in (rows, both)
    )
    assert together.ttft_s[fitting] == pytest.approx(alone.ttft_s, nan_ok=True)
    assert together.e2e_s[fitting] == pytest.approx(alone.e2e_s, nan_ok=True)
    assert together.preemptions[fitting].tolist() == alone.preemptions.tolist()
    assert (together.iterations, together.busy_s, together.kv_mean, together.waiting_max) == pytest.approx(
        (alone.iterations, alone.busy_s, alone.kv_mean, alone.waiting_max)
    )


TOY = EngineModel(
    kv_tokens=160, max_running=4, base_s=0.5, per_request_s=0.25, per_prefill_token_s=0.125, block_size=16
)
"""Times are multiples of powers of two, so that sums of them are exact."""
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12)


@dataclass
class Request:
    """A request in the computation of the tests."""

    arrival: float
    prompt: int
    output: int
    left: int = 0
    """Tokens that it has to prefill."""
    done: int = 0
    first: float = np.nan
    last: float = np.nan
    preemptions: int = 0


def step_by_step(requests: list[Request], engine: EngineModel, chunk: int) -> int:
    """Serve ``requests``, in the order of arrival, with one token at a time of each; return the tokens prefilled."""

    def blocks(tokens: int) -> int:
        return -(-tokens // engine.block_size)

    def held() -> int:
        return sum(blocks(request.prompt + request.done + 1) for request in running)

    room, total = engine.kv_tokens // engine.block_size, 0
    arrivals = [request for request in requests if blocks(request.prompt + request.output) <= room]
    waiting: list[Request] = []
    running: list[Request] = []
    now = 0.0
    while arrivals or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= now:
            waiting.append(arrivals.pop(0))
        full = False
        while held() > room:
            victim = running.pop()
            victim.preemptions += 1
            waiting.insert(0, victim)
            full = True
        tokens = chunk - sum(not request.left for request in running)
        prefilled = 0
        for request in running:
            while request.left and prefilled < tokens:
                request.left -= 1
                prefilled += 1
        while waiting and not full and len(running) < engine.max_running and prefilled < tokens:
            request = waiting[0]
            if held() + blocks(request.prompt + request.done + 1) > room:
                break
            running.append(waiting.pop(0))
            request.left = request.prompt + request.done
            while request.left and prefilled < tokens:
                request.left -= 1
                prefilled += 1
        total += prefilled
        now += engine.base_s + engine.per_request_s * len(running) + engine.per_prefill_token_s * prefilled
        for request in running.copy():
            if not request.left:
                request.done += 1
                request.first = now if request.done == 1 else request.first
                if request.done == request.output:
                    request.last = now
                    running.remove(request)
    return total


def columns(rows: list[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    arrival, prompt, output = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    return list(arrival), list(prompt), list(output)


@settings(max_examples=200)
@given(rows=ROWS, chunk=st.integers(1, 80))
def test_prompts_in_chunks_are_those_of_a_computation_token_by_token(
    rows: list[tuple[int, int, int]], chunk: int
) -> None:
    arrival, prompt, output = columns(rows)
    modeled = simulate(arrival, prompt, output, replace(TOY, chunk_tokens=chunk))
    requests = [Request(*row) for row in zip(arrival, prompt, output, strict=True)]
    step_by_step(requests, TOY, chunk)
    assert modeled.ttft_s.tolist() == pytest.approx([each.first - each.arrival for each in requests], nan_ok=True)
    assert modeled.e2e_s.tolist() == pytest.approx([each.last - each.arrival for each in requests], nan_ok=True)
    assert modeled.preemptions.tolist() == [each.preemptions for each in requests]


@given(rows=ROWS)
def test_chunks_larger_than_all_prompts_change_nothing(rows: list[tuple[int, int, int]]) -> None:
    undivided = simulate(*columns(rows), replace(TOY, max_batched_tokens=10**6))
    chunked = simulate(*columns(rows), replace(TOY, chunk_tokens=10**6))
    assert str(chunked) == str(undivided)


@given(rows=ROWS, chunk=st.integers(4, 80))
def test_chunks_prefill_each_token_of_a_prompt_once(rows: list[tuple[int, int, int]], chunk: int) -> None:
    """In a cache with room for all; the time of the iterations without their tokens is subtracted."""
    arrival, prompt, output = columns(rows)
    engine = replace(TOY, kv_tokens=10**6, per_request_s=0.0, chunk_tokens=chunk)
    modeled = simulate(arrival, prompt, output, engine)
    assert not modeled.preemptions.any()
    assert modeled.busy_s - modeled.iterations * engine.base_s == engine.per_prefill_token_s * sum(prompt)


def test_smaller_chunks_shorten_the_time_between_tokens_and_delay_the_first_token() -> None:
    """A request that decodes has its last three tokens while a long prompt is prefilled."""
    engine = EngineModel(kv_tokens=10**6, base_s=0.01, per_request_s=0.0, per_prefill_token_s=0.001)

    def serve(chunk: int | None) -> ModeledRequests:
        return simulate([0.0, 0.05], [1, 512], [8, 2], replace(engine, chunk_tokens=chunk))

    modeled = [serve(chunk) for chunk in (None, 257, 129, 65)]
    between = [float(each.token_s[0]) for each in modeled]
    first = [float(each.ttft_s[1]) for each in modeled]
    assert between == sorted(between, reverse=True)
    assert between[-1] < between[0] / 2
    assert first == sorted(first)
    assert first[-1] == pytest.approx(first[0] + 7 * engine.base_s)
    assert [float(each.token_s[1]) for each in modeled] == pytest.approx([engine.base_s] * 4)
