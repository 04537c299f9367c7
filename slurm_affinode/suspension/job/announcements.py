"""Shepherds announced by root: one file per job beside the agent's sockets, written by ``spank/announcement.c``.

The SPANK plugin writes the file as root before the shepherd starts any process of the user, and removes it when the job
ends. A leftover file is harmless: it identifies one process by PID and start time, which no later process matches.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
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
        name = str(job_id)
        try:
            with self._opened() as directory:
                text = self._read(directory, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AnnouncementError(f"{self._directory}/{name}: {error.strerror}") from error
        announcement = _parse(text, f"{self._directory}/{name}")
        if announcement.job_id != job_id:
            raise AnnouncementError(f"{self._directory}/{name}: is for job {announcement.job_id}")
        return announcement

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
        with contextlib.suppress(OSError, AnnouncementError, ExhaustedError):
            announcement = self.of(job_id)
            if announcement is None or not _lives(announcement):
                with self._opened() as directory:
                    os.unlink(str(job_id), dir_fd=directory)

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

    def _read(self, directory: int, name: str) -> str:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=directory), "rb", buffering=0) as file:
            facts = os.fstat(file.fileno())
            self._check(facts, f"{self._directory}/{name}")
            if not stat.S_ISREG(facts.st_mode):
                raise AnnouncementError(f"{self._directory}/{name}: not a regular file")
            return file.read(_MAX_BYTES).decode("ascii", "replace")

    def _check(self, facts: os.stat_result, what: str) -> None:
        if facts.st_uid != self._owner or facts.st_mode & 0o022:
            raise AnnouncementError(f"{what}: users other than {self._owner} may write to it")


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
