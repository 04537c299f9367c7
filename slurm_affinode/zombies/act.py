"""Execute clean-up decisions: read the evidence again before each action, and record everything.

A failure does not stop the rest. Each action is claimed in the database first, so that two concurrent runs do not
perform it twice; the claim of a crashed run expires after ``HOLD``. Reports of epilogs stay with the agents until they
are in the audit, each once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from slurm_affinode.agent.client import AnswerError
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.core.cleanup_plan import decide
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, AuditEntry
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import Finding, JobAttempt, NodeRef, ProcessRef
from slurm_affinode.model.suspension import Mode
from slurm_affinode.report.mail import shown
from slurm_affinode.slurm.interface import AlreadyDoneError, SlurmError, UnknownJobError
from slurm_affinode.zombies import exemption_intake
from slurm_affinode.zombies.audit import written
from slurm_affinode.zombies.mail import mail_done
from slurm_affinode.zombies.nodes import ASLEEP, AT_ONCE
from slurm_affinode.zombies.outcomes import HOLD, Outcome, Result, Tools
from slurm_affinode.zombies.recheck import AskNode, Observation

REST = timedelta(hours=1)
"""Minimum time before the same node is drained or resumed, the same job suspended, or its steps canceled again."""
REASON = "slurm-affinode"
_SPARED = frozenset({"has-job", "maybe-job", "system", "unknown", "served", "other-job", "no-memory"})
_NOT_NOW = frozenset({
    "under-way", "already-suspended", "fault", "ended", "gone", "unknown-job", "not-yours", "not-suspended",
    "not-opted-in", "starting", "no-answer", "too-often", "bad-request", "not-permitted", "slurm", "recovering",
    "not-started", "state", "busy",
})  # fmt: skip
"""Error codes that do not mean that the job cannot be suspended: it is ending or being suspended, its state is unknown,
the request was refused, or the agent was restarted and does not yet know a job that it reported when this run began."""
_GONE_CODES = frozenset({"gone", "not-on-gpu", "ended", "already-suspended"})


@dataclass(frozen=True, slots=True)
class OptedIn:
    """Raw IDs of jobs with ``--gpu-suspend-idle``, as reported by the agents."""

    watched: frozenset[int] = frozenset()
    """Jobs that may be suspended."""
    asleep: frozenset[int] = frozenset()
    """Jobs suspended in place, or waiting for GPU memory to wake or start: they are expected to be idle.

    Only those with a share of a GPU: the whole GPU of any other job stays allocated to it, so that its sleep frees
    nothing. If that is unknown, a GPU counts as whole.
    """
    unknown: frozenset[str] = frozenset()
    """Nodes whose agents do not report the states of jobs."""


def opted_in(actions: Iterable[Action], ask: AskNode) -> OptedIn:
    """Return the jobs that the agents watch on the nodes of warnings, cancellations and suspensions.

    Sends one request to each of these nodes. The jobs of a node that does not respond are unknown.
    """
    nodes = {
        node for action in actions
        if action.verb == "cancel" or action.number or action.code == "not-opted-in" for node in action.finding.nodes
    }  # fmt: skip

    def query_states(node: str) -> dict[int, str] | None:
        try:
            rows = ask(node, {"verb": "status"}).get("jobs", ())
        except AffinodeError:
            return None
        return {int(row["job_id"]): str(row.get("state")) for row in rows if _frees_gpus(row)}

    states: dict[int, str] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        names = sorted(nodes)
        by_node = dict(zip(names, pool.map(query_states, names), strict=True))
    for node_states in by_node.values():
        states |= node_states or {}
    return OptedIn(
        frozenset(job for job, state in states.items() if state == "watched"),
        frozenset(job for job, state in states.items() if state in ASLEEP),
        frozenset(node for node, node_states in by_node.items() if node_states is None),
    )


def _frees_gpus(row: Mapping[str, Any]) -> bool:
    """Return whether others can use the GPUs of a job while it is suspended, given its row of ``status``."""
    in_place = row.get("state") in ASLEEP or (row.get("option") or {}).get("mode") == Mode.INPLACE.value
    return not in_place or row.get("shares_gpus") is True


def parts(jobs: Iterable[Job]) -> dict[int, frozenset[int]]:
    """Return, for each component of a running heterogeneous job (raw ID), its components with GPUs (raw IDs)."""
    holding: dict[int, set[int]] = {}
    running = [job for job in jobs if job.het_job_id is not None and job.allocated]
    for job in running:
        if job.gpus_allocated or job.shares_gpus:
            holding.setdefault(job.het_job_id or 0, set()).add(job.job_id)
    return {job.job_id: frozenset(holding.get(job.het_job_id or 0, ())) for job in running}


def run_of(job: Job | JobAttempt) -> tuple[int, int | None]:
    """Return the identity of an attempt: raw ID and submit time (in whole seconds, as in Slurm)."""
    return job.job_id, None if job.submit is None else int(job.submit.timestamp())


def execute(actions: Iterable[Action], tools: Tools) -> list[Outcome]:
    """Execute the ``actions`` that change the cluster, then notify the owners. Other actions are skipped.

    A spared action is replaced by one that the limit of the run held back: otherwise jobs that are spared in every
    run would block the others for good.
    """
    outcomes: list[Outcome] = []
    actions = list(actions)
    tools.cancellations_left = tools.policy.limits.cancel - sum(action.verb == "cancel" for action in actions)
    held_actions = [action.prevented_action for action in actions if action.prevented_action is not None]
    todo = deque(action for action in actions if action.verb in DESTRUCTIVE)
    while todo:
        action = todo.popleft()
        tools.step(f"{action.verb}: {action.target}")
        outcomes.append(_execute(action, tools))
        following = next((candidate for candidate in held_actions if candidate.verb == action.verb), None)
        if outcomes[-1].result == "spared" and following is not None:
            held_actions.remove(following)
            todo.append(following)
    mailed = [outcome.action for outcome in outcomes if outcome.result == "done" and _owned(outcome.action)]
    mail_done(mailed, tools)
    return outcomes


def _owned(action: Action) -> bool:
    """Return whether an action was about a job, or a process of one, so that its owner is notified."""
    return action.verb in ("cancel", "suspend") or (action.verb == "kill-process" and action.finding.owner is not None)


def _execute(action: Action, tools: Tools) -> Outcome:
    claim = _claim(action)
    if not tools.log.claim(claim, tools.who.run, tools.now(), HOLD):
        text = f"{action.target}: another run does it, or has done it"
        return written(Outcome(action, "gone", text), tools)
    outcome = Outcome(action, "failed", f"{action.target}: it was interrupted; whether it was done is unknown")
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
            # A suspension has only begun: it may fail and leave the job running.
            again = outcome.action.verb in ("drain", "resume", "suspend") or action.settings.cancel_steps
            now = tools.now()
            tools.log.settle(claim, tools.who.run, now, now + REST if again else None)
        else:
            tools.log.release(claim, tools.who.run)
        # Also on an interrupt: slurmctld may already have received the request.
        written(outcome, tools)
    return outcome


def _claim(action: Action) -> str:
    """Return the claim of an action. Cancellations and suspensions of a job share one, whatever the finding."""
    finding = action.finding
    if finding.job is not None and action.verb in ("cancel", "suspend"):
        return f"job|{finding.key.split('/', 2)[2]}|{finding.cluster}"
    return action.key


def _attempt(action: Action, tools: Tools) -> Outcome:
    # The owner may have requested an exemption since the decision, in the database or in the job's comment.
    keep_outcome = _check_exemption(action, tools)
    if keep_outcome is not None:
        return keep_outcome
    observation = _observe(action, tools)
    if observation.job is not None and action.verb in ("cancel", "suspend"):
        exemption_intake.collect(
            [observation.job], action.finding.cluster, tools.policy.keep, tools.log, now=tools.now(), run=tools.who.run
        )  # fmt: skip
        keep_outcome = _check_exemption(action, tools)
        if keep_outcome is not None:
            return keep_outcome
    if observation.verdict != "still":
        result: Result = "gone" if observation.verdict == "gone" else "spared"
        return Outcome(action, result, f"{action.target}: {observation.text}", observation)
    longer = _interactive(action, tools, observation)
    if longer is not None:
        return Outcome(action, "spared", f"{action.target}: {longer}", observation)
    if action.verb == "cancel" and action.settings.prefer_suspend and observation.job is not None:
        # Since the decision, the agent may have come back and report that the job opted in, or the job was suspended.
        opted_jobs = opted_in([action], tools.ask)
        if opted_jobs.unknown:
            why = f"the agent on {min(opted_jobs.unknown)} does not respond"
            text = f"{action.target}: whether it sleeps in place is not known: {why}"
            return Outcome(action, "spared", text, observation)
        if observation.job.job_id in opted_jobs.asleep:
            return Outcome(action, "spared", f"{action.target}: it now sleeps in place", observation)
        if observation.job.job_id in opted_jobs.watched:
            action = replace(action, verb="suspend", reason=f"{action.reason}; the job may be suspended")
    try:
        return _perform(action, tools, observation)
    except (UnknownJobError, AlreadyDoneError) as error:
        return Outcome(action, "gone", f"{action.target}: it had ended already: {error}", observation)
    except AnswerError as error:
        cancels = action.settings.action == "cancel"
        if action.verb == "suspend" and cancels and error.code not in _NOT_NOW and tools.cancellations_left > 0:
            return _cancel_instead(action, tools, observation, str(error))
        kind: Result = "gone" if error.code in _GONE_CODES else "spared" if error.code in _SPARED else "failed"
        return Outcome(action, kind, f"{action.target}: {error}", observation)
    except AffinodeError as error:
        return Outcome(action, "failed", f"{action.target}: {error}", observation)


def _interactive(action: Action, tools: Tools, observation: Observation) -> str | None:
    """Return why a job is exempt as interactive if accounting did not say so and slurmctld does, else ``None``."""
    finding, ref = action.finding, action.finding.job
    if ref is None or ref.batch is not None or observation.job is None or observation.job.batch is not False:
        return None
    job_finding, now = replace(finding, subject=replace(ref, batch=False)), tools.now()
    again = decide(job_finding, tools.policy, tools.log.ledger(now), now)
    return None if again.verb in DESTRUCTIVE else f"it is interactive: {again.reason}"


def _check_exemption(action: Action, tools: Tools) -> Outcome | None:
    ref = action.finding.owner
    if ref is None or not _owned(action):
        return None
    keep = tools.log.ledger(tools.now()).keeps.get((action.finding.cluster, ref.job_id))
    if keep is None or (ref.submit is not None and int(ref.submit.timestamp()) != int(keep.submit.timestamp())):
        return None
    return Outcome(action, "spared", f"{action.target}: {keep.user} requested an exemption: {keep.why}")


def _cancel_instead(action: Action, tools: Tools, observation: Observation, why: str) -> Outcome:
    """Cancel a job that cannot be suspended: opting in must not protect it from cancellation."""
    tools.cancellations_left -= 1
    action = replace(action, verb="cancel", reason=f"{action.reason}; it cannot be suspended: {why}")
    try:
        outcome = _perform(action, tools, observation)
        return replace(outcome, text=f"{outcome.text}, for it cannot be suspended: {why}")
    except (UnknownJobError, AlreadyDoneError) as error:
        return Outcome(action, "gone", f"{action.target}: it had ended already: {error}", observation)


def _observe(action: Action, tools: Tools) -> Observation:
    finding = action.finding
    if action.verb == "kill-process":
        # The agent checks the process again right before it kills it.
        return Observation("still", "the agent of the node checks again")
    if action.verb == "resume":
        return tools.recheck.drained(_node(finding, tools))
    if action.verb == "drain":
        return tools.recheck.node(finding, _node(finding, tools))
    if not isinstance(finding.subject, JobAttempt):
        return Observation("unknown", "it is not about a job")
    for part_finding in action.parts:
        part = (
            tools.recheck.job(part_finding, part_finding.subject)
            if isinstance(part_finding.subject, JobAttempt)
            else None
        )
        if part is not None and part.verdict not in ("still", "gone"):
            return part
    return tools.recheck.job(finding, finding.subject)


def _node(finding: Finding, tools: Tools) -> str:
    """Return the node of the finding: of several on which a job does not end, the first that is not drained."""
    subject = finding.subject
    if isinstance(subject, NodeRef | ProcessRef):
        return subject.node
    if not finding.nodes:
        raise InputError(f"{finding.key}: the finding has no node")
    if len(finding.nodes) == 1:
        return finding.nodes[0]
    drained = {node.name for node in tools.slurm.nodes() if node.draining}
    return next((name for name in finding.nodes if name not in drained), finding.nodes[0])


def _perform(action: Action, tools: Tools, observation: Observation) -> Outcome:
    """Execute the action. Raises ``AffinodeError``."""
    text = _do(action, tools, observation)
    return Outcome(replace(action, steps=bool(_steps(action, observation))), "done", text, observation)


def _steps(action: Action, observation: Observation) -> list[str]:
    """Return the steps to cancel instead of the whole job."""
    if action.verb != "cancel" or not action.settings.cancel_steps or observation.job is None:
        return []
    return [step.step for step in observation.job.steps or () if step.step.isdigit()]


def _do(action: Action, tools: Tools, observation: Observation) -> str:
    """Execute the action and return a description of it."""
    finding, subject = action.finding, action.finding.subject
    if action.verb == "kill-process" and isinstance(subject, ProcessRef):
        request = {"verb": "kill-orphan", "pid": subject.pid, "start_ticks": subject.start_ticks}
        if subject.job is not None:
            request["job"] = subject.job.job_id
        answer = tools.ask(subject.node, request)
        of = "" if subject.job is None else f" of job {subject.job.id}"
        return f"process {subject.pid}{of} on {subject.node} was ended ({answer.get('ended_by')})"
    if action.verb == "drain":
        reason = f"{REASON}: {action.reason}"[:200]
        node = _node(finding, tools)
        tools.slurm.drain(node, reason)
        return f"{node} is drained: {reason}"
    if action.verb == "resume":
        node = _node(finding, tools)
        tools.slurm.resume(node)
        return f"{node} is in service again; it was drained: {_observed_reason(observation)}"
    job = observation.job
    if job is None:
        raise InputError(f"{action.target}: it is not known")
    if action.verb == "suspend":
        tools.suspend(job.id)
        return f"job {job.id} is being suspended"
    # An array's last task has the raw ID of the array: only its name identifies the task alone.
    steps = _steps(action, observation)
    if steps:
        return _end_steps(job.id, steps, tools)
    tools.slurm.cancel(job.id)
    return f"job {job.id} of {job.user} was canceled"


def _end_steps(job: str, steps: Sequence[str], tools: Tools) -> str:
    """Cancel each step, also if another one fails. Raises ``SlurmError``."""
    ended: list[str] = []
    problems: list[SlurmError] = []
    for step in steps:
        try:
            tools.slurm.cancel(f"{job}.{step}")
            ended.append(step)
        except SlurmError as error:
            problems.append(error)
    # A step that ended by itself is not an error if another one was canceled.
    problems.sort(key=lambda problem: isinstance(problem, UnknownJobError | AlreadyDoneError))
    if problems and (not ended or not isinstance(problems[0], UnknownJobError | AlreadyDoneError)):
        raise problems[0]
    return f"job {job}: steps {', '.join(ended)} were canceled; the allocation stays"


def _observed_reason(observation: Observation) -> str:
    return str(observation.evidence.get("reason")) if isinstance(observation.evidence, Mapping) else ""


AGENTS_AT_ONCE = 32
EPILOG_HOLD = timedelta(minutes=10)


def collect(nodes: Iterable[str], ask: AskNode, cluster: str, log: ZombieLog, *, now: datetime, run: str,
            forget: bool = True) -> int:  # fmt: skip
    """Collect the epilog reports of the agents into the audit and return the number of new ones.

    A node that does not respond is queried again in the next run. ``forget``: let the agents delete recorded reports.
    """
    names = list(nodes)
    if not names:
        return 0

    def query_reports(node: str) -> list[Mapping[str, Any]]:
        try:
            return list(ask(node, {"verb": "leftover-reports"}).get("reports", ()))
        except AffinodeError:
            return []

    with ThreadPoolExecutor(min(AGENTS_AT_ONCE, len(names))) as pool:
        reports = [report for node_reports in pool.map(query_reports, names) for report in node_reports]
    count = 0
    written: dict[str, list[str]] = {}
    for report in reports:
        claim = f"epilog|{report['node']}|{report['id']}"
        if log.claim(claim, run, now, EPILOG_HOLD):
            log.record([_entry(report, cluster, run)])
            log.settle(claim, run, now, None)
            count += 1
        elif not log.settled(claim):
            continue
        written.setdefault(str(report["node"]), []).append(str(report["id"]))
    for node, ids in written.items() if forget else ():
        with contextlib.suppress(AffinodeError):  # the agent reports them again, and they are skipped then
            ask(node, {"verb": "leftovers-taken", "ids": ids})
    return count


def _entry(report: Mapping[str, Any], cluster: str, run: str) -> AuditEntry:
    remaining = [
        f"process {process['pid']} ({shown(str(process['command']), 80)}): {process['ended_by'] or 'still there'}"
        for process in report["left"]
    ]
    dirty = [str(entry) for entry in report["dirty"]]
    drained = ["the node was drained"] if report.get("drained") else []
    return AuditEntry(
        time=datetime.fromtimestamp(float(report["at"]), UTC), run=run, actor=f"epilog@{report['node']}", verb="epilog",
        result="failed" if dirty else "done", reason="; ".join([*remaining, *dirty, *drained]), cluster=cluster,
        job_id=int(report["job"]), job=str(report["job"]), user=None, node=str(report["node"]), evidence=dict(report),
    )  # fmt: skip
