"""Everything that is known of one run of a job and the GPUs that it holds: what its page shows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurm_affinode.core.signature import Verdict
from slurm_affinode.model.finding import Finding, GpuEvidence, JobRef, plain


@dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of time on one GPU. ``None``: not measured."""

    start: datetime
    activity_pct: float | None
    """The largest mean of all signals."""
    memory_gib: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class GpuPage:
    """One GPU of the job."""

    gpu: GpuEvidence
    verdicts: tuple[Verdict, ...]
    """Of every signature."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one run of a job."""

    job: JobRef
    cluster: str
    user: str | None
    account: str | None
    partition: str | None
    qos: str | None
    nodes: tuple[str, ...]
    allocated_gpus: int | None
    since: datetime
    until: datetime
    findings: tuple[Finding, ...]
    gpus: tuple[GpuPage, ...]
    notes: tuple[str, ...]
    runs: int
    """Runs that the job has had; the last one is explained."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "job": plain(self.job), "cluster": self.cluster, "user": self.user, "account": self.account,
            "partition": self.partition, "qos": self.qos, "nodes": list(self.nodes),
            "allocated_gpus": self.allocated_gpus, "since": self.since, "until": self.until,
            "findings": [one.as_json() for one in self.findings],
            "gpus": [
                {**plain(page.gpu), "timeline": plain(page.slots),
                 "signatures": [{"name": one.signature.name, "fits": one.fits, "score": round(one.score, 3),
                                 "why_not": one.why_not, "evidence": plain(one.evidence)} for one in page.verdicts]}
                for page in self.gpus
            ],
            "notes": list(self.notes),
        }  # fmt: skip
