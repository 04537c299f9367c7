"""The dependencies of a clean-up run, the outcome of each decision, and its audit record."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from slurm_affinode.base.users import name_of_user
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.model.cleanup import Action, AuditEntry, Policy
from slurm_affinode.pipeline.mail_delivery import Post
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.zombies.recheck import AskNode, Look, Recheck

HOLD = timedelta(minutes=10)
"""A claim expires after this time if its holder crashed."""

Result = Literal["done", "planned", "spared", "gone", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one decision."""

    action: Action
    result: Result
    text: str
    look: Look | None = None


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


@dataclass(slots=True)
class Tools:
    """External dependencies of a run: Slurm, agents, mail, database, clock."""

    slurm: SlurmClient
    ask: AskNode
    suspend: Callable[[str], dict[str, Any]]
    """Suspends a job through its agent. Raises ``AffinodeError``."""
    recheck: Recheck
    post: Post
    log: ZombieLog
    policy: Policy
    who: Who
    now: Callable[[], datetime]
    step: Callable[[str], None] = field(default=lambda _: None)
    instead: int = 0
    """Number of jobs that this run may still cancel because they cannot be suspended."""


def entry(outcome: Outcome, who: Who, now: datetime) -> AuditEntry:
    """Return the audit record of an outcome."""
    action, finding = outcome.action, outcome.action.finding
    job, evidence = finding.owner, {"finding": finding.as_json()}
    if outcome.look is not None:
        evidence["read_again"] = {"verdict": outcome.look.verdict, "seen": outcome.look.evidence}
    return AuditEntry(
        at=now, run=who.run, actor=who.actor, verb=action.verb, result=outcome.result, reason=outcome.text,
        cluster=finding.cluster, kind=finding.kind, finding=finding.key, job_id=None if job is None else job.job_id,
        job=None if job is None else job.id, user=finding.user, node=",".join(finding.nodes) or None,
        rule=action.rule, evidence=evidence,
    )  # fmt: skip


def written(outcome: Outcome, tools: Tools) -> Outcome:
    """Record the outcome in the audit and return it."""
    tools.log.record([entry(outcome, tools.who, tools.now())])
    return outcome
