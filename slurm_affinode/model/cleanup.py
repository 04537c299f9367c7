"""Clean-up: the policy of a site, decisions, outcomes, and their audit. Durations are seconds, times UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, Literal

from slurm_affinode.model.finding import CERTAIN_MAPPINGS, USER_KINDS, Finding

RESULTS = ("done", "planned", "spared", "gone", "failed", "refused", "seen")
"""``planned``: dry run; ``spared``: not done, for the reason given; ``gone``: the target ended first; ``seen``:
listed."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One audit record. Records are append-only."""

    time: datetime
    run: str
    """The same for all records of one command."""
    actor: str
    """``root@node`` of the caller, with the user who called sudo, if any."""
    verb: str
    """``look``, ``warn-user``, ``cancel``, ``kill-process``, ``keep``, ..."""
    result: str
    """A word of ``RESULTS``."""
    reason: str
    cluster: str | None = None
    kind: str | None = None
    finding: str | None = None
    """Key of the finding."""
    job_id: int | None = None
    job: str | None = None
    user: str | None = None
    """The user concerned."""
    node: str | None = None
    rule: str | None = None
    evidence: Any = None
    """Inputs of the decision, as JSON values."""
    number: int | None = None
    """Assigned by the database."""


ActionWord = Literal["none", "warn", "cancel", "suspend", "kill", "drain", "resume"]
"""Actions that a rule can set."""
Verb = Literal["warn-user", "warn-admin", "cancel", "suspend", "kill-process", "drain", "resume", "none"]
"""Actions on one finding."""

SCOPES = ("clusters", "partitions", "nodes", "qos", "accounts", "users")
"""Criteria of rules and exemptions, the least specific first."""
NEVER = date(9999, 12, 31)
"""Expiry of a permanent exemption."""
DESTRUCTIVE: frozenset[str] = frozenset({"cancel", "suspend", "kill-process", "drain", "resume"})
"""Verbs that change the cluster."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Idle time before each stage; ``None``: the stage is skipped."""

    first_warning_s: float | None = None
    second_warning_s: float | None = None
    cancel_s: float | None = None

    @property
    def warnings(self) -> tuple[float, ...]:
        """Idle times of the warnings."""
        return tuple(delay_s for delay_s in (self.first_warning_s, self.second_warning_s) if delay_s is not None)


@dataclass(frozen=True, slots=True)
class Interactive:
    """Allowances for jobs without a script (``salloc``, ``srun``)."""

    max_run_s: float | None = None
    """Jobs with at most this time limit and ``max_gpus`` GPUs are exempt; ``None``: no such allowance."""
    max_gpus: int = 1
    extra_s: float = 0.0
    """Added to each stage for all other interactive jobs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Actions on a finding, unless more specific settings apply."""

    action: ActionWord = "warn"
    fixed: Stages = Stages()
    """For GPUs that were never used, counted from the start of the job."""
    sliding: Stages = Stages()
    """For GPUs that were used, counted from their last use."""
    min_run_s: float = 0.0
    """Minimum run time of a job before any action."""
    min_gpus: int = 1
    """Jobs with fewer GPUs are exempt."""
    gpu_fraction: float = 1.0
    """Share of the job's GPUs that must be idle for a cancellation, 0-1. Unknown GPUs do not count as idle."""
    min_score: float = 0.0
    mappings: tuple[str, ...] = CERTAIN_MAPPINGS
    """Kinds of mapping that suffice for a cancellation."""
    interactive: Interactive = Interactive()
    do_not_cancel: bool = False
    """Send warnings only, regardless of the stages."""
    prefer_suspend: bool = True
    """Suspend a job that opted in instead of canceling it."""
    cancel_steps: bool = False
    """Cancel the running steps, if any, and keep the allocation."""
    warn_user: bool = True
    warn_admins: bool = False
    cancel_working_days_only: bool = False
    warn_working_days_only: bool = False
    grace_s: float = 120.0
    """Minimum age of a finding about a process or a node before it is killed, drained or resumed."""
    repeat_s: float = 7 * 86400.0
    """Interval of repeated mails about the same matter, for findings without stages."""


@dataclass(frozen=True, slots=True)
class Match:
    """Criteria of a rule or an exemption; an empty list matches everything."""

    clusters: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    diagnoses: tuple[str, ...] = ()
    """Diagnoses of model servers."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings for some findings; the rule sets only the keys in ``sets``."""

    name: str
    match: Match
    settings: Settings
    sets: frozenset[str]
    """``action``, ``fixed``, ``grace``, ..."""
    line: int


@dataclass(frozen=True, slots=True)
class Exemption:
    """Findings that are exempt from actions, until the end of a day."""

    match: Match
    until: date
    reason: str
    warnings: bool
    """Warnings are still sent."""
    line: int


@dataclass(frozen=True, slots=True)
class Calendar:
    """Working times of the site."""

    timezone: str | None = None
    """IANA zone; ``None``: that of the process."""
    working_days: frozenset[int] = frozenset(range(5))
    """Monday is 0."""
    begin: time = time(0, 0)
    end: time = time(23, 59, 59, 999999)
    holidays: frozenset[date] = frozenset()
    yearly: frozenset[tuple[int, int]] = frozenset()
    """Month and day of yearly holidays."""

    def working(self, local: datetime) -> bool:
        """Return whether a local time of the site is working time."""
        day = local.date()
        if day in self.holidays or (day.month, day.day) in self.yearly or day.weekday() not in self.working_days:
            return False
        return self.begin <= local.time() <= self.end


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of actions in one run without confirmation by a person."""

    cancel: int = 5
    suspend: int = 10
    kill: int = 20
    drain: int = 1
    resume: int = 2
    mails: int = 200

    def of(self, verb: str) -> int | None:
        """Return the limit of a verb; ``None``: no limit."""
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
    """CA bundle (PEM) to use instead of the system's."""


WebhookFormat = Literal["json", "slack", "mattermost", "teams"]


@dataclass(frozen=True, slots=True)
class MailPolicy:
    """Delivery of notifications."""

    via: Literal["none", "smtp", "command", "webhook"] = "none"
    sender: str = "slurm-affinode@localhost"
    address: str = "{user}"
    """Address of a user; ``{user}`` is replaced by the user name in Slurm."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """User -> address, where it differs from the pattern."""
    admins: tuple[str, ...] = ()
    reply_to: str | None = None
    language: str = "en"
    languages: Mapping[str, str] = field(default_factory=dict)
    """User -> language."""
    templates: str | None = None
    """Directory with the site's own templates and texts, which override the built-in ones."""
    smtp: Smtp = Smtp()
    command: tuple[str, ...] = ()
    """Receives the message on standard input; ``{to}``, ``{subject}`` and ``{user}`` are replaced in its arguments."""
    webhook: str | None = None
    webhook_format: WebhookFormat = "json"
    webhook_token_file: str | None = None
    help_url: str | None = None


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Whether and how long owners may postpone actions."""

    allow: bool = True
    max_s: float = 4 * 3600.0
    min_why: int = 10
    """Minimum length of the reason, in characters."""


@dataclass(frozen=True, slots=True)
class EpilogPolicy:
    """Handling of processes that an ended job left on its GPUs."""

    dirty: Literal["report", "drain"] = "report"
    """Action if a GPU is still held after the processes were killed."""
    kill: bool = True
    wait_s: float = 5.0
    """Time for killed processes to end, and for their memory to be freed."""


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
    time: datetime


@dataclass(frozen=True, slots=True)
class Keep:
    """An owner's request to exempt a job for a while."""

    cluster: str
    job_id: int
    submit: datetime
    user: str
    why: str
    time: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class Ledger:
    """Earlier actions, as far as decisions depend on them."""

    warnings: Mapping[str, tuple[SentWarning, ...]] = field(default_factory=dict)
    """Key of a finding -> warnings, oldest first."""
    keeps: Mapping[tuple[str, int], Keep] = field(default_factory=dict)
    """(cluster, job ID) -> the owner's request."""
    mailed: Mapping[str, datetime] = field(default_factory=dict)
    """``Finding.matter`` -> time of the last notification, for findings without stages."""
    first_seen: Mapping[str, datetime] = field(default_factory=dict)
    """Key of a finding without a known start -> time when it was first seen."""


@dataclass(frozen=True, slots=True)
class Action:
    """One decision about one finding."""

    verb: Verb
    finding: Finding
    code: str
    """Machine-readable: ``due``, ``too-early``, ``exempt``, ``stale``, ``kept``, ``limit``, ``working-days``, ..."""
    reason: str
    """For users and administrators."""
    rule: str = ""
    number: int = 0
    """Number of a warning, from 1; 0: a finding without stages."""
    settings: Settings = Settings()
    suspends: bool = False
    """Warning: the job will be suspended at the end of the stages, because it opted in."""
    stays: bool = False
    """Warning: nothing follows at the end of the stages, regardless of the settings."""
    steps: bool = False
    """Completed cancellation: only the steps were canceled."""
    parts: tuple[Finding, ...] = ()
    """The other parts of a heterogeneous job: ending one part ends the whole job, so all must be idle."""
    prevented_action: Action | None = None
    """The action that the limit of the run prevented."""

    @property
    def key(self) -> str:
        """Identity of the action, which must not be repeated."""
        return f"{self.verb}{self.number or ''}|{self.finding.key}"

    @property
    def target(self) -> str:
        """The target, as shown to users."""
        subject = self.finding.subject
        if self.finding.kind in USER_KINDS:
            return f"user {self.finding.user}"
        if self.finding.job is not None:
            return f"job {self.finding.job.id}"
        return f"process {subject.pid} on {subject.node}" if hasattr(subject, "pid") else f"node {subject.node}"  # type: ignore[union-attr]
