"""Pending jobs that could use idle GPUs, live."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from .zombie_live_site import Slurm, find, gpu, job, node, waiting


def test_jobs_pending_in_overlapping_partitions_are_counted_once(tmp_path: Path) -> None:
    places = [("short",), ("short", "gpu"), ("elsewhere",)]
    queue = [waiting(10 + n, partitions=names) for n, names in enumerate(places)]
    findings = find(tmp_path, Slurm((job(1), *queue), (node(partitions=("gpu", "short")),)), [[gpu()]])
    (finding,) = findings.findings
    assert (finding.impact.jobs, finding.impact.examples) == (2, ("10", "11"))


def test_jobs_that_exclude_the_node_are_not_counted(tmp_path: Path) -> None:
    """With ``--nodelist`` and ``--exclude``."""
    names = ({"nodes_required": ("g2",)}, {"nodes_excluded": ("g1", "g3")}, {"nodes_required": ("g1",)},
             {"nodes_excluded": ("g2",)})  # fmt: skip
    queue = [waiting(10 + n, **named) for n, named in enumerate(names)]
    findings = find(tmp_path, Slurm((job(1), *queue), (node(),)), [[gpu()]])
    assert findings.findings[0].impact.examples == ("12", "13")


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        ("ReqNodeNotAvail, May be reserved for other job", 1),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", 1),
        ("Priority", 1),
        ("Dependency", 0),
        ("QOSMaxGRESPerUser", 0),
    ],
)
def test_jobs_waiting_for_resources_are_identified_by_reason(tmp_path: Path, reason: str, counts: int) -> None:
    """Some reasons of Slurm have a description after the keyword."""
    slurm = Slurm((job(1), dataclasses.replace(waiting(10), reason=reason)), (node(),))
    assert find(tmp_path, slurm, [[gpu()]]).findings[0].impact.jobs == counts
