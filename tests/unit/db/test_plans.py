"""Plans of the main queries: none reads a whole table of facts, so a night does not take longer with every year."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from sqlalchemy import Connection, Engine, event, text

from slurm_affinode.db.repository import Repository
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, STEPS, conform

T0 = datetime(2026, 1, 1, tzinfo=UTC)
RUNS = 12_000
EACH = timedelta(minutes=30)
SINCE, UNTIL = T0 + (RUNS - 60) * EACH, T0 + (RUNS - 12) * EACH
"""The last day of 250."""
LONG_AGO = T0 + RUNS // 3 * EACH, T0 + (RUNS // 3 + 48) * EACH

FACTS = ("jobs", "steps", "allocation_gpus")
"""The tables that grow with the jobs of a cluster."""


def _facts() -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Runs of an hour, one submitted every half hour, each with a step and a GPU; the last are running or pending."""
    at = pl.int_range(RUNS, eager=True)
    submit = pl.Series([T0 + number * EACH for number in range(RUNS)], dtype=pl.Datetime("us", "UTC"))
    runs = pl.DataFrame({"job_id": at + 1, "submit": submit}).with_columns(
        cluster=pl.lit("c1"), job_name=pl.lit("train"), user=pl.format("u{}", at % 200), gpus=pl.lit(1),
        state=pl.when(at < RUNS - 20).then(pl.lit("COMPLETED")).when(at < RUNS - 10).then(pl.lit("RUNNING"))
        .otherwise(pl.lit("PENDING")),
        start=pl.when(at < RUNS - 10).then("submit"),
        end=pl.when(at < RUNS - 20).then(pl.col("submit") + 2 * EACH),
        elapsed_s=pl.lit(3600),
        array_job_id=pl.when(at % 100 == 0).then(at + 1),
    )  # fmt: skip
    steps = runs.select(
        "cluster", "job_id", "submit", "start", "end", step_id=pl.lit("batch"), state=pl.lit("COMPLETED")
    )
    gpus = runs.filter(pl.col("start").is_not_null()).select(
        "cluster", "job_id", "start", node=pl.lit("n1"), gpu=pl.lit("GPU-a")
    )

    def shaped(frame: pl.DataFrame, schema: dict[str, pl.DataType]) -> pl.DataFrame:
        return conform(
            frame.select(pl.col(name).cast(schema[name]) for name in frame.columns if name in schema), schema
        )

    return shaped(runs, JOBS), shaped(steps, STEPS), shaped(gpus, ALLOCATION_GPUS)


@pytest.fixture
def filled(repository: Repository) -> Repository:
    """A repository of 250 days, whose statistics are up to date as those of a running server."""
    runs, steps, gpus = _facts()
    starts_s = [int((T0 + number * EACH).timestamp()) for number in range(0, RUNS, 40)]
    repository.upsert(runs, steps)
    repository.upsert_allocation_gpus(gpus)
    repository.upsert_suspensions(LedgerEntry("c1", 1, start_s, start_s * 1000) for start_s in starts_s)
    with repository.engine.connect() as connection:
        if connection.dialect.name != "sqlite":  # nothing analyzes a SQLite file of a site either
            tables = ", ".join((*FACTS, "suspensions"))
            prefix = "ANALYZE" if connection.dialect.name == "postgresql" else "ANALYZE TABLE"
            connection.execute(text(f"{prefix} {tables}"))
            connection.commit()
    return repository


@pytest.fixture
def queries(filled: Repository) -> Iterator[list[tuple[str, Any]]]:
    """The SELECT statements that are executed meanwhile, and their values."""
    seen: list[tuple[str, Any]] = []

    def record(_: Connection, __: object, statement: str, values: Any, *___: object) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "UPDATE", "DELETE", "--")):
            seen.append((statement, values))

    event.listen(filled.engine, "before_cursor_execute", record)
    yield seen
    event.remove(filled.engine, "before_cursor_execute", record)


def _scanned(engine: Engine, statement: str, values: Any) -> set[str]:
    """Return the tables that a statement reads as a whole: in the order of their rows, or of an index.

    MariaDB estimates a range that has all rows at half of them; of one in order, LIMIT reads only the first rows.
    """
    kind = engine.dialect.name
    prefix = {"sqlite": "EXPLAIN QUERY PLAN ", "postgresql": "EXPLAIN (FORMAT JSON) "}.get(kind, "EXPLAIN ")
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(prefix + statement, values).all()
    if kind == "sqlite":
        # "SCAN jobs", "SCAN jobs USING INDEX ..."; the names of its own queries and aliases are those of the tables.
        names = {"a": "allocation_gpus", "r": "jobs"}
        plan = [str(row[3]).split() for row in rows]
        scanned = {names.get(words[1], words[1]) for words in plan if words[0] == "SCAN"}
    elif kind == "postgresql":
        plans = [entry["Plan"] for entry in (json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0])]
        scanned = set()
        while plans:
            node = plans.pop()
            plans += node.get("Plans", [])
            if node["Node Type"] == "Seq Scan":
                scanned.add(node["Relation Name"])
    else:
        names = {"a": "allocation_gpus", "r": "jobs"}
        most = RUNS if "LIMIT" in statement else RUNS // 3
        whole = [row for row in rows if row.type in ("ALL", "index") or (row.type == "range" and int(row.rows) > most)]
        scanned = {names.get(row.table, row.table) for row in whole}
    return scanned & set(FACTS)


CALLS: dict[str, Callable[[Repository], object]] = {
    "jobs": lambda store: store.jobs(SINCE, UNTIL, gpu_only=True),
    "ended jobs": lambda store: store.jobs(SINCE, UNTIL, ended_only=True),
    "pending": lambda store: store.pending(UNTIL, since=SINCE),
    "allocation_gpus": lambda store: store.allocation_gpus(SINCE, UNTIL),
    "fingerprint": lambda store: store.fingerprint(SINCE, UNTIL),
    "newest_times": lambda store: store.newest_times(),
    "jobs long ago": lambda store: store.jobs(*LONG_AGO),
    "allocation_gpus long ago": lambda store: store.allocation_gpus(*LONG_AGO),
    "last_time": lambda store: store.last_time(),
    "clusters": lambda store: store.clusters(),
    "retention": lambda store: store.delete_before(T0 + 48 * EACH),
    "find_job": lambda store: store.find_job(RUNS // 2),
    "steps_of": lambda store: store.steps_of([RUNS // 2, 17]),
}


def _scans(engine: Engine, queries: list[tuple[str, Any]]) -> dict[str, set[str]]:
    """Return the statements that read whole tables, and these. A query of any row is none."""
    read = {statement: _scanned(engine, statement, values) for statement, values in tuple(queries)}
    return {statement: names for statement, names in read.items() if names and not statement.startswith("SELECT 1 ")}


@pytest.mark.parametrize("name", CALLS)
def test_query_of_a_day_reads_no_whole_table(filled: Repository, queries: list[tuple[str, Any]], name: str) -> None:
    """The runs of a day, their GPUs, who waited, one job."""
    CALLS[name](filled)
    assert queries
    assert not _scans(filled.engine, queries)


def test_ingest_of_a_day_reads_no_whole_table(filled: Repository, queries: list[tuple[str, Any]]) -> None:
    """Also if a user was forgotten, of whom each ingest removes what came again."""
    filled.forget("u7", UNTIL, apply=True)
    runs, steps, gpus = _facts()
    queries.clear()
    filled.upsert(runs.tail(50).with_columns(comment=pl.lit("new")), steps.tail(50))
    filled.upsert_allocation_gpus(gpus.tail(50))
    assert not _scans(filled.engine, queries)
