"""Many rows at once, in the connection of a write transaction: what is there, merged with what comes, written back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import polars as pl
from sqlalchemy import ColumnElement, Connection, Table, select

from slurm_affinode.store.frames import from_rows, to_stored
from slurm_affinode.store.merge import collapse, merge
from slurm_affinode.store.records import Counts

SLICE = 20_000
"""Rows that are fetched, merged and written together: bounds the memory of Python's rows."""
_IN_LIST = 2_000
Align = Callable[[pl.DataFrame, pl.DataFrame], tuple[pl.DataFrame, pl.DataFrame]]


def upsert(
    connection: Connection, table: Table, schema: dict[str, pl.DataType], frame: pl.DataFrame, revision: int
) -> Counts:
    """Merge ``frame`` into ``table``; rows that are new or changed get ``revision``."""
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
    """The same for a frame in stored form; ``align`` may change the keys of (what comes, what is there)."""
    key = primary_key(table)
    single = collapse(stored, key).sort(key)
    counts = Counts(unchanged=stored.height - single.height)
    holds_rows = connection.execute(select(1).select_from(table).limit(1)).first() is not None
    for part in single.iter_slices(SLICE):
        coming, there = part, _existing(connection, table, schema, part) if holds_rows else part.clear()
        if align is not None and not there.is_empty():
            coming, there = align(coming, there)
        merged = merge(coming, there, key)
        write_rows(connection, table, merged.write.with_columns(pl.lit(revision, pl.Int64).alias("revision")))
        counts += Counts(merged.new, merged.updated, merged.unchanged)
    return counts


def primary_key(table: Table) -> list[str]:
    """Names of the key columns of ``table``."""
    return [column.name for column in table.primary_key]


def write_rows(connection: Connection, table: Table, frame: pl.DataFrame) -> None:
    """Insert the rows of ``frame`` (stored form); a row whose key is there already is replaced."""
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
    others = [quote(name) for name in columns if name not in key]
    if connection.dialect.name in ("mysql", "mariadb"):
        return f"{insert} ON DUPLICATE KEY UPDATE {', '.join(f'{name} = VALUES({name})' for name in others)}"
    return (
        f"{insert} ON CONFLICT ({', '.join(quote(name) for name in key)}) "
        f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in others)}"
    )


def _existing(
    connection: Connection, table: Table, schema: dict[str, pl.DataType], frame: pl.DataFrame
) -> pl.DataFrame:
    """The rows of ``table`` that may be the same runs as those of ``frame``: same cluster and job id."""
    columns = [table.c[name] for name in schema]
    found = [frame.clear()]
    for cluster, condition in _conditions(table, frame):
        query = select(*columns).where(table.c.cluster == cluster, condition)
        rows = connection.execute(query).all()
        if rows:
            found.append(from_rows([tuple(row) for row in rows], schema))
    return pl.concat(found)


def _conditions(table: Table, frame: pl.DataFrame) -> Iterator[tuple[str, ColumnElement[bool]]]:
    for (cluster,), part in frame.group_by("cluster", maintain_order=True):
        ids = part.get_column("job_id").unique().sort()
        for piece in (ids.slice(offset, _IN_LIST) for offset in range(0, len(ids), _IN_LIST)):
            low, high = int(piece[0]), int(piece[-1])
            # Ids given out one after the other, as Slurm does, are a range; stray ones are listed.
            dense = high - low < 4 * len(piece)
            numbers = table.c.job_id.between(low, high) if dense else table.c.job_id.in_(piece.to_list())
            yield str(cluster), numbers
