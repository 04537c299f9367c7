"""Fewest inference engines that meet a latency target: prefill and decode together, or on separate engines.

Engines are those of ``engine_model``. Engines that do both receive the requests in turn. With separate phases the
fewest prefill engines are determined first, by the time to first token alone, and then the fewest decode engines.
Requests that need more than the KV cache of an engine reach none, and count as not served within the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from slurm_affinode.traces.engine_model import EngineModel, ModeledRequests, dealt, prefilled, split

_Result = TypeVar("_Result")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

QUANTILE = 0.99
"""Share of the requests that a target holds for, as in the benchmark MLPerf Inference."""
MOST_ENGINES = 1024
"""Sizes beyond are not tried."""
LLAMA2_70B = EngineModel(kv_tokens=1_300_000, base_s=0.0294, per_request_s=0.00032, per_prefill_token_s=0.000093)
"""Llama 2 70B in 16 bits on eight H100 with 80 GB each.

Times: lines through the medians of the measurements of Splitwise (ISCA 2024; repository Mutinifni/splitwise-sim,
data/perf_model.csv, llama2-70b, h100-80gb, tensor_parallel 8): 29.8 ms per token with a batch of 1, 50.2 ms with 64;
a prompt of 2,048 tokens takes 137 ms, one of 8,192 tokens 827 ms, one of 512 tokens 53 ms. The line of the prompts is
within 10 % from 4,096 tokens on, and above shorter ones. KV cache: 90 % of 640 GB less 138 GB of weights, 327,680 bytes
per token (80 layers, 8 heads of keys and values with 128 elements of 16 bits).
"""
TRANSFER_TOKEN_S = 327_680 / 50e9
"""Time to move the KV cache of a token over one link of 400 Gbit/s, as a DGX H100 has."""
GPUS = 8
"""Of an engine like ``LLAMA2_70B``."""


@dataclass(frozen=True, slots=True)
class RequestArrays:
    """Requests in the order of arrival; one element each."""

    arrival_s: Floats
    context: Ints
    """Tokens of the prompt."""
    generated: Ints


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Times that ``QUANTILE`` of the requests stay within, s."""

    first_token_s: float
    between_tokens_s: float
    """Mean time between the tokens of a request."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Numbers of engines and what the requests experience; times in seconds."""

    engines: int
    prefill_engines: int | None
    """Of ``engines``, those that only prefill; ``None``: each does both."""
    first_token_mean_s: float
    first_token_p99_s: float
    between_tokens_mean_s: float | None
    """``None``: no request has a second token."""
    between_tokens_p99_s: float | None
    queued_mean_s: float
    """Mean time to first token beyond that of the request alone on an engine."""
    waiting_max: int
    """Most requests that wait at an engine, or for an engine that prefills."""
    busy: float
    """Share of the time in which engines compute, 0-1, from the first arrival to the last token."""
    prefill_busy: float | None
    decode_busy: float | None
    preemptions: int
    never_fits: int
    """Requests that need more than the whole KV cache of an engine. Times are those of the others; the 99th
    percentiles are of all, with these as the slowest."""


def fewest_mixed(
    requests: RequestArrays, engine: EngineModel, targets: Sequence[LatencyTarget]
) -> list[Deployment | None]:
    """Return for each target the fewest engines that do both; ``None`` if ``MOST_ENGINES`` do not meet it.

    At least one request fits into the KV cache of an engine.
    """
    served, quantile = _served(requests, engine)
    never_fits = len(requests.arrival_s) - len(served.arrival_s)

    @cache
    def deploy(engines: int) -> Deployment:
        modeled = dealt(served.arrival_s, served.context, served.generated, engine, engines)
        return _deployment(
            served, engine, modeled, engines=engines, prefill=None, quantile=quantile, never_fits=never_fits
        )

    return [
        _fewest(deploy, partial(_meets, target=target))
        if _reachable(served, quantile, engine, target) else None
        for target in targets
    ]  # fmt: skip


def fewest_split(
    requests: RequestArrays, engine: EngineModel, targets: Sequence[LatencyTarget], transfer_token_s: float
) -> list[Deployment | None]:
    """Return for each target the fewest engines with separate phases; ``None`` if ``MOST_ENGINES`` do not meet it.

    At least one request fits into the KV cache of an engine. Prompts are not divided into chunks.
    """
    engine = replace(engine, chunk_tokens=None)
    served, quantile = _served(requests, engine)
    never_fits = len(requests.arrival_s) - len(served.arrival_s)

    @cache
    def first_token_s(engines: int) -> tuple[int, float]:
        ttft_s = prefilled(served.arrival_s, served.context, engine, engines).ttft_s
        return engines, float(np.quantile(ttft_s, quantile))

    @cache
    def deploy(prefill: int, decode: int) -> Deployment:
        modeled = split(
            served.arrival_s, served.context, served.generated, engine, prefill_engines=prefill,
            decode_engines=decode, per_transfer_token_s=transfer_token_s,
        )  # fmt: skip
        return _deployment(
            served, engine, modeled, engines=prefill + decode, prefill=prefill, quantile=quantile,
            never_fits=never_fits,
        )  # fmt: skip

    deployments = []
    for target in targets:
        result = None
        if _reachable(served, quantile, engine, target):
            first = _fewest(first_token_s, partial(_in_time, target=target))
            if first is not None:
                result = _fewest(partial(deploy, first[0]), partial(_meets, target=target))
        deployments.append(result)
    return deployments


def _fewest(deploy: Callable[[int], _Result], meets: Callable[[_Result], bool]) -> _Result | None:
    """Return the result of the smallest number that meets the target, by doubling and bisection.

    A smaller number may meet it too, as latencies of requests in turn do not fall with each engine.
    """
    low, high = 0, 1
    while not meets(fewest := deploy(high)):
        if high == MOST_ENGINES:
            return None
        low, high = high, min(MOST_ENGINES, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        result = deploy(middle)
        if meets(result):
            high, fewest = middle, result
        else:
            low = middle
    return fewest


def _alone_s(requests: RequestArrays, engine: EngineModel) -> Floats:
    """Return the time to first token of each request alone on an engine, without ``per_request_s``."""
    alone: Floats = engine.base_s * _chunks(requests, engine) + engine.per_prefill_token_s * np.maximum(
        requests.context, 1
    )
    return alone


def _chunks(requests: RequestArrays, engine: EngineModel) -> Ints:
    """Return the iterations that prefill each request alone on an engine."""
    prompts = np.maximum(requests.context, 1)
    return np.ones_like(prompts) if engine.chunk_tokens is None else -(-prompts // engine.chunk_tokens)


def _served(requests: RequestArrays, engine: EngineModel) -> tuple[RequestArrays, float]:
    """Return the requests that fit into the KV cache of an engine, and the share of these that is ``QUANTILE`` of all.

    The share is 1 if it would be more.
    """
    fits = engine.fits(np.maximum(requests.context, 1) + np.maximum(requests.generated, 1))
    served = RequestArrays(requests.arrival_s[fits], requests.context[fits], requests.generated[fits])
    return served, min(1.0, QUANTILE * len(fits) / np.count_nonzero(fits))


def _reachable(requests: RequestArrays, quantile: float, engine: EngineModel, target: LatencyTarget) -> bool:
    """Return whether requests that are alone on their engine meet the target."""
    first_s = float(np.quantile(_alone_s(requests, engine), quantile))
    token_s = engine.base_s + engine.per_request_s if (requests.generated > 1).any() else 0.0
    return first_s <= target.first_token_s and token_s <= target.between_tokens_s


def _in_time(result: tuple[int, float], target: LatencyTarget) -> bool:
    return result[1] <= target.first_token_s


def _meets(deployment: Deployment, target: LatencyTarget) -> bool:
    in_time = deployment.between_tokens_p99_s is None or deployment.between_tokens_p99_s <= target.between_tokens_s
    return in_time and deployment.first_token_p99_s <= target.first_token_s


def _deployment(
    served: RequestArrays, engine: EngineModel, modeled: ModeledRequests, *, engines: int, prefill: int | None,
    quantile: float, never_fits: int,
) -> Deployment:  # fmt: skip
    token_s = modeled.token_s[np.isfinite(modeled.token_s)]
    ttft_s = modeled.ttft_s
    last_s = float((served.arrival_s + modeled.e2e_s).max())
    span_s = last_s - float(served.arrival_s[0])
    alone_s = _alone_s(served, engine)
    prefill_s = float(alone_s.sum())
    if prefill is None:
        alone_s += engine.per_request_s * _chunks(served, engine)
    busy_s = modeled.busy_s + (0.0 if prefill is None else prefill_s)
    return Deployment(
        engines=engines,
        prefill_engines=prefill,
        first_token_mean_s=float(ttft_s.mean()),
        first_token_p99_s=float(np.quantile(ttft_s, quantile)),
        between_tokens_mean_s=float(token_s.mean()) if len(token_s) else None,
        between_tokens_p99_s=float(np.quantile(token_s, quantile)) if len(token_s) else None,
        queued_mean_s=max(0.0, float((ttft_s - alone_s).mean())),
        waiting_max=modeled.waiting_max,
        busy=busy_s / (span_s * engines),
        prefill_busy=None if prefill is None else prefill_s / (span_s * prefill),
        decode_busy=None if prefill is None else modeled.busy_s / (span_s * (engines - prefill)),
        preemptions=int(modeled.preemptions.sum()),
        never_fits=never_fits,
    )
