"""Pools of GPUs: which jobs of a cluster could have run on the same ones.

Nodes belong together if a job ran on both, or if jobs of one partition ran on both and they have the same GPU model.
So a partition with nodes of two models is two pools, and partitions that share nodes are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from slurm_affinode.base.spread import Spread, in_turn
from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.suspension import GpuJob, Replay, SuspensionRule, replay


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job ran."""

    partition: str | None
    nodes: tuple[str, ...]
    """Empty: unknown."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Jobs that compete for the same GPUs."""

    nodes: tuple[str, ...]
    """Empty: unknown."""
    jobs: tuple[int, ...]
    """Their places in the list of jobs, ascending."""


def divide(placements: Sequence[Placement], models: Mapping[str, str | None]) -> list[Pool]:
    """Return the pools of jobs, each job in one of them, the pool with the most jobs first.

    ``models``: GPU model of each node, as far as known. A job on unknown nodes is in the pool with the most jobs of
    its partition; without any in a pool of its partition alone.
    """
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first: dict[tuple[str | None, str | None], str] = {}
    for placement in dict.fromkeys(placements):
        for node in placement.nodes:
            parent[root(node)] = root(placement.nodes[0])
            parent[root(node)] = root(first.setdefault((placement.partition, models.get(node)), node))
    members: dict[str | tuple[str | None], list[int]] = {}
    most: dict[str | None, dict[str, int]] = {}
    for number, placement in enumerate(placements):
        if placement.nodes:
            name = root(placement.nodes[0])
            members.setdefault(name, []).append(number)
            counts = most.setdefault(placement.partition, {})
            counts[name] = counts.get(name, 0) + 1
    for number, placement in enumerate(placements):
        if not placement.nodes:
            counts = most.get(placement.partition, {})
            key = max(counts, key=lambda name: counts[name]) if counts else (placement.partition,)
            members.setdefault(key, []).append(number)
    nodes: dict[str, list[str]] = {}
    for node in parent:
        nodes.setdefault(root(node), []).append(node)
    pools = [
        Pool(tuple(sorted(nodes.get(key, ()))) if isinstance(key, str) else (), tuple(sorted(rows)))
        for key, rows in members.items()
    ]
    return sorted(pools, key=lambda pool: -len(pool.jobs))


@dataclass(frozen=True, slots=True)
class Queue:
    """Jobs, and the pools on which they run, each with its capacity."""

    jobs: Sequence[GpuJob]
    pools: Sequence[tuple[Pool, int]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A queue that is replayed with a rule; ``None``: no job is suspended."""

    queue: int
    """Place of the queue in a list."""
    rule: SuspensionRule | None


def replay_all(
    queues: Sequence[Queue], scenarios: Sequence[Scenario], policy: SchedulingPolicy, spread: Spread = in_turn
) -> list[Replay]:
    """Replay each scenario, its pools independently of each other; results are in the order of the jobs."""
    todo = [(scenario, pool) for scenario in scenarios for pool in range(len(queues[scenario.queue].pools))]
    parts = iter(spread(_replay_pool, todo, (queues, policy)))
    replays = [
        _joined(queue, islice(parts, len(queue.pools))) for queue in (queues[scenario.queue] for scenario in scenarios)
    ]
    next(parts, None)  # so that ``spread`` ends
    return replays


def _replay_pool(item: tuple[Scenario, int], shared: tuple[Sequence[Queue], SchedulingPolicy]) -> Replay:
    scenario, number = item
    queues, policy = shared
    queue = queues[scenario.queue]
    pool, capacity = queue.pools[number]
    return replay([queue.jobs[job] for job in pool.jobs], capacity, policy, scenario.rule)


def _joined(queue: Queue, parts: Iterable[Replay]) -> Replay:
    wait, wake_wait, wakes, returned_s, end, blocked = (np.zeros(len(queue.jobs), np.int64) for _ in range(6))
    used_s = 0.0
    for (pool, _), part in zip(queue.pools, parts, strict=True):
        rows = np.array(pool.jobs, np.int64)
        wait[rows], wake_wait[rows] = part.wait, part.wake_wait
        wakes[rows], returned_s[rows] = part.wakes, part.returned_s
        end[rows], blocked[rows] = part.end, part.blocked
        used_s += part.used_s
    return Replay(wait, wake_wait, wakes, returned_s, used_s, end, blocked)
