"""Pools of GPUs for the model servers of a trace of requests, from one for each server to a few for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import gentd26
from slurm_affinode.whatif.servers import COLD, HOT, WARM, Eviction, Floats, Ints, ServedRequests, ServerPool, serve
from slurm_affinode.whatif.suspension import RESTORE_S

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Sizes of the compared pools: GPUs by servers."""
PUBLISHED = (
    "Aegaeon (SOSP 2025): 213 instead of 1,192 GPUs by pooling of servers; 17.7 % of the GPUs served 1.35 % of the "
    "requests",
    "Splitwise (ISCA 2024): 1.4 times the throughput at 20 % less cost, or 2.35 times at the same cost and power, by "
    "separate prefill and decode",
    "DistServe (OSDI 2024): up to 7.4 times the goodput by separate prefill and decode",
)
"""Results of other systems, on other traces."""
PUBLISHED_TIERS = (
    *PUBLISHED,
    "ServerlessLLM (OSDI 2024): models load 3.6 to 8.2 times as fast as with PyTorch and Safetensors, and requests "
    "have 10 to 200 times less latency, by copies in host memory and on SSDs of the servers",
    "FaasCache (ASPLOS 2021): less than a third of the overhead of cold starts of functions by GreedyDual eviction",
    "vLLM sleep mode (vLLM blog, October 2025): models wake from host memory 18 to 200 times as fast as they reload",
)
"""As ``PUBLISHED``, with those of caches of models and of functions in tiers."""
_DAY_S = 86_400.0
EVICTIONS: tuple[Eviction, ...] = ("lru", "cost")
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly: quantiles of the servers."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """The requests in a pool of some size."""

    gpus: int
    """Limit on servers that are awake at the same time."""
    window_s: float | None
    """Idle time before a server sleeps; ``None``: it sleeps only for another one."""
    most_awake: int
    gpu_hours_awake: float
    wait_mean_s: float
    wait_p95_s: float
    hot_share: float
    """Requests whose server was awake."""
    warm_share: float
    """Requests that waited for a wake from host memory."""
    cold_share: float
    wakes_per_day: float


@dataclass(frozen=True, slots=True)
class PoolComparison:
    """Pools of several sizes; the first one has a GPU for each server, and none sleeps."""

    requests: int
    servers: int
    span_s: float
    gpu_hours: float
    """Of a GPU for each server over the whole time."""
    warm: int
    wake_s: float
    load_s: float
    pools: tuple[PoolFigures, ...]
    published: tuple[str, ...]
    notes: tuple[str, ...]


def compare(path: Path, capacity: int | None, window_s: float | None, warm: int | None) -> PoolComparison:
    """Serve the requests of a trace with a GPU for each server, and with ``capacity`` GPUs or pools of several sizes.

    ``window_s``: idle time before a server sleeps; ``None``: it sleeps only for another one. ``warm``: sleeping servers
    in host memory; ``None``: all. Raises ``InputError`` if the trace lacks the requests or the times of loads.
    """
    read = _read(path)
    arrival, exec_s, server, notes = read.arrival_s, read.exec_s, read.server, read.notes
    servers, load_s = read.servers, float(read.loads_s.mean())
    sizes = [capacity] if capacity is not None else [math.ceil(share * servers) for share in SHARES]
    warm = servers if warm is None else warm
    span_s = read.span_s
    pools = []
    for gpus, window in dict.fromkeys([(servers, None), *((gpus, window_s) for gpus in sizes)]):
        pool = ServerPool(gpus, math.inf if window is None else window, warm, RESTORE_S, load_s)
        pools.append(_figures(gpus, window, serve(arrival, exec_s, server, pool), span_s))
    return PoolComparison(
        len(arrival), servers, span_s, servers * span_s / 3600, warm, RESTORE_S, load_s, tuple(pools), PUBLISHED,
        notes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The requests with tiers of some sizes."""

    warm: int
    """Sleeping servers in host memory."""
    eviction: Eviction
    hot_share: float
    """Requests whose server was awake."""
    warm_share: float
    cold_share: float
    wake_wait_mean_s: float
    """Wait for a wake or load, mean over all requests."""
    wake_wait_p95_s: float
    """Of the requests that waited for one."""
    wait_mean_s: float
    """With the queue of the server."""
    wakes_per_day: float


@dataclass(frozen=True, slots=True)
class TierComparison:
    """Host memory of several sizes with both rules of eviction."""

    requests: int
    servers: int
    span_s: float
    gpus: int
    window_s: float | None
    wake_s: float
    load_mean_s: float
    load_p5_s: float
    load_p95_s: float
    tiers: tuple[TierFigures, ...]
    published: tuple[str, ...]
    notes: tuple[str, ...]


def compare_tiers(path: Path, capacity: int | None, window_s: float | None, warm: int | None) -> TierComparison:
    """Serve the requests of a trace with servers in GPUs (hot), host memory (warm) and storage (cold).

    Eviction by time of last use is compared with that by cost. The trace does not say how long which model takes to
    load: each gets a quantile of the measured times. ``capacity``: GPUs, an eighth of the servers by default; ``warm``:
    servers in host memory, several sizes by default. Raises ``InputError`` as ``compare`` does.
    """
    read = _read(path)
    gpus = capacity if capacity is not None else math.ceil(SHARES[-1] * read.servers)
    sizes = [warm] if warm is not None else [0, *(math.ceil(share * read.servers) for share in SHARES[::-1])]
    load_s = np.quantile(read.loads_s, np.arange(read.servers) * _GOLDEN % 1)
    tiers = []
    for size in sizes:
        for eviction in EVICTIONS:
            pool = ServerPool(gpus, math.inf if window_s is None else window_s, size, RESTORE_S, 0.0, eviction)
            served = serve(read.arrival_s, read.exec_s, read.server, pool, load_s)
            waited = served.wake_wait_s[served.wake_wait_s > 0]
            hot, in_memory, cold = (float((served.tier == tier).mean()) for tier in (HOT, WARM, COLD))
            tiers.append(TierFigures(
                warm=size, eviction=eviction, hot_share=hot, warm_share=in_memory, cold_share=cold,
                wake_wait_mean_s=float(served.wake_wait_s.mean()),
                wake_wait_p95_s=float(np.percentile(waited, 95)) if len(waited) else 0.0,
                wait_mean_s=float(served.wait_s.mean()),
                wakes_per_day=served.wakes / max(read.span_s / _DAY_S, 1.0),
            ))  # fmt: skip
    return TierComparison(
        len(read.arrival_s), read.servers, read.span_s, gpus, window_s, RESTORE_S, float(read.loads_s.mean()),
        float(np.percentile(read.loads_s, 5)), float(np.percentile(read.loads_s, 95)), tuple(tiers), PUBLISHED_TIERS,
        read.notes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _TimedRequests:
    arrival_s: Floats
    exec_s: Floats
    server: Ints
    loads_s: Floats
    """Measured times to load a base model."""
    notes: tuple[str, ...]

    @property
    def servers(self) -> int:
        return int(self.server.max()) + 1

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0])


def _read(path: Path) -> _TimedRequests:
    requests, notes = gentd26.read_timed_requests([path])
    loads_s = gentd26.load_times_s([path])
    if loads_s is None:
        raise InputError("has no table of the load latency of base models", where=str(path))
    arrival, exec_s, server = (requests[name].to_numpy() for name in ("arrival_s", "exec_s", "server"))
    return _TimedRequests(arrival, exec_s, server, loads_s, notes)


def _figures(gpus: int, window_s: float | None, served: ServedRequests, span_s: float) -> PoolFigures:
    hot, warm, cold = (float((served.tier == tier).mean()) for tier in (HOT, WARM, COLD))
    return PoolFigures(
        gpus=gpus,
        window_s=window_s,
        most_awake=served.most_awake,
        gpu_hours_awake=served.awake_s / 3600,
        wait_mean_s=float(served.wait_s.mean()),
        wait_p95_s=float(np.percentile(served.wait_s, 95)),
        hot_share=hot,
        warm_share=warm,
        cold_share=cold,
        wakes_per_day=served.wakes / max(span_s / _DAY_S, 1.0),
    )
