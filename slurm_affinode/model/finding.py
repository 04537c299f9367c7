"""Findings: GPUs that are held but not used, the evidence, and the effect on the queue.

``None`` is unknown and never counts against a job; 0 is a measurement. Times are aware UTC, spans are seconds, memory
is GiB (2**30 bytes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from slurm_affinode.base.times import utc
from slurm_affinode.model.cluster import Job

Source = Literal["history", "live"]

KINDS: Mapping[str, str] = {
    "squatter": "GPU memory is held and nothing computes",
    "idle-allocation": "GPUs are allocated and not used",
    "orphan-process": "a process on a GPU belongs to no running job",
    "orphan-memory": "GPU memory is held and no job has the GPU",
    "orphaned-engine": "the server of an inference engine has ended, but its process still holds GPU memory",
    "model-server": "a model server of the job has a problem, by its own metrics",
    "completing": "a job does not get out of COMPLETING",
    "drained-kill-failed": "a node is drained since processes of a job could not be killed",
    "drained-by-epilog": "a node is drained since a GPU was still held when its job had ended",
    "cpu-cores-per-gpu": "more CPU cores per GPU than the node has for each",
    "memory-per-gpu": "more host memory per GPU than the node has for each",
    "gpu-too-powerful": "a smaller GPU would do",
    "fragmentation": "GPUs on more nodes than necessary",
    "time-limit": "the time limit is far above the time used",
    "cpu-only-in-gpu-partition": "the job computes on CPUs alone and is in a GPU partition",
    "low-efficiency-user": "a user's GPUs did little over the period",
    "cpu-idle": "CPU cores are allocated and not used",
    "host-memory": "far more host memory allocated than used",
    "serial-job": "many cores are allocated and one is used",
    "cpu-fragmentation": "CPU cores on more nodes than necessary",
    "cpu-time-limit": "the time limit of a job without GPUs is far above the time used",
    "low-cpu-efficiency-user": "a user's CPU cores did little over the period",
}
"""Kind of finding -> its meaning, for users."""

CPU_KINDS = frozenset(
    {"cpu-idle", "host-memory", "serial-job", "cpu-fragmentation", "cpu-time-limit", "low-cpu-efficiency-user"}
)
"""Kinds about jobs without GPUs, which are searched only on request."""

LIVE_KINDS = frozenset(
    {"orphan-process", "orphaned-engine", "model-server", "completing", "drained-kill-failed", "drained-by-epilog"}
)
"""Kinds that are found only with live data of Slurm and the nodes."""

MISFIT_KINDS = CPU_KINDS | frozenset(
    {
        "cpu-cores-per-gpu", "memory-per-gpu", "gpu-too-powerful", "fragmentation", "time-limit",
        "cpu-only-in-gpu-partition", "low-efficiency-user",
    }
)  # fmt: skip
"""Kinds about resource requests that do not fit the job."""

USER_KINDS = frozenset({"low-efficiency-user", "low-cpu-efficiency-user"})

IDLE_KINDS = frozenset({"squatter", "idle-allocation"})
"""Kinds for which a job may be canceled: it holds GPUs that compute nothing."""

VARIANTS = ("never-used", "partly-used", "used-once", "idle")
"""Kinds of idle allocation: no GPU was ever used; some were never used; all were used and then no longer; they are
idle, and earlier use is unknown."""


EPILOG = "slurm-affinode: after job"
"""Beginning of the reason with which an epilog drains a node."""

MAPPINGS: Mapping[str, str] = {
    "labels": "job labels of the metrics",
    "recorded": "recorded GPU IDs",
    "slurm": "Slurm's GPU numbers",
    "processes": "the job's processes on the GPU",
    "whole-node": "GPU counts: as many as its node has, and no other job there",
}
"""Kind of mapping from a job to its GPU -> its evidence, for users."""
CERTAIN_MAPPINGS = ("labels", "recorded", "slurm", "processes")
"""Mappings that name the GPU. ``whole-node`` is inferred from counts."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One dimension of a finding: the value, its threshold, and its weight."""

    dimension: str
    """``memory``, ``compute``, ``time``, ``state``, ``power``, ``processes``, ..."""
    value: float | str | None
    """The value, in ``unit``; ``None``: unknown."""
    unit: str
    """``%``, ``GiB``, ``s``, ``W``, or empty."""
    threshold: str | None
    """The threshold, for users: ``above 95 %``; ``None`` if the value is only shown."""
    weight: float
    """Contribution to the score if it is met, 0-1; 0: only shown."""
    text: str
    """One sentence for users."""
    unknown: bool = False
    """Not measured: it counts neither for nor against."""
    met: bool = False
    """The value is beyond the threshold. Never if it is unknown."""
    sources: int = 1
    """Number of measurements of different kinds that agree: activity signals, for ``compute``."""

    def __post_init__(self) -> None:
        if self.unknown and self.met:
            raise ValueError(f"{self.dimension}: an unknown value cannot be met")

    @property
    def points(self) -> float:
        """Contribution to the score."""
        return self.weight if self.met else 0.0


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One attempt of a job."""

    job_id: int
    """The raw ID, unique also among array tasks and components of heterogeneous jobs."""
    id: str
    """ID as shown to users and used by Slurm's commands: ``123``, ``123_4``, ``123+1``."""
    submit: datetime | None
    """Distinguishes the attempts of a requeued job."""
    start: datetime | None = None
    end: datetime | None = None
    """``None`` while it runs."""
    name: str | None = None
    """Chosen by the user: untrusted."""
    state: str | None = None
    time_limit_s: float | None = None
    """``None``: unknown or none."""
    restarts: int = 0
    batch: bool | None = None
    """Submitted with a script; ``None``: unknown. Jobs without one are interactive."""
    steps: tuple[str, ...] = ()
    """Running steps, if queried: ``0``, ``batch``, ``interactive``."""

    @classmethod
    def of(cls, job: Job) -> JobAttempt:
        """Return the current attempt of a job that slurmctld lists."""
        return cls(
            job.job_id, job.id, job.submit, job.start, job.end if job.has_ended else None, job.name, job.state,
            job.time_limit_s, job.restarts, job.batch, tuple(step.step for step in job.steps or ()),
        )  # fmt: skip

    @property
    def running(self) -> bool:
        """Whether it holds its GPUs now."""
        return self.end is None and self.state in ("RUNNING", "COMPLETING", "SUSPENDED")


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node, or one of its GPUs."""

    node: str
    gpu: str | None = None
    """UUID, else the index on the node; ``None``: the node as a whole."""
    reason: str | None = None
    """Slurm's reason, for a drained node."""
    reason_user: str | None = None
    reason_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process on a node. A PID alone does not identify one: PIDs are reused."""

    node: str
    pid: int
    """In the node's own namespace."""
    start_ticks: int | None
    """Start in clock ticks after boot (field 22 of ``/proc/PID/stat``): with the PID, it identifies the process."""
    command: str | None = None
    """Set by the process itself: untrusted."""
    uid: int | None = None
    claims: str | None = None
    """The job that it belonged to, if that can still be determined."""
    job: JobAttempt | None = None
    """The job that it belongs to, if that runs."""


Subject = JobAttempt | NodeRef | ProcessRef


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """One GPU of a finding, over the window."""

    node: str | None
    gpu: str
    """Index on the node, else UUID or PCI address; ``?`` if it is not known."""
    uuid: str | None = None
    model: str | None = None
    held_gib: float | None = None
    """GPU memory held, mean over the window."""
    total_gib: float | None = None
    activity_pct: float | None = None
    """Maximum over the means of all activity signals; ``None``: not measured."""
    peak_pct: float | None = None
    """Maximum over all samples of all activity signals in the window."""
    power_w: float | None = None
    xid: int | None = None
    """The last XID error; 0: none."""
    idle_s: float | None = None
    """Uninterrupted idle time until the end of the window."""
    last_active: datetime | None = None
    """Last activity; ``None``: never, or unknown (``measured``)."""
    measured: bool = False
    """Whether any activity signal was measured. Without one the GPU is unknown and supports no finding."""
    flagged: bool = False
    """It counts as idle in this finding."""
    mapping: str | None = None
    """A key of ``MAPPINGS``: how the GPU was mapped to the job; ``None``: the finding is not about a job."""
    shared: bool = False
    """Other jobs may use it: memory and activity are those of the job's own processes, if known."""


@dataclass(frozen=True, slots=True)
class QueueImpact:
    """Effect of a finding on the queue. Model: ``analysis.queue``."""

    jobs: int
    """Pending jobs that the held GPUs would satisfy, each on its own."""
    startable: int
    """Number of these jobs that could have run on them concurrently, in queue order."""
    waited_s: float
    """Total time that these jobs waited while the GPUs were held idle."""
    longest_s: float
    """The longest of these times."""
    examples: tuple[str, ...] = ()
    """IDs of the first jobs, in queue order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding with all its evidence."""

    kind: str
    """A key of ``KINDS``."""
    cluster: str
    subject: Subject
    user: str | None
    account: str | None
    partition: str | None
    """Of a node: possibly several, separated by commas."""
    qos: str | None
    nodes: tuple[str, ...]
    gpus: tuple[GpuEvidence, ...]
    """GPUs of the job, or the GPU in question, including those that are not flagged."""
    since: datetime | None
    """Start of the condition, as far as known."""
    window_s: float
    """Length of the window that the evidence covers."""
    score: float
    """Sum of the weights that are met, 0-1. It reaches the threshold of the rule."""
    evidence: tuple[Evidence, ...]
    held_gpu_hours: float | None
    """GPU-hours held but not used since ``since``."""
    held_gib_hours: float | None
    """GPU memory x time, held but not used; ``None``: memory unknown."""
    impact: QueueImpact | None
    """``None``: queue unknown."""
    source: Source
    observed_at: datetime
    """Time of the newest evidence."""
    variant: str | None = None
    """A word of ``VARIANTS`` for an idle allocation; the name of the signature for a squatter; the diagnosis of a model
    server, a key of ``serving.DIAGNOSES``."""
    advice: str = ""
    """Advice to the owner, in one or two sentences."""
    allocated_gpus: int | None = None
    """GPUs allocated to the job by Slurm's count."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind} is not a kind of finding")

    @property
    def key(self) -> str:
        """Identity of the finding, the same each time it is found again. Used by mails and audit."""
        match self.subject:
            case JobAttempt(job_id=job, submit=submit):
                which = f"job:{job}:{'' if submit is None else int(submit.timestamp())}"
            case ProcessRef(node=node, pid=pid, start_ticks=ticks):
                which = f"process:{node}:{pid}:{'' if ticks is None else ticks}"
            case NodeRef(node=node, gpu=gpu):
                which = f"node:{node}:{gpu or ''}"
        if self.kind in USER_KINDS:
            which = f"user:{self.user}"
        kind = f"{self.kind}:{self.variant}" if self.kind == "model-server" else self.kind
        return f"{self.cluster}/{kind}/{which}"

    @property
    def matter(self) -> str:
        """Identity for repeated notifications: misfits of one user are one matter, regardless of the job."""
        return f"{self.cluster}/{self.kind}/user:{self.user}" if self.kind in MISFIT_KINDS and self.user else self.key

    @property
    def job(self) -> JobAttempt | None:
        """The job, if the finding is about one."""
        return self.subject if isinstance(self.subject, JobAttempt) else None

    @property
    def owner(self) -> JobAttempt | None:
        """The job, if the finding is about one, or about a process of one that runs."""
        return self.subject.job if isinstance(self.subject, ProcessRef) else self.job

    @property
    def diagnosis(self) -> str | None:
        """The diagnosis of a model server, a key of ``serving.DIAGNOSES``; ``None`` for other kinds."""
        return {"orphaned-engine": self.kind, "model-server": self.variant}.get(self.kind)

    @property
    def flagged_gpus(self) -> tuple[GpuEvidence, ...]:
        """The idle GPUs, without those that are busy or unknown."""
        return tuple(gpu for gpu in self.gpus if gpu.flagged)

    @property
    def unknown(self) -> tuple[Evidence, ...]:
        """Evidence that was not measured."""
        return tuple(item for item in self.evidence if item.unknown)

    @property
    def summary(self) -> str:
        """The evidence that is met, in one line."""
        return "; ".join(item.text for item in self.evidence if item.met)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as JSON values: times in ISO 8601 with ``Z``; adds ``key`` and the type of the subject."""
        names = {JobAttempt: "job", NodeRef: "node", ProcessRef: "process"}
        row: dict[str, Any] = {"key": self.key, **plain(self)}
        row["subject"] = {"type": names[type(self.subject)], **row["subject"]}
        return row


def without_repeated_hours(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings whose hours add up: diagnoses of a model server overlap, also with idle GPUs of its job."""
    rows = list(findings)
    jobs = [(row.cluster, row.job.job_id) if row.job is not None else None for row in rows]
    idle = {job for finding, job in zip(rows, jobs, strict=True) if finding.kind in IDLE_KINDS}
    longest: dict[tuple[str, int] | None, Finding] = {}
    for finding, job in zip(rows, jobs, strict=True):
        if finding.kind == "model-server" and job not in idle:
            longest_finding = longest.setdefault(job, finding)
            longest[job] = max(longest_finding, finding, key=lambda each: each.held_gpu_hours or 0.0)
    return [
        finding for finding, job in zip(rows, jobs, strict=True)
        if finding.kind != "model-server" or longest.get(job) is finding
    ]  # fmt: skip


def plain(value: Any) -> Any:
    """Convert a dataclass, or a value in one, to JSON-compatible values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return utc(value, "auto")
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if type(value).__module__ == "numpy":
        value = value.item()
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN has no JSON form
        return None
    return round(value, 6) if isinstance(value, float) else value
