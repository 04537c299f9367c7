"""Journal of ingests, list of reports, single values: small rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, and_, delete, insert, or_, select, update

from slurm_affinode.db.engine import reading, write
from slurm_affinode.db.records import IngestProblem, IngestRecord, ReportRecord
from slurm_affinode.db.tables import ingest_problems, meta
from slurm_affinode.db.tables import ingests as ingests_table
from slurm_affinode.db.tables import reports as reports_table

KEPT_PROBLEMS = 200
"""Problems kept per ingest. In a file of another kind every line is bad, and the count is enough."""


def moment(seconds: int | None) -> datetime | None:
    """Convert ``seconds`` since 1970 to a UTC time."""
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC)


def _seconds(when: datetime) -> int:
    return int(when.timestamp() // 1)


def storable(value: str) -> str:
    """Return ``value`` as every database can store it: no NUL, no lone surrogates (undecodable file names)."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "backslashreplace").decode("utf-8")


def get(connection: Connection, name: str) -> str | None:
    """Return the value of ``name``, or None."""
    return connection.execute(select(meta.c.value).where(meta.c.name == name)).scalar()


def put(connection: Connection, name: str, value: str) -> None:
    """Set the value of ``name``; the caller is the only writer."""
    if get(connection, name) is None:
        connection.execute(insert(meta).values(name=name, value=storable(value)))
    else:
        connection.execute(update(meta).where(meta.c.name == name).values(value=storable(value)))


def delete_ingests(connection: Connection, before_s: int) -> None:
    """Delete entries finished before ``before_s``."""
    old = select(ingests_table.c.id).where(ingests_table.c.finished < before_s)
    connection.execute(delete(ingest_problems).where(ingest_problems.c.ingest_id.in_(old)))
    connection.execute(delete(ingests_table).where(ingests_table.c.finished < before_s))


def _row(number: int, record: IngestRecord) -> dict[str, str | int | None]:
    """Return the columns of an entry."""
    return {
        "id": number,
        "kind": record.kind,
        "source": storable(record.source),
        "fingerprint": record.fingerprint,
        "started": _seconds(record.started),
        "finished": _seconds(record.finished),
        "first": None if record.first is None else _seconds(record.first),
        "last": None if record.last is None else _seconds(record.last),
        "records": record.records,
        "new": record.new,
        "updated": record.updated,
        "unchanged": record.unchanged,
        "bad": record.bad,
        "notes": json.dumps([storable(note) for note in record.notes]),
    }


class IngestJournal:
    """Journal of ingests, list of reports, single values. Each method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def record_ingest(self, record: IngestRecord) -> int:
        """Write ``record`` to the journal and return its number; see ``record_ingests``."""
        return self.record_ingests((record,))

    def record_ingests(self, records: Sequence[IngestRecord]) -> int:
        """Write ``records`` to the journal in one transaction and return the number of the last entry.

        Only the first problems of each are kept.
        """

        def work(connection: Connection) -> int:
            # Counted in ``meta``, so that numbers are not reused after old entries were deleted.
            before = int(get(connection, "ingests") or 0)
            if not records:
                return before
            numbered = list(enumerate(records, start=before + 1))
            put(connection, "ingests", str(before + len(records)))
            connection.execute(insert(ingests_table), [_row(number, record) for number, record in numbered])
            problems = [
                {"ingest_id": number, "number": position, "line": problem.line, "reason": storable(problem.reason)}
                for number, record in numbered
                for position, problem in enumerate(record.problems[:KEPT_PROBLEMS], start=1)
            ]
            if problems:
                connection.execute(insert(ingest_problems), problems)
            return before + len(records)

        return write(self._engine, work)

    def ingests(
        self, *, since: datetime | None = None, kind: str | None = None, only_bad: bool = False
    ) -> list[IngestRecord]:
        """Return journal entries of ``kind`` that finished at or after ``since``, oldest first.

        ``only_bad``: those with records that could not be used.
        """
        table = ingests_table.c
        conditions = [table.finished >= _seconds(since)] if since is not None else []
        if kind is not None:
            conditions.append(table.kind == kind)
        if only_bad:
            conditions.append(table.bad > 0)
        with reading(self._engine) as connection:
            rows = connection.execute(select(ingests_table).where(and_(True, *conditions)).order_by(table.id)).all()
            problems: dict[int, list[IngestProblem]] = {}
            if rows:
                problem = ingest_problems.c
                query = select(problem.ingest_id, problem.line, problem.reason).where(problem.ingest_id >= rows[0].id)
                for ingest_id, line, reason in connection.execute(query.order_by(problem.ingest_id, problem.number)):
                    problems.setdefault(ingest_id, []).append(IngestProblem(reason, line))
        return [
            IngestRecord(
                kind=row.kind,
                source=row.source,
                started=datetime.fromtimestamp(row.started, UTC),
                finished=datetime.fromtimestamp(row.finished, UTC),
                records=row.records,
                new=row.new,
                updated=row.updated,
                unchanged=row.unchanged,
                bad=row.bad,
                problems=tuple(problems.get(row.id, ())),
                notes=tuple(json.loads(row.notes)),
                fingerprint=row.fingerprint,
                first=moment(row.first),
                last=moment(row.last),
                id=row.id,
            )
            for row in rows
        ]

    def fingerprints(self, kind: str) -> frozenset[str]:
        """Return the fingerprints of the ingested inputs of ``kind``."""
        table = ingests_table.c
        query = select(table.fingerprint).where(table.kind == kind, table.fingerprint.is_not(None)).distinct()
        with reading(self._engine) as connection:
            return frozenset(connection.execute(query).scalars())

    def record_report(self, record: ReportRecord) -> None:
        """Record a rendered report, replacing an earlier one of the same period and label."""

        def work(connection: Connection) -> None:
            _delete_reports(connection, [record])
            connection.execute(
                insert(reports_table).values(
                    period=record.period,
                    label=record.label,
                    since=_seconds(record.since),
                    until=_seconds(record.until),
                    path=storable(record.path),
                    rendered=_seconds(record.rendered),
                    fingerprint=record.fingerprint,
                    summary=json.dumps(dict(record.summary)),
                )
            )

        write(self._engine, work)

    def reports(self) -> list[ReportRecord]:
        """Return the records of rendered reports, oldest period first."""
        table = reports_table.c
        with reading(self._engine) as connection:
            rows = connection.execute(select(reports_table).order_by(table.since, table.until)).all()
        return [
            ReportRecord(
                period=row.period,
                label=row.label,
                since=datetime.fromtimestamp(row.since, UTC),
                until=datetime.fromtimestamp(row.until, UTC),
                path=row.path,
                rendered=datetime.fromtimestamp(row.rendered, UTC),
                fingerprint=row.fingerprint,
                summary=json.loads(row.summary),
            )
            for row in rows
        ]

    def delete_reports(self, records: Collection[ReportRecord]) -> None:
        """Delete ``records``; deleting the files is left to the caller."""
        if records:
            write(self._engine, lambda connection: _delete_reports(connection, records))

    def get(self, name: str) -> str | None:
        """Return the value of ``name``, or None if it was never set."""
        with reading(self._engine) as connection:
            return get(connection, name)

    def set(self, name: str, value: str) -> None:
        """Set the value of ``name``."""
        write(self._engine, lambda connection: put(connection, name, value))


def _delete_reports(connection: Connection, records: Collection[ReportRecord]) -> None:
    table = reports_table.c
    same_period = (and_(table.period == record.period, table.label == record.label) for record in records)
    connection.execute(delete(reports_table).where(or_(*same_period)))
