"""Event simulation of model servers that share a pool of GPUs: which request waits for a wake, and from which tier.

A server holds one GPU while it is awake, and serves its requests one after the other. It falls asleep when it has been
idle for ``window_s``, or earlier when another server needs its GPU: the one with the longest idle time goes first, or
with ``eviction`` "cost" the one with the lowest rank.
A server without a GPU waits in the order of its first request; a busy one keeps its GPU until its queue is empty.
Sleeping servers are warm, in host memory, up to ``warm`` of them, the last ones that were awake or those with the
highest rank; the others are cold. ``wake_s`` and ``load_s`` are the times from the grant of a GPU to the first request;
a warm server that can be loaded in less than ``wake_s`` is loaded. A server that gives its GPU to a warm one needs room
in host memory before that one leaves it.

The rank is that of GreedyDual-Frequency (L. Cherkasova, HPL-98-69, 1998; servers have one size): the requests since the
server came into the tier, times the time that the next one would wait for it, plus the rank of the last server that was
evicted from the tier.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Eviction = Literal["lru", "cost"]
HOT, WARM, COLD = 0, 1, 2
"""Tiers of the server of a request at its arrival; a server that is being woken is in the tier that it comes from."""
_FINISHED, _AWAKE, _IDLE = range(3)


@dataclass(frozen=True, slots=True)
class ServerPool:
    """GPUs of model servers, and when these sleep."""

    gpus: int
    """Most servers that are awake at the same time."""
    window_s: float
    """Idle time before a server sleeps; infinity: only for another one."""
    warm: int
    """Most sleeping servers in host memory."""
    wake_s: float
    load_s: float
    eviction: Eviction = "lru"
    """Which servers leave the GPUs and the host memory first."""


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Latencies of requests; one element per request, in the order of arrival."""

    wait_s: Floats
    """From the arrival to the start of the execution."""
    tier: Ints
    """``HOT``, ``WARM`` or ``COLD``."""
    wake_wait_s: Floats
    """Of ``wait_s``: until the server is awake."""
    awake_s: float
    """GPU-seconds in which servers were awake or woken."""
    most_awake: int
    wakes: int


def serve(
    arrival_s: Floats, exec_s: Floats, server: Ints, pool: ServerPool, load_s: Floats | None = None
) -> ServedRequests:
    """Simulate the requests, sorted by arrival. ``server``: number of the server of each request, from 0.

    ``load_s``: of each server, in place of that of the pool. All servers are cold at the beginning. Raises
    ``ValueError`` for a pool without GPUs.
    """
    if pool.gpus < 1:
        raise ValueError("a pool needs a GPU")
    if load_s is None:
        load_s = np.full(int(server.max(initial=-1)) + 1, pool.load_s)
    state = _Servers(arrival_s.tolist(), exec_s.tolist(), server.tolist(), pool, load_s.tolist())
    state.run()
    return ServedRequests(
        np.array(state.starts) - arrival_s, np.array(state.tiers, np.int64), np.array(state.wake_waits), state.awake_s,
        state.most_awake, state.wakes,
    )  # fmt: skip


class _Servers:
    def __init__(
        self, arrival: list[float], exec_s: list[float], server: list[int], pool: ServerPool, load_s: list[float]
    ) -> None:
        self.wake_waits = [0.0] * len(arrival)
        self._load, self._wake = load_s, [min(seconds, pool.wake_s) for seconds in load_s]
        by_cost = pool.eviction == "cost"
        # A server that leaves the GPUs is woken again, if there is host memory.
        self._hot = _Ranks(self._wake if pool.warm else load_s) if by_cost else None
        saved_s = [load - wake for load, wake in zip(load_s, self._wake, strict=True)]
        self._in_memory = _Ranks(saved_s) if by_cost else None
        self.starts, self.tiers = [0.0] * len(arrival), [HOT] * len(arrival)
        self.awake_s, self.most_awake, self.wakes = 0.0, 0, 0
        self._arrival, self._exec, self._server, self._pool = arrival, exec_s, server, pool
        self._queues: dict[int, deque[int]] = {}
        self._since: dict[int, float] = {}
        """Server with a GPU -> when it got it."""
        self._tier: dict[int, int] = {}
        """Tier of servers that are not awake; cold if they are not in it."""
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Idle server -> when it falls asleep; the one that has been idle for the longest time first."""
        self._warm: OrderedDict[int, None] = OrderedDict()
        self._pending: OrderedDict[int, None] = OrderedDict()
        self._events: list[tuple[float, int, int]] = []

    def run(self) -> None:
        """Serve all requests."""
        position, arrival, events = 0, self._arrival, self._events
        now = 0.0
        while position < len(arrival) or events:
            # What ends at the time of an arrival ends before it.
            if events and (position == len(arrival) or events[0][0] <= arrival[position]):
                now, kind, server = heappop(events)
                if kind == _IDLE:
                    if self._idle.get(server) == now:
                        self._sleep(server, now)
                else:
                    if kind == _AWAKE:
                        for request in self._queues[server]:
                            self.wake_waits[request] = now - arrival[request]
                    self._next(server, now)
            else:
                now = arrival[position]
                self._arrived(position, now)
                position += 1
        self.awake_s += sum(now - since for since in self._since.values())

    def _arrived(self, request: int, now: float) -> None:
        server = self._server[request]
        queue = self._queues.setdefault(server, deque())
        queue.append(request)
        self.tiers[request] = self._tier.get(server, COLD)
        for ranks in (self._hot, self._in_memory):
            if ranks is not None:
                ranks.request(server)
        if server in self._idle:
            del self._idle[server]
            self._next(server, now)
        elif server not in self._since and server not in self._pending:
            self._pending[server] = None
            self._grant(now)

    def _grant(self, now: float) -> None:
        """Wake servers that need a GPU, as far as there are free or idle ones."""
        while self._pending:
            if len(self._since) == self._pool.gpus:
                if not self._idle:
                    return
                victim = next(iter(self._idle)) if self._hot is None else self._hot.evict(self._idle)
                self._sleep(victim, now)
            server, _ = self._pending.popitem(last=False)
            self._since[server] = now
            self.wakes += 1
            self.most_awake = max(self.most_awake, len(self._since))
            cold = self._tier.get(server, COLD) == COLD
            self._warm.pop(server, None)
            heappush(self._events, (now + (self._load if cold else self._wake)[server], _AWAKE, server))

    def _next(self, server: int, now: float) -> None:
        """Execute the next request of an awake server, or let it idle."""
        self._tier[server] = HOT
        queue = self._queues[server]
        if queue:
            request = queue.popleft()
            self.starts[request] = now
            heappush(self._events, (now + self._exec[request], _FINISHED, server))
            return
        self._idle[server] = now + self._pool.window_s
        if self._pending:
            self._grant(now)
        elif np.isfinite(self._pool.window_s):
            heappush(self._events, (self._idle[server], _IDLE, server))

    def _sleep(self, server: int, now: float) -> None:
        del self._idle[server]
        self.awake_s += now - self._since.pop(server)
        if self._hot is not None:
            self._hot.leave(server)
        self._tier[server] = WARM
        self._warm[server] = None
        if len(self._warm) > self._pool.warm:
            evicted = next(iter(self._warm)) if self._in_memory is None else self._in_memory.evict(self._warm)
            del self._warm[evicted]
            self._tier[evicted] = COLD
            if self._in_memory is not None:
                self._in_memory.leave(evicted)


class _Ranks:
    """Ranks of the servers of a tier, by the rule of the head of this file."""

    def __init__(self, cost_s: list[float]) -> None:
        self._cost = cost_s
        self._level = 0.0
        self._requests: dict[int, int] = {}
        self._rank: dict[int, float] = {}

    def request(self, server: int) -> None:
        self._requests[server] = self._requests.get(server, 0) + 1
        self._rank[server] = self._level + self._requests[server] * self._cost[server]

    def evict(self, servers: Iterable[int]) -> int:
        """Return the server with the lowest rank, of equal ones the first, and raise the level to it."""
        victim = min(servers, key=lambda server: self._rank[server])
        self._level = max(self._level, self._rank[victim])
        return victim

    def leave(self, server: int) -> None:
        self._requests.pop(server, None)
