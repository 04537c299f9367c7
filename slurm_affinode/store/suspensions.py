"""Suspensions of jobs: rows that lines of ledgers are put together into."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from slurm_affinode.model.ledger import COLUMNS, KEY, TEXTS, LedgerEntry
from slurm_affinode.store.journal import storable
from slurm_affinode.store.reads import ceil_s, floor_s
from slurm_affinode.store.records import Counts
from slurm_affinode.store.tables import suspensions as table


def upsert(connection: Connection, entries: Iterable[LedgerEntry], revision: int) -> Counts:
    """Put ``entries`` together with what is there; rows that are new or changed get ``revision``."""
    coming: dict[tuple[str, int, int, int], LedgerEntry] = {}
    given = 0
    for entry in entries:
        given += 1
        known = coming.get(entry.key)
        coming[entry.key] = entry if known is None else known.merged(entry)
    new = updated = 0
    for key, entry in coming.items():
        mine = and_(*(table.c[name] == value for name, value in zip(KEY, key, strict=True)))
        row = connection.execute(select(*(table.c[name] for name in COLUMNS)).where(mine)).one_or_none()
        if row is None:
            connection.execute(insert(table).values(**_values(entry), revision=revision))
            new += 1
            continue
        before = LedgerEntry(*row)
        after = _values(before.merged(entry))
        if after != _values(before):
            connection.execute(update(table).where(mine).values(**after, revision=revision))
            updated += 1
    return Counts(new, updated, given - new - updated)


def _values(entry: LedgerEntry) -> dict[str, str | int | None]:
    values = {name: getattr(entry, name) for name in COLUMNS}
    return {name: storable(value) if name in TEXTS and value is not None else value for name, value in values.items()}


def asleep() -> ColumnElement[bool]:
    """Suspended, and neither restored nor over."""
    return and_(table.c.queued_ms.is_not(None), _over().is_(None))


def _over() -> ColumnElement[int]:
    return func.coalesce(table.c.restoring_ms, table.c.ended_ms)


def overlapping(connection: Connection, since: datetime, until: datetime) -> list[LedgerEntry]:
    """Those that began before ``until`` and ended, or failed, at or after ``since``; oldest first."""
    since_ms, until_ms = floor_s(since) * 1000, ceil_s(until) * 1000
    reaches = or_(table.c.began_ms >= since_ms, _over() >= since_ms, asleep())
    query = select(*(table.c[name] for name in COLUMNS)).where(table.c.began_ms < until_ms, reaches)
    rows = connection.execute(query.order_by(table.c.began_ms, table.c.cluster, table.c.job_id)).all()
    return [LedgerEntry(*row) for row in rows]
