"""The audit of what was looked at, told and done: who, when, on what evidence, with what result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

RESULTS = ("done", "planned", "spared", "gone", "failed", "refused", "seen")
"""``planned``: dry run; ``spared``: not done, for the reason given; ``gone``: it ended first; ``seen``: a look."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One record; they are only ever added."""

    at: datetime
    run: str
    """The same for everything that one command did."""
    actor: str
    """``root@node`` of who ran the command, with the user who called sudo where there is one."""
    verb: str
    """``look``, ``warn-user``, ``cancel``, ``kill-process``, ``keep``, ..."""
    result: str
    """A word of ``RESULTS``."""
    reason: str
    cluster: str | None = None
    kind: str | None = None
    finding: str | None = None
    """Key of the finding."""
    job_id: int | None = None
    job: str | None = None
    user: str | None = None
    """Whom it is about."""
    node: str | None = None
    rule: str | None = None
    evidence: Any = None
    """What the decision went by, as JSON has it."""
    number: int | None = None
    """Given by the store."""
