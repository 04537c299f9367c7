"""Carrying out what was decided: evidence is read again before each action, and everything is written down.

One failure does not stop the rest. Before anything is done it is claimed in the store, so that two runs at the same
time do not do it twice; a claim whose holder crashed is free again after ``HOLD``.
"""

from __future__ import annotations

import os
import pwd
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.model.audit import AuditEntry
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, Ledger, Policy
from slurm_affinode.model.finding import Finding, JobRef, NodeRef, ProcessRef
from slurm_affinode.report.mail import address_of, digest
from slurm_affinode.slurm.faults import AlreadyDoneError, UnknownJobError
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.store.zombies import ZombieLog, warning_claim
from slurm_affinode.workflow.postman import Post
from slurm_affinode.workflow.zombie_recheck import AskNode, Look, Recheck

HOLD = timedelta(minutes=10)
REST = timedelta(hours=1)
"""Not before that is the same node drained or resumed again, the same job suspended, are its steps cancelled."""
REASON = "slurm-affinode"
_SPARED = frozenset({"has-job", "maybe-job", "system", "unknown"})
_NOT_NOW = frozenset(
    {"under-way", "already-suspended", "fault", "stopped", "ended", "gone", "unknown-job", "not-yours"}
)
"""Answers to a suspension that say nothing about whether it is possible."""
_GONE = frozenset({"gone", "not-on-gpu", "ended", "already-suspended"})

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
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = str(os.getuid())
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


def opted_in(actions: Iterable[Action], ask: AskNode) -> frozenset[int]:
    """Raw ids of the jobs among those to be cancelled that an agent watches: they may be suspended instead.

    One question to each node concerned; a node that does not answer knows of none.
    """
    nodes = {node for action in actions if action.verb == "cancel" for node in action.finding.nodes}
    found: set[int] = set()
    for node in sorted(nodes):
        try:
            rows = ask(node, {"verb": "status"}).get("jobs", ())
        except AffinodeError:
            continue
        found |= {int(row["job_id"]) for row in rows if row.get("state") == "watched"}
    return frozenset(found)


def looked(actions: Sequence[Action], who: Who, now: datetime, command: str) -> AuditEntry:
    """The record that somebody looked: what was found, and what was decided about each."""
    found = [
        {"finding": one.finding.key, "score": round(one.finding.score, 3), "verb": one.verb, "code": one.code}
        for one in actions
    ]
    count = sum(one.verb != "none" for one in actions)
    return AuditEntry(
        now, who.run, who.actor, "look", "seen", f"{command}: {len(actions)} findings, {count} with something to do",
        evidence=found,
    )  # fmt: skip


def execute(actions: Iterable[Action], tools: Tools) -> list[Outcome]:
    """Carry out ``actions`` that change the cluster, then tell those concerned. The others are left out."""
    outcomes = []
    actions = list(actions)
    tools.instead = tools.policy.limits.cancel - sum(one.verb == "cancel" for one in actions)
    for action in actions:
        if action.verb in DESTRUCTIVE:
            tools.step(f"{action.verb}: {action.target}")
            outcomes.append(_one(action, tools))
    told = [one.action for one in outcomes if one.result == "done" and one.action.verb in ("cancel", "suspend")]
    _tell_done(told, tools)
    return outcomes


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


def _one(action: Action, tools: Tools) -> Outcome:
    claim = _claim(action)
    if not tools.log.claim(claim, tools.who.run, tools.now(), HOLD):
        text = f"{action.target}: another run does it, or has done it"
        return _written(Outcome(action, "gone", text), tools)
    outcome = Outcome(action, "failed", "it was broken off")
    try:
        outcome = _attempt(action, tools)
    except AffinodeError as error:
        outcome = Outcome(action, "failed", f"{action.target}: {error}")
    except Exception as error:
        outcome = Outcome(
            action, "failed", f"{action.target}: a fault of slurm-affinode: {type(error).__name__}: {error}"
        )
    finally:
        if outcome.result == "done":
            # A suspension has only begun: if it fails, the job is there again.
            again = outcome.action.verb in ("drain", "resume", "suspend") or action.settings.cancel_steps
            rest = tools.now() + REST if again else None
            tools.log.settle(claim, tools.who.run, rest)
        else:
            tools.log.release(claim, tools.who.run)
    return _written(outcome, tools)


def _claim(action: Action) -> str:
    """Cancelling and suspending are about the same job, whatever it was found for."""
    finding = action.finding
    if finding.job is not None and action.verb in ("cancel", "suspend"):
        return f"job|{finding.key.split('/', 2)[2]}|{finding.cluster}"
    return action.key


def _written(outcome: Outcome, tools: Tools) -> Outcome:
    tools.log.record([entry(outcome, tools.who, tools.now())])
    return outcome


def _attempt(action: Action, tools: Tools) -> Outcome:
    # A wish of the owner may have come since the decision.
    ref = action.finding.job
    if ref is not None and action.verb in ("cancel", "suspend"):
        keep = tools.log.ledger(tools.now()).keeps.get((action.finding.cluster, ref.job_id))
        if keep is not None and (ref.submit is None or int(ref.submit.timestamp()) == int(keep.submit.timestamp())):
            return Outcome(action, "spared", f"{action.target}: {keep.user} asked to keep it: {keep.why}")
    look = _look(action, tools)
    if look.verdict != "still":
        result: Result = "gone" if look.verdict == "gone" else "spared"
        return Outcome(action, result, f"{action.target}: {look.text}", look)
    try:
        return Outcome(action, "done", _do(action, tools, look), look)
    except (UnknownJobError, AlreadyDoneError) as error:
        return Outcome(action, "gone", f"{action.target}: it had ended already: {error}", look)
    except AnswerError as error:
        if action.verb == "suspend" and error.code not in _NOT_NOW and tools.instead > 0:
            return _instead(action, tools, look, str(error))
        kind: Result = "gone" if error.code in _GONE else "spared" if error.code in _SPARED else "failed"
        return Outcome(action, kind, f"{action.target}: {error}", look)
    except AffinodeError as error:
        return Outcome(action, "failed", f"{action.target}: {error}", look)


def _instead(action: Action, tools: Tools, look: Look, why: str) -> Outcome:
    """Cancel what cannot be suspended: that a job may be suspended must not make it safe from everything."""
    tools.instead -= 1
    action = replace(action, verb="cancel", reason=f"{action.reason}; it cannot be suspended: {why}")
    try:
        return Outcome(action, "done", f"{_do(action, tools, look)}, for it cannot be suspended: {why}", look)
    except (UnknownJobError, AlreadyDoneError) as error:
        return Outcome(action, "gone", f"{action.target}: it had ended already: {error}", look)


def _look(action: Action, tools: Tools) -> Look:
    finding = action.finding
    if action.verb == "kill-process":
        # The agent itself looks again, at the moment it acts.
        return Look("still", "the agent of the node looks again")
    if action.verb == "resume":
        return tools.recheck.drained(_node(finding))
    if action.verb == "drain":
        return tools.recheck.node(finding, _node(finding))
    if isinstance(finding.subject, JobRef):
        return tools.recheck.job(finding, finding.subject)
    return Look("unknown", "it is not about a job")


def _node(finding: Finding) -> str:
    subject = finding.subject
    if isinstance(subject, NodeRef | ProcessRef):
        return subject.node
    if len(finding.nodes) != 1:
        raise InputError(f"{finding.key}: it is not about one node")
    return finding.nodes[0]


def _do(action: Action, tools: Tools, look: Look) -> str:
    """Do it; what was done, for people."""
    finding, subject = action.finding, action.finding.subject
    if action.verb == "kill-process" and isinstance(subject, ProcessRef):
        answer = tools.ask(
            subject.node, {"verb": "kill-orphan", "pid": subject.pid, "start_ticks": subject.start_ticks}
        )  # fmt: skip
        return f"process {subject.pid} on {subject.node} was ended ({answer.get('ended_by')})"
    if action.verb == "drain":
        reason = f"{REASON}: {action.reason}"[:200]
        tools.slurm.drain(_node(finding), reason)
        return f"{_node(finding)} is drained: {reason}"
    if action.verb == "resume":
        tools.slurm.resume(_node(finding))
        return f"{_node(finding)} is in service again; it was drained: {_why(look)}"
    job = look.job
    if job is None:
        raise InputError(f"{action.target}: it is not known")
    if action.verb == "suspend":
        tools.suspend(job.id)
        return f"job {job.id} is being suspended"
    # An array's last task has the raw id of the whole array: the name of the task ends the task alone.
    steps = [step for step in job.steps or () if step.step.isdigit()]
    if action.settings.cancel_steps and steps:
        for step in steps:
            tools.slurm.cancel(f"{job.id}.{step.step}")
        return f"job {job.id}: steps {', '.join(step.step for step in steps)} were cancelled; the allocation stays"
    tools.slurm.cancel(job.id)
    return f"job {job.id} of {job.user} was cancelled"


def _why(look: Look) -> str:
    return str(look.evidence.get("reason")) if isinstance(look.evidence, Mapping) else ""


# --- telling people


def tell(actions: Iterable[Action], tools: Tools, ledger: Ledger) -> list[Outcome]:
    """Send what is to be told: one mail for each recipient. What was not sent was not told, and comes again."""
    wanted = [action for action in actions if action.verb in ("warn-user", "warn-admin")]
    outcomes: list[Outcome] = []
    mails = 0
    for (user, recipients), group in by_reader(wanted, tools.policy).items():
        tools.step(f"mail: {user or 'administrators'}")
        if mails >= tools.policy.limits.mails:
            text = f"{mails} mails in this run already: the limit"
            outcomes += [_written(Outcome(one, "spared", f"{one.target}: {text}"), tools) for one in group]
            continue
        outcomes += _mail(user, recipients, group, tools, ledger)
        mails += 1
    return outcomes


def by_reader(actions: Iterable[Action], policy: Policy) -> dict[tuple[str | None, tuple[str, ...]], list[Action]]:
    groups: dict[tuple[str | None, tuple[str, ...]], list[Action]] = {}
    for action in actions:
        user = action.finding.user if action.verb == "warn-user" else None
        to = policy.mail.admins if user is None else (address_of(user, policy.mail),)
        groups.setdefault((user, to), []).append(action)
    return groups


def _mail(
    user: str | None, recipients: tuple[str, ...], group: list[Action], tools: Tools, ledger: Ledger
) -> list[Outcome]:
    now, run = tools.now(), tools.who.run
    mine: list[Action] = []
    outcomes = []
    for action in group:
        if tools.log.claim_warning(
            action.finding.key, action.number, run, now=now, hold=HOLD, seen=_seen(action, ledger)
        ):
            mine.append(action)
        else:
            outcomes.append(Outcome(action, "gone", f"{action.target}: another run tells of it, or has told"))
    if mine:
        outcomes += _send(user, recipients, mine, tools)
    return [_written(one, tools) for one in outcomes]


def _seen(action: Action, ledger: Ledger) -> datetime | None:
    """When this was told last, as the decision knew."""
    key = action.finding.key
    if action.number == 0:
        return ledger.told.get(key)
    return max((one.at for one in ledger.warnings.get(key, ()) if one.number == action.number), default=None)


def _send(user: str | None, recipients: tuple[str, ...], mine: list[Action], tools: Tools) -> list[Outcome]:
    now, policy, outcomes = tools.now(), tools.policy, []
    told, problems = [], []
    # Administrators who are told of everything that users are told get the users' mail as it is.
    copies = policy.mail.admins if user is not None and any(one.settings.warn_admins for one in mine) else ()
    for recipient in dict.fromkeys((*recipients, *copies)):
        try:
            tools.post(
                digest(
                    mine, policy.mail, recipient=recipient, user=user, now=now, timezone=policy.calendar.timezone,
                    keep_s=policy.keep.max_s if policy.keep.allow else None,
                )
            )  # fmt: skip
            told.append(recipient)
        except AffinodeError as error:
            problems.append(f"{recipient}: {error}")
        except Exception as error:
            problems.append(f"{recipient}: a fault of slurm-affinode: {type(error).__name__}: {error}")
    # Whoever loses the job has to have been told: a copy alone is no warning.
    reached = bool(told) if user is None else bool(recipients) and recipients[0] in told
    for action in mine:
        if reached:
            tools.log.warned(action.finding.key, action.number, now, ", ".join(told), tools.who.run)
            more = f" (not to {'; '.join(problems)})" if problems else ""
            what = f"warning {action.number}" if action.number else "it"
            outcomes.append(Outcome(action, "done", f"{action.target}: {what} was told to {', '.join(told)}{more}"))
        else:
            tools.log.release(warning_claim(action.finding.key, action.number), tools.who.run)
            why = "; ".join(problems) or "the policy names nobody (mail.admins)"
            outcomes.append(Outcome(action, "failed", f"{action.target}: nobody was told: {why}"))
    return outcomes


def _tell_done(actions: list[Action], tools: Tools) -> None:
    """Tell owners that their jobs were ended; that this fails changes nothing about it, and is written down."""
    if tools.policy.mail.via == "none":
        return
    for (user, recipients), group in by_reader((replace_verb(one) for one in actions), tools.policy).items():
        originals = [one for one in actions if one.finding.key in {each.finding.key for each in group}]
        copies = tools.policy.mail.admins if any(one.settings.warn_admins for one in originals) else ()
        for recipient in dict.fromkeys((*recipients, *copies)):
            result, text = "done", f"told {recipient} what was done"
            try:
                tools.post(
                    digest(
                        originals, tools.policy.mail, recipient=recipient, user=user, now=tools.now(),
                        timezone=tools.policy.calendar.timezone,
                    )
                )  # fmt: skip
            except AffinodeError as error:
                result, text = "failed", f"{recipient} was not told what was done: {error}"
            first = originals[0].finding
            tools.log.record([
                AuditEntry(tools.now(), tools.who.run, tools.who.actor, "tell", result, text, cluster=first.cluster,
                           job=None if first.job is None else first.job.id, user=user)
            ])  # fmt: skip


def replace_verb(action: Action) -> Action:
    """The same as something that its owner is told."""
    return replace(action, verb="warn-user" if action.finding.user else "warn-admin")


def warnable(action: Action) -> bool:
    """Somebody is told."""
    return action.verb in ("warn-user", "warn-admin")
