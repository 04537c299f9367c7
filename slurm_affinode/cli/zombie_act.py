"""``slurm-affinode zombies warn`` and ``clean``."""

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

from slurm_affinode.agent.reach import Reach
from slurm_affinode.cli.options import (
    Span,
    When,
    config_options,
    json_option,
    print_json,
    print_table,
    slurm_options,
    stages,
    warn,
    warn_if_exposed,
)
from slurm_affinode.cli.prometheus_options import prometheus_options
from slurm_affinode.cli.zombies import filters, prometheus_history
from slurm_affinode.config import Config
from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.core.spans import counted, span
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, Ledger, Policy
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import VARIANTS
from slurm_affinode.report.mail import Digest, digest
from slurm_affinode.slurm.backends import open_client
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.store.repository import Repository
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.workflow import zombie_actions as actions_of
from slurm_affinode.workflow import zombie_epilogs, zombie_keeps, zombie_live, zombie_policy, zombie_tell
from slurm_affinode.workflow import zombie_orphans as orphans
from slurm_affinode.workflow import zombies as workflow
from slurm_affinode.workflow.postman import postman
from slurm_affinode.workflow.zombie_recheck import AskNode, Recheck
from slurm_affinode.workflow.zombie_tools import Outcome, Tools, Who

QUIET = frozenset({"too-early", "told", "warned", "rule", "nobody", "same"})
"""Why nothing is done that need not be shown."""

UNNAMED = "default"
"""The cluster of accounting that names none."""

_CLEAN_EPILOG = """\b
Examples:
  slurm-affinode zombies clean                        what would be done now, and what speaks against it
  slurm-affinode zombies clean --live --yes           do it
  slurm-affinode zombies clean --live --warn --yes    tell people as well: what the timer runs
  slurm-affinode zombies clean --live --kind orphan-process --node c1 --yes

\b
Exit status: 0 done, or nothing to do; 1 something failed (the rest was done); 2 unusable policy or input, or data
too old to act on; 3 something needed does not answer.
"""
_WARN_EPILOG = """\b
Examples:
  slurm-affinode zombies warn                         who would be told of what
  slurm-affinode zombies warn --dry-run               the mails themselves
  slurm-affinode zombies warn --live --yes            send them

\b
Exit status: 0 done, or nobody to tell; 1 somebody could not be told; 2 unusable policy or input, or data too old
to act on; 3 something needed does not answer.
"""


def _common(function: Any) -> Any:
    options = [
        config_options,
        slurm_options,
        prometheus_options,
        filters,
        click.option("--live", is_flag=True, help="As it is now: ask Slurm once, and the agents of the nodes."),
        click.option("--watch", "watch_s", type=Span(), metavar="SPAN",
                     help="With --live: look at the nodes for so long."),
        click.option("--policy", "policy_path", type=click.Path(path_type=Path), metavar="FILE",
                     help="The policy. [default: zombies.policy, /etc/slurm-affinode/zombies.toml, else the built-in]"),
        click.option("--all", "everything", is_flag=True, help="Also show what nothing is to be done about yet."),
        json_option,
    ]  # fmt: skip
    return functools.reduce(lambda made, option: option(made), reversed(options), function)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command was asked for."""

    config: Config
    request: workflow.Request
    live: bool
    watch_s: float | None
    prometheus: bool
    policy: Policy
    as_json: bool
    everything: bool
    acting: bool = False
    """With ``--yes``."""


def _asked(
    config: Config, policy_path: Path | None, *, live: bool, watch_s: float | None, asked: bool, as_json: bool,
    everything: bool, kinds: tuple[str, ...], **filters: Any,
) -> Asked:  # fmt: skip
    request = workflow.Request(
        kinds=tuple(dict.fromkeys("idle-allocation" if kind in VARIANTS else kind for kind in kinds)),
        variants=frozenset(kinds) & frozenset(VARIANTS), **filters,
    )  # fmt: skip
    policy = zombie_policy.load(config, policy_path)
    warn_if_exposed(zombie_policy.policy_file(config, policy_path)[0])
    config = zombie_policy.reaching(config, policy)
    return Asked(config, request, live, watch_s, asked, policy, as_json, everything)


@click.command(epilog=_WARN_EPILOG)
@_common
@click.option("--since", type=When(), metavar="TIME", help="Begin. [default: 2d before the end]")
@click.option("--until", type=When(), metavar="TIME", help="End, not included. [default: the end of the history]")
@click.option("--yes", is_flag=True, help="Send. Without it nothing is sent.")
@click.option("--dry-run", is_flag=True, help="Print the mails in place of sending them.")
def warn_(*, yes: bool, dry_run: bool, config: Config, policy_path: Path | None, **given: Any) -> int:
    """Tell owners and administrators what was found, as the policy says; one mail for each.

    A user is told of all his jobs in one mail, of each stage once, and of what has no stages once in a period.
    """
    asked = replace(_asked(config, policy_path, **given), acting=yes and not dry_run)
    with _session(asked) as session:
        decided = [one for one in session.plan() if one.verb not in DESTRUCTIVE]
        session.looked(decided, "warn")
        if dry_run or not yes:
            mails = list(_mails(decided, asked.policy)) if dry_run else None
            for mail in mails or () if not asked.as_json else ():
                click.echo(f"To: {mail.recipient}\nSubject: {mail.subject}\n\n{mail.text}")
            return session.show([_planned(one) for one in decided], dry_run=True, mails=mails)
        return session.show([*zombie_tell.tell(decided, session.tools, session.ledger), *_idle(decided)], dry_run=False)


@click.command(epilog=_CLEAN_EPILOG)
@_common
@click.option("--yes", is_flag=True, help="Do it. Without it nothing is done.")
@click.option("--warn", "warnings", is_flag=True, help="Also tell people, as `zombies warn` does.")
@click.option("--over-limit", type=click.IntRange(1), metavar="N",
              help="Cancel up to N jobs in this run, whatever the policy's limit. Asks a person.")  # fmt: skip
def clean(
    *, yes: bool, warnings: bool, over_limit: int | None, config: Config, policy_path: Path | None, **given: Any
) -> int:
    """Cancel or suspend idle jobs, end orphan processes, drain and resume nodes, as the policy says.

    A dry run unless --yes is given. Evidence is read again right before each action: a job that woke up is spared.
    Every look, warning and action is written down: see `zombies history`.
    """
    asked = replace(_asked(config, policy_path, **given), acting=yes)
    if over_limit is not None:
        if yes:
            _person(over_limit)
        asked = replace(asked, policy=replace(asked.policy, limits=replace(asked.policy.limits, cancel=over_limit)))
    with _session(asked) as session:
        planned = session.plan()
        decided = [one for one in planned if warnings or not zombie_tell.warnable(one)]
        untold = len(planned) - len(decided)
        session.looked(decided, "clean")
        if not yes:
            return session.show([_planned(one) for one in decided], dry_run=True, untold=untold)
        done = actions_of.execute(decided, session.tools)
        done += zombie_tell.tell(decided, session.tools, session.ledger)
        tried = {one.action.finding.key for one in done}
        rest = [one for one in decided if one.finding.key not in tried]
        return session.show([*done, *_idle(rest)], dry_run=False, untold=untold)


def _person(limit: int) -> None:
    """Somebody at a terminal has to say it: no script raises the limit."""
    if not sys.stdin.isatty():
        raise AffinodeError(
            "--over-limit needs a person at a terminal", hint="without one, limits.cancel of the policy holds"
        )
    click.confirm(f"Cancel up to {counted(limit, 'job')} in this run?", abort=True)


def _planned(action: Action) -> Outcome:
    return Outcome(action, "spared" if action.verb == "none" else "planned", action.reason)


def _idle(decided: Sequence[Action]) -> list[Outcome]:
    return [_planned(one) for one in decided if one.verb == "none"]


@dataclass(slots=True)
class Session:
    """One run of a command: what it found, and what it acts with."""

    asked: Asked
    found: workflow.Found
    log: ZombieLog
    tools: Tools
    ledger: Ledger
    began: datetime
    """When it began to look."""
    jobs: Sequence[Job] | None = None
    """As Slurm knows them; ``None``: it does not answer."""

    def plan(self) -> list[Action]:
        """What is to be done. Agents are asked which jobs may be suspended, or sleep, where any is to be warned."""
        now = self.tools.now()
        self.log.see([one.key for one in self.found.findings if one.since is None], now, all_of=self._looked_at_all())
        self.ledger = self.log.ledger(now)
        over = self._over()
        findings = [one for one in self.found.findings if one.key not in over]
        decided = plan(findings, self.asked.policy, self.ledger, now, looked_from=self.began)
        elsewhere = self._elsewhere(decided)
        known = actions_of.opted_in(decided, self.tools.ask)
        planned = plan(findings, self.asked.policy, self.ledger, now, opted_in=known.watched,
                       asleep=known.asleep, elsewhere=elsewhere, looked_from=self.began,
                       parts=actions_of.parts(self.jobs or ()))  # fmt: skip
        text = "it has ended, or begun anew, since accounting was read"
        return planned + [Action("none", one, "ended", text) for one in self.found.findings if one.key in over]

    def _over(self) -> frozenset[str]:
        """Keys of the findings about jobs that ran when accounting was read, and do not any more."""
        running = [one for one in self.found.findings if one.job is not None and one.job.running]
        if self.jobs is None or not running:
            return frozenset()
        there = {run for job in self.jobs if job.allocated for run in (actions_of.run_of(job), (job.job_id, None))}
        here = {_cluster(self.asked, self.found) or UNNAMED, UNNAMED}
        if any(one.cluster not in here for one in running):
            here.add(self.tools.slurm.config().get("ClusterName", ""))
        return frozenset(
            one.key for one in running if one.cluster in here and one.job and actions_of.run_of(one.job) not in there
        )

    def _looked_at_all(self) -> list[str]:
        """How the keys of findings begin of which this run, which left out nothing, saw all that are there.

        A dry run makes nobody forget anything: whoever may not ask the agents sees none.
        """
        asked, seen = self.asked.request, self.found.snapshot
        narrow = (asked.clusters, asked.partitions, asked.accounts, asked.users, asked.nodes, asked.min_score)
        if seen is None or any(narrow) or not self.asked.acting:
            return []
        return [f"{seen.cluster}/{kind}/" for kind in orphans.KINDS if kind in asked.wanted]

    def _elsewhere(self, decided: Iterable[Action]) -> frozenset[str]:
        """Clusters of the store that this Slurm is not: their job numbers name other jobs here."""
        named = {one.cluster for one in self.found.findings} - {_cluster(self.asked, self.found) or UNNAMED, UNNAMED}
        slurm: SlurmClient | None = self.tools.slurm  # there is none in a dry run where it does not answer
        if not named or slurm is None or not any(one.verb in DESTRUCTIVE for one in decided):
            return frozenset()
        return frozenset(named - {slurm.config().get("ClusterName", "")})

    def looked(self, decided: Sequence[Action], command: str) -> None:
        """Write down that somebody looked."""
        self.log.record([actions_of.looked(decided, self.tools.who, self.tools.now(), command)])

    def show(
        self, outcomes: Sequence[Outcome], *, dry_run: bool, mails: Iterable[Digest] | None = None, untold: int = 0
    ) -> int:
        """Print what was done or would be, and how many are only to be told of; the exit status."""
        # On a terminal one line stands for all of them.
        hide = QUIET if self.asked.as_json else QUIET | {"stale"}
        shown = [one for one in outcomes if self.asked.everything or one.action.code not in hide]
        old = self._too_old(outcomes)
        notes = (*self.found.notes, *([old] if old else []))
        if self.asked.as_json:
            print_json({
                "dry_run": dry_run, "run": self.tools.who.run, "policy": self.asked.policy.where,
                "since": self.found.since, "until": self.found.until, "source": self.found.source,
                "findings": len(self.found.findings), "actions": [_row(one) for one in shown],
                "notes": list(notes),
                **({} if mails is None else {"mails": [dataclasses.asdict(one) for one in mails]}),
            })  # fmt: skip
            # The timer throws the JSON away; what failed is for whoever reads its mail or journal.
            for one in outcomes:
                if one.result == "failed":
                    warn(f"{one.action.verb}: {one.text}")
        else:
            rows = [
                (one.action.verb if one.action.verb != "none" else "-", one.action.target, one.action.finding.kind,
                 one.action.finding.user, one.result if one.action.verb != "none" else one.action.code, one.text)
                for one in shown
            ]  # fmt: skip
            if rows:
                print_table(("action", "target", "kind", "user", "result", "why"), rows)
            hidden = sum(one.action.code in QUIET for one in outcomes) if not self.asked.everything else 0
            more = f"; {hidden} more for which it is too early or done (--all)" if hidden else ""
            more += f"; of {untold} people are to be told (--warn)" if untold else ""
            click.echo(f"{counted(len(self.found.findings), 'finding')}, {len(shown)} shown{more}")
            for note in notes:
                warn(note)
            if dry_run and any(one.action.verb != "none" for one in outcomes):
                warn("dry run: nothing was done; add --yes")
        if any(one.result == "failed" for one in outcomes):
            return 1
        # Nothing could be done about anything.
        return 2 if old and all(one.action.code == "stale" or one.action.code in QUIET for one in outcomes) else 0

    def _too_old(self, outcomes: Iterable[Outcome]) -> str:
        """A line about the findings whose evidence is too old to act on; empty where there is none."""
        stale = [one.action.finding for one in outcomes if one.action.code == "stale"]
        if not stale:
            return ""
        newest, limit_s = max(one.observed_at for one in stale), self.asked.policy.max_evidence_age_s
        age = span((self.tools.now() - newest).total_seconds())
        return (
            f"too old to act on: {counted(len(stale), 'finding')}, the newest of {newest:%Y-%m-%d %H:%M} UTC, "
            f"{age} ago (at most {span(limit_s)}); take in newer data, or look with --live"
        )


def _row(one: Outcome) -> dict[str, Any]:
    action, finding = one.action, one.action.finding
    return {
        "verb": action.verb, "result": one.result, "code": action.code, "target": action.target,
        "reason": action.reason, "text": one.text, "rule": action.rule, "number": action.number,
        "kind": finding.kind, "user": finding.user,
        "job": None if finding.job is None else finding.job.id, "finding": finding.as_json(),
        "read_again": None if one.look is None else one.look.verdict,
    }  # fmt: skip


@contextlib.contextmanager
def _session(asked: Asked) -> Iterator[Session]:
    config = asked.config
    open_slurm: Callable[[], SlurmClient] = functools.partial(open_client, config.slurm.backend)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(stages(quiet=asked.as_json))
        began = datetime.now(UTC)
        if asked.acting:
            # systemd ends what takes too long so: what is under way then is in the audit, as after Ctrl-C.
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        found = _find(asked, open_slurm, step)
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
            jobs = _take_in(asked, found, slurm, log, who, reach.ask)
        except AffinodeError as error:
            # What owners asked for is not known: reason enough to do nothing, and none to show nothing.
            if asked.acting:
                raise
            found = replace(found, notes=(*found.notes, f"Slurm was not asked for what owners want: {error}"))
        tools = Tools(
            slurm=slurm, ask=reach.ask, suspend=lambda job: reach.about(job, {"verb": "suspend"}),
            recheck=Recheck(slurm, reach.ask, config.idle.low_pct, floors_pct=config.agent.floors_pct),
            post=postman(asked.policy.mail, now), log=log, policy=asked.policy, who=who, now=now, step=step,
        )  # fmt: skip
        yield Session(asked, found, log, tools, log.ledger(now()), began, jobs)


def _find(asked: Asked, slurm: Callable[[], SlurmClient], step: Callable[[str], None]) -> workflow.Found:
    history = prometheus_history(asked.config, asked.request, step) if asked.prometheus else None
    if asked.live:
        return zombie_live.find(
            asked.config, asked.request, slurm=slurm, watch_s=asked.watch_s, history=history, step=step
        )
    return workflow.find(asked.config, asked.request, slurm=slurm, history=history, step=step)


def _take_in(  # noqa: PLR0917
    asked: Asked, found: workflow.Found, slurm: SlurmClient, log: ZombieLog, who: Who, ask: AskNode
) -> Sequence[Job]:
    """What owners asked for and, with --live, what epilogs did since the last run; the jobs."""
    now, seen = datetime.now(UTC), found.snapshot
    named = {one.cluster for one in found.findings}
    cluster = _cluster(asked, found) or (named.pop() if len(named) == 1 else None)
    cluster = cluster or slurm.config().get("ClusterName") or UNNAMED
    jobs = slurm.overview() if seen is None else seen.jobs
    zombie_keeps.collect(jobs, cluster, asked.policy.keep, log, now=now, run=who.run)
    if seen is not None:
        nodes = [node.name for node in seen.nodes if node.gpus and node.responding and node.powered]
        zombie_epilogs.collect(nodes, ask, cluster, log, now=now, run=who.run, forget=asked.acting)
    return jobs


def _cluster(asked: Asked, found: workflow.Found) -> str | None:
    """What the cluster at hand is called in the store; ``None``: only Slurm knows."""
    return found.snapshot.cluster if found.snapshot else asked.config.cluster.name


def _mails(decided: Sequence[Action], policy: Policy) -> Iterator[Digest]:
    """What would be sent, and to whom."""
    for (_, user, recipients), group in zombie_tell.by_reader(decided, policy).items():
        keep_s = policy.keep.max_s if policy.keep.allow else None
        told = zombie_tell.readers(user, recipients, group, policy)
        for recipient in told or ("(nobody: mail.admins is empty)",):
            yield digest(
                group, policy.mail, recipient=recipient, user=user, now=datetime.now(UTC),
                timezone=policy.calendar.timezone, keep_s=keep_s,
            )  # fmt: skip
