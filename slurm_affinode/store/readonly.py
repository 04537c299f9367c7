"""A SQLite store that this user may read but not write: one user runs ``nightly``, others read reports of their own.

SQLite writes beside a file with a write-ahead log also to read it. Where it may not, and no log is there, the file is
opened as one that does not change; whether it did is looked at afterwards (``unchanged``). Where a writer has a log
open, SQLite reads both.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from slurm_affinode.errors import UnreachableError

_LOGS = ("-wal", "-journal")


def may_not_write(path: Path) -> bool:
    """Whether ``path`` is a file that can be read, and it or its directory cannot be written."""
    return os.access(path, os.R_OK, effective_ids=True) and not all(
        os.access(one, os.W_OK, effective_ids=True) for one in (path, path.parent)
    )


def connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection that never writes."""
    how = "mode=ro" if _logged(path) else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{how}", timeout_s, uri=True)


@contextlib.contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Raise ``UnreachableError`` where a writer changed the file meanwhile: what was read may be of two states."""
    if _logged(path):
        yield
        return
    before = _state(path)
    try:
        yield
    finally:  # an error in between may come of it, too
        if _state(path) != before:
            raise UnreachableError(f"{path}: was written to while it was read", hint="run it again")


def _logged(path: Path) -> bool:
    return any(Path(f"{path}{log}").exists() for log in _LOGS)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # SQLite says why
    return found.st_ino, found.st_size, found.st_mtime_ns
