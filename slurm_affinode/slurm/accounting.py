"""What reading accounting gives: the frames, and everything that a person should be told about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import polars as pl


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing in the input that could not be used."""

    line: int | None
    """Line of the file, from 1; for JSON the number of the job, from 1."""
    job: str | None
    """The job or step id as printed, where it could be read."""
    field: str | None
    """The column, where one is to blame."""
    reason: str
    dropped: bool = True
    """Whether the record was left out; else only this field is taken as unknown."""

    def __str__(self) -> str:
        who = f"job {self.job}: " if self.job else ""
        what = f"{self.field}: " if self.field else ""
        return f"{who}{what}{self.reason}"


@dataclass(frozen=True, slots=True)
class TimeDecision:
    """A local time that exists twice or never, and what it was taken for."""

    line: int | None
    job: str
    field: str
    """``submit``, ``eligible``, ``start`` or ``end``."""
    local: datetime
    """As written, naive."""
    chosen: datetime
    """UTC."""
    exists: bool
    """False: the clocks never showed this time; True: they showed it twice."""

    def __str__(self) -> str:
        how = "exists twice" if self.exists else "does not exist"
        return f"job {self.job}: {self.field} {self.local.isoformat()} {how}: taken as {self.chosen:%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True, slots=True)
class Accounting:
    """One input, read."""

    jobs: pl.DataFrame
    """Schema ``JOBS``: one row per run."""
    steps: pl.DataFrame
    """Schema ``STEPS``."""
    records: int = 0
    """Records met, good and bad."""
    problems: tuple[Problem, ...] = ()
    decisions: tuple[TimeDecision, ...] = ()
    notes: tuple[str, ...] = ()
    """What else a person should know about this input, one sentence each."""
    unit: str = "line"
    """What ``Problem.line`` counts: ``"line"`` or ``"record"``."""
    gpu_clusters: frozenset[str] = field(default_factory=frozenset)
    """Clusters that this input shows to count GPUs (see ``records.count_gpus``)."""

    @property
    def bad_records(self) -> int:
        """Records that were left out."""
        return sum(problem.dropped for problem in self.problems)
