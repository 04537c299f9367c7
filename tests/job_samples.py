"""A summary of a job with every part of its page; the figures are invented."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from slurm_affinode.model.finding import JobAttempt
from slurm_affinode.model.job_summary import (
    USES,
    Advice,
    GpuUse,
    IdleWindow,
    JobFinding,
    JobSummary,
    JobSuspension,
    ResourceUse,
)

START = datetime(2026, 11, 2, 8, tzinfo=UTC)
END = START + timedelta(hours=12)
SLOTS = 48


def job_summary(names: Sequence[str] = ()) -> JobSummary:
    """Return the summary of an ended job: GPUs busy, idle and unmeasured, two windows, a suspension, findings.

    ``names`` are used in turn for names and texts that users or other programs choose.
    """

    def named(number: int, usual: str) -> str:
        return names[number % len(names)] if names else usual

    job = JobAttempt(4711, "4711", START, START, END, named(0, "train"), "COMPLETED", 86400.0)
    gpus = tuple(_gpu(named(1, "gpu01"), number) for number in range(4))
    uses = tuple(
        ResourceUse(key, None if key == "memory" else 0.17 * (number + 1), 2.0, 12.0, "s" if number == 0 else "GiB",
                    "not-recorded" if key == "memory" else None)
        for number, key in enumerate(USES)
    )  # fmt: skip
    window = IdleWindow(START + timedelta(hours=2), START + timedelta(hours=7), (gpus[1].name, gpus[2].name))
    return JobSummary(
        job=job, cluster=named(2, "alpha"), user=named(3, "ann"), uid=4711, account=named(4, "lab"),
        partition=named(5, "gpu"), qos="normal", nodes=(named(1, "gpu01"),), cpus=32, memory_gib=256.0, gpu_count=4,
        gpu_models=(named(6, "NVIDIA H100 80GB HBM3"),), until=END, suspended_s=0.0, slot_s=900.0, uses=uses, gpus=gpus,
        idle_windows=(window,),
        suspensions=(
            JobSuspension(START + timedelta(hours=8), "requeue", "restored", "idle", named(1, "gpu01"),
                          named(1, "gpu02"), 3600.0, 4.0, None),
            JobSuspension(START + timedelta(hours=10), "requeue", "failed", "idle", named(1, "gpu01"), None, None, None,
                          named(7, "a file has changed")),
        ),
        findings=(JobFinding("idle-allocation", "partly-used", 0.9, named(8, "2 of 4 GPUs were idle")),),
        verdict="Two of four GPUs were hardly used.",
        advice=(Advice("request-fewer-gpus", named(9, "Request two GPUs"), 20.0), Advice("suspend-idle", "Suspend it")),
        notes=(named(10, "GPU 3 was not measured"),), source="database", generated=END,
    )  # fmt: skip


def _gpu(node: str, number: int) -> GpuUse:
    """Return a GPU that is busy (0), idle for a time (1, 2) or not measured (3)."""
    length = (END - START).total_seconds()
    idle = 0.0 if number == 0 else 5 * 3600.0
    measured = number < 3
    activity = [None if not measured else 0.0 if number and 8 <= slot < 28 else 85.0 for slot in range(SLOTS)]
    return GpuUse(
        node, str(number), f"GPU-{number}", "NVIDIA H100 80GB HBM3", "labels" if measured else None, False,
        length - idle if measured else 0.0, 0.0, idle if measured else 0.0, 0.0 if measured else length,
        70.0 if measured else None, 40.0 if measured else None, 80.0, idle if measured else None, tuple(activity),
    )  # fmt: skip
