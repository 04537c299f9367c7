"""Shepherds announced by root: one file per job beside the agent's sockets, written by ``spank/announcement.c``.

The SPANK plugin writes the file as root before the shepherd starts any process of the user, and removes it when the job
ends. A leftover file is harmless: it identifies one process by PID and start time, which no later process matches.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from slurm_affinode.base.pidfd import ExhaustedError, Process
from slurm_affinode.checkpoint.user_files import MOST_ID, User

DIRECTORY = "shepherds"
"""Below the directory of the sockets (``ANNOUNCEMENTS`` in ``spank/announcement.h``)."""
VERSION = 2
"""``ANNOUNCEMENT_VERSION`` in ``spank/announcement.h``."""
_MAX_BYTES = 1 << 20
"""More than 65,536 groups need, the most that Linux permits."""
_NAME = re.compile(r"[1-9][0-9]{0,9}")
_VALUE = re.compile(r"[0-9]{1,20}(?::[0-9]{1,20})?")
_GROUPS = re.compile(r"(?:[0-9]{1,10}(?:,[0-9]{1,10})*)?")


class AnnouncementError(ValueError):
    """An announcement cannot be trusted or read."""


class AnnouncementVersionError(AnnouncementError):
    """The plugin of another release has written the announcement."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Root's record of a job's shepherd. Namespaces and program are identified by device and inode."""

    job_id: int
    owner: User
    """As Slurm has launched the job."""
    pid: int
    started: int
    """Ticks since boot."""
    keeper: int
    """PID of the parent, Slurm's task."""
    keeper_started: int
    pid_namespace: tuple[int, int]
    mount_namespace: tuple[int, int]
    program: tuple[int, int]


class Announcements:
    """Reads and clears the announcements of a node."""

    def __init__(self, directory: Path, *, owner: int = 0) -> None:
        """``owner``: the only user who may have write access to the directory."""
        self._directory = directory
        self._owner = owner

    def of(self, job_id: int) -> Announcement | None:
        """Return the announcement for a job, or ``None`` if there is none. Raises ``AnnouncementError``."""
        try:
            with self._opened() as directory, self._file(directory, job_id) as file:
                return self._read(file, job_id)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AnnouncementError(f"{self._directory}/{job_id}: {error.strerror}") from error

    def mismatch(self, job_id: int) -> str | None:
        """Return the error if the plugin of another release has started the job, otherwise ``None``. Never raises."""
        with contextlib.suppress(AnnouncementError):
            try:
                self.of(job_id)
            except AnnouncementVersionError as error:
                return str(error)
        return None

    def clear(self, job_id: int) -> None:
        """Remove the announcement for a job if its shepherd has ended. Never raises."""
        # Slurm identifies a lost attempt by the job ID alone; another attempt may already run here.
        with (
            contextlib.suppress(OSError, AnnouncementError, ExhaustedError),
            self._opened() as directory,
            self._file(directory, job_id) as file,
        ):
            if not _lives(self._read(file, job_id)):
                _remove(directory, str(job_id), os.fstat(file.fileno()))

    def sweep(self) -> None:
        """Remove the announcements left by killed keepers. Never raises."""
        with contextlib.suppress(OSError, AnnouncementError, ExhaustedError):
            with self._opened() as directory:
                names = os.listdir(directory)  # noqa: PTH208 - a descriptor
            for name in names:
                if _NAME.fullmatch(name):
                    self.clear(int(name))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._check(os.fstat(directory), str(self._directory))
            yield directory
        finally:
            os.close(directory)

    def _file(self, directory: int, job_id: int) -> FileIO:
        """Open the announcement of a job. While it is open, no other file has its inode."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.fdopen(os.open(str(job_id), flags, dir_fd=directory), "rb", buffering=0)

    def _read(self, file: FileIO, job_id: int) -> Announcement:
        facts, where = os.fstat(file.fileno()), f"{self._directory}/{job_id}"
        self._check(facts, where)
        if not stat.S_ISREG(facts.st_mode):
            raise AnnouncementError(f"{where}: not a regular file")
        announcement = _parse(file.read(_MAX_BYTES).decode("ascii", "replace"), where)
        if announcement.job_id != job_id:
            raise AnnouncementError(f"{where}: is for job {announcement.job_id}")
        return announcement

    def _check(self, facts: os.stat_result, what: str) -> None:
        if facts.st_uid != self._owner or facts.st_mode & 0o022:
            raise AnnouncementError(f"{what}: users other than {self._owner} may write to it")


def _remove(directory: int, name: str, facts: os.stat_result) -> None:
    """Remove a file, unless a new one has taken its name meanwhile, which keeps it. Raises ``OSError``."""
    aside = f".{name}.{os.getpid()}-{threading.get_ident()}"
    os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
    try:
        if not os.path.samestat(os.stat(aside, dir_fd=directory, follow_symlinks=False), facts):
            with contextlib.suppress(FileExistsError):  # a still newer one
                os.link(aside, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.unlink(aside, dir_fd=directory)


def _lives(announced: Announcement) -> bool:
    try:
        with Process(announced.pid, started=announced.started) as process:
            return not process.ended()
    except ProcessLookupError:
        return False


def _parse(text: str, where: str) -> Announcement:
    fields: dict[str, tuple[int, ...]] = {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        pattern, separator = (_GROUPS, ",") if key == "groups" else (_VALUE, ":")
        if key in fields or not pattern.fullmatch(value):
            raise AnnouncementError(f"{where}: {line!r:.80} is not understood")
        fields[key] = tuple(map(int, value.split(separator))) if value else ()
    try:
        (version,) = fields["version"]
        if version != VERSION:
            raise AnnouncementVersionError(
                f"{where}: version {version}, this agent reads {VERSION}: the plugin is of another release"
            )
        if any(number > MOST_ID for key in ("uid", "gid", "groups") for number in fields[key]):
            raise AnnouncementError(f"{where}: not the number of a user or group")
        numbers = [fields[key] for key in ("job", "uid", "gid", "pid", "started", "keeper", "keeper_started")]
        pairs = [fields[key] for key in ("pid_namespace", "mount_namespace", "program")]
        (job_id,), (uid,), (gid,), (pid,), (started,), (keeper,), (keeper_started,) = numbers
        (pid_namespace, mount_namespace, program) = ((device, inode) for device, inode in pairs)
    except (KeyError, ValueError) as error:
        if isinstance(error, AnnouncementError):
            raise
        raise AnnouncementError(f"{where}: it is incomplete") from None
    owner = User(uid, gid, fields["groups"])
    return Announcement(job_id, owner, pid, started, keeper, keeper_started, pid_namespace, mount_namespace, program)
