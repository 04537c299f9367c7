"""Findings in recorded data of real clusters."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting import sacct
from slurm_affinode.zombies import explain, find
from slurm_affinode.zombies.find import Request

from .zombie_history import END, Site, Values, idle_findings


def test_clustercockpit_only_zero_averages_are_idle(shared_data: Path) -> None:
    """544 real jobs: only an average of exactly 0 is idle; memory does not matter."""
    path = shared_data / "clustercockpit" / "jobs.sqlite"
    result = find.clustercockpit(Config(), Request(), path)
    idle = idle_findings(result)
    assert {item.job.job_id for item in idle if item.job} == {
        679909, 679896, 679908, 679797, 679772, 679713, 679783, 679884, 679743,
    }  # fmt: skip
    assert {item.variant for item in idle} == {"never-used"}
    assert {item.impact for item in idle} == {None}  # without submit times, pending jobs are unknown
    assert sum(finding.kind == "time-limit" for finding in result.findings) == 52
    assert all(gpu.peak_pct == 0 for item in idle for gpu in item.flagged_gpus)
    # The memory size of the GPUs is not in the data, so none can be a squatter.
    assert not [finding for finding in result.findings if finding.kind == "squatter"]
    assert len(idle_findings(find.clustercockpit(Config(), Request(window_s=60), path))) == 66


def test_jobanalyzer_without_gpu_history_has_no_findings(shared_data: Path, tmp_path: Path) -> None:
    """84 real GPU allocations, one of them a TIMEOUT: all are unknown, which is reported."""
    read = sacct.read(shared_data / "jobanalyzer" / "sacct_p.txt")
    config = replace(Config(), store=StoreConfig(state_dir=tmp_path))
    with Repository.open(config.db_url) as store:
        store.upsert(read.jobs, read.steps)
    since, until = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    findings = find.find(config, Request(since=since, until=until))
    assert findings.jobs == 84
    assert not idle_findings(findings)
    assert findings.unmeasured >= 84
    assert any("no GPU metrics" in note for note in findings.notes)
    page = explain.explain(config, "1639021", now=until)
    assert page.job.state == "TIMEOUT"
    assert not page.findings
    assert any("not known" in note for note in page.notes)


def test_jobstats_gpu_without_entry_is_not_idle(shared_data: Path, site: Site) -> None:
    """Job 46044267 ended with TIMEOUT; one GPU has no utilization entry, the other is at 9.5 %. Neither is reported."""
    rows = json.loads((shared_data / "jobstats" / "js1_decoded.json").read_text())
    (nodes,) = (row["stats"]["nodes"] for row in rows if "|46044267|" in row["sacct"])
    ((node, stats),) = nodes.items()

    def gpu(index: str) -> Values:
        util, used = stats.get("gpu_utilization", {}).get(index), stats["gpu_used_memory"][index] / 2**20
        return lambda _: {"util_pct": util, "fb_used_mib": used}

    assert "2" not in stats["gpu_utilization"]
    end = END - timedelta(minutes=1)
    site.job(46044267, [gpu(index) for index in stats["gpu_total_memory"]], node=node, state="TIMEOUT", end=end)
    findings = site.find(window_s=600)
    assert not idle_findings(findings)
    assert findings.unmeasured == 1
