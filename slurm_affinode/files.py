"""Durable writes: a reader sees the old file or the new one, never half of one, also across a power loss."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def fsync_dir(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path in the same directory; on success it takes the name ``path``, on failure it goes.

    The caller writes the yielded file and closes it. Order: write, fsync, rename, fsync the directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(fd)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        fsync_dir(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``text`` (UTF-8), durably and atomically."""
    with replacing(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def delivering(path: Path) -> Iterator[Path]:
    """As ``replacing``, for an output that a user names: a link keeps pointing to it, and what is no file (a device, a
    pipe) is written into, for its name must not become that of a file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    with replacing(path.resolve()) as temporary:
        yield temporary
