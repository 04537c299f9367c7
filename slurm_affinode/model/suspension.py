"""A suspended job: what the user asked for, the states it passes, the image that holds it.

Standard library only. Times are seconds of the epoch (UTC) in names that end with ``_epoch``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

DEFAULT_WINDOW_S = 900
"""Idle window of ``--gpu-suspend-idle`` without a value."""

_WINDOW, _UTIL = re.compile(r"[0-9]{1,8}"), re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,4})?")
_WAKE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:+-]{0,30}")
_SIGNAL = re.compile(r"(?:SIG)?(?!SIG)([A-Z0-9]{1,11})@([0-9]{1,5})", re.IGNORECASE | re.ASCII)
_LONGEST_WINDOW_S = 366 * 86400
"""The plugin's own limits (``spank/option.c``): a user may speak in its place."""
_CLUSTER = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Mode(StrEnum):
    """What happens with the allocation while a job is suspended."""

    REQUEUE = "requeue"
    """The job goes back to the queue and its GPUs to Slurm."""
    INPLACE = "inplace"
    """The allocation stays; GPU memory moves to host memory and the processes are frozen."""


class Pressure(StrEnum):
    """When an idle job is suspended."""

    PRESSURE = "pressure"
    """Only where a pending job could use the GPUs."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Notice:
    """The signal that a job gets before it is suspended."""

    name: str
    """Without ``SIG``: ``USR1``."""
    before_s: int


@dataclass(frozen=True, slots=True)
class SuspendOption:
    """The value of ``--gpu-suspend-idle``."""

    window_s: int = DEFAULT_WINDOW_S
    """All activity signals of all the job's GPUs have to be at or below ``util_pct`` for this long."""
    util_pct: float = 0.0
    mode: Mode = Mode.REQUEUE
    wake: str = "auto"
    """``auto``, ``hold``, or a time in a form that ``scontrol update StartTime=`` takes."""
    when: Pressure = Pressure.PRESSURE
    signal: Notice | None = None

    @classmethod
    def parse(cls, text: str) -> SuspendOption:
        """From the form in which plugin and manifest carry it: ``window=900,util=0,mode=requeue,...``.

        Keys that are absent have their defaults; ``window`` is whole seconds. ``ValueError`` names a key or value that
        cannot be.
        """
        given: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            key, equals, value = part.partition("=")
            if not equals or not value or key not in _KEYS or key in given:
                raise ValueError(f"suspend option: {part!r} is not one of {', '.join(_KEYS)} with a value, given once")
            given[key] = value
        try:
            window_s = int(_matched(_WINDOW, "window", given.get("window", str(DEFAULT_WINDOW_S)))[0])
            util_pct = float(_matched(_UTIL, "util", given.get("util", "0"))[0])
            wake = _matched(_WAKE, "wake", given.get("wake", "auto"))[0]
            mode, when = Mode(given.get("mode", "requeue")), Pressure(given.get("when", "pressure"))
            notice = _notice(given["signal"]) if "signal" in given else None
        except ValueError as error:
            raise ValueError(f"suspend option {text!r:.200}: {error}") from None
        if not 0 < window_s <= _LONGEST_WINDOW_S or not 0 <= util_pct <= 100:
            raise ValueError(f"suspend option {text!r:.200}: needs window from 1 s to 366 days and util from 0 to 100")
        return cls(window_s, util_pct, mode, wake, when, notice)

    def __str__(self) -> str:
        """The form that ``parse`` reads."""
        parts = [
            f"window={self.window_s}",
            f"util={self.util_pct:.7g}",
            f"mode={self.mode}",
            f"wake={self.wake}",
            f"when={self.when}",
        ]
        if self.signal is not None:
            parts.append(f"signal={self.signal.name}@{self.signal.before_s}")
        return ",".join(parts)


_KEYS = ("window", "util", "mode", "wake", "when", "signal")


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
    """One run of a job: Slurm uses job ids again, but not with the same submit time."""

    cluster: str
    job_id: int
    """The raw id, also of a task of an array."""
    submit_epoch: int
    """``SubmitTime`` of the run. Slurm moves it when a job is requeued: ``core.suspension.owns`` allows for that."""

    def __post_init__(self) -> None:
        """A cluster name becomes part of a path."""
        if not _CLUSTER.fullmatch(self.cluster):
            raise ValueError(f"{self.cluster!r} is not the name of a cluster")
        if self.job_id <= 0 or self.submit_epoch < 0:
            raise ValueError(f"job {self.job_id}, submitted {self.submit_epoch}: not a job")

    @property
    def name(self) -> str:
        """The name of its directory in an image store: ``CLUSTER.JOBID``."""
        return f"{self.cluster}.{self.job_id}"


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A job as Slurm has it now, running or in the queue."""

    key: JobKey
    uid: int
    restarts: int


class Phase(StrEnum):
    """Where a job stands on its way out and back. ``core.suspension`` has the order and what is done after a crash."""

    RUNNING = "running"
    """On its GPUs. Nothing of ours is in its way."""
    LOCKING = "locking"
    """CUDA locks are being taken, with a time-out."""
    LOCKED = "locked"
    """All of the job's CUDA processes are locked; nothing has moved yet."""
    PARKED = "parked"
    """GPU memory is in host memory; the GPUs hold nothing of the job."""
    FROZEN = "frozen"
    """``inplace``: its processes are being stopped, or are. Where a job that sleeps in place stays."""
    WAKING = "waking"
    """``inplace``: its processes are let go, then its GPU memory moves back."""
    DUMPING = "dumping"
    """An image is being written."""
    DUMPED = "dumped"
    """The image is complete, verified and durable; the tree is stopped, and still there."""
    REQUEUEING = "requeueing"
    """Slurm is being asked to requeue the job."""
    QUEUED = "queued"
    """The job is in the queue, the tree is gone, the image is all there is."""
    RESTORING = "restoring"
    """Slurm has started the job again and the image is being put in place of a fresh start."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job cannot be suspended. Nothing was touched."""

    code: str
    """Stable, for machines and tests: ``srun-steps``, ``host-memory``, ..."""
    text: str
    """One line for the owner, with the numbers that matter."""

    def __str__(self) -> str:
        """The text."""
        return self.text


@dataclass(frozen=True, slots=True)
class Suspension:
    """One suspension of one job, as journal, ledger and ``status`` know it."""

    key: JobKey
    seq: int
    """Counts the suspensions of this submission, from 1; names the image."""
    phase: Phase
    node: str
    uid: int
    mode: Mode
    why: str
    """What made it happen: ``idle 15m, 2 jobs wait for gpu``, ``asked by alice``."""
    gpus: int
    started_epoch: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase -> when it was entered (epoch)."""
    image_bytes: int | None = None
    gpu_bytes: int | None = None
    """GPU memory that was moved out."""
    failure: str | None = None
    """One line, where it did not get through."""


@dataclass(frozen=True, slots=True)
class GpuFact:
    """A GPU that the job's processes saw, in their device order (the order of the tuple that holds it)."""

    uuid: str
    model: str
    memory_bytes: int
    allocated: bool = True
    """Slurm gave it to the job; else the driver merely showed it, because devices are not constrained."""
    held_bytes: int = 0
    """What the job's processes held there when they left it."""


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file of an image. ``path`` is relative to the image's directory: ``criu/pages-1.img``."""

    path: str
    size: int
    digest: str
    """Hexadecimal, by the manifest's ``digest`` algorithm."""


@dataclass(frozen=True, slots=True)
class SavedOutput:
    """One of the job's standard streams when it was dumped."""

    fd: int
    """0, 1 or 2."""
    kind: str
    """``file`` (a regular file), ``null``, or ``other`` (a pipe, a socket, a device)."""
    path: str
    """As the kernel shows it; for people, and to recognise the file in the image. It is never opened by this name."""
    file: str | None = None
    """Name of the saved bytes in the image (``out.1``); ``None``: not a regular file, or not saved."""
    same_as: int | None = None
    """It is the same file as this lower descriptor, saved there."""
    size: int = 0
    offset: int = 0
    """Of the open file description, in bytes."""
    append: bool = False
    """Opened with ``O_APPEND``."""
    inherit: str | None = None
    """The key of ``criu restore --inherit-fd fd[N]:KEY``; ``None``: CRIU opens it itself."""


@dataclass(frozen=True, slots=True)
class Versions:
    """With what an image was made. ``None``: not known, or not there."""

    affinode: str
    kernel: str
    criu: str
    slurm: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about an image; what ``manifest.json`` holds, under an HMAC."""

    key: JobKey
    seq: int
    uid: int
    gid: int
    node: str
    restarts: int
    """Slurm's count when the job was dumped."""
    started_epoch: float
    """When the suspension began."""
    dumped_epoch: float
    option: SuspendOption
    versions: Versions
    root_pid: int
    """Of the tree's root, in the job's PID namespace."""
    cuda_pids: tuple[int, ...]
    """Processes that hold a CUDA checkpoint, by their numbers in the namespace, in the order of restore."""
    gpus: tuple[GpuFact, ...]
    gpu_bytes: int
    """GPU memory that the processes held."""
    outputs: tuple[SavedOutput, ...]
    files: tuple[FileFact, ...]
    digest: str = "sha256"
    schema: int = 1

    @property
    def size(self) -> int:
        """Bytes of all files of the image, the manifest not counted."""
        return sum(file.size for file in self.files)
