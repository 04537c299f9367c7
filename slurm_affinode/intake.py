"""Accounting into the store: one input, one transaction, one entry in the journal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl

from slurm_affinode.slurm.accounting import Accounting
from slurm_affinode.store.records import Counts, IngestProblem, IngestRecord
from slurm_affinode.store.repository import Repository

_COUNTING = "accounting.gpu_clusters"
_UNTIL = "accounting.until"
_SHOWN_DECISIONS = 20

FIRST_SPAN = timedelta(days=7)
"""How far back accounting is read when the store is empty."""


@dataclass(frozen=True, slots=True)
class Intake:
    """What became of one input."""

    source: str
    accounting: Accounting
    jobs: Counts | None
    """``None``: nothing was stored (a dry run)."""
    steps: Counts | None


def counting_clusters(repository: Repository) -> frozenset[str]:
    """Clusters that any earlier input showed to count GPUs in accounting."""
    return frozenset(json.loads(repository.get(_COUNTING) or "[]"))


def take_in(
    repository: Repository,
    accounting: Accounting,
    *,
    source: str,
    started: datetime,
    finished: datetime,
    fingerprint: str | None = None,
) -> Intake:
    """Store ``accounting`` and write the journal. Runs and steps are one transaction.

    Content that was taken in before (``fingerprint``) and changes nothing leaves no second entry in the journal.
    """
    stored = repository.upsert(accounting.jobs, accounting.steps)
    known = counting_clusters(repository)
    if accounting.gpu_clusters - known:
        repository.set(_COUNTING, json.dumps(sorted(known | accounting.gpu_clusters)))
    total = stored.jobs + stored.steps
    if total.new + total.updated == 0 and fingerprint is not None and fingerprint in repository.fingerprints("sacct"):
        # The same content again: its bad records are in the journal already.
        return Intake(source, accounting, stored.jobs, stored.steps)
    first, last = span(accounting.jobs)
    repository.record_ingest(
        IngestRecord(
            kind="sacct",
            source=source,
            started=started,
            finished=finished,
            records=accounting.records - accounting.bad_records,
            new=total.new,
            updated=total.updated,
            unchanged=total.unchanged,
            bad=accounting.bad_records,
            problems=tuple(IngestProblem(str(problem), problem.line) for problem in accounting.problems),
            notes=(*accounting.notes, *(str(one) for one in accounting.decisions[:_SHOWN_DECISIONS])),
            fingerprint=fingerprint,
            first=first,
            last=last,
        )
    )
    return Intake(source, accounting, stored.jobs, stored.steps)


def span(jobs: pl.DataFrame) -> tuple[datetime | None, datetime | None]:
    """From the first start to the last start or end in ``jobs``."""
    row = jobs.select(
        first=pl.col("start").min(), last=pl.max_horizontal(pl.col("start").max(), pl.col("end").max())
    ).row(0)
    return row[0], row[1]


def default_since(repository: Repository, *, now: datetime, overlap: timedelta) -> datetime:
    """Where to go on: ``overlap`` before the end of the last run of sacct, else before the last run stored, else 7 d.

    A job is in sacct's answer while it was in the system at any time of the span, so a job that started long before
    and ended since is in it.
    """
    until = repository.get(_UNTIL)
    if until is not None:
        return datetime.fromisoformat(until) - overlap
    last = repository.counts().last
    return (min(last, now) - overlap) if last is not None else now - FIRST_SPAN


def reached(repository: Repository, until: datetime) -> None:
    """Remember that accounting was read up to ``until``."""
    before = repository.get(_UNTIL)
    if before is None or datetime.fromisoformat(before) < until:
        repository.set(_UNTIL, until.astimezone(UTC).isoformat())
