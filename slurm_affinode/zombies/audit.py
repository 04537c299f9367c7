"""Audit records of read-only commands (if this user may write to the database), and pruning of the audit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.base.times import named
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import AuditEntry
from slurm_affinode.model.finding import Finding
from slurm_affinode.zombies.outcomes import Who

MOST = 1000
"""Maximum number of findings in the record of a listing."""


def note_look(config: Config, command: str, findings: Sequence[Finding], *, job: str | None = None) -> bool:
    """Record in the audit that findings were listed; ``False`` if this user may not write or there is no database."""
    who, now = Who.am_i(), datetime.now(UTC)
    evidence = [{"finding": one.key, "score": round(one.score, 3)} for one in findings[:MOST]]
    text = f"{command}: {counted(len(findings), 'finding')}"
    try:
        with Repository.open(config.db_url, create=False, upgrade=False) as store:
            entry = AuditEntry(now, who.run, who.actor, "look", "seen", text, job=job, evidence=evidence)
            ZombieLog(store.engine).record([entry])
    except AffinodeError:
        return False
    return True


def prune(log: ZombieLog, before: datetime, who: Who, now: datetime, why: str) -> int:
    """Delete audit records older than ``before`` and return their number. The deletion is recorded with its reason.

    Warnings, exemptions and settled claims of that time are deleted as well, even if no record is that old.
    """
    count = log.count_before(before)
    text = f"{counted(count, 'record')} from before {named(before, UTC)} deleted: {why}"
    return log.delete_before(before, AuditEntry(now, who.run, who.actor, "prune", "done", text))
