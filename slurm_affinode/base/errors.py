"""Errors shown to users: one line with the problem, its place, and the remedy.

Vendor and library exceptions are translated into these at the adapter that met them. The command line prints
``str(error)`` on standard error and ends with ``error.exit_code``; nothing else of an error is shown.

Messages and hints quote names of users and output of other programs, and are printed on terminals and in logs. So
``AffinodeError`` escapes unprintable characters, line ends included, in both.

Exit codes: 0 success, 1 problems found (by commands that search for problems), 2 wrong usage or unusable input, 3 a
required service, program or directory could not be reached.
"""

import errno

from slurm_affinode.base.text import escaped


class AffinodeError(Exception):
    """Base class of every expected failure. ``hint`` says what to do next and is printed on its own line."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(escaped(message))
        self.hint = None if hint is None else escaped(hint)

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines for the terminal: more than the message if a file has several errors."""
        return (str(self),)


class InputError(AffinodeError):
    """A file or record cannot be used. ``where`` is ``FILE``, ``FILE:LINE`` or ``FILE, record N``."""

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.where = None if where is None else escaped(where)


class ConfigError(AffinodeError):
    """The configuration is invalid."""


class NoStoreError(AffinodeError):
    """A read-only command found no database in the given location."""


class UnreachableError(AffinodeError):
    """A required service, program or directory does not respond."""

    exit_code = 3


class DiskError(AffinodeError):
    """A local file system cannot be written: it is full, over a quota, or failing. No partial file is left."""


_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def unwritable(path: object, error: OSError, *, hint: str | None = None, doing: str = "written") -> AffinodeError:
    """Return the error for a ``path`` that cannot be written: ``DiskError``, otherwise ``UnreachableError``."""
    message = f"{path}: cannot be {doing}: {error.strerror or error}"
    if error.errno in _DISK:
        return DiskError(message, hint="free some space, or raise the quota, and run it again")
    return UnreachableError(message, hint=hint)
