"""In-memory directories for the files that targets read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Yield an empty directory, which is removed with its contents."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None) as path:
        yield Path(path)


def put(path: str, data: bytes) -> None:
    """Write a file, replacing its contents."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
