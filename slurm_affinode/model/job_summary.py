"""Summary of one attempt of a job for its owner: use of the allocation, GPUs over time, idle windows, advice.

``None`` is unknown and never 0. Times are aware UTC, spans are seconds, memory is GiB (2**30 bytes). The JSON form is
that of ``slurm-affinode job --json`` and of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from slurm_affinode.base import json_values
from slurm_affinode.model.finding import JobAttempt, plain

VERSION = 1

USES: Mapping[str, str] = {
    "time_limit": "time limit",
    "cpu": "CPU",
    "memory": "memory",
    "gpu_busy": "GPUs busy",
    "gpu_utilization": "GPU utilization",
    "gpu_memory": "GPU memory",
}
"""Key of a use -> its label."""

REASONS: Mapping[str, str] = {
    "running": "accounting has it once the job has ended",
    "not-recorded": "not recorded in accounting",
    "no-limit": "the job has no time limit, or accounting does not record it",
    "not-counted": "accounting does not count the GPUs of this cluster",
    "not-mapped": "it is not known which GPUs the job had",
    "not-measured": "its GPUs were not measured",
    "no-signal": "the GPU metrics do not have it",
    "shared": "the GPU is shared, and the metrics are those of all its jobs",
}
"""Code -> why a use is unknown."""


class LaterFormatError(ValueError):
    """The summary has a version of the format that only later releases know."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Use of one resource by the job."""

    key: str
    """A key of ``USES``."""
    share: float | None
    """Used share of the allocation, 0-1, rarely above; ``None``: unknown."""
    used: float | None
    total: float | None
    unit: str
    """Unit of ``used`` and ``total``: ``s``, ``core-hours``, ``GiB``, ``GPU-hours``, ``%``."""
    reason: str | None = None
    """A key of ``REASONS``, if the share is unknown."""
    note: str = ""
    """A limit of the figure, in a few words."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU during the attempt. The four times sum to the examined time of the attempt."""

    node: str | None
    gpu: str
    """Index on the node, else UUID or PCI address; ``?`` if unknown."""
    uuid: str | None
    model: str | None
    mapping: str | None
    """A key of ``finding.MAPPINGS``: how the GPU was mapped to the job."""
    shared: bool
    """Other jobs may have used it at the same time."""
    busy_s: float
    low_s: float
    idle_s: float
    unknown_s: float
    utilization_pct: float | None
    """Mean of the driver's utilization."""
    memory_peak_gib: float | None
    memory_total_gib: float | None
    longest_idle_s: float | None
    activity_pct: tuple[float | None, ...]
    """Mean of the busiest signal in each slot (``JobSummary.slot_s``) from the start of the attempt."""

    @property
    def measured_s(self) -> float:
        """Time for which the GPU was measured."""
        return self.busy_s + self.low_s + self.idle_s

    @property
    def used(self) -> bool | None:
        """Whether the GPU was ever active; ``None``: it was not measured."""
        return None if self.measured_s <= 0 else self.busy_s + self.low_s > 0

    @property
    def name(self) -> str:
        """Node and index, as in ``gpu01:3``."""
        return f"{self.node or '?'}:{self.gpu}"


@dataclass(frozen=True, slots=True)
class IdleWindow:
    """A time in which GPUs of the job were idle without interruption."""

    start: datetime
    end: datetime
    gpus: tuple[str, ...]
    """Names of the GPUs (``GpuUse.name``) that were idle from about this start to about this end."""

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return (self.end - self.start).total_seconds()


@dataclass(frozen=True, slots=True)
class JobSuspension:
    """A suspension of the job, from the ledgers of the agents."""

    began: datetime
    mode: str | None
    outcome: str
    """``asleep``, ``restoring``, ``restored``, ``afresh``, ``ended`` or ``failed``."""
    why: str | None
    node: str | None
    restored_node: str | None
    asleep_s: float | None
    gpu_hours: float | None
    """GPU-hours for which its GPUs were free for other jobs."""
    failure: str | None


@dataclass(frozen=True, slots=True)
class JobFinding:
    """A finding about the attempt, by the rules of ``slurm-affinode zombies``."""

    kind: str
    """A key of ``finding.KINDS``."""
    variant: str | None
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A change for the next job."""

    code: str
    """Kind of the finding behind it, or ``request-fewer-gpus``, ``suspend-idle``."""
    text: str
    gpu_hours: float | None = None
    """GPU-hours that following it would have saved in this attempt; ``None``: none, or unknown."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One attempt of a job."""

    job: JobAttempt
    cluster: str
    user: str | None
    uid: int | None
    account: str | None
    partition: str | None
    qos: str | None
    nodes: tuple[str, ...]
    cpus: int | None
    memory_gib: float | None
    gpu_count: int | None
    """GPUs allocated by Slurm's count; ``None``: accounting does not count them."""
    gpu_models: tuple[str, ...]
    until: datetime
    """End of the attempt, or of its data."""
    suspended_s: float
    """Time for which Slurm had suspended the job; when is not recorded."""
    slot_s: float
    """Length of the slots of ``GpuUse.activity_pct``."""
    uses: tuple[ResourceUse, ...]
    gpus: tuple[GpuUse, ...]
    idle_windows: tuple[IdleWindow, ...]
    """The longest first."""
    suspensions: tuple[JobSuspension, ...]
    findings: tuple[JobFinding, ...]
    verdict: str
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    """Gaps in the data."""
    source: str
    """``database``, ``live``, ``published`` or ``accounting``."""
    generated: datetime
    attempt: int = 1
    attempts: int = 1
    """Known attempts of this ID, of which this one is number ``attempt``."""
    admin_comment: str | None = None
    """The agent's line about the GPUs of the first node, from AdminComment; ``None``: accounting has no such line."""

    @property
    def key(self) -> tuple[str, int, datetime | None]:
        """Identity of the attempt."""
        return self.cluster, self.job.job_id, self.job.submit

    def as_json(self) -> dict[str, Any]:
        """Return JSON values: times in ISO 8601 with ``Z``."""
        return {"version": VERSION, **plain(self)}

    @classmethod
    def from_json(cls, value: Any) -> JobSummary:
        """Return the summary of JSON values, without keys and uses that only later releases know.

        Raises ``ValueError``; ``LaterFormatError`` for a later version.
        """
        table = json_values.table(value)
        version = table.pop("version", None)
        if isinstance(version, int) and version > VERSION:
            raise LaterFormatError(f"version {version}")
        if version != VERSION:
            raise ValueError(f"not of version {VERSION}")
        summary = json_values.record(cls, table, parsers={datetime: _moment}, strict=False)
        return replace(summary, uses=tuple(use for use in summary.uses if use.key in USES))


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r:.40} has no time zone")
    return moment
