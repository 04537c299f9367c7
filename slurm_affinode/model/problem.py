"""What could not be used of an input, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One record or line that was left out, or taken with a decision that a person should know of."""

    source: str
    """The file, ``-`` for standard input, or the command that printed it."""
    line: int | None
    """Counted from 1; None where the input has no lines (JSON: see ``record``)."""
    record: str | None
    """What the record calls itself: a job id, a GPU, ``record 12``."""
    reason: str

    def __str__(self) -> str:
        """``FILE:LINE: RECORD: reason``, one line."""
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        return ": ".join(part for part in (where, self.record, self.reason) if part)
