"""The relational store: runs of jobs, their steps and GPUs, the journal of ingests, reports, single values.

All frames are those of ``slurm.schema``. Every method is one transaction. Errors of the database come as
``AffinodeError`` (``UnreachableError`` where it does not answer), in one line and without a password.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, TypeVar

import polars as pl
from sqlalchemy import ColumnElement, Connection, Engine, Table, and_, delete, exists, not_, or_, select, text

from slurm_affinode.resources import asset_dir
from slurm_affinode.slurm.schema import ALLOCATION_GPUS, JOBS, STEPS
from slurm_affinode.store import bulk, journal, migrate, tables
from slurm_affinode.store.engine import connect, parse_url, reading, shown, translated, write
from slurm_affinode.store.frames import from_rows, from_stored
from slurm_affinode.store.records import Counts, IngestRecord, ReportRecord, StoreCounts, Upserted

T = TypeVar("T")

_REVISION = "revision"


class Repository:
    """A store that is open. Use it as a context manager, or ``close`` it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str, *, upgrade: bool = True) -> Self:
        """Open the store at ``url`` (see ``engine.parse_url``) and apply pending migrations.

        With ``upgrade`` off nothing is written and the schema may be an old one. Raises ``ConfigError`` for a URL that
        cannot be, ``UnreachableError`` where there is no answer, ``AffinodeError`` for a store of a newer release.
        """
        engine = connect(parse_url(url))
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

        Raises ``InputError`` for a record without cluster, job id or submit time.
        """

        def work(connection: Connection, revision: int) -> tuple[Upserted, bool]:
            job_counts = bulk.upsert(connection, tables.jobs, JOBS, jobs, revision)
            step_counts = Counts()
            if steps is not None:
                step_counts = bulk.upsert(connection, tables.steps, STEPS, steps, revision)
            changed = job_counts.new + job_counts.updated + step_counts.new + step_counts.updated > 0
            return Upserted(job_counts, step_counts), changed

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
        condition = _filter(since, until, clusters=clusters, partitions=partitions, accounts=accounts, users=users)
        if gpu_only:
            condition = and_(condition, or_(tables.jobs.c.gpus.is_(None), tables.jobs.c.gpus != 0))
        schema = {name: JOBS[name] for name in columns} if columns is not None else JOBS
        return self._frame(tables.jobs, schema, condition)

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
        job, step = tables.jobs.c, tables.steps.c
        same = and_(job.cluster == step.cluster, job.job_id == step.job_id, job.submit == step.submit)
        wanted = exists().where(
            same, _filter(since, until, clusters=clusters, partitions=partitions, accounts=accounts, users=users)
        )
        return self._frame(tables.steps, STEPS, wanted)

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
        job, gpu = tables.jobs.c, tables.allocation_gpus.c
        same = and_(job.cluster == gpu.cluster, job.job_id == gpu.job_id)
        wanted = exists().where(
            same, _filter(since, until, clusters=clusters, partitions=partitions, accounts=accounts, users=users)
        )
        frame = self._frame(tables.allocation_gpus, ALLOCATION_GPUS, wanted)
        unknown = pl.col("start").dt.epoch("s") == tables.UNKNOWN_START
        return frame.with_columns(
            pl.when(~unknown).then("start"),
            pl.when(pl.col("node") != "").then("node"),
        )

    def fingerprint(self, since: datetime, until: datetime) -> str:
        """A text that changes when the runs overlapping ``[since, until)`` or their GPUs change."""
        bounds = {"since": _floor(since), "until": _ceil(until)}
        with reading(self._engine) as connection:
            row = connection.execute(text(query("fingerprint")), bounds).one()
        return hashlib.sha256(",".join(str(value) for value in row).encode()).hexdigest()[:16]

    # journal, reports, single values ---------------------------------------------------------------------------------

    def record_ingest(self, record: IngestRecord) -> int:
        """Write ``record`` into the journal and return its number. Only the first problems are kept."""
        return write(self._engine, lambda connection: journal.record_ingest(connection, record))

    def ingests(self, *, since: datetime | None = None, kind: str | None = None) -> list[IngestRecord]:
        """Journal entries, oldest first; of ``kind``, finished at or after ``since``."""
        with reading(self._engine) as connection:
            return journal.ingests(connection, since=since, kind=kind)

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
        limit = _floor(moment)

        def work(connection: Connection) -> int:
            job = tables.jobs.c
            old = or_(job.end < limit, and_(job.end.is_(None), job.start.is_(None), job.submit < limit))
            deleted = connection.execute(delete(tables.jobs).where(old)).rowcount
            _delete_orphans(connection, limit)
            journal.delete_ingests(connection, limit)
            return deleted

        return write(self._engine, work)

    def counts(self) -> StoreCounts:
        """How much there is."""
        with reading(self._engine) as connection:
            row = connection.execute(text(query("counts"))).mappings().one()
            clusters = connection.execute(select(tables.jobs.c.cluster).distinct().order_by(tables.jobs.c.cluster))
            names = tuple(clusters.scalars())
        latest = [row[name] for name in ("last_start", "last_end") if row[name] is not None]
        return StoreCounts(
            **{name: int(row[name]) for name in (
                "jobs", "gpu_jobs", "running_jobs", "steps", "allocation_gpus", "ingests", "reports"
            )},
            first=journal.moment(row["first_start"]),
            last=journal.moment(max(latest, default=None)),
            clusters=names,
        )  # fmt: skip

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

    def _frame(self, table: Table, schema: dict[str, pl.DataType], condition: ColumnElement[bool]) -> pl.DataFrame:
        statement = select(*(table.c[name] for name in schema)).where(condition)
        with reading(self._engine) as connection:
            # The driver's own cursor: rows of the toolkit would cost as much again as the query.
            compiled = statement.compile(self._engine, compile_kwargs={"render_postcompile": True})
            parameters = (
                tuple(compiled.params[name] for name in compiled.positiontup)
                if compiled.positiontup
                else dict(compiled.params)
            )
            rows = connection.exec_driver_sql(str(compiled), parameters).cursor.fetchall()
        return from_stored(from_rows(rows, schema), schema)


def query(name: str) -> str:
    """The text of ``sql/queries/NAME.sql``, without its comments."""
    content = (asset_dir("sql") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return "\n".join(line for line in content.splitlines() if not line.startswith("--"))


def _filter(
    since: datetime,
    until: datetime,
    *,
    clusters: Sequence[str],
    partitions: Sequence[str],
    accounts: Sequence[str],
    users: Sequence[str],
) -> ColumnElement[bool]:
    job = tables.jobs.c
    conditions = [bulk.overlapping(tables.jobs, _floor(since), _ceil(until))]
    for column, wanted in (
        (job.cluster, clusters),
        (job.partition, partitions),
        (job.account, accounts),
        (job.user, users),
    ):
        if wanted:
            conditions.append(column.in_(list(wanted)))
    return and_(*conditions)


def _delete_orphans(connection: Connection, limit: int) -> None:
    job, step, gpu = tables.jobs.c, tables.steps.c, tables.allocation_gpus.c
    run = exists().where(job.cluster == step.cluster, job.job_id == step.job_id, job.submit == step.submit)
    connection.execute(delete(tables.steps).where(not_(run)))
    any_run = exists().where(job.cluster == gpu.cluster, job.job_id == gpu.job_id)
    # What a prolog recorded just now may come before the accounting of its job: only old rows are orphans.
    connection.execute(delete(tables.allocation_gpus).where(gpu.start < limit, not_(any_run)))


def _floor(moment: datetime) -> int:
    return math.floor(moment.astimezone(UTC).timestamp())


def _ceil(moment: datetime) -> int:
    return math.ceil(moment.astimezone(UTC).timestamp())
