"""GPU memory left by ended jobs, in a stored history."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from .zombie_history import END, Site, Values, computes


def leaves(site: Site, number: int, node: str, after: Values, *, label: str | None = None, **more: Any) -> None:
    """Add a job that ended two hours ago, with the samples of its GPU since."""
    over = {"end": END - timedelta(hours=2), "state": "COMPLETED", **more}
    site.job(number, [lambda minute: computes(minute) if minute < 120 else after(minute)], node=node, **over)
    for row in site.samples:
        if row["node"] == node and row["time"] >= END - timedelta(hours=2):
            row["job"] = label


def test_memory_left_by_ended_job_is_found(site: Site) -> None:
    """The finding has the last XID; the process is unknown in the history."""
    leaves(site, 1, "g1", lambda _: {"util_pct": 0.0, "fb_used_mib": 20_480.0, "xid": 79.0})
    leaves(site, 2, "g2", lambda _: {"util_pct": 0.0, "fb_used_mib": 450.0})
    leaves(site, 3, "g3", lambda minute: {"util_pct": 0.0, "fb_used_mib": 20_480.0 if minute > 200 else 450.0})
    site.job(9, [computes], node="g9", hours=0.1, elapsed_s=None)
    (finding,) = site.find(kinds=("orphan-memory",)).findings
    assert (finding.nodes, finding.gpus[0].gpu, finding.gpus[0].xid, finding.gpus[0].held_gib) == (
        ("g1",),
        "0",
        79,
        20.0,
    )
    assert finding.since == END - timedelta(minutes=118)
    assert finding.window_s == pytest.approx(112 * 60)  # up to the end of accounting
    assert finding.score == pytest.approx(0.8)
    assert {row.dimension for row in finding.unknown} == {"processes"}
    assert not site.find(kinds=("squatter",)).findings


def test_memory_that_a_job_may_hold_is_not_orphaned(site: Site) -> None:
    """Unknown GPU indices, shared GPUs, samples labeled with a job, and times after the end of accounting."""
    held: Values = lambda _: {"util_pct": 0.0, "fb_used_mib": 20_480.0}  # noqa: E731
    leaves(site, 1, "g1", held)
    site.job(11, [None, None], node="g1", elapsed_s=None)
    leaves(site, 2, "g2", held)
    site.job(12, [], node="g2", alloc_tres="cpu=1,gres/shard=2", elapsed_s=None)
    leaves(site, 3, "g3", held, label="777")
    assert not site.find(kinds=("orphan-memory",)).findings
    leaves(site, 4, "g4", held)
    # Accounting ends with the end of job 4; later jobs would not be in it.
    assert not [finding for finding in site.find(kinds=("orphan-memory",)).findings if finding.nodes == ("g4",)]
