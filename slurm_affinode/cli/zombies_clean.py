"""``slurm-affinode zombies warn`` and ``clean``: warn owners and administrators; execute the clean-up policy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from slurm_affinode.agent.routing import Reach
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted, span
from slurm_affinode.base.times import named
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import (
    Span,
    When,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    prometheus_options,
    slurm_options,
    stages,
    warn,
    warn_if_exposed,
)
from slurm_affinode.cli.zombies import filters, prometheus_history
from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, Ledger, Policy
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import VARIANTS
from slurm_affinode.pipeline.mail_delivery import postman
from slurm_affinode.report.mail import Digest, digest
from slurm_affinode.slurm.client import open_client
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.zombies import act, audit, exemption_intake, find, live, orphans
from slurm_affinode.zombies import mail as zombie_mail
from slurm_affinode.zombies import policy as site_policy
from slurm_affinode.zombies.outcomes import Outcome, Tools
from slurm_affinode.zombies.recheck import AskNode, Recheck

QUIET = frozenset({"too-early", "told", "warned", "rule", "nobody", "same"})
"""Reasons for doing nothing that are hidden by default."""

UNNAMED = "default"
"""Cluster name of accounting records that name none."""

_CLEAN_EPILOG = """\b
Examples:
  slurm-affinode zombies clean                        the plan, with the reasons against each action
  slurm-affinode zombies clean --live --yes           execute it
  slurm-affinode zombies clean --live --warn --yes    also send warnings, like the timer
  slurm-affinode zombies clean --live --kind orphan-process --node c1 --yes

\b
Exit status: 0 done, or nothing to do; 1 an action failed (the others were executed); 2 unusable policy or input, or
data too old; 3 a required service does not respond.
"""
_WARN_EPILOG = """\b
Examples:
  slurm-affinode zombies warn                         the planned mails, by recipient
  slurm-affinode zombies warn --dry-run               the mails themselves
  slurm-affinode zombies warn --live --yes            send them

\b
Exit status: 0 done, or no recipients; 1 a mail could not be sent; 2 unusable policy or input, or data too old;
3 a required service does not respond.
"""


def _common(function: Any) -> Any:
    options = [
        config_options,
        slurm_options,
        prometheus_options,
        filters,
        click.option("--live", is_flag=True, help="Query the live Slurm and agents"),
        click.option("--watch", "watch_s", type=Span(), metavar="SPAN",
                     help="Sample the nodes for SPAN (with --live)"),
        click.option("--policy", "policy_path", type=click.Path(path_type=Path), metavar="FILE",
                     help="Use this policy [default: zombies.policy, /etc/slurm-affinode/zombies.toml, built-in]"),
        click.option("--all", "everything", is_flag=True, help="Also show findings without an action yet"),
        json_option,
    ]  # fmt: skip
    return functools.reduce(lambda command, option: option(command), reversed(options), function)


@dataclass(frozen=True, slots=True)
class CleanUpRequest:
    """Parameters of a clean-up command."""

    config: Config
    selection: find.Request
    live: bool
    watch_s: float | None
    prometheus: bool
    policy: Policy
    as_json: bool
    everything: bool
    acting: bool = False
    """With ``--yes``."""


def _clean_up_request(
    config: Config, policy_path: Path | None, *, live: bool, watch_s: float | None, with_prometheus: bool,
    as_json: bool, everything: bool, kinds: tuple[str, ...], **filters: Any,
) -> CleanUpRequest:  # fmt: skip
    selection = find.Request(
        kinds=tuple(dict.fromkeys("idle-allocation" if kind in VARIANTS else kind for kind in kinds)),
        variants=frozenset(kinds) & frozenset(VARIANTS), **filters,
    )  # fmt: skip
    policy = site_policy.load(config, policy_path)
    warn_if_exposed(site_policy.policy_file(config, policy_path)[0])
    config = site_policy.reaching(config, policy)
    return CleanUpRequest(config, selection, live, watch_s, with_prometheus, policy, as_json, everything)


@command(epilog=_WARN_EPILOG)
@_common
@click.option("--since", type=When(), metavar="TIME", help="Begin at TIME [default: 2d before the end]")
@click.option("--until", type=When(), metavar="TIME", help="End before TIME [default: end of the stored samples]")
@click.option("--yes", is_flag=True, help="Send the mails; without it, only show the plan")
@click.option("--dry-run", is_flag=True, help="Print the mails instead of sending them")
def warn_(*, yes: bool, dry_run: bool, config: Config, policy_path: Path | None, **options: Any) -> int:
    """Mail findings to owners and administrators by the policy, one mail per recipient.

    A user gets one mail about all jobs: each stage once, and findings without stages once per period.
    """
    request = replace(_clean_up_request(config, policy_path, **options), acting=yes and not dry_run)
    with _session(request) as session:
        decided = [action for action in session.plan() if action.verb not in DESTRUCTIVE]
        session.record_decisions(decided, "warn")
        if dry_run or not yes:
            mails = list(_mails(decided, request.policy)) if dry_run else None
            for mail in mails or () if not request.as_json else ():
                echo(f"To: {mail.recipient}", f"Subject: {mail.subject}", "", *mail.text.splitlines())
            return session.show([_planned(action) for action in decided], dry_run=True, mails=mails)
        return session.show(
            [*zombie_mail.notify(decided, session.tools, session.ledger), *_idle(decided)], dry_run=False
        )


@command(epilog=_CLEAN_EPILOG)
@_common
@click.option("--yes", is_flag=True, help="Execute the plan; without it, only show it")
@click.option("--warn", "warnings", is_flag=True, help="Also send warnings, like `zombies warn`")
@click.option("--over-limit", type=click.IntRange(1), metavar="N",
              help="Cancel up to N jobs, beyond the policy's limit; asks for confirmation")  # fmt: skip
def clean(
    *, yes: bool, warnings: bool, over_limit: int | None, config: Config, policy_path: Path | None, **options: Any
) -> int:
    """Cancel or suspend idle jobs, end orphan processes, drain and resume nodes by the policy.

    A dry run unless --yes is given. Evidence is read again right before each action, so a job that has become
    active is spared. Every check, warning and action is recorded; see `zombies history`.
    """
    request = replace(_clean_up_request(config, policy_path, **options), acting=yes)
    if over_limit is not None:
        if yes:
            _person(over_limit)
        request = replace(
            request, policy=replace(request.policy, limits=replace(request.policy.limits, cancel=over_limit))
        )
    with _session(request) as session:
        planned = session.plan()
        decided = [action for action in planned if warnings or not zombie_mail.warnable(action)]
        untold = len(planned) - len(decided)
        session.record_decisions(decided, "clean")
        if not yes:
            return session.show([_planned(action) for action in decided], dry_run=True, untold=untold)
        outcomes = act.execute(decided, session.tools)
        outcomes += zombie_mail.notify(decided, session.tools, session.ledger)
        tried = {outcome.action.finding.key for outcome in outcomes}
        rest = [action for action in decided if action.finding.key not in tried]
        return session.show([*outcomes, *_idle(rest)], dry_run=False, untold=untold)


def _person(limit: int) -> None:
    """Ask for confirmation at a terminal, so that no script can raise the limit."""
    if not sys.stdin.isatty():
        raise AffinodeError("--over-limit needs a terminal", hint="without one, limits.cancel of the policy holds")
    click.confirm(f"Cancel up to {counted(limit, 'job')} in this run?", abort=True)


def _planned(action: Action) -> Outcome:
    return Outcome(action, "spared" if action.verb == "none" else "planned", action.reason)


def _idle(decided: Sequence[Action]) -> list[Outcome]:
    return [_planned(action) for action in decided if action.verb == "none"]


@dataclass(slots=True)
class Session:
    """One run of a command: its findings and dependencies."""

    request: CleanUpRequest
    assessment: find.Assessment
    log: ZombieLog
    tools: Tools
    ledger: Ledger
    began: datetime
    """Start time of the run."""
    jobs: Sequence[Job] | None = None
    """The jobs known to Slurm; ``None``: Slurm does not respond."""

    def plan(self) -> list[Action]:
        """Return the decision on each finding, using the agents' information on jobs that can be or are suspended."""
        now = self.tools.now()
        keys = [finding.key for finding in self.assessment.findings if finding.since is None]
        self.log.see(keys, now, all_of=self._looked_at_all())
        self.ledger = self.log.ledger(now)
        over = self._ended_findings()
        findings = [finding for finding in self.assessment.findings if finding.key not in over]
        decided = plan(findings, self.request.policy, self.ledger, now, looked_from=self.began)
        elsewhere = self._elsewhere(decided)
        opted_jobs = act.opted_in(decided, self.tools.ask)
        planned = plan(findings, self.request.policy, self.ledger, now, opted_in=opted_jobs.watched,
                       asleep=opted_jobs.asleep, elsewhere=elsewhere, looked_from=self.began,
                       parts=act.parts(self.jobs or ()))  # fmt: skip
        text = "it has ended, or begun anew, since accounting was read"
        return planned + [
            Action("none", finding, "ended", text) for finding in self.assessment.findings if finding.key in over
        ]

    def _ended_findings(self) -> frozenset[str]:
        """Return the keys of findings about jobs that ran when accounting was read and have ended since."""
        running = [finding for finding in self.assessment.findings if finding.job is not None and finding.job.running]
        if self.jobs is None or not running:
            return frozenset()
        allocated = {run for job in self.jobs if job.allocated for run in (act.run_of(job), (job.job_id, None))}
        own_clusters = {_cluster(self.request, self.assessment) or UNNAMED, UNNAMED}
        if any(finding.cluster not in own_clusters for finding in running):
            own_clusters.add(self.tools.slurm.config().get("ClusterName", ""))
        return frozenset(
            finding.key
            for finding in running
            if finding.cluster in own_clusters and finding.job and act.run_of(finding.job) not in allocated
        )

    def _looked_at_all(self) -> list[str]:
        """Return prefixes of the keys for which this run has seen all existing findings.

        Empty for stored data, with filters, and in a dry run: its user may not be allowed to query the agents.
        """
        chosen, snapshot = self.request.selection, self.assessment.snapshot
        narrow = (chosen.clusters, chosen.partitions, chosen.accounts, chosen.users, chosen.nodes, chosen.min_score)
        if snapshot is None or any(narrow) or not self.request.acting:
            return []
        return [f"{snapshot.cluster}/{kind}/" for kind in orphans.KINDS if kind in chosen.requested_kinds]

    def _elsewhere(self, decided: Iterable[Action]) -> frozenset[str]:
        """Return the clusters in the findings other than this Slurm's: their job IDs mean other jobs here."""
        own_clusters = {_cluster(self.request, self.assessment) or UNNAMED, UNNAMED}
        named = {finding.cluster for finding in self.assessment.findings} - own_clusters
        slurm: SlurmClient | None = self.tools.slurm  # None in a dry run if Slurm does not respond
        if not named or slurm is None or not any(action.verb in DESTRUCTIVE for action in decided):
            return frozenset()
        return frozenset(named - {slurm.config().get("ClusterName", "")})

    def record_decisions(self, decided: Sequence[Action], command: str) -> None:
        """Record the findings and decisions in the audit."""
        self.log.record([audit.command_entry(decided, self.tools.who, self.tools.now(), command)])

    def show(
        self, outcomes: Sequence[Outcome], *, dry_run: bool, mails: Iterable[Digest] | None = None, untold: int = 0
    ) -> int:
        """Print the outcomes and the number of omitted warnings (``untold``); return the exit status."""
        # Table output has a single line about all of them.
        hide = QUIET if self.request.as_json else QUIET | {"stale"}
        shown = [outcome for outcome in outcomes if self.request.everything or outcome.action.code not in hide]
        old = self._too_old(outcomes)
        notes = (*self.assessment.notes, *([old] if old else []))
        if self.request.as_json:
            print_json({
                "dry_run": dry_run, "run": self.tools.who.run, "policy": self.request.policy.where,
                "since": self.assessment.since, "until": self.assessment.until, "source": self.assessment.source,
                "findings": len(self.assessment.findings), "actions": [_row(outcome) for outcome in shown],
                "notes": list(notes),
                **({} if mails is None else {"mails": [dataclasses.asdict(mail) for mail in mails]}),
            })  # fmt: skip
            # The timer discards the JSON, so failures also go to its mail or journal.
            for outcome in outcomes:
                if outcome.result == "failed":
                    warn(f"{outcome.action.verb}: {outcome.text}")
        else:
            rows = [
                (outcome.action.verb if outcome.action.verb != "none" else "-", outcome.action.target,
                 outcome.action.finding.kind, outcome.action.finding.user,
                 outcome.result if outcome.action.verb != "none" else outcome.action.code, outcome.text)
                for outcome in shown
            ]  # fmt: skip
            if rows:
                print_table(("action", "target", "kind", "user", "result", "why"), rows, minor=("kind", "user"))
            hidden = sum(outcome.action.code in QUIET for outcome in outcomes) if not self.request.everything else 0
            more = f"; {hidden} more for which it is too early or done (--all)" if hidden else ""
            more += f"; of {untold} users are to be warned (--warn)" if untold else ""
            echo(f"{counted(len(self.assessment.findings), 'finding')}, {len(shown)} shown{more}")
            for note in notes:
                warn(note)
            if dry_run and any(outcome.action.verb != "none" for outcome in outcomes):
                warn("dry run: nothing was done; add --yes")
        if any(outcome.result == "failed" for outcome in outcomes):
            return 1
        # No action was possible for any finding.
        return (
            2
            if old and all(outcome.action.code == "stale" or outcome.action.code in QUIET for outcome in outcomes)
            else 0
        )

    def _too_old(self, outcomes: Iterable[Outcome]) -> str:
        """Return a message about findings with evidence that is too old to act on; empty if there are none."""
        stale = [outcome.action.finding for outcome in outcomes if outcome.action.code == "stale"]
        if not stale:
            return ""
        newest, limit_s = max(finding.observed_at for finding in stale), self.request.policy.max_evidence_age_s
        age = span((self.tools.now() - newest).total_seconds())
        return (
            f"too old to act on: {counted(len(stale), 'finding')}, the newest of {named(newest, UTC)}, "
            f"{age} ago (at most {span(limit_s)}); ingest newer data, or use --live"
        )


def _row(outcome: Outcome) -> dict[str, Any]:
    action, finding = outcome.action, outcome.action.finding
    return {
        "verb": action.verb, "result": outcome.result, "code": action.code, "target": action.target,
        "reason": action.reason, "text": outcome.text, "rule": action.rule, "number": action.number,
        "kind": finding.kind, "user": finding.user,
        "job": None if finding.owner is None else finding.owner.id, "finding": finding.as_json(),
        "read_again": None if outcome.observation is None else outcome.observation.verdict,
    }  # fmt: skip


@contextlib.contextmanager
def _session(request: CleanUpRequest) -> Iterator[Session]:
    config = request.config
    backend: Any = config.slurm.backend
    open_slurm: Callable[[], SlurmClient] = functools.partial(open_client, backend, warned=warn)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(stages(quiet=request.as_json))
        began = datetime.now(UTC)
        if request.acting:
            # systemd stops a run on timeout with SIGTERM: record the current action in the audit, as after Ctrl-C.
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        assessment = _find(request, open_slurm, step)
        store = stack.enter_context(Repository.open(config.db_url))
        log = ZombieLog(store.engine)
        slurm: Any = None
        jobs: Sequence[Job] | None = None
        reach = Reach(config, open_slurm)
        stack.callback(reach.close)
        who = Who.am_i()

        def now() -> datetime:
            return datetime.now(UTC)

        try:
            slurm = stack.enter_context(open_slurm())
            jobs = _take_in(request, assessment, slurm, log, who, reach.ask)
        except AffinodeError as error:
            # The owners' exemptions are unknown: take no action, but still show the findings.
            if request.acting:
                raise
            note = f"new exemptions by owners are unknown: {error}"
            assessment = replace(assessment, notes=(*assessment.notes, note))
        tools = Tools(
            slurm=slurm, ask=reach.ask, suspend=lambda job: reach.about(job, {"verb": "suspend"}),
            recheck=Recheck(slurm, reach.ask, config.idle.low_pct, floors_pct=config.agent.floors_pct),
            post=postman(request.policy.mail, now), log=log, policy=request.policy, who=who, now=now, step=step,
        )  # fmt: skip
        yield Session(request, assessment, log, tools, log.ledger(now()), began, jobs)


def _find(request: CleanUpRequest, slurm: Callable[[], SlurmClient], step: Callable[[str], None]) -> find.Assessment:
    history = prometheus_history(request.config, request.selection, step) if request.prometheus else None
    if request.live:
        return live.find_live(
            request.config, request.selection, slurm=slurm, watch_s=request.watch_s, history=history, step=step
        )
    return find.find(request.config, request.selection, slurm=slurm, history=history, step=step)


def _take_in(  # noqa: PLR0917
    request: CleanUpRequest, assessment: find.Assessment, slurm: SlurmClient, log: ZombieLog, who: Who, ask: AskNode
) -> Sequence[Job]:
    """Store requests for exemption and, with --live, new epilog reports; return the jobs known to Slurm."""
    now, snapshot = datetime.now(UTC), assessment.snapshot
    named = {finding.cluster for finding in assessment.findings}
    cluster = _cluster(request, assessment) or (named.pop() if len(named) == 1 else None)
    cluster = cluster or slurm.config().get("ClusterName") or UNNAMED
    jobs = slurm.overview() if snapshot is None else snapshot.jobs
    exemption_intake.collect(jobs, cluster, request.policy.keep, log, now=now, run=who.run)
    if snapshot is not None:
        nodes = [node.name for node in snapshot.nodes if node.gpus and node.responding and node.powered]
        act.collect(nodes, ask, cluster, log, now=now, run=who.run, forget=request.acting)
    return jobs


def _cluster(request: CleanUpRequest, assessment: find.Assessment) -> str | None:
    """Return the name of this cluster in the database; ``None``: only Slurm knows it."""
    return assessment.snapshot.cluster if assessment.snapshot else request.config.cluster.name


def _mails(decided: Sequence[Action], policy: Policy) -> Iterator[Digest]:
    """Yield the mails that would be sent."""
    for (_, user, recipients), group in zombie_mail.by_reader(decided, policy).items():
        keep_s = policy.keep.max_s if policy.keep.allow else None
        addresses = zombie_mail.readers(user, recipients, group, policy)
        for recipient in addresses or ("(no recipient: mail.admins is empty)",):
            yield digest(
                group, policy.mail, recipient=recipient, user=user, now=datetime.now(UTC),
                timezone=policy.calendar.timezone, keep_s=keep_s,
            )  # fmt: skip
