"""GPU memory that ended jobs left, in a stored history."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from zombie_history import END, Site, Values, computes


def leaves(site: Site, number: int, node: str, after: Values, *, label: str | None = None, **more: Any) -> None:
    """A job that ended two hours ago, and what its GPU shows since."""
    over = {"end": END - timedelta(hours=2), "state": "COMPLETED", **more}
    site.job(number, [lambda minute: computes(minute) if minute < 120 else after(minute)], node=node, **over)
    for row in site.samples:
        if row["node"] == node and row["time"] >= END - timedelta(hours=2):
            row["job"] = label


def test_memory_that_a_job_left_is_found_in_the_history(site: Site) -> None:
    """No job has the GPU and its memory stays held: with the last XID; whose it is the history does not show."""
    leaves(site, 1, "g1", lambda _: {"util_pct": 0.0, "fb_used_mib": 20_480.0, "xid": 79.0})
    leaves(site, 2, "g2", lambda _: {"util_pct": 0.0, "fb_used_mib": 450.0})
    leaves(site, 3, "g3", lambda minute: {"util_pct": 0.0, "fb_used_mib": 20_480.0 if minute > 200 else 450.0})
    site.job(9, [computes], node="g9", hours=0.1, elapsed_s=None)
    (one,) = site.find(kinds=("orphan-memory",)).findings
    assert (one.nodes, one.gpus[0].gpu, one.gpus[0].xid, one.gpus[0].held_gib) == (("g1",), "0", 79, 20.0)
    assert one.since == END - timedelta(minutes=118)
    assert one.window_s == pytest.approx(112 * 60)  # to where accounting knows of jobs
    assert one.score == pytest.approx(0.8)
    assert {row.dimension for row in one.unknown} == {"processes"}
    assert not site.find(kinds=("squatter",)).findings


def test_memory_that_somebody_may_have_is_no_orphan(site: Site) -> None:
    """Whose GPUs are not all known, who has a part, a label of a job, what accounting does not reach: unknown."""
    held: Values = lambda _: {"util_pct": 0.0, "fb_used_mib": 20_480.0}  # noqa: E731
    leaves(site, 1, "g1", held)
    site.job(11, [None, None], node="g1", elapsed_s=None)
    leaves(site, 2, "g2", held)
    site.job(12, [], node="g2", alloc_tres="cpu=1,gres/shard=2", elapsed_s=None)
    leaves(site, 3, "g3", held, label="777")
    assert not site.find(kinds=("orphan-memory",)).findings
    leaves(site, 4, "g4", held)
    # The last that accounting knows of is that job 4 ended: what came later it would not know.
    assert not [one for one in site.find(kinds=("orphan-memory",)).findings if one.nodes == ("g4",)]
