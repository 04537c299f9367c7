"""Users who want no mails about their use of GPUs: one empty file for each in a directory that all users may write to.

A file counts for its owner, whom the kernel records, regardless of its name and content. The directory is sticky, so
that users can remove their own files alone, and they cannot list it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError, unwritable

_HINT = "nightly.mail.opt_out is a directory of root or of the user who runs nightly: install -d -m 1733 DIRECTORY"


def opted_out(directory: Path) -> frozenset[int]:
    """Return the UIDs of the users who want no mails. Raises ``AffinodeError`` if the directory is not safe."""
    with _opened(directory) as directory_fd:
        facts = os.fstat(directory_fd)
        if facts.st_uid not in (0, os.geteuid()):
            raise UnreachableError(f"{directory}: is not used: it belongs to another user", hint=_HINT)
        if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
            raise UnreachableError(f"{directory}: is not used: users could remove files of others", hint=_HINT)
        uids = set()
        for name in os.listdir(directory_fd):  # noqa: PTH208 - a descriptor
            with contextlib.suppress(FileNotFoundError):
                file = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
                # A second name could have been made by someone else.
                if stat.S_ISREG(file.st_mode) and file.st_nlink == 1:
                    uids.add(file.st_uid)
    return frozenset(uids)


def is_opted_out(directory: Path, uid: int) -> bool:
    """Return whether the user has opted out. Needs no right to list the directory. Raises ``AffinodeError``."""
    with _opened(directory) as directory_fd:
        return _owner(directory_fd, uid) == uid


def opt_out(directory: Path, uid: int) -> bool:
    """Create the file of the user of this process; ``False`` if it exists. Raises ``AffinodeError``."""
    with _opened(directory) as directory_fd:
        try:
            os.close(
                os.open(str(uid), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory_fd)
            )
        except FileExistsError:
            owner = _owner(directory_fd, uid)
            if owner == uid:
                return False
            raise InputError(
                f"belongs to the user with UID {owner}", where=str(directory / str(uid)), hint="ask the administrator"
            ) from None
        except OSError as error:
            raise unwritable(directory / str(uid), error) from error
    return True


def opt_in(directory: Path, uid: int) -> bool:
    """Remove the file of the user; ``False`` if there is none. Raises ``AffinodeError``."""
    with _opened(directory) as directory_fd:
        try:
            os.unlink(str(uid), dir_fd=directory_fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unwritable(directory / str(uid), error, doing="removed") from error
    return True


def _owner(directory_fd: int, uid: int) -> int | None:
    try:
        return os.stat(str(uid), dir_fd=directory_fd, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    try:
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:  # users may traverse it, and not list it
        directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise AffinodeError(f"{directory}: {error.strerror}", hint=_HINT) from error
    try:
        yield directory_fd
    finally:
        os.close(directory_fd)
