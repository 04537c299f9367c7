"""Looking after the store: how much there is, whether it changed, what may go."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, and_, bindparam, delete, exists, not_, or_, select, text

from slurm_affinode.resources import asset_dir
from slurm_affinode.store import journal, suspensions, tables
from slurm_affinode.store.reads import ceil_s, floor_s
from slurm_affinode.store.records import StoreCounts

_SIZE = {
    "postgresql": "SELECT pg_database_size(current_database())",
    "mariadb": "SELECT SUM(data_length + index_length) FROM information_schema.tables WHERE table_schema = DATABASE()",
}


def query(name: str) -> str:
    """The text of ``sql/queries/NAME.sql``, without its comments."""
    content = (asset_dir("sql") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return "\n".join(line for line in content.splitlines() if not line.startswith("--"))


def counts(connection: Connection) -> StoreCounts:
    """How much there is."""
    row = connection.execute(text(query("counts"))).mappings().one()
    cluster = tables.jobs.c.cluster
    names = tuple(connection.execute(select(cluster).distinct().order_by(cluster)).scalars())
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
        size_bytes=_size_bytes(connection),
    )


def _size_bytes(connection: Connection) -> int:
    url, dialect = connection.engine.url, connection.dialect.name
    if dialect == "sqlite":
        path = Path(str(url.database))
        files = (path, path.with_name(path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
    return int(connection.execute(text(_SIZE.get(dialect, _SIZE["mariadb"]))).scalar() or 0)


def fingerprint(connection: Connection, since: datetime, until: datetime) -> str:
    """A text that changes when the runs overlapping ``[since, until)`` or their GPUs change."""
    bounds = {"since": floor_s(since), "until": ceil_s(until)}
    row = connection.execute(text(query("fingerprint")), bounds).one()
    return hashlib.sha256(",".join(str(value) for value in row).encode()).hexdigest()[:16]


def delete_runs(connection: Connection, keys: Sequence[tuple[str, int, datetime]]) -> None:
    """Delete the runs with these keys (cluster, job id, submit) and their steps."""
    rows = [{"a_cluster": name, "a_job": job, "a_submit": floor_s(submit)} for name, job, submit in keys]
    for table in (tables.steps, tables.jobs) if rows else ():
        mine = (
            table.c.cluster == bindparam("a_cluster"),
            table.c.job_id == bindparam("a_job"),
            table.c.submit == bindparam("a_submit"),
        )
        connection.execute(delete(table).where(*mine), rows)


def delete_before(connection: Connection, moment: datetime) -> int:
    """Delete what ended before ``moment``; returns the number of runs."""
    limit = floor_s(moment)
    job, step, gpu = tables.jobs.c, tables.steps.c, tables.allocation_gpus.c
    never_started = and_(job.end.is_(None), job.start.is_(None), job.submit < limit)
    deleted = connection.execute(delete(tables.jobs).where(or_(job.end < limit, never_started))).rowcount
    run = exists().where(job.cluster == step.cluster, job.job_id == step.job_id, job.submit == step.submit)
    connection.execute(delete(tables.steps).where(not_(run)))
    any_run = exists().where(job.cluster == gpu.cluster, job.job_id == gpu.job_id)
    # What a prolog recorded just now may come before the accounting of its job: only old rows are orphans.
    connection.execute(delete(tables.allocation_gpus).where(gpu.start < limit, not_(any_run)))
    over = and_(tables.suspensions.c.began_ms < limit * 1000, not_(suspensions.asleep()))
    connection.execute(delete(tables.suspensions).where(over))
    journal.delete_ingests(connection, limit)
    return deleted
