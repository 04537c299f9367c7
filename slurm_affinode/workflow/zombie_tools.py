"""What a run acts with, what became of each decision, and its record in the audit."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from slurm_affinode.model.audit import AuditEntry
from slurm_affinode.model.cleanup import Action, Policy
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.users import name_of_user
from slurm_affinode.workflow.postman import Post
from slurm_affinode.workflow.zombie_recheck import AskNode, Look, Recheck

HOLD = timedelta(minutes=10)
"""A claim whose holder crashed is free again after this."""

Result = Literal["done", "planned", "spared", "gone", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one decision."""

    action: Action
    result: Result
    text: str
    look: Look | None = None


@dataclass(frozen=True, slots=True)
class Who:
    """Under which name this run is in the audit."""

    run: str
    actor: str

    @classmethod
    def am_i(cls) -> Who:
        """A new run of this process's user, with whoever called sudo."""
        name = name_of_user(os.getuid())
        behind = os.environ.get("SUDO_USER")
        actor = f"{name}@{socket.gethostname().partition('.')[0]}" + (f" (sudo: {behind})" if behind else "")
        return cls(uuid.uuid4().hex[:12], actor)


@dataclass(slots=True)
class Tools:
    """Everything that touches the world."""

    slurm: SlurmClient
    ask: AskNode
    suspend: Callable[[str], dict[str, Any]]
    """Asks the agent that knows a job to suspend it. Raises ``AffinodeError``."""
    recheck: Recheck
    post: Post
    log: ZombieLog
    policy: Policy
    who: Who
    now: Callable[[], datetime]
    step: Callable[[str], None] = field(default=lambda _: None)
    instead: int = 0
    """So many jobs may still be cancelled in this run because they cannot be suspended."""


def entry(outcome: Outcome, who: Who, now: datetime) -> AuditEntry:
    """The record of an outcome."""
    action, finding = outcome.action, outcome.action.finding
    job, evidence = finding.job, {"finding": finding.as_json()}
    if outcome.look is not None:
        evidence["read_again"] = {"verdict": outcome.look.verdict, "seen": outcome.look.evidence}
    return AuditEntry(
        at=now, run=who.run, actor=who.actor, verb=action.verb, result=outcome.result, reason=outcome.text,
        cluster=finding.cluster, kind=finding.kind, finding=finding.key, job_id=None if job is None else job.job_id,
        job=None if job is None else job.id, user=finding.user, node=",".join(finding.nodes) or None,
        rule=action.rule, evidence=evidence,
    )  # fmt: skip


def written(outcome: Outcome, tools: Tools) -> Outcome:
    """The outcome, once it is in the audit."""
    tools.log.record([entry(outcome, tools.who, tools.now())])
    return outcome
