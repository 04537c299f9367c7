"""A synthetic cluster on which actions are executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from agent_stand_ins import NODE
from agent_stand_ins import job as slurm_job
from zombie_samples import NOW, squatter

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import Action, Policy, Settings, Stages
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import Finding
from slurm_affinode.report.mail import Digest
from slurm_affinode.slurm.interface import UnknownJobError
from slurm_affinode.zombies.act import execute
from slurm_affinode.zombies.outcomes import Outcome, Tools
from slurm_affinode.zombies.recheck import Recheck

STAGES = Stages(3600.0, 5400.0, 7200.0)
SETTINGS = Settings(action="cancel", fixed=STAGES, sliding=STAGES)
IDLE = {"util_pct": 0.0, "sm_active": 0.0, "fb_used_mib": 78000.0}
MAIL = '[mail]\nvia = "smtp"\naddress = "{user}@example.org"\nadmins = ["ops@example.org"]\n'


@dataclass
class World:
    """A slurmctld, agents and a mail server in memory."""

    store: Repository
    jobs: dict[str, Job] = field(default_factory=dict)
    nodes_: tuple[Node, ...] = (replace(NODE, name="n1"),)
    cancelled: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    reading: dict[str, Any] | None = field(default_factory=lambda: dict(IDLE))
    processes: list[dict[str, Any]] = field(default_factory=list)
    uses: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    mails: list[Digest] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)
    drained: list[tuple[str, str]] = field(default_factory=list)
    policy: Policy = field(default_factory=lambda: parse_policy(MAIL, where="z"))
    now: datetime = NOW

    # SlurmClient

    def job(self, name: str) -> Job:
        if name not in self.jobs:
            raise UnknownJobError(f"show job {name}: Invalid job id specified")
        return self.jobs[name]

    def nodes(self) -> tuple[Node, ...]:
        return self.nodes_

    def overview(self) -> tuple[Job, ...]:
        return tuple(self.jobs.values())

    def config(self) -> dict[str, str]:
        return {"SlurmUser": "slurm(64030)"}

    def cancel(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]
        self.cancelled.append(name)

    def drain(self, name: str, reason: str) -> None:
        self.drained.append((name, reason))

    def resume(self, name: str) -> None:
        self.drained.append((name, ""))

    # agents

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        self.requests.append((name, request))
        value = self.answers.get(request["verb"])
        if isinstance(value, Exception):
            raise value
        if value is not None:
            return dict(value)
        if self.reading is None:
            raise UnreachableError(f"the agent on {name} does not respond")
        row = {"uuid": "GPU-0", "index": 0, "mig": None, "reading": self.reading, "processes": self.processes,
               "fault": None, "busy_pct": 0.0}  # fmt: skip
        return {"node": name, "gpus": [row, {**row, "uuid": "GPU-1", "index": 1}], "jobs": self.uses}

    def suspend(self, name: str) -> dict[str, Any]:
        if "suspend" in self.errors:
            raise self.errors["suspend"]
        self.cancelled.append(f"suspend {name}")
        return {}

    def post(self, digest: Digest) -> None:
        if digest.recipient in self.refuse:
            raise UnreachableError(f"mail server refuses {digest.recipient}")
        self.mails.append(digest)

    def tools(self, run: str = "r1") -> Tools:
        recheck = Recheck(self, self.ask, sleep=lambda _: None)  # type: ignore[arg-type]
        return Tools(
            self, self.ask, self.suspend, recheck, self.post, ZombieLog(self.store.engine), self.policy,  # type: ignore[arg-type]
            Who(run, "root@login"), lambda: self.now,
        )  # fmt: skip

    @property
    def log(self) -> ZombieLog:
        return ZombieLog(self.store.engine)


def running(name: str = "7", **values: Any) -> Job:
    """A running job as slurmctld returns it: on n1, submitted nine hours ago."""
    return slurm_job(int(name.partition("_")[0]), **{"submit": NOW - timedelta(hours=9), "nodes": ("n1",), **values})


def due(finding: Finding | None = None, verb: str = "cancel", **settings: Any) -> Action:
    """An action that a rule requires now."""
    return Action(verb, finding or squatter(), "due", "idle", "rule", settings=replace(SETTINGS, **settings))  # type: ignore[arg-type]


def act(world: World, *actions: Action, run: str = "r1") -> list[Outcome]:
    """Execute the actions, by default the cancellation of job 7."""
    return execute(actions or (due(),), world.tools(run))
