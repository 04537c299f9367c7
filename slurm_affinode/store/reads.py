"""Accounting frames out of the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl
from sqlalchemy import ColumnElement, Engine, Table, and_, exists, func, or_, select, true

from slurm_affinode.config import UNNAMED_CLUSTER
from slurm_affinode.slurm.schema import ALLOCATION_GPUS, JOBS, STEPS
from slurm_affinode.store import tables
from slurm_affinode.store.engine import reading
from slurm_affinode.store.frames import from_rows, from_stored


@dataclass(frozen=True, slots=True)
class Selection:
    """Runs that have started and overlap ``[since, until)``; an empty filter does not filter."""

    since: datetime
    until: datetime
    clusters: Sequence[str] = ()
    partitions: Sequence[str] = ()
    accounts: Sequence[str] = ()
    users: Sequence[str] = ()
    gpu_only: bool = False
    """Leave out runs that certainly had no GPU (``gpus`` 0)."""

    def condition(self) -> ColumnElement[bool]:
        """The condition on ``tables.jobs``."""
        job = tables.jobs.c
        since_s, until_s = floor_s(self.since), ceil_s(self.until)
        # A run that ends as the interval begins is outside; a run of no length counts where it starts.
        conditions = [job.start < until_s, or_(job.end.is_(None), job.end > since_s, job.start >= since_s)]
        filters = (
            (job.cluster, self.clusters),
            (job.partition, self.partitions),
            (job.account, self.accounts),
            (job.user, self.users),
        )
        conditions += [column.in_(list(wanted)) for column, wanted in filters if wanted]
        if self.gpu_only:
            conditions.append(or_(job.gpus.is_(None), job.gpus != 0))
        return and_(*conditions)


def floor_s(moment: datetime) -> int:
    """Seconds since 1970, the last whole one."""
    return math.floor(moment.timestamp())


def ceil_s(moment: datetime) -> int:
    """Seconds since 1970, the next whole one for a fraction."""
    return math.ceil(moment.timestamp())


def jobs(engine: Engine, selection: Selection, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """The runs themselves; ``columns`` picks columns of ``JOBS``."""
    schema = JOBS if columns is None else {name: JOBS[name] for name in columns}
    return _frame(engine, tables.jobs, schema, selection.condition())


def pending(
    engine: Engine, before: datetime, columns: Sequence[str] | None = None, *, since: datetime | None = None
) -> pl.DataFrame:
    """Runs that were submitted before ``before`` and have not started, as far as the store knows.

    With ``since`` also those that started only later than ``before``, and those that ended after ``since`` unstarted.
    """
    schema = JOBS if columns is None else {name: JOBS[name] for name in columns}
    job = tables.jobs.c
    waits = and_(job.state == "PENDING", job.start.is_(None))
    if since is not None:
        gave_up = and_(job.start.is_(None), job.end > floor_s(since))
        waits = or_(waits, job.start >= ceil_s(before), gave_up)
    return _frame(engine, tables.jobs, schema, and_(waits, job.submit < ceil_s(before)))


def find_job(engine: Engine, job_id: int, cluster: str | None) -> pl.DataFrame:
    """Every run of the job, of the tasks of the array or of the components that go by this number."""
    job = tables.jobs.c
    condition = or_(job.job_id == job_id, job.array_job_id == job_id, job.het_job_id == job_id)
    if cluster is not None:
        condition = and_(condition, job.cluster == cluster)
    return _frame(engine, tables.jobs, JOBS, condition)


def steps(engine: Engine, selection: Selection) -> pl.DataFrame:
    """All steps of the runs."""
    job, step = tables.jobs.c, tables.steps.c
    same = and_(job.cluster == step.cluster, job.job_id == step.job_id, job.submit == step.submit)
    return _frame(engine, tables.steps, STEPS, exists().where(same, selection.condition()))


def allocation_gpus(engine: Engine, selection: Selection) -> pl.DataFrame:
    """What is recorded of the GPUs of the jobs.

    Where accounting has a single cluster, records that named none are of it, and so are those of a single other name: a
    prolog seldom knows what Slurm calls the cluster.
    """
    job, gpu = tables.jobs.c, tables.allocation_gpus.c
    only = _only(engine, job.cluster)
    same: ColumnElement[bool] = and_(job.cluster == gpu.cluster, job.job_id == gpu.job_id)
    if only is not None:
        unnamed = gpu.cluster.in_((only, UNNAMED_CLUSTER)) if _only(engine, gpu.cluster) is None else true()
        same = and_(unnamed, job.job_id == gpu.job_id)
    frame = _frame(engine, tables.allocation_gpus, ALLOCATION_GPUS, exists().where(same, selection.condition()))
    known = pl.col("start").dt.epoch("s") != tables.UNKNOWN_START
    return frame.with_columns(
        pl.col("cluster") if only is None else pl.lit(only).alias("cluster"),
        pl.when(known).then("start"),
        pl.when(pl.col("node") != "").then("node"),
    )


def _only(engine: Engine, cluster: ColumnElement[str]) -> str | None:
    """The value of a column of clusters that has a single one. Both ends of its index tell."""
    with reading(engine) as connection:
        first, last = connection.execute(select(func.min(cluster), func.max(cluster))).one()
    return first if first == last else None


def newest_times(engine: Engine) -> dict[str, datetime]:
    """Cluster -> the latest submission, start, end, or time up to which a running job had run."""
    job = tables.jobs.c
    times = (func.max(job.submit), func.max(job.start), func.max(job.start + job.elapsed_s))
    # Nothing of a run that has ended is later than its end, and there is an index of ends: no table is scanned.
    # SQLite would take that of clusters for it, and read all rows of one: an expression has none.
    cluster = job.cluster.concat("")
    going = select(cluster, *times).where(job.end.is_(None)).group_by(cluster)
    with reading(engine) as connection:
        found = {name: [one for one in latest if one is not None] for name, *latest in connection.execute(going)}
        name = connection.execute(select(func.min(job.cluster))).scalar()
        while name is not None:
            ended = select(job.end).where(cluster == name, job.end.is_not(None)).order_by(job.end.desc()).limit(1)
            found.setdefault(name, []).extend(connection.execute(ended).scalars())
            name = connection.execute(select(func.min(job.cluster)).where(job.cluster > name)).scalar()
    return {name: datetime.fromtimestamp(max(int(one) for one in latest), UTC) for name, latest in found.items()}


def _frame(
    engine: Engine, table: Table, schema: dict[str, pl.DataType], condition: ColumnElement[bool]
) -> pl.DataFrame:
    statement = select(*(table.c[name] for name in schema)).where(condition)
    with reading(engine) as connection:
        # The driver's own rows: those of the toolkit would cost as much again as the query.
        rows = connection.execute(statement).cursor.fetchall()
    return from_stored(from_rows(rows, schema), schema)
