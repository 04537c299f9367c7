"""Small values that the store keeps beside the accounting frames. Times are aware UTC, whole seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the records of one table; repeated and already known ones are ``unchanged``."""

    new: int = 0
    updated: int = 0
    unchanged: int = 0

    @property
    def total(self) -> int:
        """All records that were given."""
        return self.new + self.updated + self.unchanged

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.new + other.new, self.updated + other.updated, self.unchanged + other.unchanged)


@dataclass(frozen=True, slots=True)
class Upserted:
    """The outcome of ``Repository.upsert``."""

    jobs: Counts = Counts()
    steps: Counts = Counts()


@dataclass(frozen=True, slots=True)
class IngestProblem:
    """One record that could not be used."""

    reason: str
    line: int | None = None
    """Line or number of the record in the source, from 1."""


@dataclass(frozen=True, slots=True)
class IngestRecord:
    """The journal entry of one ingest: what was taken in, when, and what became of it."""

    kind: str
    """``sacct``, ``gpu``, ``allocations``, ... (at most 32 characters)."""
    source: str
    """The path, or the command."""
    started: datetime
    finished: datetime
    records: int = 0
    """Records or samples read, bad ones not counted."""
    new: int = 0
    updated: int = 0
    unchanged: int = 0
    bad: int = 0
    """Records that could not be used; ``problems`` may hold only the first of them."""
    problems: tuple[IngestProblem, ...] = ()
    notes: tuple[str, ...] = ()
    """What was decided while reading, e.g. on times that exist twice."""
    fingerprint: str | None = None
    """Of the content, so that an unchanged file can be told."""
    first: datetime | None = None
    """The time span that the content covers."""
    last: datetime | None = None
    id: int | None = None
    """Given by the store."""


@dataclass(frozen=True, slots=True)
class ReportRecord:
    """A report of a period that was rendered."""

    period: str
    """``day``, ``week`` or ``month``."""
    label: str
    """``2026-11-20``, ``2026-W47``, ``2026-11``."""
    since: datetime
    until: datetime
    path: str
    """Directory of the report, relative to the root of the reports."""
    rendered: datetime
    fingerprint: str
    """Of the data that the report shows."""
    summary: Mapping[str, float | int | str | None] = field(default_factory=dict)
    """Headline figures for the index page."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """How much the store holds, for people."""

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
    """On disk, as the database counts it."""
