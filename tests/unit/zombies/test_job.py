"""Summaries of jobs: use, idle windows, verdict and advice, consistent with the report; unknown is unknown."""

from __future__ import annotations

import json
import os
import pwd
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config, PublishedJobsConfig, StoreConfig
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.node_config import SuspendConfig
from slurm_affinode.db.repository import Repository
from slurm_affinode.demo import histories
from slurm_affinode.demo.histories import build_demo
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.job_summary import JobSummary
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.pipeline import job_files, report
from slurm_affinode.slurm.accounting.schema import STEPS, conform
from slurm_affinode.zombies import job
from slurm_affinode.zombies.explain import NoAttemptError

from .zombie_history import END, Site, computes, unmeasured
from .zombie_live_site import Slurm, client, sampler
from .zombie_live_site import gpu as live_gpu
from .zombie_live_site import job as slurm_job
from .zombie_live_site import node as slurm_node

GIB = 1 << 30


def idle(minute: int) -> dict[str, float | None]:
    """A GPU that does nothing."""
    return {"util_pct": 0.0, "fb_used_mib": 500.0, "power_w": 60.0}


def then_idle(minute: int) -> dict[str, float | None]:
    """A GPU that computes for an hour."""
    return computes(minute) if minute < 60 else idle(minute)


def summarize(site: Site, name: str, **more: Any) -> JobSummary:
    site.write()
    return job.summarize(site.config, name, now=END, **more)


def use(summary: JobSummary, key: str) -> tuple[float | None, str | None]:
    item = next(each for each in summary.uses if each.key == key)
    return item.share, item.reason


@pytest.mark.parametrize("synthetic", [False, True])
def test_hours_are_those_of_the_report(tmp_path: Path, synthetic: bool) -> None:
    """Idle, low, busy, peaks and longest windows of each job agree with the report, which computes them another way."""
    history = histories.synthetic(days=2, seed=3) if synthetic else histories.recorded()
    build_demo(tmp_path, history)
    config = replace(Config(), store=StoreConfig(state_dir=tmp_path / "state"))
    now = datetime(2026, 12, 1, tzinfo=UTC)
    query = WasteQuery(now - timedelta(days=90), now, thresholds=report.thresholds(config))
    rows = report.analyse_stored(config, query, now=now).jobs
    with Repository.open(config.db_url) as store, closing(SampleStore(config.history_dir)) as samples:
        made = job.summaries(config, store, samples, store.jobs(query.since, query.until), now)
    assert {figure.key for figure in made} >= {
        tuple(key) for key in rows.select("cluster", "job_id", "submit").iter_rows()
    }
    by_key = {figure.key: figure for figure in made}
    for row in rows.iter_rows(named=True):
        gpus = by_key[row["cluster"], row["job_id"], row["submit"]].gpus
        for state in ("idle", "low", "busy"):
            hours = sum(getattr(gpu, f"{state}_s") for gpu in gpus) / 3600
            assert hours == pytest.approx(row[f"gpu_hours_{state}"] or 0.0, abs=1e-6)
        known = [gpu.longest_idle_s for gpu in gpus if gpu.longest_idle_s is not None]
        assert max(known, default=None) == row["longest_idle_s"]
        peaks = [gpu.memory_peak_gib for gpu in gpus if gpu.memory_peak_gib is not None]
        assert max(peaks, default=None) == row["fb_peak_gib"]


def test_unused_gpus_are_not_to_be_requested(site: Site) -> None:
    """The saving is the whole time of the GPUs that were never active."""
    site.job(1, [computes, idle, idle, idle], end=END, state="COMPLETED")
    made = summarize(site, "1")
    assert made.verdict == "Partly used: 3 of 4 GPUs were never active; 12 of 16 GPU-hours were idle."
    first = made.advice[0]
    assert (first.code, first.text) == ("request-fewer-gpus", "4 GPUs requested, 1 used: request 1.")
    assert first.gpu_hours == pytest.approx(12)
    assert made.idle_windows[0].gpus == ("g1:1", "g1:2", "g1:3")


def test_gpu_measured_in_part_is_not_called_superfluous(site: Site) -> None:
    """Its busy hour may be the unmeasured one."""
    site.job(1, [computes, lambda minute: idle(minute) if minute < 120 else {"util_pct": None}],
             end=END, state="COMPLETED")  # fmt: skip
    made = summarize(site, "1")
    assert "request-fewer-gpus" not in [refusal.code for refusal in made.advice]
    assert "75 % of its GPU time was measured" in made.verdict


@pytest.mark.parametrize("offered", [True, False])
def test_idle_time_at_the_end_leads_to_the_option(site: Site, offered: bool) -> None:
    """Three hours less the window of 15 minutes, for two GPUs; only where the site has image stores."""
    if offered:
        site.config = replace(site.config, suspend=SuspendConfig(shared_store=Path("/shared/images")))
    site.job(1, [then_idle, then_idle], end=END, state="TIMEOUT", submit_line="sbatch job.sh")
    made = summarize(site, "1")
    assert made.verdict == "Mostly idle: 6 of 8 GPU-hours were idle."
    advice = {refusal.code: refusal for refusal in made.advice}
    assert ("suspend-idle" in advice) is offered
    if offered:
        assert advice["suspend-idle"].text == (
            "Its 2 GPUs were idle for 3h at the end: --gpu-suspend-idle=15m frees them."
        )
        assert advice["suspend-idle"].gpu_hours == pytest.approx(5.5)


@pytest.mark.parametrize("more", [{"submit_line": "srun --pty bash"}, {"nodes": 2, "node_list": "g[1-2]"},
                                  {"submit_line": "sbatch --gpu-suspend-idle=1h x.sh"}])  # fmt: skip
def test_option_is_not_advised_where_it_does_not_apply(site: Site, more: dict[str, Any]) -> None:
    """It takes batch jobs on one node, and the job may have it already."""
    site.config = replace(site.config, suspend=SuspendConfig(shared_store=Path("/shared/images")))
    site.job(1, [then_idle, then_idle], end=END, state="TIMEOUT", **more)
    assert "suspend-idle" not in [refusal.code for refusal in summarize(site, "1").advice]


def test_cpu_and_memory_are_those_of_seff(site: Site) -> None:
    """Core time used of allocated; the largest step, its tasks together, of the memory allocated."""
    site.job(1, [computes], end=END, state="COMPLETED", cpus=8, total_cpu_s=4 * 3600.0 * 2, alloc_mem_bytes=80 * GIB,
             max_rss_bytes=6 * GIB)  # fmt: skip
    site.write()
    assert use(summarize(site, "1"), "cpu") == (0.25, None)
    assert use(summarize(site, "1"), "memory") == (pytest.approx(6 / 80), None)
    steps = pl.DataFrame([
        {"cluster": "c", "job_id": 1, "submit": END - timedelta(hours=4), "step_id": step, "tasks": tasks,
         "max_rss_bytes": peak * GIB} for step, tasks, peak in (("batch", 1, 5), ("0", 4, 6))
    ])  # fmt: skip
    with Repository.open(site.config.db_url) as store:
        jobs = store.find_job(1)
        store.upsert(jobs, conform(steps, STEPS))
    made = job.summarize(site.config, "1", now=END)
    assert use(made, "memory") == (pytest.approx(24 / 80), None)
    assert next(item.note for item in made.uses if item.key == "memory") == "at most"


def test_unused_memory_of_gpu_job_is_advised(site: Site) -> None:
    """Asks for 80 GiB, uses 6: the rule for jobs without GPUs, which the clean-up does not apply to GPU jobs."""
    site.job(1, [computes], end=END, state="COMPLETED", alloc_mem_bytes=80 * GIB, max_rss_bytes=6 * GIB)
    (advice,) = summarize(site, "1").advice
    assert advice.text.startswith("6.0 of 80 GiB used;")
    assert advice.text.endswith("--mem=7G would have been enough.")


def test_unknown_is_unknown_with_its_reason(site: Site) -> None:
    """A running job, GPUs without samples, a cluster that does not count GPUs: no zero, and no advice."""
    site.job(1, [unmeasured], timelimit_s=None)
    site.job(2, [None], node="g2", end=END, state="COMPLETED")
    site.job(3, [], node="g3", end=END, state="COMPLETED")
    site.jobs[-1]["gpus"] = None
    running, dark, uncounted = (summarize(site, str(number)) for number in (1, 2, 3))
    assert use(running, "cpu") == use(running, "memory") == (None, "running")
    assert use(running, "time_limit") == (None, "no-limit")
    assert use(running, "gpu_busy") == (None, "not-measured")
    assert use(dark, "gpu_busy") == use(dark, "gpu_memory") == (None, "not-mapped")
    assert use(dark, "cpu") == (None, "not-recorded")
    assert use(uncounted, "gpu_utilization") == (None, "not-counted")
    assert all(item.verdict.startswith("Unknown: ") and not item.advice for item in (running, dark, uncounted))


def test_time_suspended_by_slurm_is_not_idle(site: Site) -> None:
    """When it was is not recorded, so as much idle time is unknown."""
    site.job(1, [then_idle], end=END, state="COMPLETED", suspended_s=3600)
    made = summarize(site, "1")
    assert (made.gpus[0].idle_s, made.gpus[0].unknown_s) == (2 * 3600, 3600)
    assert any("Slurm had suspended the job for 1h" in note for note in made.notes)


def test_attempts_of_requeued_job(site: Site) -> None:
    """The last one, unless another is chosen; each says how many there are."""
    site.job(1, [computes], hours=2, end=END - timedelta(hours=1), state="PREEMPTED", submit=END - timedelta(hours=9))
    site.job(1, [idle], hours=1, end=END, state="COMPLETED")
    last, first = summarize(site, "1"), summarize(site, "1", attempt=1)
    assert (last.attempt, last.attempts, last.job.state) == (2, 2, "COMPLETED")
    assert (first.attempt, first.attempts, first.job.state) == (1, 2, "PREEMPTED")
    assert summarize(site, "1", attempt=-2).key == first.key
    with pytest.raises(NoAttemptError, match="job 1 has no attempt 3: there are 2"):
        summarize(site, "1", attempt=3)


def test_ids_as_users_type_them(site: Site) -> None:
    """Array tasks and components of heterogeneous jobs; an array as a whole is several jobs."""
    site.job(11, [computes], end=END, state="COMPLETED", array_job_id=10, array_task_id=4)
    site.job(10, [computes], node="g2", end=END, state="COMPLETED", array_job_id=10, array_task_id=5)
    site.job(21, [], node="g3", end=END, state="COMPLETED", het_job_id=20, het_offset=1)
    assert summarize(site, "10_4").job.job_id == 11
    assert summarize(site, "20+1").job.id == "20+1"
    with pytest.raises(AffinodeError, match="abc' is not a job ID"):
        summarize(site, "abc")


def test_job_that_never_started_is_reported_as_such(site: Site) -> None:
    """A pending job and a canceled one are known, and have nothing to show."""
    site.waits(5, 1, reason="Priority")
    site.waits(6, 2, state="CANCELLED", end=END)
    site.job(1, [computes])
    with pytest.raises(NoAttemptError, match=r"had not started when accounting was ingested: PENDING \(Priority\)"):
        summarize(site, "5")
    with pytest.raises(NoAttemptError, match="job 6 never started: CANCELLED"):
        summarize(site, "6")
    with pytest.raises(NoAttemptError, match="no attempt of job 99 is stored"):
        summarize(site, "99")


def test_id_in_several_clusters_needs_a_choice(site: Site) -> None:
    """The line names the clusters and the option."""
    site.job(1, [], end=END, state="COMPLETED")
    site.job(1, [], end=END, state="FAILED", cluster="d")
    with pytest.raises(AffinodeError, match="several clusters have a job 1: c, d") as error:
        summarize(site, "1")
    assert "--cluster" in (error.value.hint or "")
    assert summarize(site, "1", cluster="d").job.state == "FAILED"


def test_suspensions_come_from_the_ledger(site: Site) -> None:
    """With the GPU-hours given back; the job has the option already."""
    site.config = replace(site.config, suspend=SuspendConfig(shared_store=Path("/shared/images")))
    site.job(1, [then_idle, then_idle], end=END - timedelta(minutes=1), state="REQUEUED")
    site.write()
    began = round((END - timedelta(hours=2)).timestamp() * 1000)
    with Repository.open(site.config.db_url) as store:
        store.upsert_suspensions([
            LedgerEntry("c", 1, 5, began, mode="requeue", gpus=2, queued_ms=began, restoring_ms=began + 3_600_000,
                        restored_ms=began + 3_600_000, node="g1", restored_node="g2"),
            LedgerEntry("c", 2, 5, began, mode="requeue", gpus=2, queued_ms=began),
        ])  # fmt: skip
    made = job.summarize(site.config, "1", now=END)
    (suspension,) = made.suspensions
    assert (suspension.outcome, suspension.gpu_hours, suspension.asleep_s, suspension.restored_node) == (
        "restored",
        2.0,
        3600.0,
        "g2",
    )
    assert "suspend-idle" not in [each.code for each in made.advice]


def test_json_form_is_read_back(site: Site) -> None:
    """The same summary, from text; another version or a wrong type is an error, a use of a later release left out."""
    site.job(1, [computes, then_idle], end=END, state="COMPLETED", cpus=8, total_cpu_s=100.0)
    made = summarize(site, "1")
    text = json.dumps(made.as_json())
    again = JobSummary.from_json(json.loads(text))
    assert again.as_json() == json.loads(text)
    for key, value in (
        ("version", 2),
        ("version", 10**400),
        ("gpus", {}),
        ("until", "yesterday"),
        ("until", "2026-11-01T00:00:00"),
    ):
        with pytest.raises(ValueError, match=r".+"):
            JobSummary.from_json({**json.loads(text), key: value})
    later = json.loads(text)
    later["uses"][0]["key"] = "luck"
    assert [use.key for use in JobSummary.from_json(later).uses] == [use.key for use in made.uses[1:]]


def test_nightly_publishes_what_is_new(site: Site, tmp_path: Path) -> None:
    """Jobs that ended since the last publication, and running ones; earlier lines stay. Another directory gets all."""
    uid = os.geteuid() or 65534
    name = pwd.getpwuid(uid).pw_name
    tmp_path.chmod(0o755)
    site.job(1, [computes], hours=3, end=END - timedelta(days=9), submit=END - timedelta(days=9, hours=4), user=name,
             state="COMPLETED")  # fmt: skip
    site.jobs[-1]["start"] = END - timedelta(days=9, hours=3)
    site.job(2, [idle], hours=2, user=name, node="g2")
    site.job(3, [], hours=2, end=END, user="nobody-here", node="g3", state="COMPLETED")

    def publish(directory: Path) -> list[str]:
        jobs = PublishedJobsConfig(directory, "30d")
        config = replace(site.config, nightly=replace(site.config.nightly, jobs=jobs))
        messages: list[str] = []
        with Repository.open(config.db_url) as store, closing(SampleStore(config.history_dir)) as samples:
            assert job.publish(config, store, samples, END, messages.append) == 1
        return messages

    site.write()
    assert publish(tmp_path / "jobs") == [
        f"  2 jobs of 1 user in {tmp_path / 'jobs'}",
        "  1 user skipped: unknown on this machine, or with another UID in accounting",
    ]
    first = job_files.read(tmp_path / "jobs", "1", uid=uid)
    assert (first.job.state, first.source) == ("COMPLETED", "published")
    assert job_files.read(tmp_path / "jobs", "2", uid=uid).job.end is None
    with Repository.open(site.config.db_url) as store:
        store.delete_before(END - timedelta(days=5))  # not read again: it was published before
    assert publish(tmp_path / "jobs")[0].startswith("  2 jobs of 1 user")
    assert job_files.read(tmp_path / "jobs", "1", uid=uid) == first
    publish(tmp_path / "elsewhere")
    assert job_files.read(tmp_path / "elsewhere", "1", uid=uid) == first


def test_live_summary_needs_no_database(tmp_path: Path) -> None:
    """State from slurmctld and the nodes: no hours, and no advice."""
    config = replace(Config(), store=StoreConfig(state_dir=tmp_path / "none"))
    slurm = Slurm((slurm_job(1), slurm_job(2)), (slurm_node(),))
    made = job.summarize_live(config, "1", sampler([[live_gpu(util=80.0)]]), slurm=client(slurm))
    assert (made.source, made.job.state, made.uid) == ("live", "RUNNING", 1001)
    assert made.verdict == "Only the present is known: 1 of 1 GPU is busy."
    assert made.gpus[0].activity_pct[-1] == 80.0
    assert set(made.gpus[0].activity_pct[:-1]) == {None}
    assert use(made, "cpu") == (None, "running")
    assert use(made, "gpu_busy") == (None, "not-mapped")
    assert not made.advice
    with pytest.raises(NoAttemptError):
        job.summarize_live(config, "9", sampler([[live_gpu()]]), slurm=client(slurm))
