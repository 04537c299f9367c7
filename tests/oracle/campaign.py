"""Draw clusters in batches and compare each; every batch runs in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from oracle.clusters import clusters
from oracle.comparison import differences
from oracle.model import Cluster


@dataclass(slots=True)
class Batch:
    """The result of one batch of clusters."""

    compared: int = 0
    differing: list[tuple[Cluster, list[str]]] = field(default_factory=list)


def compare(seed: int, size: int, features: frozenset[str]) -> Batch:
    """Compare ``size`` clusters that have some of ``features``; the same seed gives the same clusters."""
    batch = Batch()

    def check(cluster: Cluster) -> None:
        result = differences(cluster)
        batch.compared += 1
        if result:
            batch.differing.append((cluster, result))

    _draw(check, features, seed, size, Phase.generate)
    return batch


def shrink(seed: int, size: int, features: frozenset[str]) -> Cluster:
    """Return the smallest cluster with a difference that Hypothesis finds in a failing batch."""
    failing: list[Cluster] = []

    def check(cluster: Cluster) -> None:
        result = differences(cluster)
        if result:
            failing.append(cluster)
            raise AssertionError

    with contextlib.suppress(AssertionError):
        _draw(check, features, seed, size, Phase.generate, Phase.shrink)
    return failing[-1]


def _draw(check: Callable[[Cluster], None], features: frozenset[str], seed: int, size: int, *phases: Phase) -> None:
    hypothesis.seed(seed)(
        settings(
            max_examples=size, phases=phases, database=None, deadline=None, suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )(given(clusters(features))(check))
    )()  # fmt: skip
