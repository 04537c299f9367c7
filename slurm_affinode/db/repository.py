"""The database: runs, steps, GPUs of allocations, the ingest journal, suspensions, reports, single values.

Frames have the columns of ``slurm.accounting.schema``. Every method is one transaction. Database errors are raised as
``AffinodeError`` (``UnreachableError`` if the server does not respond), in one line and without a password.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import polars as pl
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    text,
    update,
)

from slurm_affinode.base.config import UNNAMED_CLUSTER
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.db import accounting, forget, journal, migrations, tables
from slurm_affinode.db.accounting import AccountingQueries, ceil_s, floor_s
from slurm_affinode.db.engine import connect, parse_url, reading, shown, translated, write
from slurm_affinode.db.journal import IngestJournal, storable
from slurm_affinode.db.records import Counts, StoreCounts, Upserted
from slurm_affinode.db.tables import suspensions as table
from slurm_affinode.model.ledger import COLUMNS, KEY, TEXTS, LedgerEntry
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS


def _merge(connection: Connection, entries: Iterable[LedgerEntry], revision: int) -> Counts:
    """Merge ``entries`` into the stored suspensions; new and changed rows get ``revision``."""
    merged: dict[tuple[str, int, int, int], LedgerEntry] = {}
    count = 0
    for entry in entries:
        count += 1
        earlier_entry = merged.get(entry.key)
        merged[entry.key] = entry if earlier_entry is None else earlier_entry.merged(entry)
    new = updated = 0
    for key, entry in merged.items():
        condition = and_(*(table.c[name] == value for name, value in zip(KEY, key, strict=True)))
        row = connection.execute(select(*(table.c[name] for name in COLUMNS)).where(condition)).one_or_none()
        if row is None:
            connection.execute(insert(table).values(**_values(entry), revision=revision))
            new += 1
            continue
        before = LedgerEntry(*row)
        after = _values(before.merged(entry))
        if after != _values(before):
            connection.execute(update(table).where(condition).values(**after, revision=revision))
            updated += 1
    return Counts(new, updated, count - new - updated)


def _values(entry: LedgerEntry) -> dict[str, str | int | None]:
    values = {name: getattr(entry, name) for name in COLUMNS}
    return {name: storable(value) if name in TEXTS and value is not None else value for name, value in values.items()}


def _asleep() -> ColumnElement[bool]:
    """Return the condition for suspensions that are neither restored nor over."""
    return and_(table.c.queued_ms.is_not(None), _end_ms().is_(None))


def _end_ms() -> ColumnElement[int]:
    return func.coalesce(table.c.restoring_ms, table.c.ended_ms)


_SIZE = {
    "postgresql": "SELECT pg_database_size(current_database())",
    "mariadb": "SELECT SUM(data_length + index_length) FROM information_schema.tables WHERE table_schema = DATABASE()",
}


def _query(name: str) -> str:
    """Return the text of ``sql/queries/NAME.sql``, without comments."""
    content = (asset_dir("sql") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return "\n".join(line for line in content.splitlines() if not line.startswith("--"))


def _size_bytes(connection: Connection) -> int:
    url, dialect = connection.engine.url, connection.dialect.name
    if dialect == "sqlite":
        path = Path(str(url.database))
        files = (path, path.with_name(path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
    return int(connection.execute(text(_SIZE.get(dialect, _SIZE["mariadb"]))).scalar() or 0)


class _Undo(Exception):  # noqa: N818 - it is no error
    """Ends a transaction without its changes."""


T = TypeVar("T")

_REVISION = "revision"


class Repository(AccountingQueries, IngestJournal):
    """An open database. Use it as a context manager, or ``close`` it."""

    @classmethod
    def open(cls, url: str, *, upgrade: bool = True, create: bool = True) -> Self:
        """Open the database at ``url`` (see ``engine.parse_url``) and apply pending migrations.

        With ``upgrade`` off, nothing is written and the schema may be an old one. With ``create`` off, a missing SQLite
        file raises ``NoStoreError`` instead of being created. Raises ``ConfigError`` for an invalid URL,
        ``UnreachableError`` if the server does not respond, ``AffinodeError`` for a database of a newer release.
        """
        engine = connect(parse_url(url), create=create)
        try:
            with translated(engine):
                if upgrade and migrations.status(engine).pending:
                    migrations.upgrade(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine, for custom queries (read-only: ``sql/queries``)."""
        return self._engine

    @property
    def where(self) -> str:
        """Name of the database for messages, without the password."""
        return shown(self._engine.url)

    # facts -----------------------------------------------------------------------------------------------------------

    def upsert(self, jobs: pl.DataFrame, steps: pl.DataFrame | None = None) -> Upserted:
        """Ingest ``JOBS`` and ``STEPS``. Ingesting the same input twice is a no-op; a run never moves backward.

        Two records of a job with the same start are one run, even if one of them lacks the submit time.

        Raises ``InputError`` for a record without cluster, job ID or submit time.
        """

        def work(connection: Connection, revision: int) -> tuple[Upserted, bool]:
            result = accounting.upsert_runs(connection, jobs, steps, revision)
            return result, result.jobs.new + result.jobs.updated + result.steps.new + result.steps.updated > 0

        return self._change(work)

    def upsert_allocation_gpus(self, frame: pl.DataFrame) -> Counts:
        """Ingest ``ALLOCATION_GPUS``; existing rows are unchanged."""
        filled = frame.with_columns(
            pl.col("start").fill_null(
                pl.from_epoch(pl.lit(tables.UNKNOWN_START), time_unit="s").dt.replace_time_zone("UTC")
            ),
            pl.col("node").fill_null(""),
        )

        def work(connection: Connection, revision: int) -> tuple[Counts, bool]:
            counts = accounting.upsert_frame(connection, tables.allocation_gpus, ALLOCATION_GPUS, filled, revision)
            return counts, counts.new > 0

        return self._change(work)

    def fingerprint(self, since: datetime, until: datetime) -> str:
        """Return a fingerprint of the runs overlapping ``[since, until)`` and their GPUs."""
        bounds = {"since": floor_s(since), "until": ceil_s(until)}
        with reading(self._engine) as connection:
            row = connection.execute(text(_query("fingerprint")), bounds).one()
        return hashlib.sha256(",".join(str(value) for value in row).encode()).hexdigest()[:16]

    def upsert_suspensions(self, entries: Iterable[LedgerEntry]) -> Counts:
        """Ingest ledger entries, in any order. Ingesting an entry twice is a no-op."""

        def work(connection: Connection, revision: int) -> tuple[Counts, bool]:
            counts = _merge(connection, entries, revision)
            return counts, counts.new + counts.updated > 0

        return self._change(work)

    def suspensions(self, since: datetime, until: datetime) -> list[LedgerEntry]:
        """Return suspensions that began before ``until`` and were not over before ``since``, oldest first."""
        since_ms, until_ms = floor_s(since) * 1000, ceil_s(until) * 1000
        reaches = or_(table.c.began_ms >= since_ms, _end_ms() >= since_ms, _asleep())
        chosen = select(*(table.c[name] for name in COLUMNS)).where(table.c.began_ms < until_ms, reaches)
        with reading(self._engine) as connection:
            rows = connection.execute(chosen.order_by(table.c.began_ms, table.c.cluster, table.c.job_id)).all()
        return [LedgerEntry(*row) for row in rows]

    # upkeep ----------------------------------------------------------------------------------------------------------

    def delete_before(self, moment: datetime) -> int:
        """Delete records that ended before ``moment``; return the number of deleted runs.

        These are runs that ended, or were submitted and never started, before it, with their steps and GPUs, and
        suspensions and journal entries of that time. A run that has started and not ended is kept, however old.
        """
        limit = floor_s(moment)
        job, step, gpu = tables.jobs.c, tables.steps.c, tables.allocation_gpus.c
        old = or_(job.end < limit, and_(job.end.is_(None), job.start.is_(None), job.submit < limit))
        run = exists().where(job.cluster == step.cluster, job.job_id == step.job_id, job.submit == step.submit)
        any_run = exists().where(job.cluster == gpu.cluster, job.job_id == gpu.job_id)
        old_step = or_(step.end < limit, and_(step.end.is_(None), step.submit < limit))

        def work(connection: Connection) -> int:
            # Without a start, a record would seem to belong to a later job with the same ID.
            undated, dated = gpu.start == tables.UNKNOWN_START, gpu.start > tables.UNKNOWN_START
            unnamed = gpu.cluster == UNNAMED_CLUSTER
            accounting.delete_of_runs(connection, tables.allocation_gpus, ("cluster", "job_id"), old, undated)
            accounting.delete_of_runs(connection, tables.allocation_gpus, ("job_id",), old, undated, unnamed)
            accounting.delete_of_runs(connection, tables.steps, ("cluster", "job_id", "submit"), old)
            deleted = connection.execute(delete(tables.jobs).where(old)).rowcount
            # Steps and GPUs may be recorded before the accounting of the job is ingested, so only old rows are orphans.
            connection.execute(delete(tables.steps).where(old_step, not_(run)))
            connection.execute(delete(tables.allocation_gpus).where(dated, gpu.start < limit, not_(any_run)))
            connection.execute(delete(table).where(table.c.began_ms < limit * 1000, not_(_asleep())))
            journal.delete_ingests(connection, limit)
            return deleted

        return write(self._engine, work)

    def last_time(self) -> datetime | None:
        """Return the latest start or end of a run; None if no run has started or ended."""
        job = tables.jobs.c
        # No run starts after its end, and ends are indexed.
        queries = (select(func.max(job.end)), select(func.max(job.start)).where(job.end.is_(None)))
        with reading(self._engine) as connection:
            times = [connection.execute(query).scalar() for query in queries]
        return journal.moment(max((time for time in times if time is not None), default=None))

    def clusters(self) -> tuple[str, ...]:
        """Return the clusters that have runs, in order."""
        return tuple(self._clusters(tables.jobs.c.cluster))

    def delete_runs(self, keys: Sequence[tuple[str, int, datetime]]) -> None:
        """Delete the runs with these keys (cluster, job ID, submit) and their steps."""
        rows = [{"a_cluster": name, "a_job": job, "a_submit": floor_s(submit)} for name, job, submit in keys]

        def work(connection: Connection, revision: int) -> tuple[None, bool]:
            for each in (tables.steps, tables.jobs) if rows else ():
                condition = (
                    each.c.cluster == bindparam("a_cluster"),
                    each.c.job_id == bindparam("a_job"),
                    each.c.submit == bindparam("a_submit"),
                )
                connection.execute(delete(each).where(*condition), rows)
            return None, bool(keys)

        self._change(work)

    def uids_of(self, user: str) -> list[int]:
        """Return the UIDs that accounting has for a user."""
        with reading(self._engine) as connection:
            return forget.uids_of(connection, user)

    def forget(self, user: str, now: datetime, *, apply: bool) -> tuple[str, Mapping[str, int]]:
        """Replace a user by a pseudonym in all tables, also in records of the past that are ingested later.

        Return the pseudonym, and table -> rows. Without ``apply`` nothing is changed.
        """
        outcome: list[tuple[str, Mapping[str, int]]] = []

        def work(connection: Connection, revision: int) -> tuple[None, bool]:
            outcome[:] = [forget.forget(connection, user, floor_s(now), revision)]
            if not apply:
                raise _Undo
            return None, True

        with suppress(_Undo):
            self._change(work)
        return outcome[0]

    def counts(self) -> StoreCounts:
        """Return the totals of the database."""
        names = self.clusters()
        with reading(self._engine) as connection:
            row = connection.execute(text(_query("counts"))).mappings().one()
            size_bytes = _size_bytes(connection)
        latest = [int(row[name]) for name in ("last_start", "last_end") if row[name] is not None]
        return StoreCounts(
            jobs=int(row["jobs"]),
            gpu_jobs=int(row["gpu_jobs"]),
            running_jobs=int(row["running_jobs"]),
            steps=int(row["steps"]),
            allocation_gpus=int(row["allocation_gpus"]),
            ingests=int(row["ingests"]),
            reports=int(row["reports"]),
            first=journal.moment(row["first_start"]),
            last=journal.moment(max(latest, default=None)),
            clusters=names,
            size_bytes=size_bytes,
        )

    # -----------------------------------------------------------------------------------------------------------------

    def _change(self, work: Callable[[Connection, int], tuple[T, bool]]) -> T:
        """Run ``work(connection, revision)`` as the only writer; the revision is used up if something changed."""

        def numbered(connection: Connection) -> T:
            revision = int(journal.get(connection, _REVISION) or 0) + 1
            outcome, changed = work(connection, revision)
            if changed:
                forget.forget_again(connection, revision)
                journal.put(connection, _REVISION, str(revision))
            return outcome

        return write(self._engine, numbered)
