"""What is found: who holds GPUs without using them, on what evidence, and what that keeps from others.

``None`` is unknown and never counts against anybody; 0 is a measurement. Times are aware UTC, spans are seconds, memory
is GiB (2**30 bytes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Source = Literal["history", "live"]

KINDS: Mapping[str, str] = {
    "squatter": "GPU memory is held and nothing computes",
    "idle-allocation": "GPUs are allocated and not used",
    "orphan-process": "a process on a GPU belongs to no running job",
    "orphan-memory": "GPU memory is held and no job has the GPU",
    "completing": "a job does not get out of COMPLETING",
    "drained-kill-failed": "a node is drained since processes of a job could not be killed",
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
"""Kind of finding -> what it means, for people."""

CPU_KINDS = frozenset(
    {"cpu-idle", "host-memory", "serial-job", "cpu-fragmentation", "cpu-time-limit", "low-cpu-efficiency-user"}
)
"""Kinds that are about jobs without GPUs: looked for where they are asked for."""

MISFIT_KINDS = CPU_KINDS | frozenset(
    {
        "cpu-cores-per-gpu", "memory-per-gpu", "gpu-too-powerful", "fragmentation", "time-limit",
        "cpu-only-in-gpu-partition", "low-efficiency-user",
    }
)  # fmt: skip
"""Kinds about the shape of jobs."""

USER_KINDS = frozenset({"low-efficiency-user", "low-cpu-efficiency-user"})

IDLE_KINDS = frozenset({"squatter", "idle-allocation"})
"""Kinds for which a job may be cancelled: it holds GPUs that compute nothing."""

VARIANTS = ("never-used", "partly-used", "used-once", "idle")
"""What an idle allocation is: no GPU ever did anything; some did and some never; they did, and then no more; they do
nothing, and what they did before is not known."""


MAPPINGS: Mapping[str, str] = {
    "labels": "job labels of the metrics",
    "recorded": "recorded GPU IDs",
    "slurm": "Slurm's GPU numbers",
    "processes": "the job's processes on the GPU",
    "whole-node": "GPU counts: as many as its node has, and no other job there",
}
"""Kind of mapping from a job to its GPU -> its evidence, for people."""
CERTAIN_MAPPINGS = ("labels", "recorded", "slurm", "processes")
"""Those that name the GPU. A whole node is a conclusion from counts."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One dimension of a finding: what was seen, what it is held against, and what it counts for."""

    dimension: str
    """``memory``, ``compute``, ``time``, ``state``, ``power``, ``processes``, ..."""
    value: float | str | None
    """What was seen, in ``unit``; ``None``: unknown."""
    unit: str
    """``%``, ``GiB``, ``s``, ``W``, or empty."""
    threshold: str | None
    """What the value is held against, for people: ``above 95 %``; ``None`` where it is only shown."""
    weight: float
    """What it counts for where it is met, 0-1; 0: only shown."""
    text: str
    """One sentence for people."""
    unknown: bool = False
    """It could not be measured: counts for nothing, in neither direction."""
    met: bool = False
    """The value is beyond the threshold. Never where it is unknown."""
    sources: int = 1
    """So many measurements of different kinds say it: signals of activity, for ``compute``."""

    def __post_init__(self) -> None:
        if self.unknown and self.met:
            raise ValueError(f"{self.dimension}: what is unknown cannot be met")

    @property
    def points(self) -> float:
        """What it adds to the score."""
        return self.weight if self.met else 0.0


@dataclass(frozen=True, slots=True)
class JobRef:
    """A run of a job."""

    job_id: int
    """The raw id, unique also among array tasks and components of heterogeneous jobs."""
    id: str
    """What people and Slurm's commands call it: ``123``, ``123_4``, ``123+1``."""
    submit: datetime | None
    """Tells the runs of a requeued job apart."""
    start: datetime | None = None
    end: datetime | None = None
    """``None`` while it runs."""
    name: str | None = None
    """As the user chose it: may be hostile."""
    state: str | None = None
    time_limit_s: float | None = None
    """``None``: unknown or none."""
    restarts: int = 0
    batch: bool | None = None
    """Submitted with a script; ``None``: unknown. One without is interactive."""
    steps: tuple[str, ...] = ()
    """Steps that run now, where they were asked for: ``0``, ``batch``, ``interactive``."""

    @property
    def running(self) -> bool:
        """It holds its GPUs now."""
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
    """A process on a node. A process id alone is none: it is given again to others."""

    node: str
    pid: int
    """In the node's own namespace."""
    start_ticks: int | None
    """Start in clock ticks after boot (field 22 of ``/proc/PID/stat``): with the id it names one process."""
    command: str | None = None
    """As the process shows itself: may be hostile."""
    uid: int | None = None
    claims: str | None = None
    """The job that it once belonged to, where that can still be seen."""


Subject = JobRef | NodeRef | ProcessRef


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """One GPU of a finding, over the window."""

    node: str | None
    gpu: str
    """Index on the node, else UUID or PCI address; ``?`` where it is not known which."""
    uuid: str | None = None
    model: str | None = None
    held_gib: float | None = None
    """Framebuffer held, mean over the window."""
    total_gib: float | None = None
    activity_pct: float | None = None
    """The largest mean of all activity signals; ``None``: not measured."""
    peak_pct: float | None = None
    """The largest single sample of any activity signal in the window."""
    power_w: float | None = None
    xid: int | None = None
    """The last XID error; 0: none."""
    idle_s: float | None = None
    """Idle without a break until the end of the window."""
    last_active: datetime | None = None
    """When it last did anything; ``None``: never, or unknown (``measured``)."""
    measured: bool = False
    """Any activity signal was there: without one the GPU is unknown and accuses nobody."""
    flagged: bool = False
    """Counts as idle in this finding."""
    mapping: str | None = None
    """A key of ``MAPPINGS``: how it is known that the job has this GPU; ``None``: it is not about a job."""
    shared: bool = False
    """Other jobs may be on it: memory and activity are those of the job's own processes, where they are known."""


@dataclass(frozen=True, slots=True)
class QueueImpact:
    """What a finding keeps from others: see ``analysis.queue`` for the model."""

    jobs: int
    """Pending jobs that the held GPUs would satisfy, each by itself."""
    startable: int
    """How many of these could have run on them at once, in the order of the queue."""
    waited_s: float
    """Sum of the times that these jobs waited while the GPUs were held idle."""
    longest_s: float
    """The longest of these times."""
    examples: tuple[str, ...] = ()
    """Ids of the first jobs, in the order of the queue."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, with everything that speaks for it."""

    kind: str
    """A key of ``KINDS``."""
    cluster: str
    subject: Subject
    user: str | None
    account: str | None
    partition: str | None
    """Several, with commas, of a node."""
    qos: str | None
    nodes: tuple[str, ...]
    gpus: tuple[GpuEvidence, ...]
    """GPUs of the job, or the one in question; those that are not flagged, too."""
    since: datetime | None
    """Since when it is so, as far as is known."""
    window_s: float
    """Time over which the evidence was taken."""
    score: float
    """Sum of the weights that are met, 0-1. A finding is made where it reaches the threshold of its rule."""
    evidence: tuple[Evidence, ...]
    held_gpu_hours: float | None
    """GPU-hours held and not used since ``since``."""
    held_gib_hours: float | None
    """GPU memory x time held and not used; ``None``: memory unknown."""
    impact: QueueImpact | None
    """``None``: the queue is not known."""
    source: Source
    observed_at: datetime
    """The newest evidence."""
    variant: str | None = None
    """A word of ``VARIANTS`` for an idle allocation; the name of the signature for a squatter."""
    advice: str = ""
    """What its owner can do, in one or two sentences."""
    allocated_gpus: int | None = None
    """GPUs that the job holds by Slurm's count."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind} is no kind of finding")

    @property
    def key(self) -> str:
        """The same for the same matter, however often it is found: what mails and audit go by."""
        match self.subject:
            case JobRef(job_id=job, submit=submit):
                which = f"job:{job}:{'' if submit is None else int(submit.timestamp())}"
            case ProcessRef(node=node, pid=pid, start_ticks=ticks):
                which = f"process:{node}:{pid}:{'' if ticks is None else ticks}"
            case NodeRef(node=node, gpu=gpu):
                which = f"node:{node}:{gpu or ''}"
        if self.kind in USER_KINDS:
            which = f"user:{self.user}"
        return f"{self.cluster}/{self.kind}/{which}"

    @property
    def matter(self) -> str:
        """What people are told of once in a time: the shape of a user's jobs is one matter, whichever job it is."""
        return f"{self.cluster}/{self.kind}/user:{self.user}" if self.kind in MISFIT_KINDS and self.user else self.key

    @property
    def job(self) -> JobRef | None:
        """The job, where the finding is about one."""
        return self.subject if isinstance(self.subject, JobRef) else None

    @property
    def flagged_gpus(self) -> tuple[GpuEvidence, ...]:
        """The GPUs that are idle, without those that work or are unknown."""
        return tuple(gpu for gpu in self.gpus if gpu.flagged)

    @property
    def unknown(self) -> tuple[Evidence, ...]:
        """What could not be measured."""
        return tuple(one for one in self.evidence if one.unknown)

    @property
    def summary(self) -> str:
        """The evidence that is met, in one line."""
        return "; ".join(one.text for one in self.evidence if one.met)

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and the audit: times in ISO 8601 with ``Z``; ``key`` and ``subject_type`` are added."""
        names = {JobRef: "job", NodeRef: "node", ProcessRef: "process"}
        row: dict[str, Any] = {"key": self.key, **plain(self)}
        row["subject"] = {"type": names[type(self.subject)], **row["subject"]}
        return row


def plain(value: Any) -> Any:
    """A dataclass, or what is in one, as JSON can have it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if type(value).__module__ == "numpy":
        value = value.item()
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN has no JSON form
        return None
    return round(value, 6) if isinstance(value, float) else value
