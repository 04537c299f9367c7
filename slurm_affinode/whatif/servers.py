"""Event simulation of model servers that share a pool of GPUs: which request waits for a wake, and from which tier.

A server holds one GPU while it is awake, and serves its requests one after the other. It falls asleep when it has been
idle for ``window_s``, or earlier when another server needs its GPU: the one with the longest idle time goes first.
A server without a GPU waits in the order of its first request; a busy one keeps its GPU until its queue is empty.
Sleeping servers are warm, in host memory, up to ``warm`` of them, the last ones that were awake; the others are
cold. ``wake_s`` and ``load_s`` are the times from the grant of a GPU to the first request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """What requests experience; one element per request, in the order of arrival."""

    wait_s: Floats
    """From the arrival to the start of the execution."""
    tier: Ints
    """``HOT``, ``WARM`` or ``COLD``."""
    awake_s: float
    """GPU-seconds in which servers were awake or woken."""
    most_awake: int
    wakes: int


def serve(arrival_s: Floats, exec_s: Floats, server: Ints, pool: ServerPool) -> ServedRequests:
    """Simulate the requests, sorted by arrival. ``server``: number of the server of each request, from 0.

    All servers are cold at the beginning. Raises ``ValueError`` for a pool without GPUs.
    """
    if pool.gpus < 1:
        raise ValueError("a pool needs a GPU")
    state = _Servers(arrival_s.tolist(), exec_s.tolist(), server.tolist(), pool)
    state.run()
    return ServedRequests(
        np.array(state.starts) - arrival_s, np.array(state.tiers, np.int64), state.awake_s, state.most_awake,
        state.wakes,
    )  # fmt: skip


class _Servers:
    def __init__(self, arrival: list[float], exec_s: list[float], server: list[int], pool: ServerPool) -> None:
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
        at, arrival, events = 0, self._arrival, self._events
        now = 0.0
        while at < len(arrival) or events:
            # What ends at the time of an arrival ends before it.
            if events and (at == len(arrival) or events[0][0] <= arrival[at]):
                now, kind, server = heappop(events)
                if kind == _IDLE:
                    if self._idle.get(server) == now:
                        self._sleep(server, now)
                else:
                    self._next(server, now)
            else:
                now = arrival[at]
                self._arrived(at, now)
                at += 1
        self.awake_s += sum(now - since for since in self._since.values())

    def _arrived(self, request: int, now: float) -> None:
        server = self._server[request]
        queue = self._queues.setdefault(server, deque())
        queue.append(request)
        self.tiers[request] = self._tier.get(server, COLD)
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
                self._sleep(next(iter(self._idle)), now)
            server, _ = self._pending.popitem(last=False)
            self._since[server] = now
            self.wakes += 1
            self.most_awake = max(self.most_awake, len(self._since))
            cold = self._tier.get(server, COLD) == COLD
            self._warm.pop(server, None)
            heappush(self._events, (now + (self._pool.load_s if cold else self._pool.wake_s), _AWAKE, server))

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
        self._tier[server] = COLD
        if self._pool.warm:
            self._tier[server] = WARM
            self._warm[server] = None
            if len(self._warm) > self._pool.warm:
                evicted, _ = self._warm.popitem(last=False)
                self._tier[evicted] = COLD
