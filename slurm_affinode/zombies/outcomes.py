"""The dependencies of a clean-up run, and the outcome of each decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.model.cleanup import Action, Policy
from slurm_affinode.pipeline.mail_delivery import Post
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.zombies.recheck import AskNode, Observation, Recheck

HOLD = timedelta(minutes=10)
"""A claim expires after this time if its holder crashed."""

Result = Literal["done", "planned", "spared", "gone", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one decision."""

    action: Action
    result: Result
    text: str
    observation: Observation | None = None


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
    cancellations_left: int = 0
    """Number of jobs that this run may still cancel because they cannot be suspended."""
