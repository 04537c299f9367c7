"""The relational store: runs of jobs, their steps and GPUs, the journal of ingests, reports, single values.

All frames are those of ``slurm.schema``. Every method is one transaction. Errors of the database come as
``AffinodeError`` (``UnreachableError`` where it does not answer), in one line and without a password.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar

import polars as pl
from sqlalchemy import Connection, Engine

from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.slurm.schema import ALLOCATION_GPUS
from slurm_affinode.store import bulk, journal, migrate, reads, runs, suspensions, tables, upkeep
from slurm_affinode.store.engine import connect, parse_url, reading, shown, translated, write
from slurm_affinode.store.reads import Selection
from slurm_affinode.store.records import Counts, IngestRecord, ReportRecord, StoreCounts, Upserted

T = TypeVar("T")

_REVISION = "revision"


class Repository:
    """A store that is open. Use it as a context manager, or ``close`` it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str, *, upgrade: bool = True, create: bool = True) -> Self:
        """Open the store at ``url`` (see ``engine.parse_url``) and apply pending migrations.

        With ``upgrade`` off nothing is written and the schema may be an old one; with ``create`` off a SQLite file that
        does not exist is a ``NoStoreError`` in place of a new, empty store. Raises ``ConfigError`` for a URL that
        cannot be, ``UnreachableError`` where there is no answer, ``AffinodeError`` for a store of a newer release.
        """
        engine = connect(parse_url(url), create=create)
        try:
            with translated(engine):
                if upgrade and migrate.status(engine).pending:
                    migrate.upgrade(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """For queries of one's own (read-only: ``sql/queries``)."""
        return self._engine

    @property
    def where(self) -> str:
        """The store for people: no password."""
        return shown(self._engine.url)

    # facts -----------------------------------------------------------------------------------------------------------

    def upsert(self, jobs: pl.DataFrame, steps: pl.DataFrame | None = None) -> Upserted:
        """Take in ``JOBS`` and ``STEPS``; the same input twice changes nothing, a run never goes backwards.

        Two records of a job that start at the same time are one run, also where one of them lacks the submit time.

        Raises ``InputError`` for a record without cluster, job id or submit time.
        """

        def work(connection: Connection, revision: int) -> tuple[Upserted, bool]:
            done = runs.upsert(connection, jobs, steps, revision)
            return done, done.jobs.new + done.jobs.updated + done.steps.new + done.steps.updated > 0

        return self._change(work)

    def upsert_allocation_gpus(self, frame: pl.DataFrame) -> Counts:
        """Take in ``ALLOCATION_GPUS``; a row that is there already is unchanged."""
        filled = frame.with_columns(
            pl.col("start").fill_null(
                pl.from_epoch(pl.lit(tables.UNKNOWN_START), time_unit="s").dt.replace_time_zone("UTC")
            ),
            pl.col("node").fill_null(""),
        )

        def work(connection: Connection, revision: int) -> tuple[Counts, bool]:
            counts = bulk.upsert(connection, tables.allocation_gpus, ALLOCATION_GPUS, filled, revision)
            return counts, counts.new > 0

        return self._change(work)

    def jobs(
        self,
        since: datetime,
        until: datetime,
        *,
        clusters: Sequence[str] = (),
        partitions: Sequence[str] = (),
        accounts: Sequence[str] = (),
        users: Sequence[str] = (),
        gpu_only: bool = False,
        columns: Sequence[str] | None = None,
    ) -> pl.DataFrame:
        """Runs that have started and overlap ``[since, until)``, as ``JOBS``; empty filters do not filter.

        ``gpu_only`` leaves out runs that certainly had no GPU (``gpus`` 0); ``columns`` picks columns of ``JOBS``.
        """
        selection = Selection(since, until, clusters, partitions, accounts, users, gpu_only)
        return reads.jobs(self._engine, selection, columns)

    def pending(
        self, before: datetime, *, columns: Sequence[str] | None = None, since: datetime | None = None
    ) -> pl.DataFrame:
        """Runs submitted before ``before`` that still waited when accounting was taken in, as ``JOBS``.

        With ``since`` also those that have started at ``before`` or later, and those that were cancelled, after
        ``since``, before they started.
        """
        return reads.pending(self._engine, before, columns, since=since)

    def find_job(self, job_id: int, *, cluster: str | None = None) -> pl.DataFrame:
        """Every stored run of a job, of the tasks of an array or the components of a heterogeneous job, as ``JOBS``."""
        return reads.find_job(self._engine, job_id, cluster)

    def steps(
        self,
        since: datetime,
        until: datetime,
        *,
        clusters: Sequence[str] = (),
        partitions: Sequence[str] = (),
        accounts: Sequence[str] = (),
        users: Sequence[str] = (),
    ) -> pl.DataFrame:
        """All steps of the runs that ``jobs`` gives, as ``STEPS``."""
        return reads.steps(self._engine, Selection(since, until, clusters, partitions, accounts, users))

    def allocation_gpus(
        self,
        since: datetime,
        until: datetime,
        *,
        clusters: Sequence[str] = (),
        partitions: Sequence[str] = (),
        accounts: Sequence[str] = (),
        users: Sequence[str] = (),
    ) -> pl.DataFrame:
        """What is recorded of the GPUs of the jobs that ``jobs`` gives, as ``ALLOCATION_GPUS``."""
        return reads.allocation_gpus(self._engine, Selection(since, until, clusters, partitions, accounts, users))

    def newest_times(self) -> dict[str, datetime]:
        """Cluster -> the latest time at which its accounting says that something was so: a submission, a start, an end,
        a running job that had run for so long. When a job may start at the earliest can be in the future: it says
        nothing."""
        return reads.newest_times(self._engine)

    def fingerprint(self, since: datetime, until: datetime) -> str:
        """A text that changes when the runs overlapping ``[since, until)`` or their GPUs change."""
        with reading(self._engine) as connection:
            return upkeep.fingerprint(connection, since, until)

    def upsert_suspensions(self, entries: Iterable[LedgerEntry]) -> Counts:
        """Take in lines of ledgers, in any order; what is known already changes nothing."""

        def work(connection: Connection, revision: int) -> tuple[Counts, bool]:
            counts = suspensions.upsert(connection, entries, revision)
            return counts, counts.new + counts.updated > 0

        return self._change(work)

    def suspensions(self, since: datetime, until: datetime) -> list[LedgerEntry]:
        """Suspensions that began before ``until`` and were not over before ``since``, oldest first."""
        with reading(self._engine) as connection:
            return suspensions.overlapping(connection, since, until)

    # journal, reports, single values ---------------------------------------------------------------------------------

    def record_ingest(self, record: IngestRecord) -> int:
        """Write ``record`` into the journal and return its number. Only the first problems are kept."""
        return write(self._engine, lambda connection: journal.record_ingest(connection, record))

    def ingests(self, *, since: datetime | None = None, kind: str | None = None) -> list[IngestRecord]:
        """Journal entries, oldest first; of ``kind``, finished at or after ``since``."""
        with reading(self._engine) as connection:
            return journal.ingests(connection, since=since, kind=kind)

    def fingerprints(self, kind: str) -> frozenset[str]:
        """Fingerprints of the inputs of ``kind`` that were taken in."""
        with reading(self._engine) as connection:
            return journal.fingerprints(connection, kind)

    def record_report(self, record: ReportRecord) -> None:
        """Remember that a report was rendered, in place of an earlier one of the same period and label."""
        write(self._engine, lambda connection: journal.record_report(connection, record))

    def reports(self) -> list[ReportRecord]:
        """Reports that were rendered, oldest period first."""
        with reading(self._engine) as connection:
            return journal.reports(connection)

    def delete_reports(self, records: Iterable[ReportRecord]) -> None:
        """Forget ``records``. The files are the caller's."""
        keys = [(record.period, record.label) for record in records]
        write(self._engine, lambda connection: journal.delete_reports(connection, keys))

    def get(self, name: str) -> str | None:
        """The value called ``name``, if it was set."""
        with reading(self._engine) as connection:
            return journal.get(connection, name)

    def set(self, name: str, value: str) -> None:
        """Keep ``value`` under ``name``."""
        write(self._engine, lambda connection: journal.put(connection, name, value))

    # upkeep ----------------------------------------------------------------------------------------------------------

    def delete_before(self, moment: datetime) -> int:
        """Delete what ended before ``moment``; returns the number of runs.

        That is: runs that ended, or were submitted and never started, before it, with their steps and GPUs, and
        journal entries of that time. A run that has not ended stays, however old.
        """
        return write(self._engine, lambda connection: upkeep.delete_before(connection, moment))

    def delete_runs(self, keys: Sequence[tuple[str, int, datetime]]) -> None:
        """Delete the runs with these keys (cluster, job id, submit) and their steps."""

        def work(connection: Connection, revision: int) -> tuple[None, bool]:
            upkeep.delete_runs(connection, keys)
            return None, bool(keys)

        self._change(work)

    def counts(self) -> StoreCounts:
        """How much there is."""
        with reading(self._engine) as connection:
            return upkeep.counts(connection)

    def schema(self) -> migrate.Status:
        """The version of the schema, and the migrations that are not yet applied."""
        return migrate.status(self._engine)

    def upgrade(self) -> tuple[migrate.Migration, ...]:
        """Apply pending migrations and return them."""
        return migrate.upgrade(self._engine)

    # -----------------------------------------------------------------------------------------------------------------

    def _change(self, work: Callable[[Connection, int], tuple[T, bool]]) -> T:
        """Run ``work(connection, revision)`` as the writer; the revision is used up where something changed."""

        def numbered(connection: Connection) -> T:
            revision = int(journal.get(connection, _REVISION) or 0) + 1
            outcome, changed = work(connection, revision)
            if changed:
                journal.put(connection, _REVISION, str(revision))
            return outcome

        return write(self._engine, numbered)
