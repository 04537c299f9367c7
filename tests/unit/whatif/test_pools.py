"""Pools of GPUs for which the same jobs compete."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.pools import Placement, Pool, Queue, Scenario, divide, replay_all
from slurm_affinode.whatif.suspension import GpuJob, Replay, SuspensionRule, replay

FIRST_FIT = SchedulingPolicy("fcfs", "first-fit", "requested")


def replayed(jobs: list[GpuJob], pools: list[tuple[Pool, int]], rule: SuspensionRule | None) -> Replay:
    """Replay one scenario."""
    (only,) = replay_all([Queue(jobs, pools)], [Scenario(0, rule)], FIRST_FIT)
    return only


def names(pools: list[Pool]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    return [(pool.nodes, pool.jobs) for pool in pools]


def test_partition_with_two_models_is_two_pools() -> None:
    jobs = [Placement("gpu", (node,)) for node in ("a1", "a2", "h1", "a1")]
    models = {"a1": "A100", "a2": "A100", "h1": "H100"}
    assert names(divide(jobs, models)) == [(("a1", "a2"), (0, 1, 3)), (("h1",), (2,))]


def test_partitions_that_share_nodes_are_one_pool() -> None:
    jobs = [Placement("gpu", ("a1",)), Placement("long", ("a1",)), Placement("long", ("a2",)), Placement("x", ("b1",))]
    assert names(divide(jobs, dict.fromkeys(("a1", "a2", "b1"), "A100"))) == [
        (("a1", "a2"), (0, 1, 2)),
        (("b1",), (3,)),
    ]


def test_job_on_nodes_of_two_models_joins_them() -> None:
    jobs = [Placement("p", ("a1",)), Placement("q", ("h1",)), Placement("q", ("a1", "h1"))]
    assert names(divide(jobs, {"a1": "A100", "h1": "H100"})) == [(("a1", "h1"), (0, 1, 2))]


def test_job_on_unknown_nodes_is_in_the_pool_of_most_jobs_of_its_partition() -> None:
    jobs = [Placement("p", ("a1",)), Placement("p", ("h1",)), Placement("p", ("h1",)), Placement("p", ()),
            Placement("q", ())]  # fmt: skip
    assert names(divide(jobs, {"a1": "A100", "h1": "H100"})) == [(("h1",), (1, 2, 3)), (("a1",), (0,)), ((), (4,))]


@given(places=st.lists(st.tuples(st.sampled_from("pq"), st.sets(st.sampled_from("abcd"), max_size=2)), max_size=12))
def test_every_job_is_in_one_pool_and_pools_share_no_node(places: list[tuple[str, set[str]]]) -> None:
    pools = divide([Placement(name, tuple(sorted(nodes))) for name, nodes in places], {"a": "x", "b": "x", "c": "y"})
    assert sorted(number for pool in pools for number in pool.jobs) == list(range(len(places)))
    nodes = [node for pool in pools for node in pool.nodes]
    assert len(nodes) == len(set(nodes))


def test_pools_are_replayed_apart_and_one_pool_is_the_plain_replay() -> None:
    """The second job of pool b waits although GPUs of pool a are free."""
    jobs = [
        GpuJob(number, name, submit, 100, 2, 100, 0, counted=True, idle=((20, 80),) if number == 2 else ())
        for number, (name, submit) in enumerate([("a", 0), ("b", 0), ("b", 5)])
    ]
    pools = [(Pool(("a",), (0,)), 2), (Pool(("b",), (1, 2)), 2)]
    assert replayed(jobs, pools, None).wait.tolist() == [0, 0, 95]
    rule = SuspensionRule(10, 5, 3)
    single, plain = replayed(jobs, [(Pool((), (0, 1, 2)), 4)], rule), replay(jobs, 4, FIRST_FIT, rule)
    for name in ("wait", "wake_wait", "wakes", "returned_s"):
        assert np.array_equal(getattr(single, name), getattr(plain, name))
    assert single.used_s == plain.used_s
