"""The ledger: what each suspension gave back, appended to ``NODE.jsonl`` in a directory that all nodes write to.

A line that cannot be written is logged and left: a ledger must not keep a job from its GPUs.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from slurm_affinode.files import make_open
from slurm_affinode.model.ledger import LedgerEntry, encode
from slurm_affinode.patience import NoAnswerError, Patience

_LOG = logging.getLogger("slurm_affinode.agent")
_LEFT_LIMIT = 1 << 20


class Ledger:
    """The ledger of one node."""

    def __init__(self, directory: Path | None, node: str) -> None:
        """``directory`` ``None``: none is kept."""
        self._path = None if directory is None else directory / f"{node}.jsonl"
        self._ask = Patience(directory)
        self._left = b""
        self._lock = threading.Lock()

    def write(self, entry: LedgerEntry) -> None:
        """Append a line; durable where it returns without a word in the log."""
        path = self._path
        if path is None:
            return
        line = encode(entry).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            data = self._left + line
            try:
                self._ask(lambda: _append(path, data))
                self._left = b""
            except OSError as error:
                later = isinstance(error, NoAnswerError) and len(data) <= _LEFT_LIMIT
                if later:  # what is written twice counts once
                    self._left = data
                what = "written later" if later else "lost"
                _LOG.warning("%s: a line is %s: %s", path, what, error.strerror or error)


def _append(path: Path, data: bytes) -> None:
    make_open(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        end = os.lseek(fd, 0, os.SEEK_END)
        if not end:  # whatever the agent's umask is: reports are another user's
            os.fchmod(fd, 0o644)
        if end and os.pread(fd, 1, end - 1) != b"\n":
            data = b"\n" + data  # a line that a crash has torn stays a line of its own
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
