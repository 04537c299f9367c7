"""Accounting in the database: what ingests of ``sacct`` store, and up to when it is known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.times import named, shown
from slurm_affinode.db.records import IngestProblem, IngestRecord, Upserted
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import Accounting

_COUNTING = "accounting.gpu_clusters"
_UNTIL = "accounting.until"
_QUERIED = "accounting.asked"
"""Key of a mapping: cluster -> end of the time queried with sacct."""
_STAND_INS = "accounting.stand_ins"
"""Key that is set once a stand-in for a raw ID was stored: only then stand-ins are searched for."""
_SHOWN_DECISIONS = 20


class NoAccountingError(AffinodeError):
    """No job ran in the requested interval, or the filters exclude all of them."""


FIRST_SPAN = timedelta(days=7)
"""How far back the first ingest of accounting or Prometheus goes."""


def counting_clusters(repository: Repository) -> frozenset[str]:
    """Return the clusters known from earlier inputs to count GPUs in accounting."""
    return frozenset(json.loads(repository.get(_COUNTING) or "[]"))


def ingest_accounting(
    repository: Repository,
    accounting: Accounting,
    *,
    source: str,
    started: datetime,
    finished: datetime,
    fingerprint: str | None = None,
) -> Upserted:
    """Store ``accounting``, jobs and steps in one transaction, and record it in the journal.

    Content that was ingested before (``fingerprint``) and changes nothing is not recorded again.
    """
    accounting = _raw_ids(repository, accounting)
    stored = repository.upsert(accounting.jobs, accounting.steps)
    counting = counting_clusters(repository)
    if accounting.gpu_clusters - counting:
        repository.set(_COUNTING, json.dumps(sorted(counting | accounting.gpu_clusters)))
    total = stored.jobs + stored.steps
    if total.new + total.updated == 0 and fingerprint is not None and fingerprint in repository.fingerprints("sacct"):
        # The bad records of this content are already in the journal.
        return stored
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
            notes=(*accounting.notes, *(str(decision) for decision in accounting.decisions[:_SHOWN_DECISIONS])),
            fingerprint=fingerprint,
            first=first,
            last=last,
        )
    )
    return stored


def _raw_ids(repository: Repository, accounting: Accounting) -> Accounting:
    """Replace stand-ins by raw IDs, so that an array task that inputs name by either is stored once.

    The raw ID wins, whichever was ingested first.
    """
    made_up = bool((accounting.jobs["job_id"] < 0).any())
    if not made_up and repository.get(_STAND_INS) is None:
        return accounting
    task = ["cluster", "array_job_id", "array_task_id", "submit"]
    tasks = accounting.jobs.select("job_id", "start", *task).drop_nulls()
    if tasks.is_empty():
        return accounting
    first, last = tasks.select(pl.col("start").min(), pl.col("start").max().alias("last")).row(0)
    earlier_jobs = repository.jobs(first, last + timedelta(seconds=1), columns=["job_id", *task])
    pairs = tasks.join(earlier_jobs.rename({"job_id": "stored"}), on=task).filter(pl.col("job_id") != pl.col("stored"))
    outdated = pairs.filter(pl.col("stored") < 0)
    repository.delete_runs(list(outdated.select("cluster", "stored", "submit").iter_rows()))
    if not made_up:
        return accounting
    repository.set(_STAND_INS, "1")
    real = pairs.filter(pl.col("job_id") < 0).select("cluster", "job_id", "stored").unique(["cluster", "job_id"])
    jobs, steps = (_renumbered(frame, real) for frame in (accounting.jobs, accounting.steps))
    return replace(accounting, jobs=jobs, steps=steps)


def _renumbered(frame: pl.DataFrame, real: pl.DataFrame) -> pl.DataFrame:
    joined = frame.join(real, on=["cluster", "job_id"], how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("stored", "job_id").alias("job_id")).select(frame.columns)


def span(jobs: pl.DataFrame) -> tuple[datetime | None, datetime | None]:
    """Return the first start and the last start or end in ``jobs``."""
    row = jobs.select(
        first=pl.col("start").min(), last=pl.max_horizontal(pl.col("start").max(), pl.col("end").max())
    ).row(0)
    return row[0], row[1]


def default_since(repository: Repository, *, now: datetime, overlap: timedelta) -> datetime:
    """Return where to continue: ``overlap`` before the end of the last query or else of the last job, or 7 days ago.

    sacct returns every job that was in the system at any time of the interval, including those that started earlier.
    """
    until = repository.get(_UNTIL)
    if until is not None:
        return datetime.fromisoformat(until) - overlap
    last = repository.last_time()
    return (min(last, now) - overlap) if last is not None else now - FIRST_SPAN


def with_known(query: WasteQuery, repository: Repository, now: datetime) -> WasteQuery:
    """Return ``query`` with the time up to which accounting of each cluster is known.

    That is the latest time in its records or the end of the last query with sacct, whichever is later. Ingesting an old
    file today does not make its accounting current.
    """
    newest = repository.newest_times()
    queried, until = repository.get(_QUERIED), repository.get(_UNTIL)
    if queried is not None:
        moments = {name: datetime.fromisoformat(text) for name, text in json.loads(queried).items()}
    else:  # a database of an earlier release, which did not record the cluster
        moments = {} if until is None else dict.fromkeys(newest, datetime.fromisoformat(until))
    for name, moment in moments.items():
        newest[name] = max(moment, newest.get(name, moment))
    return replace(query, known_until={name: min(moment, now) for name, moment in newest.items()})


def check_known(query: WasteQuery, jobs: pl.DataFrame, now: datetime) -> None:
    """Raise ``NoAccountingError`` if accounting of every cluster with ``jobs`` ends before the interval."""
    clusters = query.clusters or jobs["cluster"].unique().to_list() or tuple(query.known_until)
    ends = [query.known_until[name] for name in clusters if name in query.known_until]
    if ends and max(ends) <= query.since and max(ends) < now:
        raise NoAccountingError(
            f"there is no accounting from {shown(query.since, query.zone)} to {named(query.until, query.zone)}: "
            f"it is known up to {named(max(ends), query.zone)}",
            hint="ingest it first: slurm-affinode ingest sacct; or choose an earlier --since",
        )


def reached(repository: Repository, until: datetime, clusters: Iterable[str] = ()) -> None:
    """Record that sacct was queried up to ``until`` and returned jobs of ``clusters``."""
    before = repository.get(_UNTIL)
    if before is None or datetime.fromisoformat(before) < until:
        repository.set(_UNTIL, until.astimezone(UTC).isoformat())
    queried = json.loads(repository.get(_QUERIED) or "{}")
    # A response without jobs names no cluster: if only one is known, it is that one.
    clusters = {*clusters} or (only if len(only := {*repository.newest_times()}) == 1 else set())
    late = {name for name in clusters if name not in queried or datetime.fromisoformat(queried[name]) < until}
    if late:
        repository.set(_QUERIED, json.dumps(queried | dict.fromkeys(sorted(late), until.astimezone(UTC).isoformat())))
