"""The page of a job explains why it is reported, or why it is not."""

from __future__ import annotations

import pytest

from slurm_affinode.zombies import explain

from .zombie_history import Site, computes, squats, unmeasured


def test_page_explains_why_job_is_not_reported(site: Site) -> None:
    """The page of a busy job, and of one that is not measured."""
    site.job(1, [computes])
    site.job(2, [unmeasured], node="g2")
    page = site.explain("1")
    assert not page.findings
    assert "98.6" in page.gpus[0].verdicts[0].why_not
    assert len(page.gpus[0].slots) == 60
    unknown = site.explain("2")
    assert not unknown.gpus[0].gpu.measured
    assert all(one.activity_pct is None for one in unknown.gpus[0].slots)
    with pytest.raises(explain.NoAttemptError):
        site.explain("99")


def test_page_of_unmeasured_gpu_names_the_missing_signal(site: Site) -> None:
    """Activity is unknown, memory is known."""
    site.job(1, [unmeasured])
    (one,) = site.explain("1").gpus
    assert one.gpu.held_gib == pytest.approx(79_000 / 1024)
    assert [verdict.why_not for verdict in one.verdicts] == ["activity was not measured"] * 4


def test_timeline_of_short_job_has_no_gaps(site: Site) -> None:
    """It has no more columns than samples; idle time shorter than the window is shown as such."""
    site.job(1, [squats], hours=0.5)
    page = site.explain("1")
    assert page.answer.startswith("There are no findings for this job yet: GPU 0 on g1 has been idle for 30m of the 1h")
    assert len(page.gpus[0].slots) == 20
    assert all(slot.activity_pct == 0 for slot in page.gpus[0].slots)
