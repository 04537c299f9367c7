"""``slurm-affinode zombies policy`` and ``history``; ``slurm-affinode keep``."""

from __future__ import annotations

import dataclasses
import math
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    json_option,
    print_json,
    print_table,
    printable,
    progress,
    slurm_options,
    warn,
    zone,
)
from slurm_affinode.config import Config
from slurm_affinode.core.spans import counted, span
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.audit import RESULTS
from slurm_affinode.model.cleanup import Keep, Policy
from slurm_affinode.model.cluster import Job
from slurm_affinode.resources import asset_dir
from slurm_affinode.slurm.backends import open_client
from slurm_affinode.store.repository import Repository
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.workflow import zombie_audit, zombie_keeps, zombie_policy
from slurm_affinode.workflow import zombies as workflow
from slurm_affinode.workflow.zombie_tools import Who

_CHECK_EPILOG = """\b
Examples:
  slurm-affinode zombies policy check                  the policy that holds, and the last week with it
  slurm-affinode zombies policy check new.toml         what would be different
  slurm-affinode zombies policy check new.toml --no-replay

\b
Exit status: 0 it is right, 1 something is wrong with it (each mistake by its line), 2 it cannot be read.
"""


@click.group()
def policy() -> None:
    """What is done about findings: check the policy file, show the one that comes with the package."""


@policy.command()
def show() -> int:
    """Print the policy that holds where a site has none, to start from."""
    click.echo((asset_dir("reports") / "zombies-policy.toml").read_text(encoding="utf-8"), nl=False)
    return 0


@policy.command(epilog=_CHECK_EPILOG)
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--since", type=When(), default="7d", metavar="TIME", help="Begin of the replay.  [default: 7d]")
@click.option("--until", type=When(), default="now", metavar="TIME", help="Its end.  [default: now]")
@click.option("--every", type=Span(60), default="15m", metavar="SPAN", show_default=True,
              help="How often the timer runs.")  # fmt: skip
@click.option("--look-every", type=Span(60), default="4h", metavar="SPAN", show_default=True,
              help="The history is looked at so often; what lasted for less may be missed.")  # fmt: skip
@click.option("--replay/--no-replay", default=True, show_default=True, help="Say what it would have done.")
@json_option
def check(
    *, config: Config, file: Path | None, since: datetime, until: datetime, every: float, look_every: float,
    replay: bool, as_json: bool,
) -> int:  # fmt: skip
    """Say what a policy says, what is wrong with it by line, and what it would have done over the last week.

    FILE is the policy. [default: zombies.policy, /etc/slurm-affinode/zombies.toml, else the one that is built in]
    """
    now = datetime.now(UTC)
    found, faults = zombie_policy.examine(config, file)
    if faults:
        if as_json:
            print_json({"policy": found.where, "faults": [dataclasses.asdict(one) for one in faults]})
        for fault in () if as_json else faults:
            click.echo(printable(f"{found.where}:{fault.line}: {fault.message}"))
            if fault.hint:
                click.echo(printable(f"  {fault.hint}"))
        return 1
    done, note = _replay(config, found, since, until, every, look_every) if replay else ([], None)
    lines = zombie_policy.explain(found, now)
    if as_json:
        print_json({
            "policy": found.where, "faults": [], "says": lines, "note": note,
            "replay": None if note or not replay else [
                {"at": one.at, "verb": one.action.verb, "code": one.action.code, "number": one.action.number,
                 "target": one.action.target, "user": one.action.finding.user, "kind": one.action.finding.kind,
                 "reason": one.action.reason, "rule": one.action.rule, "finding": one.action.finding.key}
                for one in done
            ],
        })  # fmt: skip
        return 0
    click.echo(f"{printable(found.where)}: no mistakes")
    for line in lines:
        click.echo(printable(f"  {line}"))
    if note:
        warn(note)
    elif replay:
        _print_replay(done, since, until)
    return 0


def _replay(  # noqa: PLR0917
    config: Config, found: Policy, since: datetime, until: datetime, every_s: float, look_s: float
) -> tuple[list[zombie_policy.Replayed], str | None]:  # fmt: skip
    config = zombie_policy.reaching(config, found)
    looks, problem = [], None
    # The last one is at the end, however long the interval is.
    count = max(0, math.ceil((until - since).total_seconds() / look_s))
    with progress("looking at the history", max(1, count)) as advance:
        for number in range(1, count + 1):
            moment = min(since + timedelta(seconds=number * look_s), until)
            try:
                request = workflow.Request(until=moment, running_only=False)
                looks.append(workflow.find(config, request, slurm=None, now=moment).findings)
            except AffinodeError as error:
                problem = str(error)
            advance(1)
    if not looks:
        return [], f"what it would have done is not known: {problem or 'the interval is empty'}"
    past = zombie_policy.episodes(looks)
    return zombie_policy.replay(past, found, since, until, timedelta(seconds=every_s)), None


def _print_replay(done: list[zombie_policy.Replayed], since: datetime, until: datetime) -> None:
    click.echo(f"\nFrom {clock(since)} to {clock(until)} ({zone()}) it would have done:")
    rows = [
        (clock(one.at), one.action.verb if one.action.verb != "none" else f"none ({one.action.code})",
         one.action.number or "", one.action.target, one.action.finding.user, one.action.finding.kind,
         one.action.reason)
        for one in done
    ]  # fmt: skip
    if not rows:
        click.echo("  nothing")
        return
    print_table(("at", "action", "number", "target", "user", "kind", "why"), rows)
    counts: dict[str, int] = {}
    for one in done:
        counts[one.action.verb] = counts.get(one.action.verb, 0) + 1
    click.echo("; ".join(f"{verb}: {count}" for verb, count in sorted(counts.items())))


_HISTORY_EPILOG = """\b
Examples:
  slurm-affinode zombies history --since 7d
  slurm-affinode zombies history --job 123 --json       with the evidence of each decision
  slurm-affinode zombies history --verb cancel --result spared
  slurm-affinode zombies history --prune 730d          how many records are older; with --yes they go

\b
`nightly` deletes what is older than nightly.keep_audit. Whoever deletes leaves a record of it.
"""


@click.command(epilog=_HISTORY_EPILOG)
@config_options
@click.option("--since", type=When(), metavar="TIME", help="Begin.")
@click.option("--until", type=When(), metavar="TIME", help="End, not included.")
@click.option("--job", metavar="JOB", help="About this job; of an array, all of its tasks.")
@click.option("--user", "-u", metavar="NAME", help="About this user's jobs.")
@click.option("--verb", metavar="WORD", help="Only this: look, warn-user, warn-admin, cancel, suspend, keep, ...")
@click.option("--result", type=click.Choice(RESULTS), help="Only with this result.")
@click.option("--limit", type=click.IntRange(1), default=200, show_default=True, metavar="N", help="The newest N.")
@click.option("--prune", type=When(), metavar="TIME", help="Delete what is older than TIME: 730d, 2025-01-01.")
@click.option("--yes", is_flag=True, help="With --prune: do it.")
@json_option
def history(
    *, config: Config, since: datetime | None, until: datetime | None, job: str | None, user: str | None,
    verb: str | None, result: str | None, limit: int, prune: datetime | None, yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """Show what was looked at, told and done: who, when, on what evidence, with what result. Oldest first."""
    if prune is not None:
        return _prune(config, prune, yes=yes, as_json=as_json)
    with Repository.open(config.db_url, create=False) as store:
        rows = ZombieLog(store.engine).history(
            since=since, until=until, job=job, user=user, verb=verb, result=result, limit=limit + 1
        )
    if len(rows) > limit:
        rows = rows[1:]
        warn(f"older records are left out: --limit {10 * limit}, or --since")
    if as_json:
        print_json([dataclasses.asdict(one) for one in rows])
        return 0
    print_table(
        (f"at ({zone()})", "who", "verb", "result", "job", "user", "node", "what"),
        [
            (clock(one.at, seconds=True), one.actor, one.verb, one.result, one.job, one.user, one.node, one.reason)
            for one in rows
        ],
    )
    return 0


def _prune(config: Config, before: datetime, *, yes: bool, as_json: bool) -> int:
    now = datetime.now(UTC)
    with Repository.open(config.db_url, create=False) as store:
        log = ZombieLog(store.engine)
        count = log.count_before(before)
        if yes:
            count = zombie_audit.prune(log, before, Who.am_i(), now, "zombies history --prune")
    if as_json:
        print_json({"before": before, "records": count, "deleted": yes})
        return 0
    done = "deleted" if yes else "would be deleted"
    click.echo(f"{counted(count, 'record')} from before {clock(before)} ({zone()}) {done}")
    if count and not yes:
        warn("nothing was deleted; add --yes")
    return 0


# --- keep


_KEEP_EPILOG = """\b
Examples:
  slurm-affinode keep 123 --for 2h --why "the debugger is attached, back after lunch"

\b
Exit status: 0 noted, 1 not granted, 2 unusable input, 3 Slurm does not answer.
"""


@click.command(epilog=_KEEP_EPILOG)
@config_options
@slurm_options
@click.argument("job")
@click.option("--for", "for_s", type=Span(60), required=True, metavar="SPAN", help="For so long from now on.")
@click.option("--why", required=True, metavar="TEXT", help="The reason, for administrators.")
@json_option
def keep(*, config: Config, job: str, for_s: float, why: str, as_json: bool) -> int:
    """Ask that a job of yours be left alone for a time although its GPUs are idle. Once for each run of a job.

    It is written into the job's comment, where the administrators' tool finds it.
    """
    now = datetime.now(UTC)
    found = zombie_policy.load(config)
    wish = zombie_keeps.Wish(now + timedelta(seconds=for_s), " ".join(why.split()))
    with open_client(config.slurm.backend) as slurm:  # type: ignore[arg-type]
        there = slurm.job(job)
        problem = _against(there, wish, found, now)
        if problem is not None:
            warn(f"job {there.id}: {problem}")
            return 1
        slurm.set_comment(there.id, zombie_keeps.comment_with(there.comment, wish))
        cluster = config.cluster.name or slurm.config().get("ClusterName") or "default"
    keep_ = Keep(cluster, there.job_id, there.submit or now, there.user or "?", wish.why, now, wish.until)
    written = _write(config, keep_, there.id, now)
    if as_json:
        print_json({"job": there.id, "until": wish.until, "why": wish.why, "written": written})
    else:
        click.echo(f"Job {there.id} is left alone for {span(for_s)}, until {clock(wish.until)} ({zone()})")
    return 0


def _against(job: Job, wish: zombie_keeps.Wish, found: Policy, now: datetime) -> str | None:
    uid = os.getuid()
    if uid not in (0, job.uid):
        return "it is not yours"
    if not job.allocated:
        return f"it does not run: it is {job.state}"
    if zombie_keeps.asked_before(job):
        return "it was asked to be kept before; that may be done once"
    try:
        zombie_keeps.check(wish, found.keep, now)
    except AffinodeError as error:
        return str(error)
    return None


def _write(config: Config, wish: Keep, job: str, now: datetime) -> bool:
    """Into the store at once, where this user may write there."""
    try:
        with Repository.open(config.db_url, create=False) as store:
            log = ZombieLog(store.engine)
            if log.keep(wish) is None:
                who = Who.am_i()
                log.record([zombie_keeps.record(wish, job, who.run, who.actor, now)])
    except AffinodeError:
        return False
    return True
