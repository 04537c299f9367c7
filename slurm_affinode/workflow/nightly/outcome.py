"""What a nightly run did and what failed, as values and as the text that cron mails."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from slurm_affinode.errors import AffinodeError


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that failed; the others were done all the same."""

    part: str
    """``accounting``, ``GPU history``, ``day 2026-11-20``, ``retention``, ``index``."""
    message: str
    hint: str | None = None
    exit_code: int = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did."""

    now: datetime
    out: str
    """The root of the reports."""
    taken_in: tuple[str, ...] = ()
    """What was taken in, one line each."""
    rendered: tuple[str, ...] = ()
    """Reports that were made or made anew, e.g. ``day/2026-11-20``."""
    current: tuple[str, ...] = ()
    """Reports that were looked at and show the data as it is."""
    empty: tuple[str, ...] = ()
    """Periods in which no job ran: they have no report."""
    deleted_runs: int = 0
    deleted_days: int = 0
    """Days of GPU samples."""
    deleted_reports: tuple[str, ...] = ()
    deleted_audit: int = 0
    """Records of what was done about squatters, zombies and orphans."""
    failures: tuple[Failure, ...] = field(default_factory=tuple)


class NightlyError(AffinodeError):
    """Parts of a run failed. The exit code is the highest one among them."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(describe_failures(outcome))
        self.outcome = outcome
        self.exit_code = max(failure.exit_code for failure in outcome.failures)


def describe_failures(outcome: Outcome) -> str:
    """One text: what failed, why, what to do, and what was done nevertheless."""
    count = len(outcome.failures)
    lines = [f"nightly: {count} {'part' if count == 1 else 'parts'} failed"]
    for failure in outcome.failures:
        lines.append(f"  {failure.part}: {failure.message}")
        if failure.hint:
            lines.append(f"    {failure.hint}")
    made = len(outcome.rendered)
    reports = "no report was due" if made == 0 else f"{made} {'report' if made == 1 else 'reports'} made"
    lines.append(f"The other parts were done: {reports}, in {outcome.out}")
    return "\n".join(lines)
