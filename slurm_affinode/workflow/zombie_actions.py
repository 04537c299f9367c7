"""Carrying out what was decided: evidence is read again before each action, and everything is written down.

One failure does not stop the rest. Before anything is done it is claimed in the store, so that two runs at the same
time do not do it twice; a claim whose holder crashed is free again after ``HOLD``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.core.cleanup_plan import decide
from slurm_affinode.core.spans import counted
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.model.audit import AuditEntry
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import Finding, JobRef, NodeRef, ProcessRef
from slurm_affinode.slurm.faults import AlreadyDoneError, SlurmError, UnknownJobError
from slurm_affinode.workflow import zombie_keeps
from slurm_affinode.workflow.zombie_nodes import AT_ONCE
from slurm_affinode.workflow.zombie_recheck import AskNode, Look
from slurm_affinode.workflow.zombie_tell import tell_done
from slurm_affinode.workflow.zombie_tools import HOLD, Outcome, Result, Tools, Who, written

REST = timedelta(hours=1)
"""Not before that is the same node drained or resumed again, the same job suspended, are its steps cancelled."""
REASON = "slurm-affinode"
_SPARED = frozenset({"has-job", "maybe-job", "system", "unknown"})
_NOT_NOW = frozenset({
    "under-way", "already-suspended", "fault", "ended", "gone", "unknown-job", "not-yours", "not-suspended",
    "not-opted-in", "slurm", "recovering", "not-started", "state", "busy",
})  # fmt: skip
"""Answers to a suspension that say nothing about whether it is possible: of a job that ends or is suspended just now,
of an agent that was started a moment ago and does not know yet what it told of the job when this run began."""
_ASLEEP = frozenset({"asleep", "waking", "starting"})
_GONE = frozenset({"gone", "not-on-gpu", "ended", "already-suspended"})


@dataclass(frozen=True, slots=True)
class OptedIn:
    """Raw ids of jobs with ``--gpu-suspend-idle``, as the agents know them."""

    watched: frozenset[int] = frozenset()
    """They may be suspended."""
    asleep: frozenset[int] = frozenset()
    """They sleep in place, or wait there for room: that they are idle is what they were asked for."""


def opted_in(actions: Iterable[Action], ask: AskNode) -> OptedIn:
    """The jobs on the nodes of those that are to be warned or cancelled that an agent watches.

    One question to each node concerned; a node that does not answer knows of none.
    """
    nodes = {node for action in actions if action.verb == "cancel" or action.number for node in action.finding.nodes}

    def one(node: str) -> dict[int, str]:
        try:
            rows = ask(node, {"verb": "status"}).get("jobs", ())
        except AffinodeError:
            return {}
        return {int(row["job_id"]): str(row.get("state")) for row in rows}

    states: dict[int, str] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(one, sorted(nodes)):
            states |= found
    return OptedIn(
        frozenset(job for job, state in states.items() if state == "watched"),
        frozenset(job for job, state in states.items() if state in _ASLEEP),
    )


def parts(jobs: Iterable[Job]) -> dict[int, frozenset[int]]:
    """Raw id of each part of a running heterogeneous job -> of those of its parts that hold GPUs."""
    holding: dict[int, set[int]] = {}
    running = [job for job in jobs if job.het_job_id is not None and job.allocated]
    for job in running:
        if job.gpus_allocated or job.shares_gpus:
            holding.setdefault(job.het_job_id or 0, set()).add(job.job_id)
    return {job.job_id: frozenset(holding.get(job.het_job_id or 0, ())) for job in running}


def run_of(job: Job | JobRef) -> tuple[int, int | None]:
    """What tells the runs of jobs apart: the raw id and when it was submitted, which Slurm counts in seconds."""
    return job.job_id, None if job.submit is None else int(job.submit.timestamp())


def looked(actions: Sequence[Action], who: Who, now: datetime, command: str) -> AuditEntry:
    """The record that somebody looked: what was found, and what was decided about each."""
    found = [
        {"finding": one.finding.key, "score": round(one.finding.score, 3), "verb": one.verb, "code": one.code}
        for one in actions
    ]
    count = sum(one.verb != "none" for one in actions)
    return AuditEntry(
        now, who.run, who.actor, "look", "seen",
        f"{command}: {counted(len(actions), 'finding')}, {count} with something to do", evidence=found,
    )  # fmt: skip


def execute(actions: Iterable[Action], tools: Tools) -> list[Outcome]:
    """Carry out ``actions`` that change the cluster, then tell those concerned. The others are left out.

    In place of what is spared comes what the limit of the run held back: else jobs that are spared in each
    run would keep the others from ever being looked at.
    """
    outcomes: list[Outcome] = []
    actions = list(actions)
    tools.instead = tools.policy.limits.cancel - sum(one.verb == "cancel" for one in actions)
    held = [one.held for one in actions if one.held is not None]
    todo = deque(one for one in actions if one.verb in DESTRUCTIVE)
    while todo:
        action = todo.popleft()
        tools.step(f"{action.verb}: {action.target}")
        outcomes.append(_one(action, tools))
        following = next((one for one in held if one.verb == action.verb), None)
        if outcomes[-1].result == "spared" and following is not None:
            held.remove(following)
            todo.append(following)
    told = [one.action for one in outcomes if one.result == "done" and one.action.verb in ("cancel", "suspend")]
    tell_done(told, tools)
    return outcomes


def _one(action: Action, tools: Tools) -> Outcome:
    claim = _claim(action)
    if not tools.log.claim(claim, tools.who.run, tools.now(), HOLD):
        text = f"{action.target}: another run does it, or has done it"
        return written(Outcome(action, "gone", text), tools)
    outcome = Outcome(action, "failed", f"{action.target}: it was broken off; whether it was done is not known")
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
            now = tools.now()
            tools.log.settle(claim, tools.who.run, now, now + REST if again else None)
        else:
            tools.log.release(claim, tools.who.run)
        # Also where somebody breaks it off: scancel may have been heard by then.
        written(outcome, tools)
    return outcome


def _claim(action: Action) -> str:
    """Cancelling and suspending are about the same job, whatever it was found for."""
    finding = action.finding
    if finding.job is not None and action.verb in ("cancel", "suspend"):
        return f"job|{finding.key.split('/', 2)[2]}|{finding.cluster}"
    return action.key


def _attempt(action: Action, tools: Tools) -> Outcome:
    # A wish of the owner may have come since the decision, into the store or into the comment.
    kept = _kept(action, tools)
    if kept is not None:
        return kept
    look = _look(action, tools)
    if look.job is not None and action.verb in ("cancel", "suspend"):
        zombie_keeps.collect(
            [look.job], action.finding.cluster, tools.policy.keep, tools.log, now=tools.now(), run=tools.who.run
        )  # fmt: skip
        kept = _kept(action, tools)
        if kept is not None:
            return kept
    if look.verdict != "still":
        result: Result = "gone" if look.verdict == "gone" else "spared"
        return Outcome(action, result, f"{action.target}: {look.text}", look)
    longer = _interactive(action, tools, look)
    if longer is not None:
        return Outcome(action, "spared", f"{action.target}: {longer}", look)
    if action.verb == "cancel" and action.settings.prefer_suspend and look.job is not None:
        # An agent may have come back since the decision, and know that the job opted in; or the job went to sleep.
        known = opted_in([action], tools.ask)
        if look.job.job_id in known.asleep:
            return Outcome(action, "spared", f"{action.target}: it sleeps in place by now", look)
        if look.job.job_id in known.watched:
            action = replace(action, verb="suspend", reason=f"{action.reason}; the job may be suspended")
    try:
        return _done(action, tools, look)
    except (UnknownJobError, AlreadyDoneError) as error:
        return Outcome(action, "gone", f"{action.target}: it had ended already: {error}", look)
    except AnswerError as error:
        if action.verb == "suspend" and error.code not in _NOT_NOW and tools.instead > 0:
            return _instead(action, tools, look, str(error))
        kind: Result = "gone" if error.code in _GONE else "spared" if error.code in _SPARED else "failed"
        return Outcome(action, kind, f"{action.target}: {error}", look)
    except AffinodeError as error:
        return Outcome(action, "failed", f"{action.target}: {error}", look)


def _interactive(action: Action, tools: Tools, look: Look) -> str | None:
    """Why an interactive job is left alone that accounting did not know as one: Slurm does."""
    finding, ref = action.finding, action.finding.job
    if ref is None or ref.batch is not None or look.job is None or look.job.batch is not False:
        return None
    known, now = replace(finding, subject=replace(ref, batch=False)), tools.now()
    again = decide(known, tools.policy, tools.log.ledger(now), now)
    return None if again.verb in DESTRUCTIVE else f"it is interactive: {again.reason}"


def _kept(action: Action, tools: Tools) -> Outcome | None:
    ref = action.finding.job
    if ref is None or action.verb not in ("cancel", "suspend"):
        return None
    keep = tools.log.ledger(tools.now()).keeps.get((action.finding.cluster, ref.job_id))
    if keep is None or (ref.submit is not None and int(ref.submit.timestamp()) != int(keep.submit.timestamp())):
        return None
    return Outcome(action, "spared", f"{action.target}: {keep.user} asked to keep it: {keep.why}")


def _instead(action: Action, tools: Tools, look: Look, why: str) -> Outcome:
    """Cancel what cannot be suspended: that a job may be suspended must not make it safe from everything."""
    tools.instead -= 1
    action = replace(action, verb="cancel", reason=f"{action.reason}; it cannot be suspended: {why}")
    try:
        done = _done(action, tools, look)
        return replace(done, text=f"{done.text}, for it cannot be suspended: {why}")
    except (UnknownJobError, AlreadyDoneError) as error:
        return Outcome(action, "gone", f"{action.target}: it had ended already: {error}", look)


def _look(action: Action, tools: Tools) -> Look:
    finding = action.finding
    if action.verb == "kill-process":
        # The agent itself looks again, at the moment it acts.
        return Look("still", "the agent of the node looks again")
    if action.verb == "resume":
        return tools.recheck.drained(_node(finding, tools))
    if action.verb == "drain":
        return tools.recheck.node(finding, _node(finding, tools))
    if not isinstance(finding.subject, JobRef):
        return Look("unknown", "it is not about a job")
    for other in action.parts:
        part = tools.recheck.job(other, other.subject) if isinstance(other.subject, JobRef) else None
        if part is not None and part.verdict not in ("still", "gone"):
            return part
    return tools.recheck.job(finding, finding.subject)


def _node(finding: Finding, tools: Tools) -> str:
    """The node that it is about; of several on which a job does not end, the first that is not drained."""
    subject = finding.subject
    if isinstance(subject, NodeRef | ProcessRef):
        return subject.node
    if not finding.nodes:
        raise InputError(f"{finding.key}: it is about no node")
    if len(finding.nodes) == 1:
        return finding.nodes[0]
    drained = {node.name for node in tools.slurm.nodes() if node.draining}
    return next((name for name in finding.nodes if name not in drained), finding.nodes[0])


def _done(action: Action, tools: Tools, look: Look) -> Outcome:
    """Do it. Raises ``AffinodeError``."""
    text = _do(action, tools, look)
    return Outcome(replace(action, steps=bool(_steps(action, look))), "done", text, look)


def _steps(action: Action, look: Look) -> list[str]:
    """The steps to end in place of the whole job."""
    if action.verb != "cancel" or not action.settings.cancel_steps or look.job is None:
        return []
    return [step.step for step in look.job.steps or () if step.step.isdigit()]


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
        node = _node(finding, tools)
        tools.slurm.drain(node, reason)
        return f"{node} is drained: {reason}"
    if action.verb == "resume":
        node = _node(finding, tools)
        tools.slurm.resume(node)
        return f"{node} is in service again; it was drained: {_why(look)}"
    job = look.job
    if job is None:
        raise InputError(f"{action.target}: it is not known")
    if action.verb == "suspend":
        tools.suspend(job.id)
        return f"job {job.id} is being suspended"
    # An array's last task has the raw id of the whole array: the name of the task ends the task alone.
    steps = _steps(action, look)
    if steps:
        return _end_steps(job.id, steps, tools)
    tools.slurm.cancel(job.id)
    return f"job {job.id} of {job.user} was cancelled"


def _end_steps(job: str, steps: Sequence[str], tools: Tools) -> str:
    """Each of them, whatever becomes of the others. Raises ``SlurmError``."""
    ended: list[str] = []
    problems: list[SlurmError] = []
    for step in steps:
        try:
            tools.slurm.cancel(f"{job}.{step}")
            ended.append(step)
        except SlurmError as error:
            problems.append(error)
    # That a step ended by itself is no problem where another one was cancelled.
    problems.sort(key=lambda one: isinstance(one, UnknownJobError | AlreadyDoneError))
    if problems and (not ended or not isinstance(problems[0], UnknownJobError | AlreadyDoneError)):
        raise problems[0]
    return f"job {job}: steps {', '.join(ended)} were cancelled; the allocation stays"


def _why(look: Look) -> str:
    return str(look.evidence.get("reason")) if isinstance(look.evidence, Mapping) else ""
