"""What takes a job off its GPUs, writes it to an image and puts it back: contracts, errors, and their values.

Implementations: ``cuda.py`` (``CudaDriver``), ``criu.py`` (``Imager``), ``writer.py`` (``Writer``). Images are kept by
``images.DirectoryStore``.
PIDs are those of the agent's own PID namespace unless the name says ``_ns`` (the job's namespace). Sizes are bytes.
"""
# ruff: noqa: N818 - the errors are named for what they say

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slurm_affinode.checkpoint.asuser import User
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.suspension import Manifest
from slurm_affinode.pinned import Id

Take = Callable[[str, int, memoryview], None]
"""Gets a piece of a file of pages: its name, where the piece begins, whole pages. The piece is its for the call."""


class CheckpointError(AffinodeError):
    """Base of the errors below; each is one line."""


class CudaError(CheckpointError):
    """The CUDA driver refused or failed. ``code`` is its own name: ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class LockTimeout(CudaError):
    """A process could not be locked in time. It runs on."""


class CudaUnavailable(CudaError):
    """No usable driver or bindings on this node, or the driver lacks what was asked for."""


class HelperLost(CudaError):
    """The process that talks to the driver died or did not answer in time; a new one is started for the next call.

    Whether the call had its effect is not known: look at the state.
    """


class DumpFailed(CheckpointError):
    """No image was made. The tree is unharmed; where it was not CRIU that failed it is still stopped (SIGCONT)."""


class RestoreFailed(CheckpointError):
    """The tree was not restored; nothing of it is left."""


class ImageDamaged(CheckpointError):
    """An image is not what was written, or is not where and whose it should be. It must not be restored."""


class ImageUnreadable(ImageDamaged):
    """Whether there is an image, and what it is like, is not known: the file system failed, or this process."""


class ImageUnanswered(ImageUnreadable):
    """The file system does not answer: it may do so soon."""


class NoRoom(CheckpointError):
    """The store is full, or a quota is."""


class DumpNoRoom(DumpFailed, NoRoom):
    """No image was made, as its file system ran full or read-only; the tree is as after ``DumpFailed``.

    In another store it may succeed.
    """


class CudaState(StrEnum):
    """``CUprocessState``. Also processes without CUDA are ``RUNNING``: ask ``users`` first."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    CHECKPOINTING = "checkpointing"
    """With custom storage (driver 615): mapped to be copied out."""
    RESTORING = "restoring"
    """With custom storage: mapped to be copied back."""


class Feature(StrEnum):
    """What some drivers can do for a checkpoint, and others cannot."""

    LOCK = "lock with time-out"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    MIGRATION = "restore on other GPUs"
    IPC = "CUDA IPC"
    CUSTOM_STORAGE = "custom storage"


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether the driver of this node has a feature, and how that is known."""

    feature: Feature
    since: int
    """First branch of the driver that has it: 580."""
    available: bool
    why: str
    """What shows that it is there, or why it is not; one line."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the driver of this node can do. All false without one."""

    driver: str | None
    """``580.95.05``; ``None``: there is none, or it does not tell."""
    checkpoint: bool = False
    """Lock, checkpoint, restore, unlock: 570."""
    migration: bool = False
    """Restore on other GPUs of the same chip: 580."""
    ipc: bool = False
    """CUDA IPC memory of jobs that were started through it: 610."""
    custom_storage: bool = False
    """Device memory without host staging: 615."""
    why_not: str | None = None
    """Why ``checkpoint`` is false, one line."""
    cuda: str | None = None
    """CUDA version of the driver's library: ``13.0``."""
    bindings: str | None = None
    """Version of ``cuda-bindings``."""
    table: tuple[Ability, ...] = ()
    """Feature by feature."""


class CudaDriver(Protocol):
    """The checkpoint API of the CUDA driver, for processes of any user (the caller is root).

    Every call has a deadline of its own and raises ``HelperLost`` past it, ``CudaUnavailable`` without a driver,
    ``CudaError`` with the driver's error name else.
    """

    def capabilities(self) -> Capabilities:
        """What the driver can do. Never raises."""
        ...

    def devices(self) -> tuple[str, ...]:
        """UUIDs (``GPU-...``) of all GPUs that the driver shows, in its order."""
        ...

    def users(self, pids: Iterable[int]) -> frozenset[int]:
        """Those of ``pids`` that use CUDA. A process that is not there is none."""
        ...

    def restore_threads(self, pids: Iterable[int]) -> frozenset[int]:
        """The thread through which the driver works in each of ``pids`` that use CUDA."""
        ...

    def state(self, pid: int) -> CudaState:
        """Where a process stands."""
        ...

    def lock(self, pid: int, *, timeout_ms: int, started: int | None = None) -> None:
        """RUNNING -> LOCKED. ``LockTimeout``: still RUNNING. ``timeout_ms`` has to be above 0.

        ``started``: ticks since boot; a process that began at another time is not touched. The other calls fail for one
        that was not locked before.
        """
        ...

    def checkpoint(self, pid: int) -> None:
        """LOCKED -> CHECKPOINTED: its device memory is in its host memory."""
        ...

    def restore(self, pid: int, *, pairs: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED. ``pairs``: old UUID -> new UUID of every GPU that the driver showed it.

        Look at the free memory of the GPUs first: a restore without room fails now and ever after (driver 580).
        """
        ...

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING."""
        ...


@dataclass(frozen=True, slots=True)
class Tree:
    """The processes to dump: the root and all below it, in the PID namespace of which ``init`` is PID 1."""

    init: Id
    root_pid: int
    root_pid_ns: int


@dataclass(frozen=True, slots=True)
class InheritFd:
    """A descriptor that takes the place of a file of the image at restore (``criu --inherit-fd fd[N]:KEY``)."""

    fd: int
    """Of the caller."""
    key: str
    """``SavedOutput.inherit``."""


@dataclass(frozen=True, slots=True)
class DumpResult:
    """What a dump made, read from its files and not from what was promised."""

    size: int
    pids_ns: tuple[int, ...]
    """All processes in the image, root first."""
    frozen_s: float | None
    """As CRIU counted it."""
    version: str


class Pages(Protocol):
    """The pages of an image's processes, by far the most of it, which are read while its tree is restored."""

    def begin(self, take: Take | None = None) -> None:
        """Have them read from now on, by several threads, each byte once; done already, this does nothing.

        ``take`` gets them before they are known to be sound, and raises nothing.
        """
        ...

    def sound(self, timeout_s: float | None = None) -> None:
        """Wait until all of them are verified, and were taken: for so many seconds; ``None``: as long as it takes. May
        be called again, and without ``begin``.

        Raises ``ImageDamaged``, and ``CheckpointError`` where the time is over.
        """
        ...

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """Compare the contents of a file with the manifest, which lists it by ``path``. Raises ``ImageDamaged``.

        ``blocks``: the contents in blocks of ``digest.BLOCK`` bytes, the last one shorter. All of them are read, unless
        they exceed the listed size.
        """
        ...


class Imager(Protocol):
    """Dumps and restores trees of processes that hold no GPU."""

    def check(self) -> str:
        """Version of CRIU. Raises ``CheckpointError`` where it is missing, too old, or cannot work here."""
        ...

    def dump(self, tree: Tree, directory_fd: int, *, timeout_s: float) -> DumpResult:
        """Write the tree to the directory and leave it stopped. Raises ``DumpFailed``: the tree goes on as it was.

        ``DumpNoRoom``: the file system of the directory ran full meanwhile.
        """
        ...

    def restore(
        self,
        init: Id,
        directory_fd: int,
        inherit: Sequence[InheritFd],
        *,
        root_pid_ns: int,
        timeout_s: float,
        pages: Pages,
        user: User,
        shared: bool,
        ready: Callable[[], None],
    ) -> int:
        """Put the tree below PID 1 of the namespace; its root's PID there.

        ``user``: whose files the tree may open. ``shared``: other machines may write to the image's file system.

        The tree runs when ``pages`` are sound and ``ready`` has returned, which is called only where nothing is left
        that can be against it. Raises ``RestoreFailed``, and what ``pages`` raise: nothing of the tree is left.
        """
        ...


@dataclass(frozen=True, slots=True)
class Image:
    """A complete image whose manifest is authentic. Its files are checked by ``DirectoryStore.verify``."""

    manifest: Manifest
    store: str
    """Name of the store that it was found in: a path, for people."""
    former: bool = False
    """Signed by a release that did not sign notes and claims."""

    @property
    def job(self) -> str:
        """Name of its job's directory."""
        return self.manifest.key.name

    @property
    def entry(self) -> str:
        """Name of its own directory there."""
        return f"{self.manifest.seq:04d}"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds and may hold, in bytes."""

    used: int
    free: int
    """On its file system, for root."""
    quota: int | None
    by_user: Mapping[int, int]
    """uid -> bytes."""
    images: int


class Writer(Protocol):
    """An image being written, under a name that no reader takes. A context: left without ``commit`` it is gone."""

    seq: int
    criu_fd: int
    """Directory for CRIU's files."""

    def save(self, name: str, source_fd: int, size: int) -> int:
        """Copy the first ``size`` bytes of an open file to ``name``; the number of bytes that there were."""
        ...

    def follow(self) -> None:
        """Begin to digest CRIU's files and to write them to disk while it adds to them. Saves time in ``commit``."""
        ...

    def commit(self, manifest: Manifest) -> Image:
        """Digest, write and sign the manifest, make all durable, give it its name. ``manifest.files`` is filled in."""
        ...

    def abandon(self) -> None:
        """Remove what was written."""
        ...

    def __enter__(self) -> Writer:
        """Itself."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Abandon it unless it was committed."""
        ...
