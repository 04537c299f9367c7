"""Audit records of commands that only look, and of the outcomes of clean-up decisions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import Action, AuditEntry
from slurm_affinode.model.finding import Finding
from slurm_affinode.zombies.outcomes import Outcome, Tools

MOST = 1000
"""Maximum number of findings in the record of a listing."""


def record_listing(config: Config, command: str, findings: Sequence[Finding], *, job: str | None = None) -> bool:
    """Record in the audit that findings were listed; ``False`` if this user may not write or there is no database."""
    who, now = Who.am_i(), datetime.now(UTC)
    evidence = [{"finding": finding.key, "score": round(finding.score, 3)} for finding in findings[:MOST]]
    text = f"{command}: {counted(len(findings), 'finding')}"
    try:
        with Repository.open(config.db_url, create=False, upgrade=False) as store:
            entry = AuditEntry(now, who.run, who.actor, "look", "seen", text, job=job, evidence=evidence)
            ZombieLog(store.engine).record([entry])
    except AffinodeError:
        return False
    return True


def command_entry(actions: Sequence[Action], who: Who, now: datetime, command: str) -> AuditEntry:
    """Return the audit record of a command: its findings, and the decision on each."""
    evidence = [
        {
            "finding": action.finding.key,
            "score": round(action.finding.score, 3),
            "verb": action.verb,
            "code": action.code,
        }
        for action in actions
    ]
    count = sum(action.verb != "none" for action in actions)
    return AuditEntry(
        now, who.run, who.actor, "look", "seen",
        f"{command}: {counted(len(actions), 'finding')}, {count} with something to do", evidence=evidence,
    )  # fmt: skip


def entry(outcome: Outcome, who: Who, now: datetime) -> AuditEntry:
    """Return the audit record of an outcome."""
    action, finding = outcome.action, outcome.action.finding
    job, evidence = finding.owner, {"finding": finding.as_json()}
    if outcome.observation is not None:
        evidence["read_again"] = {"verdict": outcome.observation.verdict, "seen": outcome.observation.evidence}
    return AuditEntry(
        time=now, run=who.run, actor=who.actor, verb=action.verb, result=outcome.result, reason=outcome.text,
        cluster=finding.cluster, kind=finding.kind, finding=finding.key, job_id=None if job is None else job.job_id,
        job=None if job is None else job.id, user=finding.user, node=",".join(finding.nodes) or None,
        rule=action.rule, evidence=evidence,
    )  # fmt: skip


def written(outcome: Outcome, tools: Tools) -> Outcome:
    """Record the outcome in the audit and return it."""
    tools.log.record([entry(outcome, tools.who, tools.now())])
    return outcome
