"""A synthetic engine: requests in a queue, a batch of limited size, and a pool of KV tokens.

It is a model for tests of the diagnosis, not an engine: all running requests get a token in each iteration of constant
length, prefill takes time for each token, and when the pool is full the request admitted last is preempted and starts
again with the tokens it had.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import polars as pl

from slurm_affinode.engines.schema import SAMPLES

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Engine:
    """Size and speed of a synthetic engine, and its requests."""

    pool: int
    """KV tokens."""
    prompt: int
    output: int
    """Mean lengths; they vary uniformly by half."""
    iteration_s: float = 0.05
    prefill_s: float = 0.0001
    """For each token."""
    batch: int = 256


def simulate(
    engine: Engine, rate: float, seconds: float, seed: int, *, step_s: float = 15.0, bursts: float = 1.0
) -> pl.DataFrame:
    """Return samples of the engine with Poisson arrivals. ``bursts``: mean number of requests that arrive at a time."""
    rng = np.random.default_rng(seed)
    count = max(1, int(rate / bursts * seconds * 1.2 + 20))
    moments = np.cumsum(rng.exponential(bursts / rate, count)) if rate > 0 else np.array([seconds + 1.0])
    if bursts > 1:
        moments = np.repeat(moments, rng.geometric(1 / bursts, len(moments)))
    arrivals = moments[moments < seconds].tolist()
    prompts = rng.integers(engine.prompt // 2, engine.prompt * 3 // 2 + 1, len(arrivals)).tolist()
    outputs = rng.integers(engine.output // 2, engine.output * 3 // 2 + 1, len(arrivals)).tolist()
    return _run(engine, arrivals, prompts, outputs, seconds, step_s)


def _run(  # noqa: PLR0917
    engine: Engine, arrivals: list[float], prompts: list[int], outputs: list[int], seconds: float, step_s: float
) -> pl.DataFrame:
    waiting: deque[int] = deque()
    running: list[int] = []  # in order of admission
    held, left, first = [0] * len(arrivals), list(outputs), [False] * len(arrivals)
    totals = dict.fromkeys(
        ("finished", "preemptions", "prompt_tokens", "generation_tokens", "ttft_s", "ttft_count", "token_latency_s",
         "token_latency_count", "prompt_length", "generation_length", "prefill_s", "decode_s"), 0.0,
    )  # fmt: skip
    rows: list[dict[str, float | int]] = []
    now, used, following, scrape = 0.0, 0, 0, 0.0
    while now < seconds or scrape < seconds:
        while following < len(arrivals) and arrivals[following] <= now:
            waiting.append(following)
            following += 1
        while waiting and len(running) < engine.batch:
            item = waiting[0]
            need = prompts[item] + outputs[item] - left[item]
            if used + need + len(running) + 1 > engine.pool:
                break
            waiting.popleft()
            running.append(item)
            held[item], used = need, used + need
            now += need * engine.prefill_s
            totals["prefill_s"] += need * engine.prefill_s
            if not first[item]:
                first[item] = True
                totals["ttft_s"] += now - arrivals[item]
                totals["ttft_count"] += 1
                totals["prompt_tokens"] += need
        steps = max(int((scrape - now) / engine.iteration_s) + 1, 1)
        if running:
            steps = min(steps, *(left[entry] for entry in running), (engine.pool - used) // len(running))
        if following < len(arrivals):
            steps = min(steps, max(int((arrivals[following] - now) / engine.iteration_s) + 1, 1))
        if running and steps == 0:
            item = running.pop()
            used -= held[item]
            waiting.appendleft(item)
            totals["preemptions"] += 1
            continue
        now += max(steps, 1) * engine.iteration_s
        if running:
            used += steps * len(running)
            totals["generation_tokens"] += steps * len(running)
            totals["token_latency_count"] += steps * len(running)
            totals["token_latency_s"] += steps * len(running) * engine.iteration_s
            totals["decode_s"] += steps * len(running) * engine.iteration_s
            for item in running:
                held[item] += steps
                left[item] -= steps
            done = [entry for entry in running if left[entry] <= 0]
            for item in done:
                running.remove(item)
                used -= held[item]
                totals["finished"] += 1
                totals["prompt_length"] += prompts[item]
                totals["generation_length"] += outputs[item]
        while scrape <= now and scrape < seconds:
            rows.append({
                "time": int(scrape * 1000), "running": len(running), "waiting": len(waiting),
                "kv_usage": used / engine.pool, **totals,
            })  # fmt: skip
            scrape += step_s
    return _frame(rows, engine)


def _frame(rows: list[dict[str, float | int]], engine: Engine) -> pl.DataFrame:
    frame = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        time=pl.lit(BEGIN) + pl.duration(milliseconds=pl.col("time")), cluster=pl.lit("synthetic"),
        node=pl.lit("gpu01"), address=pl.lit("gpu01:8000"), engine=pl.lit("vllm"), model=pl.lit("synthetic"),
        kv_tokens=pl.lit(float(engine.pool)), prompt_length_count=pl.col("finished"),
        generation_length_count=pl.col("finished"), start_time=pl.lit(BEGIN.timestamp() - 60), scrape_s=pl.lit(0.01),
    )  # fmt: skip
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SAMPLES.items()
    )


def service_rate(engine: Engine, seconds: float = 2000.0) -> float:
    """Return the requests per second that the engine serves under saturation."""
    guess = engine.pool / (engine.iteration_s * engine.output * (engine.prompt + engine.output / 2))
    samples = simulate(engine, 3 * guess, seconds, 0, step_s=seconds / 4)
    served = samples["finished"].to_list()
    return float((served[-1] - served[1]) / (seconds / 2))
