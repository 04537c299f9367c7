"""Pending jobs that could use the GPUs of a finding."""

from __future__ import annotations

from datetime import timedelta

import pytest

from .zombie_history import END, Site, computes, idle_findings, squats


def test_pending_jobs_that_fit_are_counted(site: Site) -> None:
    """They match in partition, number and type of GPUs; only the overlapping time counts."""
    site.job(1, [squats])
    site.waits(10, 2)
    site.waits(11, 30)
    site.waits(12, 2, req_gpus=2)
    site.waits(13, 2, partition="cpu")
    site.waits(14, 2, req_tres="cpu=1,gres/gpu=1,gres/gpu:h100=1")
    (idle_finding,) = idle_findings(site.find())
    assert idle_finding.impact is not None
    assert (idle_finding.impact.jobs, idle_finding.impact.startable) == (2, 1)
    assert idle_finding.impact.longest_s == pytest.approx(4 * 3600, abs=120)
    assert idle_finding.impact.waited_s == pytest.approx(6 * 3600, abs=240)
    assert set(idle_finding.impact.examples) == {"10", "11"}


def test_jobs_pending_for_other_reasons_are_not_counted(site: Site) -> None:
    """Held, dependent, at a limit, or needing more nodes; jobs canceled or started later waited until then."""
    site.job(1, [squats, squats])
    reasons = ("JobHeldUser", "Dependency", "BeginTime", "QOSMaxGRESPerUser", "AssocGrpGRES")
    for number, reason in enumerate(reasons):
        site.waits(20 + number, 2, reason=reason)
    site.waits(30, 2, req_gpus=2, req_tres="cpu=2,node=2,gres/gpu=2")
    site.waits(31, 3, state="CANCELLED", end=END - timedelta(hours=1), reason="None")
    later = {"state": "RUNNING", "start": END + timedelta(hours=1), "gpus": 1, "nodes": 1, "node_list": "g9"}
    site.waits(32, 1, **later)
    (idle_finding,) = idle_findings(site.find(until=END))
    assert idle_finding.impact is not None
    assert set(idle_finding.impact.examples) == {"31", "32"}
    assert idle_finding.impact.waited_s == pytest.approx(3 * 3600, abs=240)


def test_array_tasks_are_counted_individually(site: Site) -> None:
    """Ten tasks in one record are ten jobs; the limit of the array lets three start at once."""
    site.job(1, [squats] * 8)
    site.waits(10, 2, array_job_id=10, array_spec="0-9%3")
    (idle_finding,) = idle_findings(site.find())
    assert idle_finding.impact is not None
    assert (idle_finding.impact.jobs, idle_finding.impact.startable, idle_finding.impact.examples) == (
        10,
        3,
        ("10_[0-9%3]",),
    )
    assert idle_finding.impact.waited_s == pytest.approx(20 * 3600, abs=2400)
    assert idle_finding.impact.longest_s == pytest.approx(2 * 3600, abs=120)


def test_pending_jobs_are_compared_with_the_idle_gpus(site: Site) -> None:
    """Another GPU of the node has another type, and so had the GPU of an earlier attempt."""
    site.job(1, [squats], gpu_type=None)
    site.job(2, [computes])
    for sample in site.samples:
        sample["model"] = "Tesla T4" if sample["job"] == "2" else sample["model"]
    earlier = {"start": END - timedelta(hours=3), "end": END - timedelta(hours=2), "node_list": "g9"}
    site.job(1, [None], submit=END - timedelta(hours=9), state="REQUEUED", gpu_type="t4", **earlier)
    site.waits(10, 2, req_tres="cpu=1,gres/gpu=1,gres/gpu:a100=1")
    (idle_finding,) = idle_findings(site.find())
    assert idle_finding.impact is not None
    assert idle_finding.impact.examples == ("10",)
