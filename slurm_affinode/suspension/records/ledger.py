"""The ledger: the GPU time freed by each suspension, appended to ``NODE.jsonl`` in a directory that all nodes write to.

A failed write is logged and otherwise ignored: the ledger must not keep a job from its GPUs.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from slurm_affinode.base.files import make_open
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.model.ledger import LedgerEntry, encode

_LOG = logging.getLogger("slurm_affinode.agent")
_LEFT_LIMIT = 1 << 20


class SuspensionLedger:
    """The ledger of one node."""

    def __init__(self, directory: Path | None, node: str) -> None:
        """``directory``: ``None`` disables the ledger."""
        self._path = None if directory is None else directory / f"{node}.jsonl"
        self._ask = FileSystemCalls(directory)
        self._unwritten = b""
        self._lock = threading.Lock()
        """Guards the file and the lines that could not be written yet."""

    def write(self, entry: LedgerEntry) -> None:
        """Append a line. It is durable on return, unless a warning was logged."""
        path = self._path
        if path is None:
            return
        line = encode(entry).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            data = self._unwritten + line
            try:
                self._ask(lambda: _append(path, data))
                self._unwritten = b""
            except OSError as error:
                later = isinstance(error, NoAnswerError) and len(data) <= _LEFT_LIMIT
                if later:  # duplicate lines count once
                    self._unwritten = data
                what = "written later" if later else "lost"
                _LOG.warning("%s: a line is %s: %s", path, what, error.strerror or error)


def _append(path: Path, data: bytes) -> None:
    make_open(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        end = os.lseek(fd, 0, os.SEEK_END)
        if not end:  # regardless of the agent's umask: reports run as another user
            os.fchmod(fd, 0o644)
        if end and os.pread(fd, 1, end - 1) != b"\n":
            data = b"\n" + data  # keep a line truncated by a crash separate
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
