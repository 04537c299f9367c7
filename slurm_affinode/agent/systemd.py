"""Reports of the agent to systemd: its state, see sd_notify(3), and log lines for the journal."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from datetime import UTC, datetime
from typing import Any

from slurm_affinode.base.text import escaped
from slurm_affinode.base.times import utc


def notify(state: str) -> None:
    """Notify systemd if it started the agent with Type=notify, see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


class _Formatter(logging.Formatter):
    """One line with the time, or with the priority for the journal, which has its own time stamps.

    Messages contain names of files and processes that users chose. Unprintable characters are escaped, so a name can
    neither start a log line nor send control sequences to a terminal.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)s %(message)s")
        self._journal = journal

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - of logging
        """Return the time in UTC, with milliseconds."""
        return utc(datetime.fromtimestamp(record.created, UTC), "milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging
        """See ``logging``."""
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - of logging
        """See ``logging``."""
        return "\n".join(map(escaped, super().formatException(ei).splitlines()))

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging``."""
        text = super().format(record)
        if not self._journal:
            return text
        level = 3 if record.levelno >= logging.ERROR else 4 if record.levelno >= logging.WARNING else 6
        return "\n".join(f"<{level}>{line}" for line in text.splitlines())


def log_to_stderr(*, verbose: bool) -> None:
    """Log to standard error, which systemd forwards to the journal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in os.environ))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
