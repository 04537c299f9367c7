"""Summaries of jobs in one file per user, for users who may not read the database.

A file has one line of JSON per attempt (``JobSummary``), is named after the UID, and belongs to that user with mode
0600; users can traverse its directory and not list it. A user may change the own file, so it is never read back: the
service keeps a copy of its own, and replaces the published file with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError, unwritable
from slurm_affinode.base.files import replacing
from slurm_affinode.base.text import counted
from slurm_affinode.base.users import uid_of_user
from slurm_affinode.model.job_summary import VERSION, JobSummary, LaterFormatError
from slurm_affinode.slurm import identifiers

_DIRECTORY_MODE = 0o711
_FILE_MODE = 0o600
_LONGEST_LINE = 16 << 20
_NEW_KEYS = ("admin_comment",)
"""Keys that summaries have since release 0.9.0, whose readers refuse all others."""
Key = tuple[str, int, str | None]
"""Cluster, raw job ID, submit time as in JSON."""


class NoSummaryError(AffinodeError):
    """No summary of the job is published for this user."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of a publication."""

    users: int
    jobs: int
    skipped: int
    """Users without an account on this machine, or with another UID in accounting."""


def publish(
    directory: Path,
    copies: Path,
    fresh: Iterable[JobSummary],
    keep_since: datetime,
    *,
    uid_of: Callable[[str], int | None] = uid_of_user,
) -> Published:
    """Merge ``fresh`` into the files of their owners, without attempts that ended before ``keep_since``.

    An attempt that still ran in an earlier publication and is not in ``fresh`` is left out. ``copies``: directory of
    the copies that the service keeps. Raises ``AffinodeError`` if the directory is not the service's own or cannot
    be written, and ``UnreachableError`` if files cannot be given to their owners: these are not published then.
    """
    owned, skipped = _by_owner(fresh, uid_of)
    directory_fd = _own_directory(directory)
    try:
        copies.mkdir(parents=True, exist_ok=True, mode=0o700)
        users = jobs = 0
        for uid in sorted(owned.keys() | set(_uids(copies))):
            lines = _merged(copies / _name(uid), uid, owned.get(uid, {}), keep_since, uid_of)
            if not lines:
                _remove(copies / _name(uid), directory_fd, uid)
                continue
            text = "".join(lines)
            _write(copies / _name(uid), text)
            _give(directory, directory_fd, uid, text)
            users += 1
            jobs += len(lines)
    except OSError as error:
        raise unwritable(error.filename or directory, error) from error
    finally:
        os.close(directory_fd)
    return Published(users, jobs, skipped)


def _by_owner(
    fresh: Iterable[JobSummary], uid_of: Callable[[str], int | None]
) -> tuple[dict[int, dict[Key, str]], int]:
    """Return UID -> attempt -> line, and the number of users without a certain UID.

    The name of the user decides; a UID in accounting that contradicts it is that of another user. Root needs no file.
    """
    owned: dict[int, dict[Key, str]] = {}
    skipped = set()
    uids: dict[str, int | None] = {}
    for summary in fresh:
        name = summary.user or ""
        if name not in uids:
            uids[name] = uid_of(name) if name else None
        uid = uids[name]
        if uid is None or (summary.uid is not None and summary.uid != uid):
            skipped.add(name)
        elif uid != 0:
            value = summary.as_json()
            owned.setdefault(uid, {})[_key(value)] = json.dumps(_without_new_keys(value), separators=(",", ":")) + "\n"
    return owned, len(skipped)


def _without_new_keys(value: dict[str, Any]) -> dict[str, Any]:
    """Return a summary without the null entries that readers of release 0.9.0 refuse."""
    return {key: entry for key, entry in value.items() if entry is not None or key not in _NEW_KEYS}


def _key(value: dict[str, object]) -> Key:
    attempt = json_values.table(value["job"])
    return str(value["cluster"]), int(attempt["job_id"]), attempt["submit"]


def _name(uid: int) -> str:
    return f"{uid}.jsonl"


def _uids(copies: Path) -> Iterator[int]:
    for path in copies.glob("*.jsonl"):
        if path.stem.isdecimal():
            yield int(path.stem)


def _own_directory(directory: Path) -> int:
    """Create the directory if it is absent; return its descriptor. Raises ``AffinodeError`` unless it is safe."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=_DIRECTORY_MODE)
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        hint = "nightly.jobs.directory is a directory, no symbolic link, of the user who runs nightly"
        raise unwritable(directory, error, hint=hint, doing="used") from error
    facts = os.fstat(directory_fd)
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        os.close(directory_fd)
        why = "others may write to it" if facts.st_uid == os.geteuid() else "it belongs to another user"
        raise UnreachableError(
            f"{directory}: is not used for job summaries: {why}",
            hint="give the directory to the user who runs nightly, with mode 0711",
        )
    os.fchmod(directory_fd, _DIRECTORY_MODE)  # the umask, or an administrator, may have set another mode
    return directory_fd


def _merged(
    copy: Path, uid: int, fresh: dict[Key, str], keep_since: datetime, uid_of: Callable[[str], int | None]
) -> list[str]:
    """Return the lines of a user's file: kept and fresh ones, ordered by their end."""
    ends: dict[Key, tuple[str, str]] = {}
    for line in _lines_of(copy):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # of another version, or damaged by a full disk
            value = json_values.table(json_values.loads(line))
            JobSummary.from_json(dict(value))
            end = value["job"]["end"]
            # The UID may belong to another user by now.
            if end is not None and uid_of(value["user"]) == uid:
                ends[_key(value)] = (end, line)
    for key, line in fresh.items():
        ends[key] = (json.loads(line)["job"]["end"] or "9999", line)
    return [line for end, line in sorted(ends.values()) if end == "9999" or datetime.fromisoformat(end) >= keep_since]


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        return []


def _write(path: Path, text: str) -> None:
    with replacing(path, mode=_FILE_MODE) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _give(directory: Path, directory_fd: int, uid: int, text: str) -> None:
    """Replace the file of a user. The directory is addressed by its descriptor: its path may be exchanged meanwhile."""
    try:
        with replacing(Path(f"/proc/self/fd/{directory_fd}") / _name(uid), mode=_FILE_MODE, owner=uid) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except PermissionError as error:
        raise UnreachableError(
            f"{directory}: job summaries are not published: files cannot be given to their owners",
            hint="run nightly as root, or with the capability CAP_CHOWN",
        ) from error
    except OSError as error:
        raise unwritable(directory / _name(uid), error) from error


def _remove(copy: Path, directory_fd: int, uid: int) -> None:
    copy.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_name(uid), dir_fd=directory_fd)


def read(
    directory: Path, job: str, *, cluster: str | None = None, attempt: int | None = None, uid: int | None = None
) -> JobSummary:
    """Return the published summary of a job of a user, by default the present one: the last attempt, unless another
    number is given.

    Raises ``NoSummaryError`` if there is none, and ``InputError`` for a file that is damaged, of a later release, or
    that another user could have written.
    """
    user = os.geteuid() if uid is None else uid
    path = directory / _name(user)
    try:
        parsed = identifiers.parse(job)
    except ValueError as error:
        raise AffinodeError(str(error), hint="a job ID is 123, 123_4 or 123+1") from None
    attempts, failure = _matching(path, user, parsed, cluster)
    if not attempts:
        if failure is not None:
            raise failure
        raise NoSummaryError(
            f"no summary of a job {job} of yours is published in {directory}",
            hint="summaries appear after the next night, and only the owner of a job may read its summary",
        )
    clusters = sorted({attempt.cluster for attempt in attempts})
    if len(clusters) > 1:
        raise AffinodeError(f"several clusters have a job {job}: {', '.join(clusters)}", hint="choose one: --cluster")
    if (count := len({attempt.job.job_id for attempt in attempts})) > 1:
        raise AffinodeError(f"{job} is {count} jobs", hint=f"name one of them, such as {attempts[0].job.id}")
    attempts.sort(key=lambda attempt: attempt.job.start or attempt.until)
    number = len(attempts) if attempt is None else attempt if attempt > 0 else len(attempts) + 1 + attempt
    if not 1 <= number <= len(attempts):
        raise NoSummaryError(f"{counted(len(attempts), 'attempt')} of job {job} published, and no attempt {attempt}")
    return replace(attempts[number - 1], source="published", attempt=number, attempts=len(attempts))


def _matching(
    path: Path, user: int, job_id: identifiers.JobId, cluster: str | None
) -> tuple[list[JobSummary], InputError | None]:
    """Return the summaries of a job, and the error about the first line that cannot be read, if there is one."""
    failure: InputError | None = None
    exact, related = [], []
    with _opened(path, user) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            try:
                summary = JobSummary.from_json(json_values.loads(line))
            except ValueError as error:
                failure = failure or _unreadable(error, f"{path}:{number}")
                continue
            if cluster not in (None, summary.cluster):
                continue
            if _is(summary, job_id):
                exact.append(summary)
            elif job_id.array_task_id is None and job_id.het_offset is None and _belongs(summary, job_id.job_id):
                related.append(summary)
    return exact or related, failure


def _unreadable(error: ValueError, where: str) -> InputError:
    if isinstance(error, LaterFormatError):
        return InputError(
            f"has {error} of the format; this release reads {VERSION}", where=where,
            hint="upgrade slurm-affinode on this machine",
        )  # fmt: skip
    return InputError("is damaged", where=where, hint="the next nightly run writes it again")


def _is(summary: JobSummary, job_id: identifiers.JobId) -> bool:
    if job_id.array_task_id is not None:
        return summary.job.id == f"{job_id.job_id}_{job_id.array_task_id}"
    if job_id.het_offset is not None:
        return summary.job.id == f"{job_id.job_id}+{job_id.het_offset}"
    return summary.job.job_id == job_id.job_id


def _belongs(summary: JobSummary, job_id: int) -> bool:
    return summary.job.id.startswith((f"{job_id}_", f"{job_id}+"))


@contextlib.contextmanager
def _opened(path: Path, user: int) -> Iterator[BinaryIO]:
    """Open a published file. Raises ``NoSummaryError`` if there is none, ``InputError`` unless it can be trusted."""
    try:
        owner = path.parent.stat().st_uid
        # A FIFO in its place must not block.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NoSummaryError(
            f"{path}: no summaries of your jobs are published yet", hint="they appear after the next night"
        ) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
    with io.BufferedReader(io.FileIO(fd)) as file:
        facts = os.fstat(fd)
        why = _untrusted(facts, (0, owner, user))
        if why:
            raise InputError(f"is not used: {why}", where=str(path), hint="ask an administrator; nightly replaces it")
        yield file


def _untrusted(facts: os.stat_result, owners: Sequence[int]) -> str:
    if not stat.S_ISREG(facts.st_mode):
        return "it is not a regular file"
    if facts.st_uid not in owners:
        return f"it belongs to UID {facts.st_uid}"
    return "others may write to it" if facts.st_mode & 0o022 else ""
