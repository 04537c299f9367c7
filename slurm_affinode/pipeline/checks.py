"""Results of the checks of ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass

OK, PROBLEM, UNREACHABLE, SKIPPED = "ok", "problem", "unreachable", "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: str
    """``ok``, ``problem``, ``unreachable`` or ``skipped`` (could not be checked, or does not apply)."""
    detail: str
    hint: str | None = None
