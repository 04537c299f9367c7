"""A suspended job: its options, states, checkpoint image, and the mails to its owner.

Standard library only. Times are epoch seconds (UTC) in names that end with ``_epoch``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from slurm_affinode.model.cluster import Job

MailKind = Literal["suspended", "restored", "failed"]
MAIL_KINDS: tuple[MailKind, ...] = ("suspended", "restored", "failed")


@dataclass(frozen=True, slots=True)
class SuspensionMail:
    """One event of a job. ``None`` is unknown."""

    kind: MailKind
    """``failed``: it was not restored, or not woken."""
    cluster: str
    job_id: int
    user: str
    node: str
    """Node on which it was suspended, restored, or failed to be restored."""
    at_epoch: float
    once: str
    """Identity of the event, also if it is reported again after a crash: letters, digits, ``. - _``."""
    shown: str | None = None
    """ID as shown to users, if it is not the number: ``123_4``."""
    job_name: str | None = None
    partition: str | None = None
    why: str | None = None
    """Why it was suspended; for ``failed``, why it was not restored."""
    gpus: int | None = None
    gpu_model: str | None = None
    gpu_bytes: int | None = None
    """GPU memory that was saved."""
    slept_s: float | None = None
    wake: str | None = None
    """When it resumes: ``auto``, ``hold`` or a time."""
    fresh: bool = False
    """For ``failed``: it was started from its beginning instead of being held."""
    in_place: bool = False
    """It is suspended in place: there is no checkpoint image, and it keeps its allocation."""
    on_request: bool = False
    """In place: a request on one of its sockets wakes it."""
    ended: bool = False
    """For ``failed``, in place: it was canceled, because it had waited too long."""
    lost: bool = False
    """Its attempt was lost after a restore: it has returned to the image (``restored``), or was not restored again."""
    lost_s: float | None = None
    """With ``lost``: how long that attempt had run since its restore."""
    checkpoint_epoch: float | None = None
    """With ``lost``: time of the checkpoint."""
    left_out: int = 0
    """Mails to this user that were dropped since the last one: there were too many."""

    @property
    def called(self) -> str:
        """ID as shown to users."""
        return self.shown or str(self.job_id)


DEFAULT_WINDOW_S = 900
"""Idle window of ``--gpu-suspend-idle`` without a value."""

_WINDOW, _UTIL = re.compile(r"[0-9]{1,8}"), re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,4})?")
_WAKE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:+-]{0,30}")
_SIGNAL = re.compile(r"(?:SIG)?(?!SIG)([A-Z0-9]{1,11})@([0-9]{1,5})", re.IGNORECASE | re.ASCII)
_LONGEST_WINDOW_S = 366 * 86400
"""The plugin's own limits (``spank/time_span.h``), checked again because users can bypass the plugin."""
_CLUSTER = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Mode(StrEnum):
    """Treatment of the allocation while a job is suspended."""

    REQUEUE = "requeue"
    """The job returns to the queue and its GPUs to Slurm."""
    INPLACE = "inplace"
    """The allocation stays; GPU memory moves to host memory and the processes are frozen."""


class Pressure(StrEnum):
    """Condition under which an idle job is suspended."""

    PRESSURE = "pressure"
    """Only if a pending job could use the GPUs."""
    ALWAYS = "always"


class Steps(StrEnum):
    """The program that the batch script runs as ``srun``."""

    SLURM = "slurm"
    """Slurm's: the job cannot be suspended while a step runs."""
    LOCAL = "local"
    """The launcher (``spank/srun.py``), whose steps belong to the script's process tree."""


class AfterLoss(StrEnum):
    """Action for a restored job that is preempted or requeued, or loses its node."""

    IMAGE = "image"
    """It is restored from the same checkpoint image again."""
    START = "start"
    """The batch script starts from its beginning; the image is discarded."""
    HOLD = "hold"
    """It is held, and its owner decides."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The signal sent to a job before it is suspended."""

    name: str
    """Without ``SIG``: ``USR1``."""
    before_s: int


@dataclass(frozen=True, slots=True)
class SuspendOption:
    """The value of ``--gpu-suspend-idle``."""

    window_s: int = DEFAULT_WINDOW_S
    """Time for which all activity signals of all the job's GPUs must be at or below ``util_pct``."""
    util_pct: float = 0.0
    mode: Mode = Mode.REQUEUE
    wake: str = "auto"
    """``auto``, ``hold``, or a time in a format of ``scontrol update StartTime=``."""
    when: Pressure = Pressure.PRESSURE
    signal: Notice | None = None
    steps: Steps = Steps.SLURM
    after_loss: AfterLoss | None = None
    """``None``: as the site has configured (``suspend.after_loss``)."""

    @classmethod
    def parse(cls, text: str) -> SuspendOption:
        """Parse the format used by plugin and manifest: ``window=900,util=0,mode=requeue,...``.

        Absent keys have their defaults; ``window`` is whole seconds. Raises ``ValueError`` with the invalid key or
        value.
        """
        values: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            key, equals, value = part.partition("=")
            if not equals or not value or key not in _KEYS or key in values:
                raise ValueError(f"suspend option: {part!r} is not one of {', '.join(_KEYS)} with a value, given once")
            values[key] = value
        try:
            window_s = int(_matched(_WINDOW, "window", values.get("window", str(DEFAULT_WINDOW_S)))[0])
            util_pct = float(_matched(_UTIL, "util", values.get("util", "0"))[0])
            wake = _matched(_WAKE, "wake", values.get("wake", "auto"))[0]
            mode, when = Mode(values.get("mode", "requeue")), Pressure(values.get("when", "pressure"))
            notice = _notice(values["signal"]) if "signal" in values else None
            steps = Steps(values.get("steps", "slurm"))
            after_loss = AfterLoss(values["after_loss"]) if "after_loss" in values else None
        except ValueError as error:
            raise ValueError(f"suspend option {text!r:.200}: {error}") from None
        if not 0 < window_s <= _LONGEST_WINDOW_S or not 0 <= util_pct <= 100:
            raise ValueError(f"suspend option {text!r:.200}: needs window from 1 s to 366 days and util from 0 to 100")
        return cls(window_s, util_pct, mode, wake, when, notice, steps, after_loss)

    def __str__(self) -> str:
        """Return the format that ``parse`` reads."""
        parts = [
            f"window={self.window_s}",
            f"util={self.util_pct:.7g}",
            f"mode={self.mode}",
            f"wake={self.wake}",
            f"when={self.when}",
        ]
        if self.signal is not None:
            parts.append(f"signal={self.signal.name}@{self.signal.before_s}")
        if self.steps is not Steps.SLURM:
            parts.append(f"steps={self.steps}")
        if self.after_loss is not None:
            parts.append(f"after_loss={self.after_loss}")
        return ",".join(parts)


_KEYS = ("window", "util", "mode", "wake", "when", "signal", "steps", "after_loss")


def _notice(text: str) -> Notice:
    match = _SIGNAL.fullmatch(text)
    if match is None:
        raise ValueError(f"signal {text!r:.60} is not NAME@SECONDS")
    return Notice(match[1].upper(), int(match[2]))


def _matched(form: re.Pattern[str], key: str, value: str) -> re.Match[str]:
    match = form.fullmatch(value)
    if match is None:
        raise ValueError(f"{key} {value!r:.60} has another form")
    return match


@dataclass(frozen=True, slots=True, order=True)
class JobKey:
    """One attempt of a job: Slurm reuses job IDs, but not with the same submit time."""

    cluster: str
    job_id: int
    """The raw ID, also for an array task."""
    submit_epoch: int
    """``SubmitTime`` of the attempt. Slurm moves it when a job is requeued: ``core.suspension.owns`` allows for
    that."""

    def __post_init__(self) -> None:
        """Check the values: the cluster name becomes part of a path."""
        if not _CLUSTER.fullmatch(self.cluster):
            raise ValueError(f"{self.cluster!r} is not the name of a cluster")
        if self.job_id <= 0 or self.submit_epoch < 0:
            raise ValueError(f"job {self.job_id}, submitted {self.submit_epoch}: not a job")

    @classmethod
    def of(cls, cluster: str, job: Job) -> JobKey | None:
        """Return the key of a job in Slurm; ``None`` if its submit time is unknown."""
        return None if job.submit is None else cls(cluster, job.job_id, round(job.submit.timestamp()))

    @property
    def name(self) -> str:
        """Name of its directory in an image store: ``CLUSTER.JOBID``."""
        return f"{self.cluster}.{self.job_id}"


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A job in Slurm, running or in the queue."""

    key: JobKey
    uid: int
    restarts: int

    @classmethod
    def of(cls, cluster: str, job: Job, *, uid: int | None = None) -> LiveRun | None:
        """Return a job in Slurm as an attempt; ``None`` if its submit time is unknown. ``uid``: if known already."""
        key = JobKey.of(cluster, job)
        return None if key is None else cls(key, (job.uid or 0) if uid is None else uid, job.restarts)


class Phase(StrEnum):
    """State of a job during suspension and restore. Order and recovery: ``core.suspension``."""

    RUNNING = "running"
    """On its GPUs, without a suspension in progress."""
    LOCKING = "locking"
    """CUDA locks are being taken, with a timeout."""
    LOCKED = "locked"
    """All of the job's CUDA processes are locked; no memory has been moved yet."""
    PARKED = "parked"
    """GPU memory is in host memory; the GPUs hold nothing of the job."""
    FROZEN = "frozen"
    """``inplace``: its processes are being frozen, or are frozen. A job suspended in place stays in this state."""
    WAKING = "waking"
    """``inplace``: its processes are being thawed, then its GPU memory is restored."""
    DUMPING = "dumping"
    """A checkpoint image is being written."""
    DUMPED = "dumped"
    """The checkpoint image is complete, verified and durable; the process tree is stopped, but still exists."""
    REQUEUEING = "requeueing"
    """The requeue of the job is being requested from Slurm."""
    QUEUED = "queued"
    """The job is in the queue, its process tree is gone, and only the checkpoint image is left."""
    RESTORING = "restoring"
    """Slurm has restarted the job, and the checkpoint image is being restored instead of a fresh start."""


class RefusalCode(StrEnum):
    """Why a job cannot be suspended or woken, for programs and tests. Values are stable."""

    # The job, as it was submitted.
    INTERACTIVE = "interactive"
    NOT_OPTED_IN = "not-opted-in"
    HETEROGENEOUS = "heterogeneous"
    MULTI_NODE = "multi-node"
    NO_REQUEUE = "no-requeue"
    MODE = "mode"
    OTHER_USER = "other-user"
    ROOT = "root"

    # Its state.
    UNKNOWN_JOB = "unknown-job"
    NOT_KNOWN = "not-known"
    STATE = "state"
    SLURM = "slurm"
    NOT_STARTED = "not-started"
    GONE = "gone"
    ENDED = "ended"
    RUNNING = "running"
    NOT_SUSPENDED = "not-suspended"
    BUSY = "busy"
    RECOVERING = "recovering"
    HELD_BY_ADMIN = "held-by-admin"
    NO_NOTE = "no-note"

    # Its processes.
    SRUN_STEPS = "srun-steps"
    LEFT_TREE = "left-tree"
    SETUID = "setuid"
    CREDENTIALS = "credentials"
    SESSION = "session"
    STOPPED = "stopped"
    TRACED = "traced"
    UNDUMPABLE = "undumpable"
    LANDLOCK = "landlock"
    NAMESPACES = "namespaces"
    KERNEL_STATE = "kernel-state"
    IO_URING = "io-uring"
    SOCKET_KIND = "socket-kind"
    SOCKETS = "sockets"
    RDMA = "rdma"
    SYSV_IPC = "sysv-ipc"
    STREAM_DELETED = "stream-deleted"
    SERVICE_BUSY = "service-busy"
    REQUEST = "request"

    # Its GPUs and memory.
    GPU_FILE = "gpu-file"
    GPU_NUMBERS = "gpu-numbers"
    GPU_COUNT = "gpu-count"
    GPU_MODEL = "gpu-model"
    MIG = "mig"
    MPS = "mps"
    NO_GPU_MEMORY = "no-gpu-memory"
    HOST_MEMORY = "host-memory"
    LIMIT_RAISED = "limit-raised"

    # The node and the site.
    CRIU = "criu"
    CRIU_SOCKETS = "criu-sockets"
    DRIVER = "driver"
    SERVICE_PLUGIN = "service-plugin"
    NO_SHARED_STORE = "no-shared-store"
    NO_ROOM = "no-room"
    NODE_BUSY = "node-busy"
    AWAKE_LIMIT = "awake-limit"

    # The policy.
    MIN_RUN = "min-run"
    RUN_UNKNOWN = "run-unknown"
    BACKOFF = "backoff"
    FAILED = "failed"
    SHORT_SLEEPS = "short-sleeps"
    EXCLUDED_PARTITION = "excluded-partition"
    EXCLUDED_ACCOUNT = "excluded-account"
    EXCLUDED_USER = "excluded-user"
    LIMIT_PARTITION = "limit-partition"
    LIMIT_ACCOUNT = "limit-account"
    LIMIT_USER = "limit-user"
    LIMIT_UNKNOWN = "limit-unknown"
    NO_PRESSURE = "no-pressure"
    QUEUE_UNKNOWN = "queue-unknown"
    PROMISED = "promised"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job cannot be suspended. Nothing was changed."""

    code: RefusalCode
    text: str
    """One line for the owner, with the relevant numbers."""
    remedy: str | None = None
    """Remedy for the owner, where the code does not name it."""

    def __str__(self) -> str:
        """Return the text."""
        return self.text


@dataclass(frozen=True, slots=True)
class GpuFact:
    """A GPU visible to the job's processes. Tuples of these are in device order."""

    uuid: str
    model: str
    memory_bytes: int
    allocated: bool = True
    """Slurm allocated it to the job; otherwise it was only visible, because devices are not constrained."""
    held_bytes: int = 0
    """Bytes that the job's processes held there when they were suspended."""


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file of a checkpoint image. ``path`` is relative to the image's directory: ``criu/pages-1.img``."""

    path: str
    size: int
    digest: str
    """Hexadecimal, by the manifest's ``digest`` algorithm."""


@dataclass(frozen=True, slots=True)
class SavedOutput:
    """One of the job's standard streams at the time of the dump."""

    fd: int
    """0, 1 or 2."""
    kind: str
    """``file`` (a regular file), ``null``, or ``other`` (a pipe, a socket, a device)."""
    path: str
    """As shown by the kernel; for display, and to identify the file in the image. Never used to open the file."""
    file: str | None = None
    """Name of the saved bytes in the image (``out.1``); ``None``: not a regular file, or not saved."""
    same_as: int | None = None
    """The lower descriptor of the same file, where its bytes are saved."""
    size: int = 0
    offset: int = 0
    """Offset of the open file description, in bytes."""
    append: bool = False
    """Opened with ``O_APPEND``."""
    inherit: str | None = None
    """The key for ``criu restore --inherit-fd fd[N]:KEY``; ``None``: CRIU opens the file itself."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions that made a checkpoint image. ``None``: not known, or not present."""

    affinode: str
    kernel: str
    criu: str
    slurm: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """All facts about a checkpoint image; the contents of ``manifest.json``, protected by an HMAC."""

    key: JobKey
    seq: int
    uid: int
    gid: int
    node: str
    restarts: int
    """Slurm's restart count at the time of the dump."""
    started_epoch: float
    """Start of the suspension."""
    dumped_epoch: float
    option: SuspendOption
    versions: Versions
    root_pid: int
    """PID of the tree's root, in the job's PID namespace."""
    cuda_pids: tuple[int, ...]
    """Processes with a CUDA checkpoint, by PID in the namespace, in restore order."""
    gpus: tuple[GpuFact, ...]
    gpu_bytes: int
    """GPU memory that the processes held."""
    outputs: tuple[SavedOutput, ...]
    files: tuple[FileFact, ...]
    digest: str = "sha256"
    schema: int = 1

    @property
    def size(self) -> int:
        """Total bytes of the files in the image, without the manifest."""
        return sum(file.size for file in self.files)
