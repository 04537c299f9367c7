"""Definitions of the tables for SQLAlchemy Core. ``sql/migrations`` creates them; a test checks that the two agree.

``jobs``, ``steps`` and ``allocation_gpus`` mirror ``slurm.accounting.schema``: same names, times as UTC seconds, plus
``revision``, the number of the change that last wrote the row. Columns of later releases follow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl
from sqlalchemy import BigInteger, Column, Double, MetaData, SmallInteger, String, Table, Text
from sqlalchemy.types import TypeEngine

from slurm_affinode.model import ledger
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOB_KEY, JOBS, STEP_KEY, STEPS

metadata = MetaData()

KEY_LENGTHS = {"cluster": 128, "step_id": 64, "node": 255, "gpu": 128}
"""Maximum length in characters of text columns in a key: MariaDB does not index longer ones."""

UNKNOWN_START = -1
"""``allocation_gpus.start`` if the run is unknown: a key column cannot be NULL."""

ALLOCATION_GPU_KEY = tuple(ALLOCATION_GPUS)


def _sql_type(name: str, dtype: pl.DataType, *, in_key: bool) -> TypeEngine[Any]:
    if isinstance(dtype, pl.Boolean):
        return SmallInteger()
    if isinstance(dtype, pl.Float64):
        return Double()
    if isinstance(dtype, pl.String):
        return String(KEY_LENGTHS[name]) if in_key else Text()
    return BigInteger()


_APPENDED = ("suspended_s", "time_doubt_s", "priority")
"""Columns of ``JOBS`` that later migrations have appended, in their order."""


def _mirror(name: str, schema: dict[str, pl.DataType], key: tuple[str, ...]) -> Table:
    columns = [
        Column(
            column,
            _sql_type(column, dtype, in_key=column in key),
            primary_key=column in key,
            nullable=column not in key,
            autoincrement=False,
        )
        for column, dtype in schema.items()
    ]
    first = [column for column in columns if column.name not in _APPENDED]
    last = sorted(
        (column for column in columns if column.name in _APPENDED), key=lambda column: _APPENDED.index(column.name)
    )
    return Table(name, metadata, *first, Column("revision", BigInteger, nullable=False), *last)


jobs = _mirror("jobs", JOBS, JOB_KEY)
steps = _mirror("steps", STEPS, STEP_KEY)
allocation_gpus = _mirror("allocation_gpus", ALLOCATION_GPUS, ALLOCATION_GPU_KEY)


def _ledger_columns(names: Iterable[str]) -> list[Column[Any]]:
    return [
        Column(
            name,
            (String(KEY_LENGTHS[name]) if name in KEY_LENGTHS and name in ledger.KEY else Text())
            if name in ledger.TEXTS
            else BigInteger(),
            primary_key=name in ledger.KEY,
            nullable=name not in ledger.KEY,
            autoincrement=False,
        )
        for name in names
    ]


_ADDED = ("shares_gpus",)
"""Columns that a later migration has appended."""

suspensions = Table(
    "suspensions",
    metadata,
    *_ledger_columns(name for name in ledger.COLUMNS if name not in _ADDED),
    Column("revision", BigInteger, nullable=False),
    *_ledger_columns(_ADDED),
)

ingests = Table(
    "ingests",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("source", Text, nullable=False),
    Column("fingerprint", Text),
    Column("started", BigInteger, nullable=False),
    Column("finished", BigInteger, nullable=False),
    Column("first", BigInteger),
    Column("last", BigInteger),
    Column("records", BigInteger, nullable=False),
    Column("new", BigInteger, nullable=False),
    Column("updated", BigInteger, nullable=False),
    Column("unchanged", BigInteger, nullable=False),
    Column("bad", BigInteger, nullable=False),
    Column("notes", Text, nullable=False),
)

ingest_problems = Table(
    "ingest_problems",
    metadata,
    Column("ingest_id", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("line", BigInteger),
    Column("reason", Text, nullable=False),
)

reports = Table(
    "reports",
    metadata,
    Column("period", String(16), primary_key=True),
    Column("label", String(32), primary_key=True),
    Column("since", BigInteger, nullable=False),
    Column("until", BigInteger, nullable=False),
    Column("path", Text, nullable=False),
    Column("rendered", BigInteger, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("summary", Text, nullable=False),
)

meta = Table(
    "meta",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("value", Text, nullable=False),
)

FINDING_LENGTH = 512
CLAIM_LENGTH = 640

zombie_audit = Table(
    "zombie_audit",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("run", String(64), nullable=False),
    Column("actor", Text, nullable=False),
    Column("verb", String(32), nullable=False),
    Column("result", String(32), nullable=False),
    Column("cluster", Text),
    Column("kind", String(64)),
    Column("finding", String(FINDING_LENGTH)),
    Column("job_id", BigInteger),
    Column("job", Text),
    Column("user", Text),
    Column("node", Text),
    Column("rule", Text),
    Column("reason", Text, nullable=False),
    Column("evidence", Text),
)

zombie_warnings = Table(
    "zombie_warnings",
    metadata,
    Column("finding", String(FINDING_LENGTH), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("recipient", Text, nullable=False),
)

zombie_claims = Table(
    "zombie_claims",
    metadata,
    Column("claim", String(CLAIM_LENGTH), primary_key=True),
    Column("run", String(64), nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)

zombie_keeps = Table(
    "zombie_keeps",
    metadata,
    Column("cluster", String(KEY_LENGTHS["cluster"]), primary_key=True),
    Column("job_id", BigInteger, primary_key=True, autoincrement=False),
    Column("submit", BigInteger, primary_key=True, autoincrement=False),
    Column("user", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)
