"""Interfaces, errors and value types for checkpointing and restoring a job.

Implementations: ``cuda.client`` (``CudaDriver``), ``criu.criu`` (``Imager``), ``image.verifier`` (``Pages``).
Checkpoint images are written by ``image.writer`` and stored by ``store.image_store.DirectoryStore``.

PIDs are those of the agent's PID namespace, except names with ``_ns`` (the job's namespace). Sizes are in bytes.
"""
# ruff: noqa: N818 - the errors are named for what they say

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import Manifest

if TYPE_CHECKING:
    from slurm_affinode.checkpoint.files.created_files import CreatedFiles

_MAY_PASS = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.ECONNRESET, errno.EDQUOT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EINTR,
    errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENOLCK, errno.ENOMEM, errno.ENOSPC, errno.ENOTCONN,
    errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ETXTBSY,
})  # fmt: skip
"""Errors of a node or a file server, and not of the file that they are about."""

Take = Callable[[str, int, memoryview], None]
"""Receives a piece of a pages file: name, offset, whole pages. The memory is valid only during the call."""


class CheckpointError(AffinodeError):
    """Base class of the errors below. The text is one line."""


class CudaError(CheckpointError):
    """The CUDA driver returned an error. ``code``: the driver's error name, such as ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class LockTimeout(CudaError):
    """Locking a process timed out. The process keeps running."""


class CudaUnavailable(CudaError):
    """This node has no usable driver or bindings, or the driver lacks the requested feature."""


class HelperLost(CudaError):
    """The helper process of the driver died or timed out. The next call starts a new one.

    The call may or may not have taken effect: check the state of the process.
    """


class DumpFailed(CheckpointError):
    """The dump failed. The process tree is intact; it is still stopped (SIGCONT) unless CRIU itself failed."""


class RestoreFailed(CheckpointError):
    """The process tree was not restored. No process of it is left."""


class RestoreInterrupted(RestoreFailed):
    """As ``RestoreFailed``, for a cause that may pass or that another node may not have. The image is intact."""


class ImageDamaged(CheckpointError):
    """A checkpoint image has the wrong contents, location or owner. It must not be restored."""


class ImageUnreadable(ImageDamaged):
    """The state of a checkpoint image is unknown, because the file system or this process failed."""


class ImageUnanswered(ImageUnreadable):
    """The file system does not respond. This may be temporary."""


class NoRoom(CheckpointError):
    """The store is full or a quota is exceeded."""


class DumpNoRoom(DumpFailed, NoRoom):
    """The dump failed because the file system is full or read-only; the process tree is as after ``DumpFailed``.

    The dump may succeed in another store.
    """


class CudaState(StrEnum):
    """``CUprocessState``. Processes without CUDA are ``RUNNING`` too: see ``CudaDriver.users``."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    CHECKPOINTING = "checkpointing"
    """With custom storage (driver 615): GPU memory is mapped for copying out."""
    RESTORING = "restoring"
    """With custom storage: GPU memory is mapped for copying in."""


class Feature(StrEnum):
    """Checkpoint features that depend on the driver."""

    LOCK = "lock with time-out"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    MIGRATION = "restore on other GPUs"
    IPC = "CUDA IPC"
    CUSTOM_STORAGE = "custom storage"


@dataclass(frozen=True, slots=True)
class Ability:
    """Availability of a feature with the driver of this node."""

    feature: Feature
    since: int
    """First driver branch with the feature, such as 580."""
    available: bool
    why: str
    """Evidence that the feature is available, or the reason why it is not, in one line."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Checkpoint features of the driver of this node."""

    driver: str | None
    """Driver version, such as ``580.95.05``; ``None``: no driver, or unknown."""
    checkpoint: bool = False
    """Lock, checkpoint, restore, unlock: driver 570."""
    why_not: str | None = None
    """Reason why ``checkpoint`` is false, in one line."""
    cuda: str | None = None
    """CUDA version of the driver library, such as ``13.0``."""
    bindings: str | None = None
    """Version of ``cuda-bindings``."""
    table: tuple[Ability, ...] = ()
    """Availability of each feature."""


class CudaDriver(Protocol):
    """The checkpoint API of the CUDA driver, for processes of any user (the caller is root).

    Each call raises ``HelperLost`` if it times out, ``CudaUnavailable`` without a driver, and ``CudaError`` with the
    driver's error name otherwise.
    """

    def capabilities(self) -> Capabilities:
        """Return the driver's checkpoint features. Never raises."""
        ...

    def devices(self) -> tuple[str, ...]:
        """Return the UUIDs (``GPU-...``) of all GPUs that the driver lists, in its order."""
        ...

    def users(self, pids: Iterable[int]) -> frozenset[int]:
        """Return those of ``pids`` that use CUDA. Processes that do not exist are left out."""
        ...

    def restore_threads(self, pids: Iterable[int]) -> frozenset[int]:
        """Return the driver's restore threads in those of ``pids`` that use CUDA."""
        ...

    def state(self, pid: int) -> CudaState:
        """Return the checkpoint state of a process."""
        ...

    def lock(self, pid: int, *, timeout_ms: int, started: int | None = None) -> None:
        """RUNNING -> LOCKED. Raises ``LockTimeout``, with the process still RUNNING. ``timeout_ms`` must be positive.

        ``started``: start time in ticks since boot; a process with another start time is not locked. The other calls
        fail for a process that is not locked.
        """
        ...

    def checkpoint(self, *pids: int) -> None:
        """LOCKED -> CHECKPOINTED. Moves the GPU memory of the processes to their host memory, at once.

        Raises the error of the first that failed, after all have ended: the others have moved.
        """
        ...

    def restore(self, *pids: int, pairs: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED, at once. ``pairs``: old UUID -> new UUID, for every GPU that a process could see.

        Raises as ``checkpoint`` does. Check that the GPUs have enough free memory first: after a failure for lack of
        memory, all later restores of the process fail too (driver 580).
        """
        ...

    def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING."""
        ...


@dataclass(frozen=True, slots=True)
class Tree:
    """The process tree to dump: the root and its descendants. ``init`` is PID 1 of their PID namespace."""

    init: Id
    root_pid: int
    root_pid_ns: int
    owner: User
    """According to Slurm."""
    forked: frozenset[Id] = frozenset()
    """Processes with device files of the NVIDIA driver that they have inherited and do not use."""
    stopped: frozenset[int] = frozenset()
    """Processes, by PID in the namespace, that were stopped before the suspension, and remain so after a restore."""


@dataclass(frozen=True, slots=True)
class InheritFd:
    """A descriptor that replaces a file of the image on restore (``criu --inherit-fd fd[N]:KEY``)."""

    fd: int
    """Descriptor of the caller."""
    key: str
    """``SavedOutput.inherit``."""


class Pages(Protocol):
    """The memory pages of an image, most of its data, which are read while its process tree is being restored."""

    def begin(self, take: Take | None = None) -> None:
        """Start reading the pages with several threads, each byte once. A second call is a no-op.

        ``take`` receives the pages before they are verified, and must not raise.
        """
        ...

    def sound(self, timeout_s: float | None = None) -> None:
        """Wait until all pages are verified and passed to ``take``. May be called repeatedly, and without ``begin``.

        Raises ``ImageDamaged``, or ``CheckpointError`` after ``timeout_s`` seconds (``None``: no timeout).
        """
        ...

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """Verify the contents of a file against the manifest entry for ``path``. Raises ``ImageDamaged``.

        ``blocks``: the contents in blocks of ``digest.BLOCK`` bytes (the last one may be shorter). All blocks are read
        unless they exceed the size in the manifest.
        """
        ...


class Stop(Protocol):
    """The stop of all processes of a job. Nothing of the job runs while it is held."""

    def hold(self) -> None:
        """Hold the processes, whatever signal arrives. Raises ``AffinodeError`` if one cannot be held."""
        ...

    def release(self) -> None:
        """Release them to another tracer. They stay stopped unless they receive SIGCONT."""
        ...


class Imager(Protocol):
    """Dumps and restores process trees that hold no GPU."""

    def check(self) -> str:
        """Return the version of CRIU. Raises ``CheckpointError`` if CRIU is missing, too old or unusable here."""
        ...

    def why_no_device_files(self) -> str | None:
        """Return why processes with inherited device files cannot be dumped here, in one line, or ``None``."""
        ...

    def why_no_plugin(self) -> str | None:
        """Return why connections to services cannot be passed over in a dump here, in one line, or ``None``."""
        ...

    def dump(self, tree: Tree, directory_fd: int, *, timeout_s: float, stop: Stop) -> None:
        """Dump the process tree, which is stopped, to the directory, and leave it stopped.

        ``stop`` holds the tree. It is released only while CRIU runs, which traces the processes itself. Raises
        ``DumpFailed``, or ``DumpNoRoom`` if the file system of the directory is full; see there for the state of the
        tree.
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
        created: CreatedFiles,
        shared: bool,
        ready: Callable[[], None],
    ) -> int:
        """Restore the process tree below PID 1 of the namespace and return the root's PID in the namespace.

        ``user``: the owner of the job, with whose rights files are opened. ``created``: the record of the files that
        restores of the job have created on this node. ``shared``: other machines may write to the file system of the
        image.

        The tree runs when ``pages`` are verified and ``ready`` has returned; ``ready`` is called after all other
        checks. Raises ``RestoreFailed`` and the errors of ``pages``; no process of the tree is left then.
        """
        ...


@dataclass(frozen=True, slots=True)
class Image:
    """A complete checkpoint image with an authentic manifest. ``DirectoryStore.verify`` checks its files."""

    manifest: Manifest
    store: str
    """Path of the store, for messages."""
    former: bool = False
    """Signed by a release that did not yet sign notes and claims."""

    @property
    def job(self) -> str:
        """Name of the job's directory in the store."""
        return self.manifest.key.name

    @property
    def entry(self) -> str:
        """Name of the image's directory in the job's directory."""
        return f"{self.manifest.seq:04d}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage and limits of a store. Sizes are in bytes."""

    used: int
    free: int
    """Space available on the file system (``f_bavail``)."""
    quota: int | None
    by_user: Mapping[int, int]
    """UID -> bytes."""
    images: int


def restore_failure(text: str, error: OSError) -> RestoreFailed:
    """Return the error of a restore that ``error`` has ended; ``text``: what failed, without a reason."""
    kind = RestoreInterrupted if error.errno in _MAY_PASS else RestoreFailed
    return kind(f"{text}: {error.strerror or error}")


def may_pass(error: Exception) -> bool:
    """Return whether a later restore, or one on another node, may succeed after this error of a restore.

    A refusal of the image or of its environment repeats itself, as does a damaged image.
    """
    if isinstance(error, ImageDamaged):
        return isinstance(error, ImageUnreadable)
    return not isinstance(error, RestoreFailed) or isinstance(error, RestoreInterrupted)
