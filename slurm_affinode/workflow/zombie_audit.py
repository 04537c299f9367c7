"""Looks that change nothing are written down, too, where this user may write into the store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from slurm_affinode.config import Config
from slurm_affinode.core.spans import counted
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.audit import AuditEntry
from slurm_affinode.model.finding import Finding
from slurm_affinode.store.repository import Repository
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.workflow.zombie_tools import Who

MOST = 1000
"""Findings that are named in the record of a look."""


def note_look(config: Config, command: str, findings: Sequence[Finding], *, job: str | None = None) -> bool:
    """Write down that somebody looked; ``False`` where this user may not write, or there is no store."""
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
    """Delete records older than ``before``; how many. That they went, and why, is a record itself.

    What was remembered beside them (warnings, wishes, what was done) goes with them, also where no record is as old.
    """
    count = log.count_before(before)
    text = f"{counted(count, 'record')} from before {before:%Y-%m-%d %H:%M} UTC deleted: {why}"
    return log.delete_before(before, AuditEntry(now, who.run, who.actor, "prune", "done", text))
