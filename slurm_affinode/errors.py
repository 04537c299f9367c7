"""Errors that a person sees: one line that says what is wrong, where, and what to do.

Vendor and library exceptions are translated into these at the adapter that met them. The command line prints
``str(error)`` on standard error and ends with ``error.exit_code``; nothing else of an error is shown.

Exit codes: 0 done, 1 found problems (where finding is the point), 2 wrong usage or unusable input,
3 could not reach something that is needed.
"""

import errno


class AffinodeError(Exception):
    """Base of every expected failure. ``hint`` says what to do next and is printed on its own line."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class InputError(AffinodeError):
    """A file or a record that cannot be used. ``where`` is ``FILE``, ``FILE:LINE`` or ``FILE, record N``."""

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.where = where


class ConfigError(AffinodeError):
    """The configuration says something that cannot be."""


class NoStoreError(AffinodeError):
    """There is no store where a command that only reads was told to look."""


class UnreachableError(AffinodeError):
    """A service, program or directory that is needed does not answer."""

    exit_code = 3


class DiskError(AffinodeError):
    """A local file system takes no more: it is full, over a quota, or failing. Nothing half-written is left."""


_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def unwritable(path: object, error: OSError, *, hint: str | None = None, doing: str = "written") -> AffinodeError:
    """Our error for ``path`` that cannot be written: a ``DiskError``, or an ``UnreachableError`` for another reason."""
    said = f"{path}: cannot be {doing}: {error.strerror or error}"
    if error.errno in _DISK:
        return DiskError(said, hint="free some space, or raise the quota, and run it again")
    return UnreachableError(said, hint=hint)


def one_line(error: BaseException, most: int = 300) -> str:
    """What a library says of an error, which may be several lines, as one."""
    return " ".join(str(error).split())[:most]
