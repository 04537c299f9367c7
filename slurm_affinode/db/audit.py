"""Audit log of actions against squatters, zombies and orphans; warnings sent, keeps, and claims of running commands."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, and_, delete, func, insert, or_, select, update

from slurm_affinode.base.text import counted
from slurm_affinode.base.times import epoch_ms, named
from slurm_affinode.base.users import name_of_user
from slurm_affinode.db.engine import reading, write
from slurm_affinode.db.journal import storable
from slurm_affinode.db.tables import (
    CLAIM_LENGTH,
    FINDING_LENGTH,
    zombie_audit,
    zombie_claims,
    zombie_keeps,
    zombie_warnings,
)
from slurm_affinode.model.cleanup import AuditEntry, Keep, Ledger, SentWarning

REMEMBERED = timedelta(days=90)
"""Warnings older than this are ignored."""
FOREVER_MS = 1 << 62
"""Base of the expiry of a permanently settled claim. The time of settlement is added, so that old ones can be
deleted."""
SEEN = -1
"""``number`` of a row that records when a finding was first seen; ``recipient`` is when it was last seen."""
UNSEEN_MS = 86_400_000
_DIGITS = 18
"""Longest number that fits an integer column in any case."""
_TEXTS = ("run", "actor", "verb", "result", "reason", "cluster", "kind", "job", "user", "node", "rule")


@dataclass(frozen=True, slots=True)
class Who:
    """The identity of this run in the audit."""

    run: str
    actor: str

    @classmethod
    def am_i(cls) -> Who:
        """Return a new run of this process's user, with the user who called sudo, if any."""
        name = name_of_user(os.getuid())
        behind = os.environ.get("SUDO_USER")
        actor = f"{name}@{socket.gethostname().partition('.')[0]}" + (f" (sudo: {behind})" if behind else "")
        return cls(uuid.uuid4().hex[:12], actor)


class ZombieLog:
    """Audit log, warnings, claims and keeps in a database (``Repository.engine``). Each call is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # --- audit

    def record(self, entries: Iterable[AuditEntry]) -> None:
        """Append ``entries`` to the audit log, in this order."""
        rows = [_row(entry) for entry in entries]
        if rows:
            write(self._engine, lambda connection: _append(connection, rows))

    def history(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        job: str | None = None,
        user: str | None = None,
        verb: str | None = None,
        result: str | None = None,
        limit: int | None = None,
    ) -> list[AuditEntry]:
        """Return records, oldest first; with ``limit``, the newest of them. ``job``: as displayed, or a raw ID."""
        table = zombie_audit.c
        query = select(zombie_audit).order_by(table.id.desc())
        if since is not None:
            query = query.where(table.at_ms >= epoch_ms(since))
        if until is not None:
            query = query.where(table.at_ms < epoch_ms(until))
        if job is not None:
            same = table.job == job
            # The ID of an array or of a heterogeneous job also finds its tasks or components.
            parts = [table.job.like(f"{job}{mark}%", escape="\\") for mark in ("\\_", "+")]
            plain = job.isascii() and job.isdigit() and len(job) <= _DIGITS
            number = or_(same, table.job_id == int(job), *parts) if plain else same
            query = query.where(number)
        for column, value in ((table.user, user), (table.verb, verb), (table.result, result)):
            if value is not None:
                query = query.where(column == value)
        if limit is not None:
            query = query.limit(limit)
        with reading(self._engine) as connection:
            rows = connection.execute(query).mappings().all()
        return [_entry(dict(row)) for row in reversed(rows)]

    def count_before(self, moment: datetime) -> int:
        """Count the records before ``moment``."""
        query = select(func.count()).select_from(zombie_audit).where(zombie_audit.c.at_ms < epoch_ms(moment))
        with reading(self._engine) as connection:
            return int(connection.execute(query).scalar() or 0)

    def prune(self, before: datetime, who: Who, now: datetime, why: str) -> int:
        """Delete records older than ``before`` and return their number. The deletion is recorded with its reason.

        Warnings, keeps and settled claims of that time are deleted as well, even if no record is that old.
        """
        limit = epoch_ms(before)

        def work(connection: Connection) -> int:
            count = connection.execute(delete(zombie_audit).where(zombie_audit.c.at_ms < limit)).rowcount
            connection.execute(delete(zombie_warnings).where(zombie_warnings.c.at_ms < limit))
            connection.execute(delete(zombie_keeps).where(zombie_keeps.c.until_ms < limit))
            until = zombie_claims.c.until_ms
            settled = until.between(FOREVER_MS, FOREVER_MS + limit - 1)
            connection.execute(delete(zombie_claims).where(or_(until < limit, settled)))
            if count:
                text = f"{counted(count, 'record')} from before {named(before, UTC)} deleted: {why}"
                _append(connection, [_row(AuditEntry(now, who.run, who.actor, "prune", "done", text))])
            return int(count)

        return write(self._engine, work)

    # --- history for decisions

    def ledger(self, now: datetime) -> Ledger:
        """Return the warnings, keeps, notifications and first sightings that still count at ``now``."""
        table = zombie_warnings.c
        with reading(self._engine) as connection:
            rows = connection.execute(
                select(table.finding, table.number, table.at_ms).where(table.at_ms >= epoch_ms(now - REMEMBERED))
            ).all()
            kept_rows = (
                connection.execute(select(zombie_keeps).where(zombie_keeps.c.until_ms > epoch_ms(now))).mappings().all()
            )
        warnings: dict[str, tuple[SentWarning, ...]] = {}
        mailed: dict[str, datetime] = {}
        warned_at: dict[str, datetime] = {}
        for key, number, at_ms in sorted(rows, key=lambda row: int(row.at_ms)):
            if number == SEEN:
                warned_at[key] = _moment(at_ms)
            elif number == 0:
                mailed[key] = _moment(at_ms)
            else:
                warnings[key] = (*warnings.get(key, ()), SentWarning(key, int(number), _moment(at_ms)))
        keeps = sorted((_keep(dict(row)) for row in kept_rows), key=lambda keep: keep.submit)
        return Ledger(warnings, {(keep.cluster, keep.job_id): keep for keep in keeps}, mailed, warned_at)

    def see(self, keys: Iterable[str], now: datetime, *, all_of: Iterable[str] = ()) -> None:
        """Record when these findings were first seen; a finding that was not seen for a day counts as new.

        ``all_of``: key prefixes for which ``keys`` is complete; other findings with these prefixes are gone.
        """
        table = zombie_warnings.c
        bounded_keys = {bounded(key) for key in keys}

        def work(connection: Connection) -> None:
            for begin in all_of:
                alike = and_(table.finding.startswith(begin, autoescape=True), table.number == SEEN)
                finding_keys = connection.execute(select(table.finding).where(alike)).scalars().all()
                for key in set(finding_keys) - bounded_keys:
                    expired = and_(table.finding == key, table.number == SEEN)
                    connection.execute(delete(zombie_warnings).where(expired))
            for key in bounded_keys:
                condition = and_(table.finding == key, table.number == SEEN)
                row = connection.execute(select(table.recipient).where(condition)).scalar()
                if row is not None and epoch_ms(now) - int(row) < UNSEEN_MS:
                    connection.execute(update(zombie_warnings).where(condition).values(recipient=str(epoch_ms(now))))
                    continue
                connection.execute(delete(zombie_warnings).where(condition))
                first = {"finding": key, "number": SEEN, "at_ms": epoch_ms(now), "recipient": str(epoch_ms(now))}
                connection.execute(insert(zombie_warnings).values(**first))

        write(self._engine, work)

    # --- claims, against doing anything twice

    def claim(self, claim: str, run: str, now: datetime, hold: timedelta) -> bool:
        """Claim an action for ``run``; ``False`` if another run has claimed it or has done it."""
        return write(self._engine, lambda connection: _take(connection, claim, run, now, hold))

    def claim_warning(
        self, key: str, number: int, run: str, *, now: datetime, hold: timedelta, last_seen: datetime | None
    ) -> bool:
        """Claim a warning. ``False`` also if it was sent since the decision; ``last_seen``: last time known to it."""

        def work(connection: Connection) -> bool:
            condition = and_(zombie_warnings.c.finding == bounded(key), zombie_warnings.c.number == number)
            sent = connection.execute(select(zombie_warnings.c.at_ms).where(condition)).scalar()
            if sent is not None and (last_seen is None or int(sent) > epoch_ms(last_seen)):
                return False
            return _take(connection, warning_claim(key, number), run, now, hold)

        return write(self._engine, work)

    def settle(self, claim: str, run: str, now: datetime, until: datetime | None) -> None:
        """Mark an action as done: no repetition before ``until`` (``None``: before ``prune`` deletes it)."""
        until_ms = FOREVER_MS + epoch_ms(now) if until is None else epoch_ms(until)
        condition = and_(zombie_claims.c.claim == bounded(claim, CLAIM_LENGTH), zombie_claims.c.run == run)
        write(self._engine, lambda c: c.execute(update(zombie_claims).where(condition).values(until_ms=until_ms)))

    def settled(self, claim: str) -> bool:
        """Return whether the action was done for good, by any run."""
        condition = zombie_claims.c.claim == bounded(claim, CLAIM_LENGTH)
        with reading(self._engine) as connection:
            until = connection.execute(select(zombie_claims.c.until_ms).where(condition)).scalar()
        return until is not None and int(until) >= FOREVER_MS

    def release(self, claim: str, run: str) -> None:
        """Release the claim on an action that was not done; the next run may do it."""
        condition = and_(zombie_claims.c.claim == bounded(claim, CLAIM_LENGTH), zombie_claims.c.run == run)
        write(self._engine, lambda c: c.execute(delete(zombie_claims).where(condition)))

    def warned(self, key: str, number: int, sent_at: datetime, recipient: str, run: str) -> None:
        """Record that a warning was sent, and release its claim."""

        def work(connection: Connection) -> None:
            finding = bounded(key)
            condition = and_(zombie_warnings.c.finding == finding, zombie_warnings.c.number == number)
            # After a repeated warning, the later ones are counted anew.
            later = and_(zombie_warnings.c.finding == finding, zombie_warnings.c.number > number)
            connection.execute(delete(zombie_warnings).where(or_(condition, later) if number > 0 else condition))
            row = {"finding": finding, "number": number, "at_ms": epoch_ms(sent_at), "recipient": storable(recipient)}
            connection.execute(insert(zombie_warnings).values(**row))
            claim = bounded(warning_claim(key, number), CLAIM_LENGTH)
            connection.execute(delete(zombie_claims).where(zombie_claims.c.claim == claim, zombie_claims.c.run == run))

        write(self._engine, work)

    # --- keeps

    def keep(self, keep: Keep) -> Keep | None:
        """Store an exemption unless the attempt of the job has one; return that one, else ``None``."""
        table = zombie_keeps.c

        def work(connection: Connection) -> Keep | None:
            condition = and_(
                table.cluster == storable(keep.cluster), table.job_id == keep.job_id,
                table.submit == int(keep.submit.timestamp()),
            )  # fmt: skip
            stored = connection.execute(select(zombie_keeps).where(condition)).mappings().one_or_none()
            if stored is not None:
                return _keep(dict(stored))
            connection.execute(
                insert(zombie_keeps).values(
                    cluster=storable(keep.cluster), job_id=keep.job_id, submit=int(keep.submit.timestamp()),
                    user=storable(keep.user), why=storable(keep.why), at_ms=epoch_ms(keep.time),
                    until_ms=epoch_ms(keep.until),
                )
            )  # fmt: skip
            return None

        return write(self._engine, work)


def bounded(text: str, length: int = FINDING_LENGTH) -> str:
    """Fit ``text`` into a key column: a text that is too long is cut and ends in its digest."""
    text = storable(text)
    if len(text) <= length:
        return text
    return f"{text[: length - 33]}~{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def warning_claim(key: str, number: int) -> str:
    """Return the name of the claim on a warning."""
    return f"warn{number}|{key}"


def _take(connection: Connection, claim: str, run: str, now: datetime, hold: timedelta) -> bool:
    table, name = zombie_claims.c, bounded(claim, CLAIM_LENGTH)
    holder = connection.execute(select(table.until_ms).where(table.claim == name)).scalar()
    if holder is not None:
        if int(holder) > epoch_ms(now):
            return False
        connection.execute(delete(zombie_claims).where(table.claim == name))
    connection.execute(insert(zombie_claims).values(claim=name, run=run, until_ms=epoch_ms(now + hold)))
    return True


def _append(connection: Connection, rows: list[dict[str, Any]]) -> None:
    last = int(connection.execute(select(func.max(zombie_audit.c.id))).scalar() or 0)
    connection.execute(insert(zombie_audit), [{"id": last + 1 + index, **row} for index, row in enumerate(rows)])


def _row(entry: AuditEntry) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(entry, name) for name in _TEXTS}
    row = {name: None if value is None else storable(value) for name, value in row.items()}
    row["finding"] = None if entry.finding is None else bounded(entry.finding)
    row["at_ms"] = epoch_ms(entry.time)
    row["job_id"] = entry.job_id
    row["evidence"] = None if entry.evidence is None else storable(json.dumps(entry.evidence, ensure_ascii=True))
    return row


def _entry(row: dict[str, Any]) -> AuditEntry:
    evidence = row.pop("evidence")
    return AuditEntry(
        time=_moment(row.pop("at_ms")),
        number=int(row.pop("id")),
        evidence=None if evidence is None else json.loads(evidence),
        **row,
    )


def _keep(row: dict[str, Any]) -> Keep:
    return Keep(
        cluster=row["cluster"],
        job_id=int(row["job_id"]),
        submit=datetime.fromtimestamp(int(row["submit"]), UTC),
        user=row["user"],
        why=row["why"],
        time=_moment(row["at_ms"]),
        until=_moment(row["until_ms"]),
    )


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
