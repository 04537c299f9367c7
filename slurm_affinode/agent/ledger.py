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

_LOG = logging.getLogger("slurm_affinode.agent")


class Ledger:
    """The ledger of one node."""

    def __init__(self, directory: Path | None, node: str) -> None:
        """``directory`` ``None``: none is kept."""
        self._path = None if directory is None else directory / f"{node}.jsonl"
        self._lock = threading.Lock()

    def write(self, entry: LedgerEntry) -> None:
        """Append a line; durable where it returns without a word in the log."""
        if self._path is None:
            return
        line = encode(entry).encode("utf-8", "backslashreplace") + b"\n"
        try:
            with self._lock:
                make_open(self._path.parent)
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    end = os.lseek(fd, 0, os.SEEK_END)
                    if not end:  # whatever the agent's umask is: reports are another user's
                        os.fchmod(fd, 0o644)
                    if end and os.pread(fd, 1, end - 1) != b"\n":
                        line = b"\n" + line  # a line that a crash has torn stays a line of its own
                    while line:
                        line = line[os.write(fd, line) :]
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            _LOG.warning("%s: a line is lost: %s", self._path, error.strerror or error)
