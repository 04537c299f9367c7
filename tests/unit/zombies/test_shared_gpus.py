"""Shared GPUs in a stored history: samples of the whole GPU say little about each job."""

from __future__ import annotations

from .zombie_history import Site, Values, computes, idle_findings, squats


def share(site: Site, values: Values, *jobs: int) -> None:
    """Add jobs with shards of one GPU, named in the labels of its samples."""
    site.job(jobs[0], [values])
    sample = [row for row in site.samples if row["job"] == str(jobs[0])]
    for number in jobs[1:]:
        site.job(number, [])
        site.samples += [{**row, "job": str(number)} for row in sample]
    for row in site.jobs:
        row.update(gpus=0)


def test_memory_of_jobs_on_shared_gpu_is_unknown(site: Site) -> None:
    """If the GPU is idle, all its jobs are; if it is busy, each of them is unknown."""
    share(site, squats, 1, 2)
    findings = site.find()
    assert [
        (idle_finding.kind, idle_finding.variant, idle_finding.held_gpu_hours, idle_finding.impact)
        for idle_finding in idle_findings(findings)
    ] == [("idle-allocation", "never-used", None, None)] * 2
    assert {gpu.held_gib for idle_finding in idle_findings(findings) for gpu in idle_finding.gpus} == {None}
    assert [row.fits for row in site.explain("1").gpus[0].verdicts] == [False, True, False, True]


def test_job_on_busy_shared_gpu_is_unknown(site: Site) -> None:
    share(site, computes, 1, 2)
    assert not idle_findings(site.find())
    page = site.explain("2")
    assert page.answer == "There are no findings for this job: its GPUs were not measured."


def test_only_job_on_shared_gpu_is_judged_by_its_samples(site: Site) -> None:
    """The labels name no other job."""
    share(site, squats, 1)
    assert [idle_finding.kind for idle_finding in idle_findings(site.find())] == ["squatter"]
