"""Pools of GPUs for the model servers of a trace of requests, from one for each server to a few for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import gentd26
from slurm_affinode.whatif.servers import COLD, HOT, WARM, ServedRequests, ServerPool, serve
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
_DAY_S = 86_400.0


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
    requests, notes = gentd26.read_timed_requests([path])
    load_s = gentd26.mean_load_s([path])
    if load_s is None:
        raise InputError("has no table of the load latency of base models", where=str(path))
    arrival, exec_s, server = (requests[name].to_numpy() for name in ("arrival_s", "exec_s", "server"))
    servers = int(server.max()) + 1
    sizes = [capacity] if capacity is not None else [math.ceil(share * servers) for share in SHARES]
    warm = servers if warm is None else warm
    span_s = float(arrival[-1] - arrival[0])
    pools = []
    for gpus, window in dict.fromkeys([(servers, None), *((gpus, window_s) for gpus in sizes)]):
        pool = ServerPool(gpus, math.inf if window is None else window, warm, RESTORE_S, load_s)
        pools.append(_figures(gpus, window, serve(arrival, exec_s, server, pool), span_s))
    return PoolComparison(
        requests.height, servers, span_s, servers * span_s / 3600, warm, RESTORE_S, load_s, tuple(pools), PUBLISHED,
        notes,
    )  # fmt: skip


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
