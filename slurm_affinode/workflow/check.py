"""One finding of ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass

OK, PROBLEM, UNREACHABLE, SKIPPED = "ok", "problem", "unreachable", "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: str
    """``ok``, ``problem``, ``unreachable`` or ``skipped`` (could not be looked at, or does not apply)."""
    detail: str
    hint: str | None = None
