"""Pseudonyms in place of users who are to be forgotten, in every table of the database.

Sums by user remain, because each user has one pseudonym; texts that a user chose or that may name the user are removed.
The name itself is not kept: a salted digest recognizes it when accounting or a ledger is ingested again, up to the time
at which the user was forgotten.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, case, delete, exists, not_, or_, select, true, update

from slurm_affinode.db import journal, tables

PREFIX = "forgotten-"
_META = "forgotten"
_TEXTS = ("job_name", "comment", "admin_comment", "work_dir", "submit_line")
_STEP_TEXTS = ("step_name", "submit_line")
_LEDGER_TEXTS = ("why", "failure", "restore_failure")
_REMOVED = "removed: the user was forgotten"

Rows = Mapping[str, int]
"""Table -> rows with data of the user."""


@dataclass(frozen=True, slots=True)
class _Person:
    """A user to be replaced; ``until_s``: by the time at which the jobs were submitted."""

    user: str
    pseudonym: str
    until_s: int


def forget(connection: Connection, user: str, now_s: int, revision: int) -> tuple[str, Rows]:
    """Replace a user in all tables by a pseudonym; return it, and the number of rows. Repeating it is a no-op."""
    salt_file = _load(connection)
    digest = _digest(salt_file["salt"], user)
    pseudonym = salt_file["users"].get(digest, [f"{PREFIX}{secrets.token_hex(4)}"])[0]
    rows = _clear(connection, _Person(user, pseudonym, now_s), revision)
    rows += _clear_logs(connection, user, pseudonym)
    salt_file["users"][digest] = [pseudonym, now_s]
    journal.put(connection, _META, json.dumps(salt_file))
    return pseudonym, {name: count for name, count in rows.items() if count}


def forget_again(connection: Connection, revision: int) -> bool:
    """Forget users whose records were ingested again with this ``revision``. Return whether rows were changed."""
    if journal.get(connection, _META) is None:
        return False
    salt_file = _load(connection)
    changed = 0
    for table in (tables.jobs, tables.suspensions):
        recent = select(table.c.user).where(table.c.revision == revision, table.c.user.is_not(None)).distinct()
        for (name,) in connection.execute(recent).all():
            record = salt_file["users"].get(_digest(salt_file["salt"], name))
            if record is not None:
                changed += _clear(connection, _Person(name, *record), revision).total()
    # Records that were completed keep the pseudonym, and may have got their texts again.
    for pseudonym, until_s in salt_file["users"].values():
        changed += _clear(connection, _Person(pseudonym, pseudonym, until_s), revision, only=revision).total()
    return changed > 0


def _load(connection: Connection) -> dict[str, Any]:
    text = journal.get(connection, _META)
    salt_file: dict[str, Any] = {"salt": secrets.token_hex(16), "users": {}} if text is None else json.loads(text)
    return salt_file


def _digest(salt: str, user: str) -> str:
    return hashlib.sha256(f"{salt}:{user}".encode("utf-8", "surrogatepass")).hexdigest()


def _clear(connection: Connection, person: _Person, revision: int, *, only: int | None = None) -> Counter[str]:
    """Replace a user in jobs, steps and suspensions. ``only``: in rows of this revision."""
    user, pseudonym, until_s = person.user, person.pseudonym, person.until_s
    job, step, sleep = tables.jobs, tables.steps, tables.suspensions
    rows: Counter[str] = Counter()
    named = and_(job.c.user == user, job.c.submit <= until_s)
    of_sleep = and_(sleep.c.user == user, sleep.c.submit <= until_s)
    of_step = exists().where(
        job.c.cluster == step.c.cluster, job.c.job_id == step.c.job_id, job.c.submit == step.c.submit, named
    )
    canceled = _canceled_by(connection, user, until_s, only)
    by_user = {table.name: table.c.cancelled_by.in_(canceled) for table in (job, step)}
    canceler = {
        table.name: {"cancelled_by": case((by_user[table.name], pseudonym), else_=table.c.cancelled_by)}
        for table in (job, step)
    }
    # Of the rows of other users, only who canceled a job is replaced; the user's own jobs are last, as others refer to
    # their owner.
    changes: list[tuple[Table, ColumnElement[bool], dict[str, Any]]] = [
        (step, and_(of_step, or_(_filled(step, _STEP_TEXTS), by_user["steps"])),
         {**canceler["steps"], **dict.fromkeys(_STEP_TEXTS)}),
        (step, and_(not_(of_step), by_user["steps"], step.c.submit <= until_s), canceler["steps"]),
        (sleep, and_(of_sleep, or_(sleep.c.user != pseudonym, _filled(sleep, ("uid", *_LEDGER_TEXTS)))),
         {"user": pseudonym, "uid": None, **dict.fromkeys(_LEDGER_TEXTS)}),
        (job, and_(or_(job.c.user.is_(None), job.c.user != user), by_user["jobs"], job.c.submit <= until_s),
         canceler["jobs"]),
        (job, and_(named, or_(job.c.user != pseudonym, _filled(job, ("uid", *_TEXTS)))),
         {**canceler["jobs"], "user": pseudonym, "uid": None, **dict.fromkeys(_TEXTS)}),
    ]  # fmt: skip
    for table, condition, values in changes:
        recent = true() if only is None else table.c.revision == only
        result = connection.execute(update(table).where(condition, recent).values(**values, revision=revision))
        rows[table.name] += result.rowcount
    return rows


def _filled(table: Table, columns: Sequence[str]) -> ColumnElement[bool]:
    return or_(*(table.c[name].is_not(None) for name in columns))


def _canceled_by(connection: Connection, user: str, until_s: int, only: int | None = None) -> list[str]:
    """Return the texts by which Slurm names the user as the one who canceled a job: name and UIDs.

    ``only``: UIDs in rows of this revision. A user that was forgotten has none in others.
    """
    job = tables.jobs.c
    recent = true() if only is None else job.revision == only
    uids = select(job.uid).where(recent, job.user == user, job.submit <= until_s, job.uid.is_not(None)).distinct()
    names = [] if user.startswith(PREFIX) else [user]
    return [*names, *(str(uid) for (uid,) in connection.execute(uids).all())]


def _clear_logs(connection: Connection, user: str, pseudonym: str) -> Counter[str]:
    """Replace a user in the audit, warnings, claims, keeps, and the journal of ingests."""
    audit, sent, claim, keep = tables.zombie_audit, tables.zombie_warnings, tables.zombie_claims, tables.zombie_keeps
    rows: Counter[str] = Counter()
    suffix = f"/user:{user}"
    changes: list[tuple[Table, ColumnElement[bool], dict[str, Any] | None]] = [
        (audit, audit.c.finding.endswith(suffix, autoescape=True), {"finding": None}),
        (audit, audit.c.user == user, {"user": pseudonym, "reason": _REMOVED, "evidence": None}),
        (audit, or_(audit.c.actor.startswith(f"{user}@", autoescape=True),
                    audit.c.actor.endswith(f"(sudo: {user})", autoescape=True)), {"actor": pseudonym}),
        (sent, sent.c.finding.endswith(suffix, autoescape=True), None),
        (sent, or_(sent.c.recipient == user, sent.c.recipient.startswith(f"{user}@", autoescape=True)),
         {"recipient": pseudonym}),
        (claim, claim.c.claim.contains(suffix, autoescape=True), None),
        (keep, keep.c.user == user, {"user": pseudonym, "why": _REMOVED}),
    ]  # fmt: skip
    for table, condition, values in changes:
        statement = delete(table).where(condition) if values is None else update(table).where(condition).values(values)
        rows[table.name] += connection.execute(statement).rowcount
    for table, columns in (
        (tables.ingests, ("source", "notes")), (tables.ingest_problems, ("reason",)), (audit, ("reason", "evidence")),
    ):  # fmt: skip
        rows[table.name] += _replace_word(connection, table, columns, (user, pseudonym))
    return rows


def _replace_word(connection: Connection, table: Table, columns: Iterable[str], names: tuple[str, str]) -> int:
    """Replace the first name by the second in texts that may quote it; return the number of values."""
    user, pseudonym = names
    word = re.compile(rf"(?<![\w.-]){re.escape(user)}(?![\w-])")
    keys = list(table.primary_key.columns)
    count = 0
    for name in columns:
        column = table.c[name]
        for *key, text in connection.execute(select(*keys, column).where(column.contains(user, autoescape=True))).all():
            if word.search(text):
                of_row = and_(*(key_column == value for key_column, value in zip(keys, key, strict=True)))
                connection.execute(update(table).where(of_row).values({name: word.sub(pseudonym, text)}))
                count += 1
    return count


def uids_of(connection: Connection, user: str) -> list[int]:
    """Return the UIDs that accounting has for a user."""
    job = tables.jobs.c
    query = select(job.uid).where(job.user == user, job.uid.is_not(None)).distinct()
    return sorted(int(uid) for (uid,) in connection.execute(query).all())
