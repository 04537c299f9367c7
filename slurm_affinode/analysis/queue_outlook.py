"""When the GPUs that pending jobs request become free: by the limits of the running jobs, and by predictions.

The jobs of the nodes in the partitions of a pending job end one after the other; the time is that at which as many GPUs
as it requests are free, if no other job takes them. Nodes that are down or drained, and those with GPUs of another
type than the requested one, have none to offer. CPUs, memory and the distribution over nodes are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_affinode.model.cluster import Job, Node


@dataclass(frozen=True, slots=True)
class GpuOutlook:
    """The GPUs that a pending job could use."""

    job_id: int
    gpus_free: int
    """Now, on the nodes of its partitions."""
    enough_by_limits: datetime | None
    """``None``: never, as jobs without a limit hold them, or there are not as many."""
    enough_by_predictions: datetime | None
    """``None``: unknown without predictions, or never."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The GPUs of a set of partitions."""

    free: int
    releases: tuple[tuple[int, datetime | None, datetime | None], ...]
    """GPUs, and the end by limit and by prediction, of each running job."""


def outlooks(
    jobs: Sequence[Job], nodes: Sequence[Node], now: datetime, expected: Mapping[int, datetime] | None
) -> list[GpuOutlook]:
    """Return the outlook of each pending job that requests GPUs.

    ``expected``: raw ID of a running job -> end by its predicted run time, as far as it is known; ``None``: there are
    no predictions. A job without one, or that has outrun it, is expected to end at its limit.
    """
    places: dict[tuple[frozenset[str], str | None], _Place] = {}
    estimates = []
    for job in jobs:
        if not job.pending or not job.gpus_requested:
            continue
        key = (frozenset(job.partitions), job.gpus_requested.kind)
        if key not in places:
            places[key] = _place(jobs, nodes, key, now, expected or {})
        place, needed = places[key], job.gpus_requested.count
        by_limits = _enough(place.free, needed, [(gpus, limit) for gpus, limit, _ in place.releases], now)
        by_predictions = None
        if expected is not None:
            by_predictions = _enough(place.free, needed, [(gpus, end) for gpus, _, end in place.releases], now)
        estimates.append(GpuOutlook(job.job_id, place.free, by_limits, by_predictions))
    return estimates


def _place(
    jobs: Iterable[Job], nodes: Iterable[Node], key: tuple[frozenset[str], str | None], now: datetime,
    expected: Mapping[int, datetime],
) -> _Place:  # fmt: skip
    partitions, kind = key
    names, free = set(), 0
    for node in nodes:
        if node.gpus is None or node.draining or not node.responding or partitions.isdisjoint(node.partitions):
            continue
        if kind is not None and node.gpus.kind is not None and kind not in node.gpus.kind.split("+"):
            continue
        names.add(node.name)
        free += max(0, node.gpus.count - (0 if node.gpus_used is None else node.gpus_used.count))
    releases = []
    for job in jobs:
        if not job.allocated or not (gpus := _gpus_on(job, names)):
            continue
        limit = _limit(job)
        # A job that is past its limit is about to end.
        limit = None if limit is None else max(limit, now)
        end = expected.get(job.job_id)
        releases.append((gpus, limit, end if end is not None and end > now else limit))
    return _Place(free, tuple(releases))


def _gpus_on(job: Job, names: set[str]) -> int:
    """Return the GPUs of a job on some nodes; without counts by node, all its nodes have equally many."""
    if job.node_gpus is not None:
        return sum(part.count for part in job.node_gpus if part.node in names)
    if job.gpus_allocated is None or not job.nodes:
        return 0
    return job.gpus_allocated.count * sum(name in names for name in job.nodes) // len(job.nodes)


def _limit(job: Job) -> datetime | None:
    if job.expected_end is not None:
        return job.expected_end
    if job.start is None or job.time_limit_s is None:
        return None
    return job.start + timedelta(seconds=job.time_limit_s)


def _enough(free: int, needed: int, releases: Iterable[tuple[int, datetime | None]], now: datetime) -> datetime | None:
    if free >= needed:
        return now
    for end, gpus in sorted((end, gpus) for gpus, end in releases if end is not None):
        free += gpus
        if free >= needed:
            return end
    return None
