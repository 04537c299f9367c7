"""The page of a job explains why it is reported, or why it is not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.core.explanation import ASLEEP
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.zombies import explain

from .zombie_history import END, Site, computes, squats, unmeasured


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
    assert all(slot.activity_pct is None for slot in unknown.gpus[0].slots)
    with pytest.raises(explain.NoAttemptError):
        site.explain("99")


def test_page_of_unmeasured_gpu_names_the_missing_signal(site: Site) -> None:
    """Activity is unknown, memory is known."""
    site.job(1, [unmeasured])
    (gpu,) = site.explain("1").gpus
    assert gpu.gpu.held_gib == pytest.approx(79_000 / 1024)
    assert [verdict.why_not for verdict in gpu.verdicts] == ["activity was not measured"] * 4


def test_timeline_of_short_job_has_no_gaps(site: Site) -> None:
    """It has no more columns than samples; idle time shorter than the window is shown as such."""
    site.job(1, [squats], hours=0.5)
    page = site.explain("1")
    assert page.answer.startswith("There are no findings for this job yet: GPU 0 on g1 has been idle for 30m of the 1h")
    assert len(page.gpus[0].slots) == 20
    assert all(slot.activity_pct == 0 for slot in page.gpus[0].slots)


@pytest.mark.parametrize(("restored_h", "asleep"), [(None, True), (1, False)])
def test_page_of_a_sleeping_job_reports_its_state(site: Site, restored_h: float | None, asleep: bool) -> None:
    """Its GPU is idle because its job is frozen: the program is not at fault. The ledger has the last sleep."""
    site.job(1, [lambda minute: {"util_pct": 0.0, "fb_used_mib": 1.0}], hours=6)
    began = round((END - timedelta(hours=2)).timestamp() * 1000)
    restored = None if restored_h is None else round((END - timedelta(hours=restored_h)).timestamp() * 1000)
    site.write()
    with Repository.open(site.config.db_url) as store:
        store.upsert_suspensions([
            LedgerEntry("c", 1, 5, began, mode="inplace", parked_ms=began, restoring_ms=restored, restored_ms=restored)
        ])  # fmt: skip
    page = explain.explain(site.config, "1", now=END)
    (finding,) = [item for item in page.findings if item.kind == "idle-allocation"]
    assert (page.asleep, page.as_json()["asleep"]) == (asleep, asleep)
    assert page.answer.endswith(ASLEEP) is asleep
    assert ("find its GPU" in str(finding.advice)) is not asleep
    assert ("sleeps in place" in str(finding.advice)) is asleep


def test_id_of_several_jobs_is_refused(site: Site) -> None:
    """Neither the last task of an array nor the cluster that started its job last is meant."""
    site.job(8, [computes], array_job_id=9, array_task_id=1)
    site.job(7, [computes], array_job_id=9, array_task_id=0)
    site.job(1, [computes])
    site.job(1, [], cluster="d", node="c1")
    with pytest.raises(AffinodeError, match="9 is 2 jobs"):
        site.explain("9")
    with pytest.raises(AffinodeError, match="several clusters have a job 1: c, d"):
        site.explain("1")
    assert site.explain("9_1").job.job_id == 8
