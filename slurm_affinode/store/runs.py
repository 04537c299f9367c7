"""Runs and their steps into the store, in the connection of a write transaction.

The key of a run holds its submit time. Output of sacct without that field has a stand-in for it (eligible, else start),
so the same run may come under two keys. Two records of one job that start at the same time are one run; of the two
submit times the earlier is the true one, since a job is submitted before it is eligible, and eligible before it starts.
"""

from __future__ import annotations

import polars as pl
from sqlalchemy import Connection, delete, select, update

from slurm_affinode.slurm.schema import JOB_KEY, JOBS, STEP_KEY, STEPS
from slurm_affinode.store import bulk, tables
from slurm_affinode.store.frames import from_rows, to_stored
from slurm_affinode.store.merge import collapse
from slurm_affinode.store.records import Counts, Upserted

_RUN = ["cluster", "job_id", "start"]
_KEY = list(JOB_KEY)
_NAMES = pl.Schema({"cluster": pl.String(), "job_id": pl.Int64(), "submit": pl.Int64(), "known_as": pl.Int64()})
"""A key, and the submit time under which the run is kept."""


def upsert(connection: Connection, jobs: pl.DataFrame, steps: pl.DataFrame | None, revision: int) -> Upserted:
    """Merge ``JOBS`` and ``STEPS``; rows that are new or changed get ``revision``."""
    stored = to_stored(jobs, JOBS, JOB_KEY)
    names = _within(stored)
    renamed = [names]

    def align(coming: pl.DataFrame, there: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        pairs = _pairs(coming, there)
        if pairs.is_empty():
            return coming, there
        ours = pairs.filter(pl.col("submit") != pl.col("known_as")).select(*_NAMES)
        theirs = pairs.filter(pl.col("old") != pl.col("known_as")).select(
            "cluster", "job_id", pl.col("old").alias("submit"), "known_as"
        )
        _move(connection, theirs, revision)
        renamed.append(ours)
        return collapse(_apply(coming, ours), _KEY), _apply(there, theirs)

    job_counts = bulk.upsert_stored(connection, tables.jobs, JOBS, _apply(stored, names), revision, align=align)
    if steps is None:
        return Upserted(job_counts, Counts())
    parts = to_stored(steps, STEPS, STEP_KEY)
    for table in renamed:
        parts = _apply(parts, table)
    return Upserted(job_counts, bulk.upsert_stored(connection, tables.steps, STEPS, parts, revision))


def _within(jobs: pl.DataFrame) -> pl.DataFrame:
    """Keys of one input that are another's run."""
    started = jobs.filter(pl.col("start").is_not_null())
    twice = started.filter(pl.struct(_RUN).is_duplicated()).select(*_RUN, "submit").unique()
    if twice.height == 0:
        return pl.DataFrame(schema=_NAMES)
    true = pl.col("submit").filter(pl.col("submit") > 0).min().over(_RUN).fill_null(pl.col("submit").min().over(_RUN))
    return twice.with_columns(true.alias("known_as")).filter(pl.col("submit") != pl.col("known_as")).select(*_NAMES)


def _pairs(coming: pl.DataFrame, there: pl.DataFrame) -> pl.DataFrame:
    """Runs that are there under another submit time (``old``) than they come with (``submit``)."""
    known = there.filter(pl.col("start").is_not_null()).select(*_RUN, pl.col("submit").alias("old"))
    begun = coming.filter(pl.col("start").is_not_null()).select(*_RUN, "submit")
    of_key = begun.select("cluster", "job_id", pl.col("submit").alias("old"), pl.col("start").alias("claims"))
    pairs = (
        begun.join(known, on=_RUN)
        .filter(pl.col("submit") != pl.col("old"))
        .join(there.select(*_KEY, pl.col("start").alias("began"), taken=True), on=_KEY, how="left")
        .join(of_key, on=["cluster", "job_id", "old"], how="left")
        # Where the key is that of another run, which has started, the run keeps the key that it has.
        .filter(pl.col("taken").is_null() | (pl.col("began") != pl.col("start")))
        .unique(_RUN)
    )
    earlier = (pl.col("submit") > 0) & ((pl.col("submit") < pl.col("old")) | (pl.col("old") <= 0))
    # One that came alone has the key of the run before it, until that comes too.
    earlier |= (pl.col("claims") != pl.col("start")).fill_null(value=False)
    earlier &= pl.col("taken").is_null()
    return pairs.with_columns(pl.when(earlier).then("submit").otherwise("old").alias("known_as"))


def _apply(frame: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with the submit times of ``names``."""
    if names.is_empty():
        return frame
    joined = frame.join(names, on=_KEY, how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("known_as", "submit").alias("submit")).select(frame.columns)


def _move(connection: Connection, names: pl.DataFrame, revision: int) -> None:
    """Give runs that are there, and their steps, another submit time."""
    job, step = tables.jobs.c, tables.steps.c
    for cluster, job_id, submit, known_as in names.iter_rows():
        old_job = (job.cluster == cluster, job.job_id == job_id, job.submit == submit)
        connection.execute(update(tables.jobs).where(*old_job).values(submit=known_as, revision=revision))
        old_step = (step.cluster == cluster, step.job_id == job_id, step.submit == submit)
        rows = connection.execute(select(*(step[name] for name in STEPS)).where(*old_step)).all()
        if rows:
            connection.execute(delete(tables.steps).where(*old_step))
            moved = from_rows([tuple(row) for row in rows], STEPS).with_columns(submit=pl.lit(known_as, pl.Int64))
            bulk.upsert_stored(connection, tables.steps, STEPS, moved, revision)
