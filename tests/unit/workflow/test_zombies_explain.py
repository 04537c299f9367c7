"""The page of one job: why it is found, or why not."""

from __future__ import annotations

import pytest
from zombie_history import Site, computes, squats, unmeasured

from slurm_affinode.workflow import zombie_explain


def test_an_explanation_says_why_nothing_is_held_against_a_job(site: Site) -> None:
    """The page of a job at work, and of one that is not measured."""
    site.job(1, [computes])
    site.job(2, [unmeasured], node="g2")
    page = site.explain("1")
    assert not page.findings
    assert "98.6" in page.gpus[0].verdicts[0].why_not
    assert len(page.gpus[0].slots) == 60
    unknown = site.explain("2")
    assert not unknown.gpus[0].gpu.measured
    assert all(one.activity_pct is None for one in unknown.gpus[0].slots)
    with pytest.raises(zombie_explain.UnknownJobError):
        site.explain("99")


def test_the_page_of_a_gpu_without_a_signal_says_what_is_missing(site: Site) -> None:
    """Activity, and not memory, which is known."""
    site.job(1, [unmeasured])
    (one,) = site.explain("1").gpus
    assert one.gpu.held_gib == pytest.approx(79_000 / 1024)
    assert [verdict.why_not for verdict in one.verdicts] == ["activity was not measured"] * 4


def test_the_time_line_of_a_short_job_has_no_holes(site: Site) -> None:
    """No more columns than there are samples; what is idle for less than the window is said so."""
    site.job(1, [squats], hours=0.5)
    page = site.explain("1")
    assert page.answer.startswith("Nothing is held against this job yet: GPU 0 on g1 does nothing for 30m of the 1h")
    assert len(page.gpus[0].slots) == 20
    assert all(slot.activity_pct == 0 for slot in page.gpus[0].slots)
