"""Model servers that share GPUs: wakes, tiers and waits by hand, and general properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.whatif.servers import COLD, HOT, WARM, Eviction, ServedRequests, ServerPool, serve

POOL = ServerPool(gpus=1, window_s=math.inf, warm=8, wake_s=6, load_s=22)


def served(
    rows: list[tuple[float, float, int]], pool: ServerPool, load_s: tuple[float, ...] | None = None
) -> ServedRequests:
    """Serve rows of arrival, execution time and server."""
    arrival, exec_s, server = (np.array(column) for column in zip(*rows, strict=True))
    loads = None if load_s is None else np.array(load_s)
    return serve(arrival.astype(float), exec_s.astype(float), server.astype(np.int64), pool, loads)


def test_servers_take_turns_on_one_gpu() -> None:
    """The first is loaded; the second needs its GPU, which is free once its request is done; then it is woken."""
    result = served([(0, 10, 0), (5, 10, 1), (100, 10, 0), (105, 10, 0)], POOL)
    assert result.wait_s.tolist() == [22, 32 - 5 + 22, 6, 11]
    assert result.tier.tolist() == [COLD, COLD, WARM, WARM]
    assert (result.most_awake, result.wakes) == (1, 3)
    assert result.awake_s == 126
    assert result.wake_wait_s.tolist() == [22, 49, 6, 1]


def test_wait_for_a_wake_is_without_the_queue_of_the_server() -> None:
    """The second request waits for the load, and then for the first one."""
    result = served([(0, 10, 0), (2, 10, 0)], POOL)
    assert (result.wait_s.tolist(), result.wake_wait_s.tolist()) == ([22, 30], [22, 20])


def test_eviction_by_cost_keeps_servers_that_load_slowly() -> None:
    """Of two cold servers that were used once each, the one that loads in 30 s stays on its GPU, and LRU evicts it."""
    rows = [(0.0, 1.0, 0), (100.0, 1.0, 1), (200.0, 1.0, 2), (300.0, 1.0, 0), (400.0, 1.0, 1)]
    waits = {}
    for eviction in ("lru", "cost"):
        pool = ServerPool(2, math.inf, 0, wake_s=6, load_s=0, eviction=eviction)  # type: ignore[arg-type]
        result = served(rows, pool, (30.0, 10.0, 20.0))
        waits[eviction] = result.wait_s.tolist()
    assert waits == {"lru": [30, 10, 20, 30, 10], "cost": [30, 10, 20, 0, 10]}


def test_eviction_by_cost_keeps_servers_that_are_requested_often() -> None:
    """Three requests against one: LRU evicts the first server from host memory, and eviction by cost the second."""
    rows = [(0.0, 1.0, 0), (50.0, 1.0, 0), (100.0, 1.0, 0), (200.0, 1.0, 1), (300.0, 1.0, 2), (400.0, 1.0, 0)]
    tiers = {}
    for eviction in ("lru", "cost"):
        pool = ServerPool(1, math.inf, 1, wake_s=6, load_s=22, eviction=eviction)  # type: ignore[arg-type]
        tiers[eviction] = served(rows, pool).tier.tolist()
    assert tiers == {"lru": [COLD, HOT, HOT, COLD, COLD, COLD], "cost": [COLD, HOT, HOT, COLD, COLD, WARM]}


def test_warm_server_is_loaded_if_that_is_quicker() -> None:
    result = served([(0, 1, 0), (100, 1, 1), (200, 1, 0)], POOL, (2.0, 22.0))
    assert (result.tier.tolist(), result.wait_s.tolist()) == ([COLD, COLD, WARM], [2, 22, 2])


def test_idle_server_sleeps_after_the_window() -> None:
    """It finishes at 32 and sleeps at 42: awake until then, and again from 100 to 126."""
    pool = ServerPool(gpus=2, window_s=10, warm=1, wake_s=6, load_s=22)
    result = served([(0, 10, 0), (35, 1, 0), (100, 10, 0)], pool)
    assert (result.wait_s.tolist(), result.tier.tolist()) == ([22, 0, 6], [COLD, HOT, WARM])
    assert result.awake_s == 46 + 26


def test_server_is_cold_again_when_others_fill_the_host_memory() -> None:
    pool = ServerPool(gpus=1, window_s=math.inf, warm=1, wake_s=6, load_s=22)
    result = served([(0, 1, 0), (100, 1, 1), (200, 1, 2), (300, 1, 1), (400, 1, 0)], pool)
    assert result.tier.tolist() == [COLD, COLD, COLD, WARM, COLD]
    nothing_warm = ServerPool(gpus=1, window_s=math.inf, warm=0, wake_s=6, load_s=22)
    assert served([(0, 1, 0), (100, 1, 1), (200, 1, 0)], nothing_warm).tier.tolist() == [COLD] * 3


def test_pool_without_gpus_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        served([(0, 1, 0)], ServerPool(0, 1, 1, 1, 1))


REQUESTS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40), st.integers(0, 4)), min_size=1, max_size=25)


@given(rows=REQUESTS, gpus=st.integers(1, 4), window=st.integers(1, 60), warm=st.integers(0, 3),
       eviction=st.sampled_from(["lru", "cost"]))  # fmt: skip
def test_every_request_is_served_and_the_limit_holds(
    rows: list[tuple[int, int, int]], gpus: int, window: int, warm: int, eviction: Eviction
) -> None:
    rows = sorted(rows)
    result = served(list(rows), ServerPool(gpus, window, warm, 6, 22, eviction))
    assert (result.wake_wait_s <= result.wait_s).all()
    assert (result.wake_wait_s[result.tier == HOT] == 0).all()
    starts = result.wait_s + [row[0] for row in rows]
    assert (result.wait_s >= 0).all()
    assert result.most_awake <= gpus
    busy = [(start, start + row[1], row[2]) for start, row in zip(starts.tolist(), rows, strict=True)]
    for start, _, server in busy:
        running = [other for begin, end, other in busy if begin <= start < end]
        assert len(running) <= gpus
        assert running.count(server) == 1
    assert result.awake_s >= sum(row[1] for row in rows)


@given(rows=REQUESTS)
def test_with_a_gpu_for_each_server_each_is_loaded_once(rows: list[tuple[int, int, int]]) -> None:
    """No request waits for another server."""
    rows = sorted(rows)
    result = served(list(rows), ServerPool(5, math.inf, 0, 6, 22))
    assert result.wakes == len({row[2] for row in rows})
    for server in {row[2] for row in rows}:
        positions = [at for at, row in enumerate(rows) if row[2] == server]
        alone = served([rows[at] for at in positions], ServerPool(1, math.inf, 0, 6, 22))
        assert result.wait_s[positions].tolist() == alone.wait_s.tolist()
