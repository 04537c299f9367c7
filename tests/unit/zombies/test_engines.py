"""Findings about model servers in running jobs, from stored samples of their engines."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.core.cleanup_plan import decide, plan
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.engines.store import engine_store
from slurm_affinode.model.cleanup import Ledger
from slurm_affinode.model.finding import Finding
from slurm_affinode.slurm.accounting.schema import conform
from slurm_affinode.zombies.nodes import LiveGpu

from .zombie_live_site import NOW, Slurm, find, gpu, job, node, process

SUSPEND = '[[rule]]\ndiagnoses = ["idle"]\naction = "suspend"\nmin_score = 0.5\ngrace = "30m"\n'


def store(state: Path, end: datetime = NOW, **values: Any) -> None:
    """Store an hour of samples of an engine in job 1 that serves no requests."""
    config = dataclasses.replace(Config(), store=StoreConfig(state_dir=state))
    base = {"cluster": "c", "node": "g1", "address": "127.0.0.1:8000", "engine": "vllm", "model": "m", "job": "1",
            "user": "ann", "gpus": "GPU-0", "running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "generation_tokens": 100.0,
            "prompt_tokens": 100.0, "finished": 10.0, **values}  # fmt: skip
    rows = [{**base, "time": end - timedelta(seconds=30 * n)} for n in range(120, -1, -1)]
    with contextlib.closing(engine_store(config.serving_dir)) as engines:
        engines.ingest(conform(pl.DataFrame(rows), SAMPLES), source="test")


def about(tmp_path: Path, on_gpu: LiveGpu | None = None, **changes: Any) -> list[Finding]:
    findings = find(tmp_path, Slurm((job(1, **changes),), (node(),)), [[on_gpu or gpu()]], watch_s=None)
    return [finding for finding in findings.findings if finding.kind == "model-server"]


def test_idle_server_is_found_with_its_gpus(tmp_path: Path) -> None:
    store(tmp_path)
    (item,) = about(tmp_path)
    assert (item.variant, item.diagnosis, item.user) == ("idle", "idle", job(1).user)
    assert item.key.startswith("c/model-server:idle/job:1:")
    assert [(seen.node, seen.gpu, seen.flagged, seen.measured) for seen in item.gpus] == [("g1", "0", True, True)]
    assert item.since is not None
    assert NOW - item.since >= timedelta(minutes=50)
    assert item.held_gpu_hours == pytest.approx(1, abs=0.1)
    assert "vllm m at 127.0.0.1:8000" in item.summary


def test_idle_server_on_a_shard_is_found_with_its_share(tmp_path: Path) -> None:
    """Another job computes on the same GPU. Slurm lists no shards unless ``AccountingStorageTRES`` names them."""
    store(tmp_path)
    own_process = process(job=1, source="cgroup", used_mib=2048.0, sm_pct=0.0, memory_pct=0.0)
    other = process(pid=43, job=2, source="cgroup", sm_pct=99.0, memory_pct=50.0)
    shards: dict[str, Any] = {"gpus_allocated": None, "node_gpus": None, "tres_allocated": {"cpu": "1"}}
    (item,) = about(tmp_path, gpu(util=99.0, processes=(own_process, other)), **shards)
    (seen,) = item.gpus
    assert (seen.node, seen.gpu, seen.flagged, seen.shared) == ("g1", "0", True, True)
    assert (seen.held_gib, seen.activity_pct, seen.mapping) == (2.0, 0.0, "processes")
    assert (item.allocated_gpus, item.impact, item.held_gpu_hours, item.held_gib_hours) == (1, None, None, None)


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({"asleep": True}, {}),
        ({"job": "2"}, {}),
        ({"cluster": "other"}, {}),
        ({"end": NOW - timedelta(hours=2)}, {}),
        ({}, {"start": NOW + timedelta(seconds=1)}),
        ({}, {"state": "SUSPENDED"}),
    ],
)
def test_sleeping_other_or_old_engines_are_not_found(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any]
) -> None:
    store(tmp_path, **values)
    assert about(tmp_path, **changes) == []


def test_without_samples_of_engines_nothing_is_found(tmp_path: Path) -> None:
    assert about(tmp_path) == []


def test_idle_server_is_suspended_if_its_job_opted_in(tmp_path: Path) -> None:
    """Confidence, duration and age of the evidence decide, and a job that sleeps in place is left alone."""
    store(tmp_path)
    (item,) = about(tmp_path)
    policy = parse_policy(SUSPEND, where="z")
    assert decide(item, policy, Ledger(), NOW, opted_in={1}).verb == "suspend"
    assert decide(item, policy, Ledger(), NOW).code == "not-opted-in"
    assert decide(item, policy, Ledger(), NOW, opted_in={1}, asleep={1}).code == "asleep"
    assert decide(item, policy, Ledger(), NOW + timedelta(minutes=11), opted_in={1}).code == "stale"
    strict = parse_policy(SUSPEND.replace("30m", "2h"), where="z")
    assert decide(item, strict, Ledger(), NOW, opted_in={1}).code == "too-early"
    unsure = dataclasses.replace(item, score=0.4)
    assert decide(unsure, policy, Ledger(), NOW, opted_in={1}).code == "score"
    [limited] = plan([item], parse_policy(SUSPEND + "[limits]\nsuspend = 0", where="z"), Ledger(), NOW, opted_in={1})
    assert limited.code == "limit"


def test_owner_is_warned_of_other_diagnoses(tmp_path: Path) -> None:
    """A rule for one diagnosis does not apply to another."""
    store(tmp_path)
    (idle,) = about(tmp_path)
    stalled = dataclasses.replace(idle, variant="stalled")
    policy = parse_policy(SUSPEND, where="z")
    assert decide(stalled, policy, Ledger(), NOW, opted_in={1}).verb == "warn-user"
    assert stalled.key != idle.key
    quiet = parse_policy('[[rule]]\ndiagnoses = ["stalled"]\naction = "none"\n', where="z")
    assert decide(stalled, quiet, Ledger(), NOW).code == "rule"
    assert decide(idle, quiet, Ledger(), NOW).verb == "warn-user"
