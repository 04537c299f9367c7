"""The one way in which a thread of the agent survives a fault of ours.

What is expected (``AffinodeError``, ``OSError``) is caught where it is known what to do about it. A thread that serves
all jobs of a node must not end by anything else either: jobs would sleep on for ever, shepherds wait for an answer that
does not come. Such a fault is logged with its traceback, and the thread goes on with what is next.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self


class Survival:
    """A block of code whose faults are logged. ``error``: what went wrong in it; ``None``: nothing."""

    def __init__(self, log: logging.Logger, text: str, arguments: tuple[object, ...]) -> None:
        self._log = log
        self._text = text
        self._arguments = arguments
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Whether what follows the block is done."""
        if not isinstance(error, Exception):
            return False
        self._log.error(self._text, *self._arguments, exc_info=error)
        self.error = error
        return True


def surviving(log: logging.Logger, text: str, *arguments: object) -> Survival:
    """Log whatever is raised within, as ``text`` with ``arguments``, and go on behind it.

    ``KeyboardInterrupt`` and ``SystemExit`` go through.
    """
    return Survival(log, text, arguments)
