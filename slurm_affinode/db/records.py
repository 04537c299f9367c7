"""Small records that the database stores beside the accounting frames. Times are aware UTC, in whole seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Counts:
    """Outcome for the records of one table; repeated and already known records are ``unchanged``."""

    new: int = 0
    updated: int = 0
    unchanged: int = 0

    @property
    def total(self) -> int:
        """Number of all records."""
        return self.new + self.updated + self.unchanged

    def __add__(self, summand: Counts) -> Counts:
        return Counts(self.new + summand.new, self.updated + summand.updated, self.unchanged + summand.unchanged)


@dataclass(frozen=True, slots=True)
class Upserted:
    """The outcome of ``Repository.upsert``."""

    jobs: Counts = Counts()
    steps: Counts = Counts()


@dataclass(frozen=True, slots=True)
class IngestProblem:
    """A record that could not be used."""

    reason: str
    line: int | None = None
    """Line, or number of the record, in the source, from 1."""


@dataclass(frozen=True, slots=True)
class IngestRecord:
    """The journal entry of one ingest: input, time and outcome."""

    kind: str
    """``sacct``, ``gpu``, ``allocations``, ... (at most 32 characters)."""
    source: str
    """The path or the command."""
    started: datetime
    finished: datetime
    records: int = 0
    """Records or samples read, not counting bad ones."""
    new: int = 0
    updated: int = 0
    unchanged: int = 0
    bad: int = 0
    """Records that could not be used; ``problems`` may hold only the first of them."""
    problems: tuple[IngestProblem, ...] = ()
    notes: tuple[str, ...] = ()
    """Decisions made while reading, e.g. on local times that exist twice."""
    fingerprint: str | None = None
    """Fingerprint of the content, to recognize an unchanged file."""
    first: datetime | None = None
    """Earliest time in the content; ``last`` is the latest one."""
    last: datetime | None = None
    id: int | None = None
    """Assigned by the database."""


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """A rendered report of a period."""

    period: str
    """``day``, ``week`` or ``month``."""
    label: str
    """``2026-11-20``, ``2026-W47``, ``2026-11``."""
    since: datetime
    until: datetime
    path: str
    """Directory of the report, relative to the root directory of reports."""
    rendered: datetime
    fingerprint: str
    """Fingerprint of the data that the report shows."""
    summary: Mapping[str, float | int | str | None] = field(default_factory=dict)
    """Headline figures for the index page."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Totals of the database."""

    jobs: int
    gpu_jobs: int
    """Runs with at least one GPU."""
    running_jobs: int
    """Runs that have started and not ended."""
    steps: int
    allocation_gpus: int
    ingests: int
    reports: int
    first: datetime | None
    """Earliest start of a run."""
    last: datetime | None
    """Latest start or end of a run."""
    clusters: tuple[str, ...]
    size_bytes: int
    """Size on disk, as the database reports it."""
