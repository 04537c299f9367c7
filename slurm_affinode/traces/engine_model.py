"""A model of an inference engine with continuous batching, iteration by iteration: a queueing model, not a measurement.

An iteration decodes one token for every running request and prefills the requests that it admits. It lasts

    base_s + per_request_s x running + per_prefill_token_s x prefilled tokens.

Requests are admitted in the order of arrival while blocks of the KV cache, places in the batch and the prefill budget
of the iteration last. Each generated token takes one more place in the cache; when none is left, the request admitted
last is preempted: its tokens are dropped, and it is prefilled again with all of them. This is how vLLM's scheduler
works (recomputation, first come first served). A prompt is prefilled in a single iteration, alone or with others within
the budget, which delays the tokens of decoding requests; with ``chunk_tokens`` in several, as by vLLM: the tokens of
an iteration, one for each decoding request and the rest for prompts, are limited. One request at a time is prefilled
in part, the one admitted last, and the others wait. The cache holds its whole prompt from its admission on; vLLM
allocates blocks with each chunk. Prefix caching is not modeled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The parameters of an engine. Defaults are assumptions; take them from measurements of the engine in question."""

    kv_tokens: int = 400_000
    """Capacity of the KV cache in tokens."""
    max_running: int = 256
    """Most requests in a batch."""
    base_s: float = 0.015
    """Time of an iteration with an empty batch, in seconds."""
    per_request_s: float = 0.0002
    """Time that a running request adds to an iteration."""
    per_prefill_token_s: float = 0.0001
    """Time that a prefilled token adds to an iteration."""
    block_size: int = 16
    """Tokens in a block of the KV cache."""
    max_batched_tokens: int = 8192
    """Most tokens that an iteration prefills; a longer prompt takes an iteration of its own."""
    chunk_tokens: int | None = None
    """Most tokens of an iteration, at least 1, decoded and prefilled ones, in place of ``max_batched_tokens``: vLLM's
    ``max_num_batched_tokens`` with chunked prefill. Decoding requests get their token in any case. ``None``: prompts
    are not divided."""

    def fits(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the KV cache has room for requests with these numbers of tokens, prompt and output."""
        return -(-tokens // self.block_size) <= self.kv_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class ModeledRequests:
    """Latencies of the requests in the model; one element per request, NaN for events that did not happen."""

    ttft_s: NDArray[np.float64]
    """Time to first token."""
    e2e_s: NDArray[np.float64]
    """Time from arrival to the last token."""
    preemptions: NDArray[np.int64]
    never_fits: int
    """Requests that need more than the whole KV cache; they are left out."""
    iterations: int
    busy_s: float
    """Time in iterations."""
    waiting_max: int
    kv_mean: float
    """Mean share of the KV cache in use, 0-1, over the time in iterations."""
    kv_full_s: float
    """Time in iterations in which the first waiting request found no room in the KV cache."""
    prefill_s: float
    """Time of the iterations that prefilled tokens."""

    @property
    def token_s(self) -> NDArray[np.float64]:
        """Mean time between the tokens of each request, in seconds; NaN for one token."""
        return (self.e2e_s - self.ttft_s) / np.where(self._after_first > 0, self._after_first, np.nan)

    _after_first: NDArray[np.int64]


def simulate(
    arrival_s: Sequence[float] | NDArray[np.float64],
    context: Sequence[int] | NDArray[np.int64],
    generated: Sequence[int] | NDArray[np.int64],
    engine: EngineModel,
) -> ModeledRequests:
    """Return what requests experience at one engine.

    ``arrival_s`` ascends; lengths are tokens, and at least 1 is assumed. Takes some 20 microseconds per iteration.
    """
    run = _Run(
        np.asarray(arrival_s, np.float64), np.maximum(np.asarray(context, np.int64), 1),
        np.maximum(np.asarray(generated, np.int64), 1), engine,
    )  # fmt: skip
    while run.advance():
        pass
    return run.result()


class _Run:
    """One engine and the requests that it receives."""

    def __init__(
        self, arrival: NDArray[np.float64], prompt: NDArray[np.int64], output: NDArray[np.int64], engine: EngineModel
    ) -> None:
        self._arrival, self._prompt, self._output, self._engine = arrival, prompt, output, engine
        self._pool = engine.kv_tokens // engine.block_size
        self._fits = engine.fits(prompt + output)
        count = len(arrival)
        self._ttft, self._e2e = np.full(count, np.nan), np.full(count, np.nan)
        self._preemptions = np.zeros(count, np.int64)
        self._decoded = np.zeros(count, np.int64)
        self._waiting: deque[int] = deque()
        self._running = np.empty(0, np.int64)  # in the order of admission
        self._unfilled = 0  # tokens that the request admitted last has to prefill in later iterations
        self._now = float(arrival[0]) if count else 0.0
        self._next = self._iterations = self._waiting_max = 0
        self._busy = self._full = self._prefill = self._kv = 0.0

    def _blocks(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-tokens // self._engine.block_size)

    def advance(self) -> bool:
        """Run iterations to the next event, or wait for the next request; return whether any request is left."""
        self._receive()
        if not self._waiting:
            if len(self._running) and not self._unfilled:
                self._decode()
                return True
            if not len(self._running):
                if self._next == len(self._arrival):
                    return False
                self._now = float(self._arrival[self._next])
                return True
        used, preempted = self._make_room()
        budget = self._budget()
        prefilled, refused = 0 if budget is None else min(self._unfilled, budget), preempted
        self._unfilled -= prefilled
        if not preempted and not self._unfilled:  # vLLM admits nothing in the iteration of a preemption
            remaining = None if budget is None else budget - prefilled
            used, admitted, refused = self._admit(used, remaining)
            prefilled += admitted
        self._waiting_max = max(self._waiting_max, len(self._waiting))
        self._iterate(used, prefilled, refused=refused)
        return True

    def _receive(self) -> None:
        while self._next < len(self._arrival) and self._arrival[self._next] <= self._now:
            if self._fits[self._next]:
                self._waiting.append(self._next)
            self._next += 1

    def _make_room(self) -> tuple[int, bool]:
        """Return the blocks in use after one more token for each running request, and whether one was preempted."""
        blocks = self._blocks(self._prompt[self._running] + self._decoded[self._running] + 1)
        used, free_blocks = int(blocks.sum()), len(blocks)
        while used > self._pool:
            free_blocks -= 1
            used -= int(blocks[free_blocks])
            self._preemptions[self._running[free_blocks]] += 1
            self._waiting.appendleft(int(self._running[free_blocks]))
            self._unfilled = 0
        preempted = free_blocks < len(self._running)
        self._running = self._running[:free_blocks]
        return used, preempted

    def _budget(self) -> int | None:
        """Return the tokens of prompts that the next iteration prefills at most; ``None``: prompts are not divided."""
        if self._engine.chunk_tokens is None:
            return None
        return max(0, self._engine.chunk_tokens - len(self._running) + bool(self._unfilled))

    def _admit(self, used: int, budget: int | None) -> tuple[int, int, bool]:
        """Admit requests; return blocks in use, tokens to prefill, and whether one found no room in the cache."""
        admitted: list[int] = []
        prefilled = 0
        refused = False
        while self._waiting and len(self._running) + len(admitted) < self._engine.max_running:
            if budget is not None and prefilled >= budget:
                break
            first = self._waiting[0]
            tokens = int(self._prompt[first] + self._decoded[first])
            need = -(-(tokens + 1) // self._engine.block_size)
            refused = used + need > self._pool
            if refused:
                break
            if budget is not None:
                self._unfilled = max(0, prefilled + tokens - budget)
            elif prefilled and prefilled + tokens > self._engine.max_batched_tokens:
                break
            admitted.append(self._waiting.popleft())
            prefilled += tokens - self._unfilled
            used += need
        self._running = np.concatenate([self._running, np.asarray(admitted, np.int64)])
        return used, prefilled, refused

    def _decode(self) -> None:
        """Run equal iterations while no request arrives or ends and the cache has room, at least one iteration."""
        running = self._running
        lasts = self._engine.base_s + self._engine.per_request_s * len(running)
        steps = int((self._output[running] - self._decoded[running]).min())
        if self._next < len(self._arrival):
            steps = min(steps, math.ceil((float(self._arrival[self._next]) - self._now) / lasts))
        tokens = self._prompt[running] + self._decoded[running]
        if steps > 1 and int(self._blocks(tokens + steps).sum()) <= self._pool:
            used = self._blocks(tokens[:, None] + np.arange(1, steps)).sum()
            self._now += (steps - 1) * lasts
            self._busy += (steps - 1) * lasts
            self._kv += lasts * float(used) / self._pool
            self._iterations += steps - 1
            self._decoded[running] += steps - 1
        used, preempted = self._make_room()
        self._waiting_max = max(self._waiting_max, len(self._waiting))
        self._iterate(used, 0, refused=preempted)

    def _iterate(self, used: int, prefilled: int, *, refused: bool) -> None:
        engine, running = self._engine, self._running
        lasts = engine.base_s + engine.per_request_s * len(running) + engine.per_prefill_token_s * prefilled
        self._now += lasts
        self._busy += lasts
        self._kv += lasts * used / self._pool
        self._full += lasts if refused else 0.0
        self._prefill += lasts if prefilled else 0.0
        self._iterations += 1
        if self._unfilled:
            running = running[:-1]
        self._decoded[running] += 1
        fresh = running[np.isnan(self._ttft[running])]
        self._ttft[fresh] = self._now - self._arrival[fresh]
        ended = self._decoded[running] >= self._output[running]
        if ended.any():
            self._e2e[running[ended]] = self._now - self._arrival[running[ended]]
            self._running = np.concatenate([running[~ended], self._running[len(running) :]])

    def result(self) -> ModeledRequests:
        """Return what the requests experienced."""
        return ModeledRequests(
            ttft_s=self._ttft, e2e_s=self._e2e, preemptions=self._preemptions, never_fits=int((~self._fits).sum()),
            iterations=self._iterations, busy_s=self._busy, waiting_max=self._waiting_max,
            kv_mean=self._kv / self._busy if self._busy else 0.0, kv_full_s=self._full, prefill_s=self._prefill,
            _after_first=self._output - 1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefilledRequests:
    """What requests experience at engines that only prefill; one element per request, in the order of arrival."""

    ttft_s: NDArray[np.float64]
    waiting_max: int
    busy_s: float


def prefilled(
    arrival_s: NDArray[np.float64], context: NDArray[np.int64], engine: EngineModel, engines: int
) -> PrefilledRequests:
    """Return what requests experience at engines that only prefill, one request at a time, first come first served.

    Prompts are not divided: there are no tokens of other requests to delay.
    """
    arrival = np.asarray(arrival_s, np.float64)
    lasts = engine.base_s + engine.per_prefill_token_s * np.maximum(np.asarray(context, np.int64), 1)
    free = [0.0] * max(1, min(engines, len(arrival)))
    began = np.empty(len(arrival))
    for index, (time, seconds) in enumerate(zip(arrival.tolist(), lasts.tolist(), strict=True)):
        begin = max(heappop(free), time)
        began[index] = begin
        heappush(free, begin + seconds)
    # Requests begin in the order of arrival, so those that have not begun are the last ones.
    queued = np.arange(1, len(arrival) + 1) - np.searchsorted(began, arrival, side="right")
    return PrefilledRequests(began + lasts - arrival, int(queued.max(initial=0)), float(lasts.sum()))


def split(
    arrival_s: NDArray[np.float64], context: NDArray[np.int64], generated: NDArray[np.int64], engine: EngineModel,
    *, prefill_engines: int, decode_engines: int, per_transfer_token_s: float = 0.0,
) -> ModeledRequests:  # fmt: skip
    """Return what requests experience if some engines only prefill and the others only decode.

    The first token is the result of the prefill (see ``prefilled``). The KV cache then moves to a decode engine, in
    ``per_transfer_token_s`` for each token of the prompt. Decode engines receive the requests in turn, in the order of
    the ends of these transfers. Figures of the iterations are those of the decode engines.
    """
    arrival = np.asarray(arrival_s, np.float64)
    prompt = np.maximum(np.asarray(context, np.int64), 1)
    output = np.maximum(np.asarray(generated, np.int64), 1)
    first = prefilled(arrival, prompt, engine, prefill_engines)
    ttft = first.ttft_s
    moved = ttft + per_transfer_token_s * prompt
    decoder = replace(engine, per_prefill_token_s=0.0, max_batched_tokens=2**62, chunk_tokens=None)
    e2e = np.where(output > 1, np.nan, ttft)
    preemptions = np.zeros(len(arrival), np.int64)
    order = np.argsort(arrival + moved, kind="stable")
    order = order[output[order] > 1]
    decoded = _in_turn((arrival + moved)[order], prompt[order] + 1, output[order] - 1, decoder, decode_engines)
    e2e[order] = moved[order] + decoded.e2e_s
    preemptions[order] = decoded.preemptions
    return replace(
        decoded,
        waiting_max=max(decoded.waiting_max, first.waiting_max),
        ttft_s=ttft,
        e2e_s=e2e,
        preemptions=preemptions,
        prefill_s=0.0,
        _after_first=output - 1,
    )


def dealt(
    arrival_s: NDArray[np.float64], context: NDArray[np.int64], generated: NDArray[np.int64], engine: EngineModel,
    engines: int,
) -> ModeledRequests:  # fmt: skip
    """Return what requests experience at several equal engines that receive them in turn."""
    return _in_turn(np.asarray(arrival_s), np.asarray(context), np.asarray(generated), engine, engines)


def _in_turn(
    arrival: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    engine: EngineModel,
    engines: int,
) -> ModeledRequests:
    count = len(arrival)
    ttft, e2e = np.full(count, np.nan), np.full(count, np.nan)
    preemptions = np.zeros(count, np.int64)
    parts = []
    for which in range(min(engines, count)):
        positions = slice(which, None, engines)
        part = simulate(arrival[positions], prompt[positions], output[positions], engine)
        ttft[positions], e2e[positions], preemptions[positions] = part.ttft_s, part.e2e_s, part.preemptions
        parts.append(part)
    busy = sum(part.busy_s for part in parts)
    return ModeledRequests(
        ttft_s=ttft, e2e_s=e2e, preemptions=preemptions, never_fits=sum(part.never_fits for part in parts),
        iterations=sum(part.iterations for part in parts), busy_s=busy,
        waiting_max=max((part.waiting_max for part in parts), default=0),
        kv_mean=sum(part.kv_mean * part.busy_s for part in parts) / busy if busy else 0.0,
        kv_full_s=sum(part.kv_full_s for part in parts), prefill_s=sum(part.prefill_s for part in parts),
        _after_first=np.maximum(output, 1) - 1,
    )  # fmt: skip
