"""Runs and steps in the database: the stored form of frames, upserts within a transaction, and queries.

Stored form: times are UTC seconds (``Int64``), booleans 0 or 1, text without NUL (PostgreSQL has no such character),
floats without NaN. Everything else is as in the schema.

A run only moves forward: pending, running, ended. Of two records of a run the later stage wins; at the same stage the
one ingested last wins (of two running ones, the one that had run longer, suspended or not). Missing values of the
winner are filled from the other, so a smaller field set erases nothing.

The key of a run contains its submit time. Output of sacct without that field has a substitute (eligible, else start),
so one run may arrive under two keys. Two records of one job with the same start are one run; the earlier submit time is
the true one, since a job is submitted before it is eligible, and eligible before it starts.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict, Unpack

import polars as pl
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Table,
    and_,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)

from slurm_affinode.base.config import UNNAMED_CLUSTER
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.db import journal, tables
from slurm_affinode.db.engine import reading
from slurm_affinode.db.records import Counts, Upserted
from slurm_affinode.db.tables import KEY_LENGTHS
from slurm_affinode.slurm.accounting.schema import (
    ALLOCATION_GPUS,
    JOB_KEY,
    JOBS,
    RECORDED_GPUS,
    STEP_KEY,
    STEPS,
    conform,
)

Schema = Mapping[str, pl.DataType]


def stored_dtype(dtype: pl.DataType) -> pl.DataType:
    """Return the type in which a column of ``dtype`` is stored."""
    if isinstance(dtype, pl.Datetime):
        return pl.Int64()
    return pl.Int8() if isinstance(dtype, pl.Boolean) else dtype


def to_stored(frame: pl.DataFrame, schema: dict[str, pl.DataType], key: Sequence[str]) -> pl.DataFrame:
    """Convert ``frame`` to stored form, with exactly the columns of ``schema``.

    Raises ``InputError`` for a record with an incomplete or overlong key, which could not be found again.
    """
    stored = conform(frame, schema).select(_to_stored(name, dtype) for name, dtype in schema.items())
    for name in key:
        if stored.get_column(name).null_count():
            row = stored.filter(pl.col(name).is_null()).row(0, named=True)
            raise InputError(f"a record has no {name}: {_identity(row, key)}")
        limit = KEY_LENGTHS.get(name)
        if limit is not None and (stored.get_column(name).str.len_chars().max() or 0) > limit:  # type: ignore[operator]
            row = stored.filter(pl.col(name).str.len_chars() > limit).row(0, named=True)
            raise InputError(f"{name} is longer than {limit} characters: {_identity(row, key)}")
    return stored


def _to_stored(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if isinstance(dtype, pl.Datetime):
        return column.dt.epoch("s")
    if isinstance(dtype, pl.Boolean):
        return column.cast(pl.Int8)
    if isinstance(dtype, pl.Float64):
        return column.fill_nan(None)
    if isinstance(dtype, pl.String):
        return column.str.replace_all("\0", "\N{REPLACEMENT CHARACTER}", literal=True)
    return column


def _identity(row: Mapping[str, Any], key: Sequence[str]) -> str:
    return ", ".join(f"{name} {str(row[name])[:40]}" for name in key if row[name] is not None)


def from_rows(rows: Iterable[Sequence[Any]], schema: Schema) -> pl.DataFrame:
    """Convert ``rows`` (tuples in the order of ``schema``), as fetched by a driver, to a frame in stored form."""
    with without_collection():
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pl.DataFrame(
        [
            pl.Series(name, values, dtype=stored_dtype(dtype))
            for (name, dtype), values in zip(schema.items(), columns, strict=True)
        ]
    )


def from_stored(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Convert ``frame`` back to the types of ``schema``."""
    return frame.select(_from_stored(name, dtype) for name, dtype in schema.items())


def _from_stored(name: str, dtype: pl.DataType) -> pl.Expr:
    column = pl.col(name)
    if isinstance(dtype, pl.Datetime):
        return pl.from_epoch(column, time_unit="s").cast(pl.Datetime("ms")).dt.replace_time_zone("UTC").alias(name)
    return column.cast(dtype)


TRANSIENT = ("array_spec", "reason")
"""Columns that apply to one stage only: why a job is pending, and which array tasks are pending with it. They are not
carried over to a later stage."""

_STAGE = 1 << 40  # above any elapsed time in seconds
_OLD = "\N{LEFTWARDS ARROW}"  # suffix of the columns from the database; no schema has such a name
_IS_STORED = "seen" + _OLD


@dataclass(frozen=True, slots=True)
class Merged:
    """Outcome of a merge: the rows to write, and the number of records of each kind."""

    write: pl.DataFrame
    """New and changed rows, with all columns."""
    new: int
    updated: int
    unchanged: int


def merge(incoming: pl.DataFrame, existing: pl.DataFrame, key: Sequence[str]) -> Merged:
    """Merge ``incoming`` (any number of records per run) into ``existing`` (at most one); the columns are equal."""
    single = collapse(incoming, key)
    if existing.is_empty():
        return Merged(single, single.height, 0, incoming.height - single.height)
    values = [name for name in incoming.columns if name not in key]
    joined = single.join(
        existing.with_columns(pl.lit(1, pl.Int8).alias(_IS_STORED)), on=list(key), how="left", suffix=_OLD,
        maintain_order="left",
    )  # fmt: skip
    wins = _order(values) >= _order(values, _OLD)
    surpasses = _stage(values) > _stage(values, _OLD)
    was_seen = pl.col(_IS_STORED).is_not_null()
    merged = joined.select(
        *key,
        *(_value(name, wins, surpasses, was_seen).alias(name) for name in values),
        was_seen.alias(_IS_STORED),
        pl.any_horizontal(
            pl.lit(False), *(_value(name, wins, surpasses, was_seen).ne_missing(pl.col(name + _OLD)) for name in values)
        )
        .and_(was_seen)
        .alias("changed" + _OLD),
    )
    new = merged.height - int(merged.get_column(_IS_STORED).sum())
    updated = int(merged.get_column("changed" + _OLD).sum())
    to_write = merged.filter(~pl.col(_IS_STORED) | pl.col("changed" + _OLD)).select(incoming.columns)
    return Merged(to_write, new, updated, incoming.height - new - updated)


def collapse(frame: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """Reduce ``frame`` to one row per key, by the rule of ``merge``. A frame without repeated keys is unchanged."""
    repeated = frame.select(pl.struct(key).is_duplicated().alias("repeated")).get_column("repeated")
    if not repeated.any():
        return frame
    values = [name for name in frame.columns if name not in key]
    again = frame.filter(repeated).unique(maintain_order=True).sort(_order(values), maintain_order=True)
    last = [pl.col(name).last() if name in TRANSIENT else pl.col(name).drop_nulls().last() for name in values]
    return pl.concat([frame.filter(~repeated), again.group_by(list(key), maintain_order=True).agg(last)])


def _stage(values: Sequence[str], suffix: str = "") -> pl.Expr:
    """Stage of a run: 0 pending, 1 running, 2 ended."""
    if "end" not in values:
        return pl.lit(0)
    ended, started = pl.col("end" + suffix).is_not_null(), pl.col("start" + suffix).is_not_null()
    return pl.when(ended).then(2).when(started).then(1).otherwise(0)


def _order(values: Sequence[str], suffix: str = "") -> pl.Expr:
    stage = _stage(values, suffix)
    if "elapsed_s" not in values:
        return stage
    elapsed = pl.col("elapsed_s" + suffix).fill_null(0)
    if "suspended_s" in values:
        elapsed += pl.col("suspended_s" + suffix).fill_null(0)
    return stage.cast(pl.Int64) * _STAGE + pl.when(stage == 1).then(elapsed).otherwise(0)


def _value(name: str, wins: pl.Expr, surpasses: pl.Expr, was_seen: pl.Expr) -> pl.Expr:
    new, old = pl.col(name), pl.col(name + _OLD)
    won = pl.when(surpasses).then(new).otherwise(pl.coalesce(new, old)) if name in TRANSIENT else pl.coalesce(new, old)
    lost = old if name in TRANSIENT else pl.coalesce(old, new)
    return pl.when(~was_seen | wins).then(won).otherwise(lost)


SLICE = 20_000
"""Rows fetched, merged and written at a time; bounds the memory taken by rows as Python objects."""
FETCHED = 4_000
"""Rows fetched by a query before they become columns: few enough to stay in the caches of the processor."""
ARRAY = 50_000
"""Most values in a JSON array that SQLite returns: it is held in memory, and SQLite's limit is 1 GB."""
_SQLITE_WITH_JSON = (3, 38)
_IN_LIST = 2_000
Align = Callable[[pl.DataFrame, pl.DataFrame], tuple[pl.DataFrame, pl.DataFrame]]


def upsert_frame(
    connection: Connection, table: Table, schema: dict[str, pl.DataType], frame: pl.DataFrame, revision: int
) -> Counts:
    """Merge ``frame`` into ``table``; new and changed rows get ``revision``."""
    return upsert_stored(connection, table, schema, to_stored(frame, schema, primary_key(table)), revision)


def upsert_stored(
    connection: Connection,
    table: Table,
    schema: dict[str, pl.DataType],
    stored: pl.DataFrame,
    revision: int,
    *,
    align: Align | None = None,
) -> Counts:
    """Like ``upsert_frame``, for a frame in stored form. ``align`` may change the keys of (incoming, existing) rows."""
    key = primary_key(table)
    single = collapse(stored, key).sort(key)
    counts = Counts(unchanged=stored.height - single.height)
    holds_rows = connection.execute(select(1).select_from(table).limit(1)).first() is not None
    for part in single.iter_slices(SLICE):
        incoming, existing = part, _stored_rows(connection, table, schema, part) if holds_rows else part.clear()
        if align is not None and not existing.is_empty():
            incoming, existing = align(incoming, existing)
        merged = merge(incoming, existing, key)
        if table is tables.jobs:
            _note_longest(connection, merged.write)
        write_rows(connection, table, merged.write.with_columns(pl.lit(revision, pl.Int64).alias("revision")))
        counts += Counts(merged.new, merged.updated, merged.unchanged)
    return counts


_LONGEST = "accounting.longest_s"
"""Key of the longest time in seconds from the start to the end of a run, of all that were ever stored."""


def _longest_s(connection: Connection) -> int | None:
    """Return the longest time from the start to the end of a run; None if no run has ended."""
    value = journal.get(connection, _LONGEST)
    return None if value is None else int(value)


def _note_longest(connection: Connection, runs: pl.DataFrame) -> None:
    longest = runs.select((pl.col("end") - pl.col("start")).max()).item()
    if longest is not None and longest > (_longest_s(connection) or -1):
        journal.put(connection, _LONGEST, str(longest))


def primary_key(table: Table) -> list[str]:
    """Return the names of the primary key columns of ``table``."""
    return [column.name for column in table.primary_key]


def write_rows(connection: Connection, table: Table, frame: pl.DataFrame) -> None:
    """Insert the rows of ``frame`` (stored form), or update the rows with the same keys."""
    if frame.is_empty():
        return
    connection.exec_driver_sql(_statement(connection, table, frame.columns), frame.rows())


def _statement(connection: Connection, table: Table, columns: Sequence[str]) -> str:
    quote = connection.dialect.identifier_preparer.quote_identifier
    key = primary_key(table)
    mark = "?" if connection.dialect.name == "sqlite" else "%s"
    names = ", ".join(quote(name) for name in columns)
    marks = ", ".join(mark for _ in columns)
    insert = f"INSERT INTO {quote(table.name)} ({names}) VALUES ({marks})"  # noqa: S608 - names of our own tables
    value_columns = [quote(name) for name in columns if name not in key]
    if connection.dialect.name in ("mysql", "mariadb"):
        return f"{insert} ON DUPLICATE KEY UPDATE {', '.join(f'{name} = VALUES({name})' for name in value_columns)}"
    return (
        f"{insert} ON CONFLICT ({', '.join(quote(name) for name in key)}) "
        f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in value_columns)}"
    )


def _stored_rows(
    connection: Connection, table: Table, schema: dict[str, pl.DataType], frame: pl.DataFrame
) -> pl.DataFrame:
    """Return the rows of ``table`` with the clusters and job IDs of ``frame``: they may be the same runs."""
    columns = [table.c[name] for name in schema]
    frames = [frame.clear()]
    for cluster, condition in _conditions(table, frame):
        query = select(*columns).where(table.c.cluster == cluster, condition)
        rows = connection.execute(query).all()
        if rows:
            frames.append(from_rows([tuple(row) for row in rows], schema))
    return pl.concat(frames)


def _conditions(table: Table, frame: pl.DataFrame) -> Iterator[tuple[str, ColumnElement[bool]]]:
    for (cluster,), part in frame.group_by("cluster", maintain_order=True):
        ids = part.get_column("job_id").unique().sort()
        for piece in (ids.slice(offset, _IN_LIST) for offset in range(0, len(ids), _IN_LIST)):
            low, high = int(piece[0]), int(piece[-1])
            # Slurm assigns consecutive IDs, so most of them form a range; scattered ones are listed.
            dense = high - low < 4 * len(piece)
            numbers = table.c.job_id.between(low, high) if dense else table.c.job_id.in_(piece.to_list())
            yield str(cluster), numbers


_RUN = ["cluster", "job_id", "start"]
_KEY = list(JOB_KEY)
_NAMES = pl.Schema({"cluster": pl.String(), "job_id": pl.Int64(), "submit": pl.Int64(), "known_as": pl.Int64()})
"""A key, and the submit time under which the run is stored."""


def upsert_runs(connection: Connection, jobs: pl.DataFrame, steps: pl.DataFrame | None, revision: int) -> Upserted:
    """Merge ``JOBS`` and ``STEPS``; new and changed rows get ``revision``."""
    stored = to_stored(jobs, JOBS, JOB_KEY)
    names = _within(stored)
    renamed = [names]

    def align(incoming: pl.DataFrame, existing: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        pairs = _pairs(incoming, existing)
        if pairs.is_empty():
            return incoming, existing
        incoming_names = pairs.filter(pl.col("submit") != pl.col("known_as")).select(*_NAMES)
        stored_names = pairs.filter(pl.col("old") != pl.col("known_as")).select(
            "cluster", "job_id", pl.col("old").alias("submit"), "known_as"
        )
        _move(connection, stored_names, revision)
        renamed.append(incoming_names)
        return collapse(_apply(incoming, incoming_names), _KEY), _apply(existing, stored_names)

    job_counts = upsert_stored(connection, tables.jobs, JOBS, _apply(stored, names), revision, align=align)
    if steps is None:
        return Upserted(job_counts, Counts())
    parts = to_stored(steps, STEPS, STEP_KEY)
    for table in renamed:
        parts = _apply(parts, table)
    return Upserted(job_counts, upsert_stored(connection, tables.steps, STEPS, parts, revision))


def _within(jobs: pl.DataFrame) -> pl.DataFrame:
    """Return the keys of one input that belong to the same run as another of its keys."""
    started = jobs.filter(pl.col("start").is_not_null())
    twice = started.filter(pl.struct(_RUN).is_duplicated()).select(*_RUN, "submit").unique()
    if twice.height == 0:
        return pl.DataFrame(schema=_NAMES)
    true = pl.col("submit").filter(pl.col("submit") > 0).min().over(_RUN).fill_null(pl.col("submit").min().over(_RUN))
    return twice.with_columns(true.alias("known_as")).filter(pl.col("submit") != pl.col("known_as")).select(*_NAMES)


def _pairs(incoming: pl.DataFrame, existing: pl.DataFrame) -> pl.DataFrame:
    """Return the runs stored under another submit time (``old``) than that of the incoming record (``submit``)."""
    earlier_runs = existing.filter(pl.col("start").is_not_null()).select(*_RUN, pl.col("submit").alias("old"))
    begun = incoming.filter(pl.col("start").is_not_null()).select(*_RUN, "submit")
    of_key = begun.select("cluster", "job_id", pl.col("submit").alias("old"), pl.col("start").alias("claims"))
    pairs = (
        begun.join(earlier_runs, on=_RUN)
        .filter(pl.col("submit") != pl.col("old"))
        .join(existing.select(*_KEY, pl.col("start").alias("began"), taken=True), on=_KEY, how="left")
        .join(of_key, on=["cluster", "job_id", "old"], how="left")
        # If the incoming key belongs to another run that has started, the run keeps its stored key.
        .filter(pl.col("taken").is_null() | (pl.col("began") != pl.col("start")))
        .unique(_RUN)
    )
    earlier = (pl.col("submit") > 0) & ((pl.col("submit") < pl.col("old")) | (pl.col("old") <= 0))
    # A run that was ingested alone has the key of the run before it until that run is ingested, too.
    earlier |= (pl.col("claims") != pl.col("start")).fill_null(value=False)
    earlier &= pl.col("taken").is_null()
    return pairs.with_columns(pl.when(earlier).then("submit").otherwise("old").alias("known_as"))


def _apply(frame: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """Replace the submit times of ``frame`` with those of ``names``."""
    if names.is_empty():
        return frame
    joined = frame.join(names, on=_KEY, how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("known_as", "submit").alias("submit")).select(frame.columns)


def _move(connection: Connection, names: pl.DataFrame, revision: int) -> None:
    """Change the submit time of stored runs and of their steps."""
    job, step = tables.jobs.c, tables.steps.c
    for cluster, job_id, submit, known_as in names.iter_rows():
        old_job = (job.cluster == cluster, job.job_id == job_id, job.submit == submit)
        connection.execute(update(tables.jobs).where(*old_job).values(submit=known_as, revision=revision))
        old_step = (step.cluster == cluster, step.job_id == job_id, step.submit == submit)
        rows = connection.execute(select(*(step[name] for name in STEPS)).where(*old_step)).all()
        if rows:
            connection.execute(delete(tables.steps).where(*old_step))
            moved = from_rows([tuple(row) for row in rows], STEPS).with_columns(submit=pl.lit(known_as, pl.Int64))
            upsert_stored(connection, tables.steps, STEPS, moved, revision)


def delete_of_runs(
    connection: Connection, table: Table, columns: Sequence[str], condition: ColumnElement[bool],
    *more: ColumnElement[bool],
) -> None:  # fmt: skip
    """Delete the rows of ``table`` that have the ``columns`` of a run that meets ``condition``, and meet ``more``."""
    rows, runs = [table.c[name] for name in columns], [tables.jobs.c[name] for name in columns]
    if connection.dialect.name == "sqlite":  # it has no DELETE of several tables
        connection.execute(delete(table).where(tuple_(*rows).in_(select(*runs).where(condition)), *more))
        return
    # MariaDB reads the whole table for IN.
    equal = (row == run for row, run in zip(rows, runs, strict=True))
    connection.execute(delete(table).where(*equal, condition, *more))


class RunFilters(TypedDict, total=False):
    """Names that select runs; an empty or missing filter matches all of them."""

    clusters: Sequence[str]
    partitions: Sequence[str]
    accounts: Sequence[str]
    users: Sequence[str]


class AccountingQueries:
    """Queries of runs, steps and allocated GPUs. Each is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def jobs(
        self,
        since: datetime,
        until: datetime,
        *,
        gpu_only: bool = False,
        ended_only: bool = False,
        columns: Sequence[str] | None = None,
        **filters: Unpack[RunFilters],
    ) -> pl.DataFrame:
        """Return runs that have started and overlap ``[since, until)``, as ``JOBS``.

        ``gpu_only`` excludes runs known to have had no GPU (``gpus`` 0), ``ended_only`` those without an end;
        ``columns`` selects columns of ``JOBS``.
        """
        job = tables.jobs.c
        selected = _selected(since, until, filters)
        if ended_only:
            selected = and_(selected, job.end.is_not(None))
        if gpu_only:
            selected = and_(selected, or_(job.gpus.is_(None), job.gpus != 0))
        return self._frame(tables.jobs, _columns(columns), selected, and_(selected, self._reaches(since, until)))

    def pending(
        self, before: datetime, *, columns: Sequence[str] | None = None, since: datetime | None = None
    ) -> pl.DataFrame:
        """Return runs submitted before ``before`` that were pending when accounting was ingested, as ``JOBS``.

        With ``since``, also runs that started at ``before`` or later, and runs that were canceled after ``since``
        while pending.
        """
        job = tables.jobs.c
        waits = and_(job.state == "PENDING", job.start.is_(None))
        ends: ColumnElement[bool] = job.end.is_(None)
        if since is not None:
            gave_up = and_(job.start.is_(None), job.end > floor_s(since))
            waits, ends = or_(waits, job.start >= ceil_s(before), gave_up), _ends_from(min(since, before))
        waiting = and_(waits, job.submit < ceil_s(before))
        return self._frame(tables.jobs, _columns(columns), waiting, and_(waiting, ends))

    def find_job(self, job_id: int, *, cluster: str | None = None) -> pl.DataFrame:
        """Return every stored run of a job, of the tasks of an array or of heterogeneous components, as ``JOBS``."""
        job = tables.jobs.c
        # With the cluster, the first columns of the key.
        plain = and_(job.cluster.in_(self._clusters(job.cluster)), job.job_id == job_id)
        condition = or_(plain, job.array_job_id == job_id, job.het_job_id == job_id)
        if cluster is not None:
            condition = and_(condition, job.cluster == cluster)
        return self._frame(tables.jobs, JOBS, condition)

    def steps_of(self, job_ids: Sequence[int]) -> pl.DataFrame:
        """Return the stored steps of every run with one of these raw IDs, in any cluster, as ``STEPS``."""
        step = tables.steps.c
        of_clusters = step.cluster.in_(self._clusters(step.cluster))
        parts = [
            self._frame(tables.steps, STEPS, and_(of_clusters, step.job_id.in_(job_ids[first : first + _IN_LIST])))
            for first in range(0, len(job_ids), _IN_LIST)
        ]
        return pl.concat(parts) if parts else from_stored(from_rows((), STEPS), STEPS)

    def allocation_gpus(self, since: datetime, until: datetime, **filters: Unpack[RunFilters]) -> pl.DataFrame:
        """Return the recorded GPUs of the jobs that ``jobs`` returns, as ``RECORDED_GPUS``.

        If accounting has a single cluster, records without a cluster belong to it, and so do records of a single other
        name: a prolog seldom knows Slurm's name of the cluster.
        """
        job, gpu = tables.jobs.c, tables.allocation_gpus.c
        selected = _selected(since, until, filters)
        runs = and_(selected, self._reaches(since, until))
        names = self._clusters(job.cluster)
        only = names[0] if len(names) == 1 else None
        conditions: list[tuple[ColumnElement[bool], ColumnElement[bool]]]
        if only is None:
            same = and_(job.cluster == gpu.cluster, job.job_id == gpu.job_id)
            of_these = tuple_(gpu.cluster, gpu.job_id).in_(select(job.cluster, job.job_id).where(runs))
            conditions = [(same, of_these)]
        else:
            recorded = self._clusters(gpu.cluster)
            # A query for each name: for a list of names, MariaDB reads all their records.
            conditions = [
                (and_(gpu.cluster == name, job.cluster == only, job.job_id == gpu.job_id),
                 and_(gpu.cluster == name, gpu.job_id.in_(select(job.job_id).where(runs))))
                for name in recorded if len(recorded) == 1 or name in (only, UNNAMED_CLUSTER)
            ]  # fmt: skip
        frames = [
            self._frame(tables.allocation_gpus, ALLOCATION_GPUS, exists().where(same, runs), of_these)
            for same, of_these in conditions
        ]
        frame = pl.concat([from_stored(from_rows((), ALLOCATION_GPUS), ALLOCATION_GPUS), *frames])
        has_start = pl.col("start").dt.epoch("s") != tables.UNKNOWN_START
        frame = frame.with_columns(
            pl.col("cluster") if only is None else pl.lit(only).alias("cluster"),
            pl.when(has_start).then("start"),
            pl.when(pl.col("node") != "").then("node"),
        )
        attempts = self._attempts() if frame["start"].has_nulls() else pl.DataFrame(schema=_ATTEMPTS)
        return frame.join(attempts, on=["cluster", "job_id"], how="left", maintain_order="left").select(*RECORDED_GPUS)

    def _attempts(self) -> pl.DataFrame:
        """Return ``cluster``, ``job_id``, ``attempts``: the runs of each job with recorded GPUs without a start."""
        job, gpu = tables.jobs.c, tables.allocation_gpus.c
        undated = select(gpu.job_id).where(gpu.start == tables.UNKNOWN_START)
        counts = (
            select(job.cluster, job.job_id, func.count())
            .where(job.start.is_not(None), job.job_id.in_(undated))
            .group_by(job.cluster, job.job_id)
        )
        with reading(self._engine) as connection:
            return pl.DataFrame([tuple(row) for row in connection.execute(counts)], schema=_ATTEMPTS, orient="row")

    def newest_times(self) -> dict[str, datetime]:
        """Return the time up to which accounting is known, by cluster.

        It is the latest submission, start, end, or time up to which a running job had run. The eligible time does not
        count: it can be in the future.
        """
        job = tables.jobs.c
        # Elapsed time is without the time in which Slurm had suspended the job.
        last_seen = job.start + job.elapsed_s + func.coalesce(job.suspended_s, 0)
        times = (func.max(job.submit), func.max(job.start), func.max(last_seen))
        # No time of an ended run is later than its end, and ends are indexed, so no table is scanned. Grouping by an
        # expression keeps SQLite from using the index on clusters, which would read all rows of a cluster.
        cluster = job.cluster.concat("")
        going = select(cluster, *times).where(job.end.is_(None)).group_by(cluster)
        with reading(self._engine) as connection:
            latest_times = {
                name: [value for value in latest if value is not None] for name, *latest in connection.execute(going)
            }
            for name in _distinct(connection, job.cluster):
                ended = select(job.end).where(cluster == name, job.end.is_not(None)).order_by(job.end.desc()).limit(1)
                latest_times.setdefault(name, []).extend(connection.execute(ended).scalars())
        return {
            name: datetime.fromtimestamp(max(int(value) for value in latest), UTC)
            for name, latest in latest_times.items()
        }

    def _reaches(self, since: datetime, until: datetime) -> ColumnElement[bool]:
        """Return a condition that follows from ``_selected``, for the indexes on starts and ends.

        Databases estimate starts and ends as if they were independent: without the earliest start of a run that can
        end in the interval, one of the past seems to have a quarter of all runs.
        """
        job, since_s = tables.jobs.c, floor_s(since)
        with reading(self._engine) as connection:
            longest_s = _longest_s(connection)
        if longest_s is None:
            return _ends_from(since)
        earliest_s = since_s - longest_s
        return or_(job.end.is_(None), and_(job.start >= earliest_s, job.start < ceil_s(until), job.end >= since_s))

    def _clusters(self, column: ColumnElement[str]) -> list[str]:
        """Return the values of a column of cluster names, in order."""
        with reading(self._engine) as connection:
            return list(_distinct(connection, column))

    def _frame(
        self, table: Table, schema: dict[str, pl.DataType], condition: ColumnElement[bool],
        by_index: ColumnElement[bool] | None = None,
    ) -> pl.DataFrame:  # fmt: skip
        """Return the rows that meet ``condition``. ``by_index``: an equivalent that is quicker for few of the rows."""
        quick = condition if by_index is None else by_index
        with without_collection(), reading(self._engine) as connection:
            span = _row_span(connection, table, quick) if _has_arrays(connection, schema) else None
            if span is None:
                frames = _in_rows(connection, table, schema, quick)
            else:  # by row numbers
                frames = _read_as_arrays(connection, table, schema, condition, span)
            stored = pl.concat([from_rows((), schema), *frames])
        return from_stored(stored, schema)


def _distinct(connection: Connection, column: ColumnElement[str]) -> Iterator[str]:
    """Yield the values of a column that begins an index, in order, without reading the index in between."""
    name = connection.execute(select(func.min(column))).scalar()
    while name is not None:
        yield name
        name = connection.execute(select(func.min(column)).where(column > name)).scalar()


def _in_rows(
    connection: Connection, table: Table, schema: Schema, condition: ColumnElement[bool]
) -> Iterator[pl.DataFrame]:
    # Rows of the driver: making SQLAlchemy's rows would take as long as the query itself.
    cursor = connection.execute(select(*(table.c[name] for name in schema)).where(condition)).cursor
    while rows := cursor.fetchmany(FETCHED):
        yield from_rows(rows, schema)


_ROW = literal_column("rowid", BigInteger)


def _has_arrays(connection: Connection, schema: Schema) -> bool:
    """Return whether the database is a SQLite that returns these columns as JSON; it would round floats."""
    if connection.dialect.name != "sqlite" or sqlite3.sqlite_version_info < _SQLITE_WITH_JSON:
        return False
    return not any(isinstance(dtype, pl.Float64) for dtype in schema.values())


def _row_span(connection: Connection, table: Table, condition: ColumnElement[bool]) -> range | None:
    """Return the range of SQLite's row numbers, or ``None`` if the rows are few, or scattered."""
    counts = select(func.count(), func.min(_ROW), func.max(_ROW)).select_from(table).where(condition)
    count, first, last = connection.execute(counts).one()
    if count < SLICE or last - first >= 4 * count:
        return None
    return range(first, last + 1)


def _read_as_arrays(
    connection: Connection, table: Table, schema: Schema, condition: ColumnElement[bool], span: range
) -> Iterator[pl.DataFrame]:
    """Read each column as JSON arrays: no Python object is made for a value, which takes a third of the time."""
    arrays = select(*(func.json_group_array(table.c[name]) for name in schema)).where(condition)
    for first in span[::ARRAY]:
        texts = connection.execute(arrays.where(_ROW.between(first, first + ARRAY - 1))).one()
        yield pl.DataFrame(dict(zip(schema, texts, strict=True))).select(
            pl.col(name).str.json_decode(pl.List(stored_dtype(dtype))).explode(empty_as_null=False)
            for name, dtype in schema.items()
        )


_ATTEMPTS = {"cluster": pl.String(), "job_id": pl.Int64(), "attempts": pl.Int64()}


def _columns(names: Sequence[str] | None) -> dict[str, pl.DataType]:
    return JOBS if names is None else {name: JOBS[name] for name in names}


def _selected(since: datetime, until: datetime, filters: RunFilters) -> ColumnElement[bool]:
    """Return the condition on ``tables.jobs`` for runs that have started and overlap ``[since, until)``."""
    job = tables.jobs.c
    since_s, until_s = floor_s(since), ceil_s(until)
    # A run that ends at ``since`` is outside; a run of zero length counts at its start.
    conditions = [job.start < until_s, or_(job.end.is_(None), job.end > since_s, job.start >= since_s)]
    filtered = (
        (job.cluster, filters.get("clusters")),
        (job.partition, filters.get("partitions")),
        (job.account, filters.get("accounts")),
        (job.user, filters.get("users")),
    )
    conditions += [column.in_(list(names)) for column, names in filtered if names]
    return and_(*conditions)


def _ends_from(since: datetime) -> ColumnElement[bool]:
    """Return the condition for runs that end at ``since`` or later, or have not ended. An index serves it."""
    end = tables.jobs.c.end
    return or_(end.is_(None), end >= floor_s(since))


def floor_s(moment: datetime) -> int:
    """Return ``moment`` as seconds since 1970, rounded down."""
    return math.floor(moment.timestamp())


def ceil_s(moment: datetime) -> int:
    """Return ``moment`` as seconds since 1970, rounded up."""
    return math.ceil(moment.timestamp())
