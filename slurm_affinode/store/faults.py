"""What a database driver raised, said as one clear line that holds no password."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from slurm_affinode.errors import AffinodeError, DiskError, InputError, UnreachableError

_MARIADB_TRANSIENT = {1205, 1213}  # lock wait timeout, deadlock
_POSTGRESQL_TRANSIENT = {"40001", "40P01"}  # serialization failure, deadlock
_MARIADB_DENIED = {1044, 1045, 1142, 1227, 1698}
_MARIADB_FULL = {1021, 1114}


def clean(message: str) -> str:
    """``message`` on one line, without control characters."""
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def is_transient(error: DBAPIError) -> bool:
    """Whether the server broke the transaction off for another one's sake, so that running it again can succeed."""
    return _sqlstate(error) in _POSTGRESQL_TRANSIENT or _errno(error) in _MARIADB_TRANSIENT


def translate(error: DBAPIError, dialect: str, where: str) -> AffinodeError:
    """Our error for ``error``; ``where`` names the store for people."""
    if dialect == "sqlite":
        return _sqlite(clean(str(error.orig)), where, getattr(error.orig, "sqlite_errorname", ""))
    said = _said(error)
    state, number = _sqlstate(error), _errno(error)
    if state == "42501" or number in _MARIADB_DENIED or (state or "").startswith("28"):
        return UnreachableError(f"{where}: not allowed: {said}", hint="check the user, the password and its rights")
    if state == "53100" or number in _MARIADB_FULL:
        return DiskError(f"{where}: the disk of the server is full: {said}")
    if is_transient(error):
        return UnreachableError(f"{where}: other writers were in the way: {said}", hint="try again")
    if error.connection_invalidated or _is_connection(error):
        return UnreachableError(f"{where}: cannot be reached: {said}", hint="is the server running, is the URL right?")
    return AffinodeError(f"{where}: the database refused: {said}")


def _sqlite(said: str, path: str, name: str) -> AffinodeError:
    low = said.lower()
    if "not a database" in low or "malformed" in low:
        return InputError(
            "is damaged, or is not a SQLite database", where=path,
            hint="restore it from a copy, or move it away and take the history in again",
        )  # fmt: skip
    if "readonly" in low or "read-only" in low:
        return UnreachableError(
            f"{path}: cannot be written: it, or its directory, is read-only",
            hint="run as the user who owns it",
        )
    if "full" in low or name == "SQLITE_IOERR_SHMSIZE":  # no room for the index of the write-ahead log
        return DiskError(f"{path}: the disk is full", hint="nothing was changed; make room and run it again")
    if "locked" in low or "busy" in low:
        return UnreachableError(f"{path}: another process has kept it locked", hint="try again when that one is done")
    if "unable to open" in low:
        return UnreachableError(f"{path}: cannot be opened", hint="check that you may read and write its directory")
    if "i/o error" in low:
        return DiskError(f"{path}: the disk gave an error: {said}")
    return AffinodeError(f"{path}: the database refused: {said}")


def _said(error: DBAPIError) -> str:
    orig = error.orig
    arguments: tuple[object, ...] = getattr(orig, "args", ())
    if len(arguments) == 2 and isinstance(arguments[0], int):  # PyMySQL: (number, text)
        return clean(str(arguments[1]))
    lines = str(orig).strip().splitlines()
    return clean(lines[0]) if lines else type(orig).__name__


def _sqlstate(error: DBAPIError) -> str | None:
    state = getattr(error.orig, "sqlstate", None)
    return state if isinstance(state, str) else None


def _errno(error: DBAPIError) -> int | None:
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None


def _is_connection(error: DBAPIError) -> bool:
    number = _errno(error)
    if number is not None:
        return 2000 <= number < 3000 or number in (0, 1040, 1049, 1053, 1129, 1130, 1203)
    state = _sqlstate(error)
    return state is None or state[:2] in ("08", "57", "53", "3D")
