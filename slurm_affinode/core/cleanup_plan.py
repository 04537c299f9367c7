"""The plan of a clean-up: the rules of a policy that match a finding, and the resulting action. Pure.

No job is canceled on fewer than ``min_dimensions`` measurements, on outdated evidence, without the required warnings
and the time between them, beyond the limits of a run, or against an exemption.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from slurm_affinode.base.text import counted, span
from slurm_affinode.base.times import named
from slurm_affinode.core.cleanup_policy import ACTION_DIAGNOSES, ACTION_KINDS, working_now
from slurm_affinode.core.policy_values import zone_of
from slurm_affinode.model.cleanup import (
    DESTRUCTIVE,
    NEVER,
    SCOPES,
    Action,
    Exemption,
    Ledger,
    Match,
    Policy,
    Rule,
    Settings,
    Stages,
    Verb,
)
from slurm_affinode.model.finding import (
    IDLE_KINDS,
    MAPPINGS,
    MISFIT_KINDS,
    USER_KINDS,
    Finding,
    JobAttempt,
    NodeRef,
    ProcessRef,
)

_FIELDS = {
    "min_run": "min_run_s", "grace": "grace_s", "repeat": "repeat_s",
}  # fmt: skip
"""Key in the file -> field of ``Settings``, where the names differ."""
_WHOLE = re.compile(r"^\d+")
"""The array or heterogeneous job that a job ID is part of."""


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings that apply to a finding, and the rules that set them."""

    settings: Settings
    rules: tuple[str, ...]
    """Names of the matching rules, the most specific last; empty: only the defaults apply."""
    origin: dict[str, str]
    """Key -> name of the rule that sets it; other keys have their defaults."""

    @property
    def rule(self) -> str:
        """Name of the rule that sets the action."""
        return self.origin.get("action") or (self.rules[-1] if self.rules else "default")


def matches(match: Match, finding: Finding) -> bool:
    """Return whether a finding matches: every list that is not empty must match. Patterns: ``*`` and ``?``."""
    job = finding.owner
    candidates_by_key: dict[str, Iterable[str | None]] = {
        "clusters": (finding.cluster,),
        "partitions": (finding.partition or "").split(","),
        "nodes": finding.nodes,
        "qos": (finding.qos,),
        "accounts": (finding.account,),
        "users": (finding.user,),
        "kinds": (finding.kind,),
        "jobs": () if job is None else (job.id, str(job.job_id), *_WHOLE.findall(job.id)),
        "diagnoses": (finding.diagnosis,),
    }
    return all(_fits(getattr(match, key), candidates) for key, candidates in candidates_by_key.items())


def _fits(patterns: tuple[str, ...], candidates: Iterable[str | None]) -> bool:
    if not patterns:
        return True
    return any(fnmatch.fnmatchcase(candidate, pattern) for candidate in candidates if candidate for pattern in patterns)


def specificity(match: Match) -> tuple[bool, ...]:
    """Return the sort key of rules: jobs beat users, users beat accounts, and so on down to clusters; then kinds."""
    scopes = (bool(getattr(match, scope)) for scope in reversed(SCOPES))
    return (bool(match.jobs), *scopes, bool(match.diagnoses), bool(match.kinds))


def effective(policy: Policy, finding: Finding) -> Effective:
    """Return the defaults, overridden by every matching rule, the most specific (of equals, the later one) last."""
    settings, origin = policy.default, {}
    fitting = [rule for rule in policy.rules if matches(rule.match, finding)]
    fitting.sort(key=lambda rule: (specificity(rule.match), rule.line))
    for rule in fitting:
        names = {key: _FIELDS.get(key, key) for key in rule.sets}
        settings = replace(settings, **{name: getattr(rule.settings, name) for name in names.values()})
        origin.update(dict.fromkeys(names, rule.name))
    return Effective(settings, tuple(rule.name for rule in fitting), origin)


def exemption(policy: Policy, finding: Finding, today: date) -> Exemption | None:
    """Return the exemption that applies to a finding today; of several, the one that lasts longest."""
    fitting = [entry for entry in policy.exemptions if entry.until >= today and matches(entry.match, finding)]
    return max(fitting, key=lambda entry: (not entry.warnings, entry.until), default=None)


def undecided(policy: Policy, finding: Finding, today: date) -> tuple[str, int] | None:
    """Return a property that is not known, and the line of an exemption or rule that may apply because of it.

    Only rules that may forbid an action count. The account, partition and QOS of a process without a job are not
    unknown: it has none.
    """
    properties: dict[str, str | None] = {}
    match finding.subject:
        case JobAttempt():
            properties = {"accounts": finding.account, "partitions": finding.partition, "qos": finding.qos,
                     "users": finding.user}  # fmt: skip
        case ProcessRef(uid=uid):
            properties = {"users": None if finding.user == str(uid) else finding.user}
    unknown = [key for key, value in properties.items() if not value]
    entries = [(entry.match, entry.line) for entry in policy.exemptions if entry.until >= today]
    entries += [(rule.match, rule.line) for rule in policy.rules if _may_forbid(rule)]
    for key in unknown:
        for entry, line in entries:
            if getattr(entry, key) and matches(replace(entry, **dict.fromkeys(unknown, ())), finding):
                return _PROPERTIES[key], line
    return None


_PROPERTIES = {"accounts": "account", "partitions": "partition", "qos": "QOS", "users": "user"}


def _may_forbid(rule: Rule) -> bool:
    """Return whether a rule prevents that anything is ended where it applies."""
    gentle = "action" in rule.sets and rule.settings.action in ("none", "warn")
    return gentle or ("do_not_cancel" in rule.sets and rule.settings.do_not_cancel)


NO_MEASUREMENT = frozenset({"time", "use", "state", "power", "queue", "limit", "window"})
"""Dimensions that are not measurements: durations, states, and values derived from others. Power is only shown."""
SHAPE_KINDS = (IDLE_KINDS | MISFIT_KINDS) - USER_KINDS
"""Kinds about a single job and its use of resources."""
NEVER_USED_S = 60.0
"""A GPU that is idle from within this many seconds of the job's start was never used: samples begin after the job."""


def plan(
    findings: Iterable[Finding],
    policy: Policy,
    ledger: Ledger,
    now: datetime,
    *,
    opted_in: Collection[int] = (),
    asleep: Collection[int] = (),
    elsewhere: Collection[str] = (),
    looked_from: datetime | None = None,
    parts: Mapping[int, Collection[int]] | None = None,
) -> list[Action]:
    """Return one action for each finding, the worst first; ``none`` with the reason if nothing is done.

    ``opted_in``: raw IDs of jobs that may be suspended; ``asleep``: those of them that are suspended in place;
    ``elsewhere``: clusters whose findings are only reported; ``looked_from``: when this run began to measure;
    ``parts``: raw ID of each part of a heterogeneous job -> raw IDs of its parts that hold GPUs; ``None``: those with
    findings.
    """
    order = sorted(findings, key=lambda finding: (-(finding.held_gpu_hours or 0.0), finding.key))
    used: Counter[str] = Counter()
    chosen: list[Action] = []
    cancelled: set[str] = set()
    decided = [
        decide(finding, policy, ledger, now, opted_in=opted_in, asleep=asleep, looked_from=looked_from)
        for finding in order
    ]
    for due in _whole(decided, parts):
        action, finding = due, due.finding
        if action.verb in DESTRUCTIVE and finding.cluster in elsewhere:
            text = f"it is on {finding.cluster}, which this machine's Slurm is not"
            action = replace(action, verb="none", code="elsewhere", reason=f"{action.reason}; {text}")
        if action.verb in DESTRUCTIVE:
            action = _cancel_once(action, cancelled)
        most = policy.limits.of(action.verb)
        if most is not None and used[action.verb] >= most:
            text = f"{most} in this run already: the limit of {action.verb}; a person may raise it"
            action = replace(
                action, verb="none", code="limit", reason=f"{action.reason}; {text}", prevented_action=action
            )
        used[action.verb] += 1
        chosen.append(action)
    return chosen


def _whole(decided: Sequence[Action], parts: Mapping[int, Collection[int]] | None) -> list[Action]:
    """Cancel parts of a heterogeneous job only if all its parts that hold GPUs are due: they are one program."""
    groups: dict[tuple[str, str], dict[int, Action]] = {}
    for action in decided:
        job = action.finding.job
        if job is not None and "+" in job.id and action.finding.kind in IDLE_KINDS:
            groups.setdefault((action.finding.cluster, job.id.partition("+")[0]), {})[job.job_id] = action
    replacements = {
        action.finding.key: _part(action, group, group if parts is None else parts.get(number))
        for group in groups.values() for number, action in group.items()
    }  # fmt: skip
    return [replacements.get(action.finding.key, action) for action in decided]


def _part(action: Action, group: Mapping[int, Action], holding: Collection[int] | None) -> Action:
    """Decide about one part. ``group``: the parts with findings; ``holding``: the parts with GPUs, if known."""
    part_actions = [] if holding is None else [group.get(number) for number in holding]
    if action.verb != "cancel":
        idle = bool(part_actions) and all(part and enough_idle(part.settings, part.finding) for part in part_actions)
        return action if idle else replace(action, stays=True)
    if part_actions and all(part and part.verb == "cancel" for part in part_actions):
        return replace(action, parts=tuple(part.finding for part in part_actions if part and part is not action))
    text = "it is a part of a heterogeneous job, and what its other parts do speaks against it, or is not known"
    return replace(action, verb="none", code="part", reason=f"{action.reason}; {text}")


def _cancel_once(action: Action, processed: set[str]) -> Action:
    """Cancel a job with several findings once: a squatter may also be partly idle."""
    target = f"{action.finding.cluster}/{action.target}"
    if target in processed:
        return replace(action, verb="none", code="same", reason=f"{action.target} is dealt with already in this run")
    processed.add(target)
    return action


def decide(
    finding: Finding,
    policy: Policy,
    ledger: Ledger,
    now: datetime,
    *,
    opted_in: Collection[int] = (),
    asleep: Collection[int] = (),
    looked_from: datetime | None = None,
) -> Action:
    """Decide about one finding, without the limits of a run."""
    case = _Case(finding, policy, ledger, now, effective(policy, finding), looked_from)
    return case.decide(opted_in, asleep)


def idle_since(settings: Settings, finding: Finding) -> datetime | None:
    """Return the time since which as many GPUs are idle as the rule requires. The stages count from it.

    The GPUs of a job become idle at different times; ``finding.since`` is when the first of them did.
    """
    spans = sorted((gpu.idle_s for gpu in finding.flagged_gpus if gpu.idle_s is not None), reverse=True)
    if finding.since is None or not spans:
        return finding.since
    return finding.since + timedelta(seconds=spans[0] - spans[min(_gpus_needed(settings, finding), len(spans)) - 1])


def stages_of(settings: Settings, finding: Finding) -> Stages:
    """Return the stages that apply to a finding: ``fixed`` for GPUs that were never used, else ``sliding``."""
    start, since = None if finding.job is None else finding.job.start, idle_since(settings, finding)
    first = finding.since
    if start is None or since is None or first is None:
        return settings.sliding
    if finding.variant == "used-once" and _gpus_needed(settings, finding) >= len(finding.flagged_gpus):
        return settings.sliding  # one of the GPUs that count was used, if only briefly
    # The limit applies to each difference: the GPUs of a job are not sampled at the same moment.
    fixed = max((first - start).total_seconds(), (since - first).total_seconds()) <= NEVER_USED_S
    return settings.fixed if fixed else settings.sliding


def extra_s(settings: Settings, finding: Finding) -> float:
    """Return the seconds added to each stage: interactive jobs get more time."""
    return settings.interactive.extra_s if finding.job is not None and finding.job.batch is False else 0.0


def enough_idle(settings: Settings, finding: Finding) -> bool:
    """Return whether enough of the job's GPUs are idle to cancel it. Unknown GPUs do not count as idle."""
    gpu_count = _held_gpus(finding)
    return gpu_count > 0 and len(finding.flagged_gpus) / gpu_count >= settings.gpu_fraction


def _gpus_needed(settings: Settings, finding: Finding) -> int:
    """Return the number of GPUs that must be idle."""
    return max(1, math.ceil(settings.gpu_fraction * _held_gpus(finding) - 1e-9))


def _held_gpus(finding: Finding) -> int:
    return finding.allocated_gpus if finding.allocated_gpus is not None else len(finding.gpus)


@dataclass(frozen=True, slots=True)
class _Case:
    """One finding and all inputs of the decision about it."""

    finding: Finding
    policy: Policy
    ledger: Ledger
    now: datetime
    rule: Effective
    looked_from: datetime | None = None
    """Idle time that begins then or later may be longer in reality: there are no earlier samples."""

    @property
    def settings(self) -> Settings:
        return self.rule.settings

    def _mailed_findings(self) -> list[Finding]:
        """Return this finding and, if the policy treats both alike, the other idle kind for the same job.

        A small change in a job's memory changes its kind, and its owner has been warned already.
        """
        other_kinds = IDLE_KINDS - {self.finding.kind} if self.finding.kind in IDLE_KINDS and self.finding.job else ()
        alike = [replace(self.finding, kind=kind) for kind in other_kinds]
        return [
            self.finding,
            *(finding for finding in alike if effective(self.policy, finding).settings == self.settings),
        ]

    def _clock(self, moment: datetime) -> str:
        return named(moment, zone_of(self.policy.calendar.timezone))

    def none(self, code: str, reason: str) -> Action:
        return Action("none", self.finding, code, reason, self.rule.rule, settings=self.settings)

    def do(self, verb: Verb, reason: str, number: int = 0) -> Action:
        return Action(verb, self.finding, "due", reason, self.rule.rule, number, self.settings)

    def decide(self, opted_in: Collection[int], asleep: Collection[int]) -> Action:
        finding, policy = self.finding, self.policy
        today = self.now.astimezone(zone_of(policy.calendar.timezone)).date()
        exempt = exemption(policy, finding, today)
        if exempt is not None and not exempt.warnings:
            until = "" if exempt.until == NEVER else f" until {exempt.until.isoformat()}"
            return self.none("exempt", f"exempt{until}: {exempt.reason} ({policy.where}:{exempt.line})")
        if self.settings.action == "none":
            return self.none("rule", f"{self.rule.rule} asks for nothing")
        age_s, most_s = self._age_s(finding.observed_at), policy.max_evidence_age_s
        if finding.job is not None and finding.job.end is not None:
            most_s = max(most_s, self.settings.repeat_s)  # an ended job does not change and is only reported
        if age_s > most_s:
            return self.none("stale", f"its evidence is {span(age_s)} old, more than {span(most_s)}")
        job = finding.job
        if job is not None and job.job_id in asleep and (
            finding.kind == "model-server" or (finding.kind in IDLE_KINDS and self.settings.prefer_suspend)
        ):  # fmt: skip
            return self.none(
                "asleep", "it sleeps in place as its owner requested, and its GPU memory is free for others"
            )
        if finding.kind in IDLE_KINDS and isinstance(finding.subject, JobAttempt) and finding.subject.running:
            action = self._job(finding.subject)
        else:
            action = self._matter()
        if exempt is not None and action.verb in DESTRUCTIVE:
            reason = f"exempt from more than warnings: {exempt.reason} ({policy.where}:{exempt.line})"
            return self.none("exempt", reason)
        if action.verb in DESTRUCTIVE and (entry := undecided(policy, finding, today)) is not None:
            name, line = entry
            return self.none(
                "unknown", f"{action.reason}; its {name} is not known, and {policy.where}:{line} may apply"
            )
        if exempt is not None:
            action = replace(action, stays=True)
        return self._timely(action, opted_in)

    def _timely(self, action: Action, opted_in: Collection[int]) -> Action:
        """Postpone an action to working times, and prefer a suspension if the job allows it."""
        if action.verb == "none":
            return action
        working = working_now(self.policy.calendar, self.now)
        if action.verb in DESTRUCTIVE and self.settings.cancel_working_days_only and not working:
            return self.none("working-days", f"{action.reason}; only during working hours")
        if action.verb not in DESTRUCTIVE and self.settings.warn_working_days_only and not working:
            return self.none("working-days", f"{action.reason}; users are warned during working hours only")
        job = self.finding.job
        if action.verb == "suspend" and (job is None or job.job_id not in opted_in):
            return self.none("not-opted-in", f"{action.reason}; the job was not submitted with --gpu-suspend-idle")
        if self.settings.prefer_suspend and job is not None and job.job_id in opted_in:
            if action.verb == "cancel":
                return replace(action, verb="suspend", reason=f"{action.reason}; the job may be suspended")
            return replace(action, suspends=True)
        return action

    def _age_s(self, moment: datetime) -> float:
        return (self.now - moment).total_seconds()

    # --- jobs with idle GPUs: stages

    def _job(self, job: JobAttempt) -> Action:
        finding, settings = self.finding, self.settings
        keep_action = self._exemption(job)
        if keep_action is not None:
            return keep_action
        gpu_count = _held_gpus(finding)
        small = self._small(job, gpu_count)
        if small is not None:
            return small
        if job.batch is False:
            allowed = settings.interactive
            most_s = -1.0 if allowed.max_run_s is None else allowed.max_run_s
            if job.time_limit_s is not None and job.time_limit_s <= most_s and gpu_count <= allowed.max_gpus:
                text = f"interactive, at most {counted(allowed.max_gpus, 'GPU')} for at most {span(most_s)}"
                return self.none("interactive", text)
        since = idle_since(settings, finding)
        if since is None:
            return self.none("unknown", "it is not known since when")
        return self._stage(stages_of(settings, finding), since)

    def _exemption(self, job: JobAttempt) -> Action | None:
        """Return no action if the owner has exempted the job."""
        keep = self.ledger.keeps.get((self.finding.cluster, job.job_id))
        if keep is not None and self.now < keep.until and _is_same_attempt(job.submit, keep.submit):
            return self.none("kept", f"{keep.user} requested an exemption until {self._clock(keep.until)}: {keep.why}")
        return None

    def _small(self, job: JobAttempt, gpu_count: int) -> Action | None:
        """Return no action if the finding is below the thresholds of the rule."""
        settings, score = self.settings, self.finding.score
        if gpu_count < settings.min_gpus and (gpu_count > 0 or self.finding.kind in IDLE_KINDS):
            return self.none(
                "few-gpus", f"it has {counted(gpu_count, 'GPU')}; the rule is for {settings.min_gpus} or more"
            )
        if score < settings.min_score:
            return self.none("score", f"its score {score:.2f} is below {settings.min_score:.2f}")
        ran_s = None if job.start is None else ((job.end or self.now) - job.start).total_seconds()
        if settings.min_run_s > 0 and (ran_s is None or ran_s < settings.min_run_s):
            return self.none("min-run", f"it runs for less than {span(settings.min_run_s)}")
        return None

    def _stage(self, stages: Stages, since: datetime) -> Action:
        times, more_s = stages.warnings, extra_s(self.settings, self.finding)
        idle_s = (self.finding.observed_at - since).total_seconds()
        idle = f"idle for {span(idle_s)}"
        # Idle time begins again after activity that follows a warning.
        warnings = [
            warning for mailed in self._mailed_findings() for warning in self.ledger.warnings.get(mailed.key, ())
        ]
        sent = [warning for warning in warnings if warning.time >= since]
        count = max((warning.number for warning in sent), default=0)
        last = max((warning.time for warning in sent), default=None)
        if not times:
            return self._repeat(idle)
        if not sent and self.looked_from is not None and since >= self.looked_from:
            before = max((warning.time for warning in warnings), default=None)
            if before is not None and self._age_s(before) < self.settings.repeat_s:
                activity = f"{idle} as far as this run saw"
                text = f"{activity}; it was warned at {self._clock(before)}, and its activity since then is unknown"
                return self.none("told", text)
        if count < len(times):
            need_s = times[count] + more_s
            apart_s = times[count] - times[count - 1] if count else 0.0
            if idle_s < need_s:
                return self.none("too-early", f"{idle}; warning {count + 1} comes after {span(need_s)}")
            if last is not None and self._age_s(last) < apart_s:
                return self.none("too-early", f"{idle}; warning {count + 1} comes {span(apart_s)} after the one before")
            return self._warn(f"{idle}, warning {count + 1} of {len(times)}", count + 1)
        warned = f"{idle}, warned {'once' if count == 1 else f'{count} times'}"
        if self.settings.action != "cancel" or stages.cancel_s is None:
            return self.none("warned", warned)
        need_s, apart_s = stages.cancel_s + more_s, stages.cancel_s - times[-1]
        if idle_s < need_s or last is None or self._age_s(last) < apart_s:
            text = f"{warned}; it ends after {span(need_s)}, and {span(apart_s)} after the last warning"
            return self.none("too-early", text)
        if self.settings.do_not_cancel:
            return self.none("do-not-cancel", f"{warned}; {self.rule.rule} forbids a cancellation")
        weak = self._weak()
        if weak is not None:
            return self.none("weak-evidence", f"{warned}; {weak}")
        if not enough_idle(self.settings, self.finding):
            text = f"only {len(self.finding.flagged_gpus)} of its {counted(_held_gpus(self.finding), 'GPU')} idle"
            return self.none("fraction", f"{warned}; {text}, less than the rule asks for")
        return self.do("cancel", warned)

    def _weak(self) -> str | None:
        """Return why the evidence is too weak for a cancellation; ``None``: it is strong enough."""
        sources: dict[str, int] = {}
        for item in self.finding.evidence:
            if item.met and not item.unknown and item.weight > 0 and item.dimension not in NO_MEASUREMENT:
                sources[item.dimension] = max(sources.get(item.dimension, 0), item.sources)
        if sum(sources.values()) < self.policy.min_dimensions:
            names = ", ".join(sorted(sources)) or "nothing"
            return f"its evidence is {names} alone: {self.policy.min_dimensions} measurements have to agree"
        flagged = self.finding.flagged_gpus
        if not flagged or not all(gpu.measured for gpu in flagged):
            return "a GPU that is to count as idle was not measured"
        guessed = [gpu for gpu in flagged if gpu.mapping not in self.settings.mappings]
        if guessed:
            source = MAPPINGS.get(guessed[0].mapping or "", "nothing")
            return (
                f"that GPU {guessed[0].gpu} is the job's is known from {source} alone, which {self.rule.rule} excludes"
            )
        return None

    # --- findings without stages: misfits, processes, nodes, model servers

    def _matter(self) -> Action:
        settings, finding, subject = self.settings, self.finding, self.finding.subject
        if finding.kind in SHAPE_KINDS and isinstance(subject, JobAttempt):
            small = self._small(subject, _held_gpus(finding))
            if small is not None:
                return small
        if finding.diagnosis is not None and finding.owner is not None:
            spared = self._exemption(finding.owner) or self._small(finding.owner, _held_gpus(finding))
            if spared is not None:
                return spared
        text = finding.summary or finding.kind
        action = settings.action if finding.kind in ACTION_KINDS.get(settings.action, ()) else "warn"
        if settings.do_not_cancel and finding.owner is not None:
            action = "warn"
        verb: Verb | None = None
        if action == "kill" and isinstance(subject, ProcessRef):
            if subject.start_ticks is None:
                return self.none("unknown", "it is not known when the process started: its number may be another's")
            verb = "kill-process"
        elif action == "suspend" and finding.job is not None and finding.diagnosis in ACTION_DIAGNOSES["suspend"]:
            verb = "suspend"
        elif action == "drain":
            verb = "drain"
        elif action == "resume" and isinstance(subject, NodeRef):
            verb = "resume"
        if verb is None:
            return self._repeat(text)
        since = finding.since or self.ledger.first_seen.get(finding.key, self.now)
        if self._age_s(since) < settings.grace_s:
            return self.none("too-early", f"{text}; seen for less than {span(settings.grace_s)}")
        return self.do(verb, text)

    def _repeat(self, text: str) -> Action:
        when = [
            sent_at
            for finding in self._mailed_findings()
            if (sent_at := self.ledger.mailed.get(finding.matter)) is not None
        ]
        mailed, repeat_s = max(when, default=None), self.settings.repeat_s
        if mailed is not None and self._age_s(mailed) < repeat_s:
            return self.none("told", f"already mailed at {self._clock(mailed)}; again after {span(repeat_s)}")
        return self._warn(text)

    def _warn(self, text: str, number: int = 0) -> Action:
        if self.settings.warn_user and self.finding.owner is not None and self.finding.user:
            return self.do("warn-user", text, number)
        if self.settings.warn_admins or self.finding.owner is None:
            return self.do("warn-admin", text, number)
        return self.none("nobody", f"{text}; {self.rule.rule} mails no one")


def _is_same_attempt(submit: datetime | None, recorded_submit: datetime) -> bool:
    """Return whether both are the same attempt of a job, as far as known. Slurm's times are whole seconds."""
    return submit is None or int(submit.timestamp()) == int(recorded_submit.timestamp())
