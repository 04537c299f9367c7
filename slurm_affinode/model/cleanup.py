"""What a site allows to be done about findings, what is decided, and what was done. Spans are seconds, times UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Literal

from slurm_affinode.model.finding import CERTAIN_MAPPINGS, USER_KINDS, Finding

ActionWord = Literal["none", "warn", "cancel", "kill", "drain", "resume"]
"""What a rule may ask for."""
Verb = Literal["warn-user", "warn-admin", "cancel", "suspend", "kill-process", "drain", "resume", "none"]
"""What is done about one finding."""

SCOPES = ("clusters", "partitions", "nodes", "qos", "accounts", "users")
"""What rules and exemptions go by, the least specific first."""
NEVER = date(9999, 12, 31)
"""Expiry of an exemption that stays."""
DESTRUCTIVE: frozenset[str] = frozenset({"cancel", "suspend", "kill-process", "drain", "resume"})
"""Verbs that change something on the cluster."""


@dataclass(frozen=True, slots=True)
class Stages:
    """After how long without use what happens; ``None``: not at all."""

    first_warning_s: float | None = None
    second_warning_s: float | None = None
    cancel_s: float | None = None

    @property
    def warnings(self) -> tuple[float, ...]:
        """Times of the warnings."""
        return tuple(one for one in (self.first_warning_s, self.second_warning_s) if one is not None)


@dataclass(frozen=True, slots=True)
class Interactive:
    """What jobs without a script (``salloc``, ``srun``) are allowed more than others."""

    max_run_s: float | None = None
    """With a time limit up to this and at most ``max_gpus`` GPUs they are left alone; ``None``: no such allowance."""
    max_gpus: int = 1
    extra_s: float = 0.0
    """Added to each stage of the others."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is done about a finding, where nothing more specific says otherwise."""

    action: ActionWord = "warn"
    fixed: Stages = Stages()
    """For GPUs that were never used, counted from the start of the job."""
    sliding: Stages = Stages()
    """For GPUs that were used, counted from when they were used last."""
    min_run_s: float = 0.0
    """A run is left alone for so long."""
    min_gpus: int = 1
    """Jobs with fewer GPUs are left alone."""
    gpu_fraction: float = 1.0
    """So much of the job's GPUs has to be idle for a cancellation, 0-1. GPUs that are unknown do not count as idle."""
    min_score: float = 0.0
    mappings: tuple[str, ...] = CERTAIN_MAPPINGS
    """Kinds of mapping on which a cancellation may rest."""
    interactive: Interactive = Interactive()
    do_not_cancel: bool = False
    """Warnings only, whatever the stages say."""
    prefer_suspend: bool = True
    """A job that opted in is suspended in place of being cancelled."""
    cancel_steps: bool = False
    """Where steps run, they are ended and the allocation stays."""
    warn_user: bool = True
    warn_admins: bool = False
    cancel_working_days_only: bool = False
    warn_working_days_only: bool = False
    grace_s: float = 120.0
    """A process that belongs to no job, or a node, has been so for so long before anything is done."""
    repeat_s: float = 7 * 86400.0
    """The same matter is mailed again after so long, where there are no stages."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a rule or an exemption is about; an empty list is everything."""

    clusters: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings for some findings; only those in ``sets`` are said by this rule."""

    name: str
    match: Match
    settings: Settings
    sets: frozenset[str]
    """``action``, ``fixed.cancel_s``, ..."""
    line: int


@dataclass(frozen=True, slots=True)
class Exemption:
    """What nothing is done about, until the end of a day."""

    match: Match
    until: date
    reason: str
    warnings: bool
    """Warnings are sent all the same."""
    line: int


@dataclass(frozen=True, slots=True)
class Calendar:
    """When people are at work."""

    timezone: str | None = None
    """IANA zone; ``None``: that of the process."""
    working_days: frozenset[int] = frozenset(range(5))
    """Monday is 0."""
    begin: time = time(0, 0)
    end: time = time(23, 59, 59, 999999)
    holidays: frozenset[date] = frozenset()
    yearly: frozenset[tuple[int, int]] = frozenset()
    """Month and day of holidays that are the same each year."""

    def working(self, local: datetime) -> bool:
        """Whether people are at work at this time of the site."""
        day = local.date()
        if day in self.holidays or (day.month, day.day) in self.yearly or day.weekday() not in self.working_days:
            return False
        return self.begin <= local.time() <= self.end


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one run does without a person."""

    cancel: int = 5
    suspend: int = 10
    kill: int = 20
    drain: int = 1
    resume: int = 2
    mails: int = 200

    def of(self, verb: str) -> int | None:
        """For a verb; ``None``: no limit."""
        return {
            "cancel": self.cancel, "suspend": self.suspend, "kill-process": self.kill, "drain": self.drain,
            "resume": self.resume,
        }.get(verb)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Smtp:
    """A mail server."""

    host: str = "localhost"
    port: int = 25
    tls: Literal["none", "starttls", "tls"] = "none"
    user: str | None = None
    password_file: str | None = None
    timeout_s: float = 30.0
    ca_file: str | None = None
    """Certificates (PEM) of authorities to believe in place of the system's."""


@dataclass(frozen=True, slots=True)
class MailPolicy:
    """How people are told."""

    via: Literal["none", "smtp", "command", "webhook"] = "none"
    sender: str = "slurm-affinode@localhost"
    address: str = "{user}"
    """Of a user, ``{user}`` replaced by the name in Slurm."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """User -> address, for those who have another one."""
    admins: tuple[str, ...] = ()
    reply_to: str | None = None
    language: str = "en"
    languages: Mapping[str, str] = field(default_factory=dict)
    """User -> language."""
    templates: str | None = None
    """A directory with the site's own templates and texts, looked into before ours."""
    smtp: Smtp = Smtp()
    command: tuple[str, ...] = ()
    """Gets the message on standard input; ``{to}``, ``{subject}`` and ``{user}`` are replaced in its arguments."""
    webhook: str | None = None
    webhook_token_file: str | None = None
    help_url: str | None = None


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Whether owners may postpone."""

    allow: bool = True
    max_s: float = 4 * 3600.0
    min_why: int = 10
    """Characters of the reason."""


@dataclass(frozen=True, slots=True)
class EpilogPolicy:
    """What is done about processes that a job left on its GPUs when it has ended."""

    dirty: Literal["report", "drain"] = "report"
    """When a GPU is still held after the processes were killed."""
    kill: bool = True
    wait_s: float = 5.0
    """For killed processes to go and for their memory to become free."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy file."""

    default: Settings = Settings()
    rules: tuple[Rule, ...] = ()
    exemptions: tuple[Exemption, ...] = ()
    calendar: Calendar = Calendar()
    limits: Limits = Limits()
    max_evidence_age_s: float = 600.0
    min_dimensions: int = 2
    mail: MailPolicy = MailPolicy()
    keep: KeepPolicy = KeepPolicy()
    epilog: EpilogPolicy = EpilogPolicy()
    where: str = "built-in policy"


@dataclass(frozen=True, slots=True)
class SentWarning:
    """A warning that was sent."""

    key: str
    number: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Keep:
    """An owner's wish to be left alone for a time."""

    cluster: str
    job_id: int
    submit: datetime
    user: str
    why: str
    at: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was done before, as far as a decision needs it."""

    warnings: Mapping[str, tuple[SentWarning, ...]] = field(default_factory=dict)
    """Key of a finding -> warnings, oldest first."""
    keeps: Mapping[tuple[str, int], Keep] = field(default_factory=dict)
    """(cluster, job id) -> the owner's wish."""
    told: Mapping[str, datetime] = field(default_factory=dict)
    """Key of a finding -> when somebody was last told, where there are no stages."""
    seen: Mapping[str, datetime] = field(default_factory=dict)
    """Key of a finding of which it is not known since when -> when it was first seen."""


@dataclass(frozen=True, slots=True)
class Action:
    """One decision about one finding."""

    verb: Verb
    finding: Finding
    code: str
    """For machines: ``due``, ``too-early``, ``exempt``, ``stale``, ``kept``, ``limit``, ``working-days``, ..."""
    reason: str
    """For people."""
    rule: str = ""
    number: int = 0
    """Of a warning, from 1; 0: it has no stages."""
    settings: Settings = Settings()
    suspends: bool = False
    """Of a warning: at the end of the stages the job is suspended, for it opted in."""
    stays: bool = False
    """Of a warning: nothing follows at the end of the stages, whatever the settings say."""
    steps: bool = False
    """Of a cancellation that was done: of its steps alone."""
    parts: tuple[Finding, ...] = ()
    """The other parts of the heterogeneous job: what ends one of them ends the whole, and all have to be idle."""
    held: Action | None = None
    """What would be done if the run had not reached its limit."""

    @property
    def key(self) -> str:
        """What must not be done twice."""
        return f"{self.verb}{self.number or ''}|{self.finding.key}"

    @property
    def target(self) -> str:
        """What it is done to, for people."""
        subject = self.finding.subject
        if self.finding.kind in USER_KINDS:
            return f"user {self.finding.user}"
        if self.finding.job is not None:
            return f"job {self.finding.job.id}"
        return f"process {subject.pid} on {subject.node}" if hasattr(subject, "pid") else f"node {subject.node}"  # type: ignore[union-attr]
