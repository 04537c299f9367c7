"""Synthetic findings for tests of actions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from slurm_affinode.model.finding import Evidence, Finding, GpuEvidence, JobAttempt, NodeRef, ProcessRef

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
"""A Wednesday."""
HOSTILE = "<script>alert('x')</script>\r\nBcc: all@example.org\x1b[2J{{ 7*7 }}"


def evidence(dimension: str, *, met: bool = True, weight: float = 0.4, **values: Any) -> Evidence:
    base = Evidence(dimension, 0.0, "%", "at most 5 %", weight, f"{dimension} speaks against it", met=met)
    return replace(base, **values)


def gpu(index: int = 0, **values: Any) -> GpuEvidence:
    base = GpuEvidence("n1", str(index), f"GPU-{index}", "H100", 77.0, 80.0, 0.0, 0.0, 60.0, idle_s=7200.0,
                       measured=True, flagged=True, mapping="slurm")  # fmt: skip
    return replace(base, **values)


def job(**values: Any) -> JobAttempt:
    base = JobAttempt(7, "7", NOW - timedelta(hours=9), NOW - timedelta(hours=8), None, "train", "RUNNING", 86400.0,
                  batch=True)  # fmt: skip
    return replace(base, **values)


def squatter(*, idle: timedelta = timedelta(hours=3), **values: Any) -> Finding:
    """A job that computed, and has been idle for ``idle``."""
    subject = values.pop("subject", job())
    base = Finding(
        "squatter", "alpha", subject, "alice", "vision", "gpu", "normal", ("n1",), (gpu(),), NOW - idle, 3600.0, 0.95,
        (evidence("memory"), evidence("compute"), evidence("time", weight=0.2)), 3.0, 240.0, None, "live", NOW,
        allocated_gpus=1,
    )  # fmt: skip
    return replace(base, **values)


def orphan(**values: Any) -> Finding:
    base = squatter(kind="orphan-process", subject=ProcessRef("n1", 4242, 99887, "python", 2001, "7"))
    return replace(base, **{"since": NOW - timedelta(minutes=10), **values})


def lost(**values: Any) -> Finding:
    """A process of job 7 whose server has ended ten minutes ago."""
    subject = ProcessRef("n1", 4242, 99887, "VLLM::EngineCore", 2001, "7", job())
    base = squatter(kind="orphaned-engine", subject=subject, since=NOW - timedelta(minutes=10), score=1.0)
    return replace(base, **values)


def node(kind: str = "drained-kill-failed", **values: Any) -> Finding:
    base = squatter(kind=kind, subject=NodeRef("n1", reason="Kill task failed"), user=None)
    return replace(base, **values)
