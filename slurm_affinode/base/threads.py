"""Protection of agent threads against unexpected errors.

Expected errors (``AffinodeError``, ``OSError``) are caught where they can be handled. A thread that serves all jobs of
a node must not end because of another error either: suspended jobs would never wake, and shepherds would wait forever
for a response. Such an error is logged with its traceback, and the thread continues.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self


class Survival:
    """A block of code whose errors are logged. ``error``: the error of the block; ``None``: none."""

    def __init__(self, log: logging.Logger, text: str, arguments: tuple[object, ...]) -> None:
        self._log = log
        self._text = text
        self._arguments = arguments
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        """Enter the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Return whether the error was logged and is suppressed."""
        if not isinstance(error, Exception):
            return False
        self._log.error(self._text, *self._arguments, exc_info=error)
        self.error = error
        return True


def surviving(log: logging.Logger, text: str, *arguments: object) -> Survival:
    """Log any exception of a block, as ``text`` with ``arguments``, and continue after the block.

    ``KeyboardInterrupt`` and ``SystemExit`` are not caught.
    """
    return Survival(log, text, arguments)
