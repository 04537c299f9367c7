"""``slurm-affinode zombies policy`` and ``history``; ``slurm-affinode keep``."""

from __future__ import annotations

import dataclasses
import math
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import counted, span
from slurm_affinode.cli.command import command, group
from slurm_affinode.cli.options import (
    Span,
    When,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    progress,
    slurm_options,
    warn,
    zone,
)
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import RESULTS, Keep, Policy
from slurm_affinode.model.cluster import Job
from slurm_affinode.slurm.client import open_client
from slurm_affinode.zombies import exemptions, find
from slurm_affinode.zombies import policy as site_policy

_CHECK_EPILOG = """\b
Examples:
  slurm-affinode zombies policy check                  the policy in effect, replayed over the last week
  slurm-affinode zombies policy check new.toml         another file
  slurm-affinode zombies policy check new.toml --no-replay

\b
Exit status: 0 valid, 1 errors found (by line), 2 unreadable.
"""


@group()
def policy() -> None:
    """Check the clean-up policy, or show the built-in one."""


@policy.command()
def show() -> int:
    """Print the built-in policy, as a starting point."""
    click.echo((asset_dir("reports") / "zombies-policy.toml").read_text(encoding="utf-8"), nl=False)
    return 0


@policy.command(epilog=_CHECK_EPILOG)
@config_options
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--since", type=When(), default="7d", metavar="TIME", help="Begin the replay at TIME  [default: 7d]")
@click.option("--until", type=When(), default="now", metavar="TIME", help="End the replay at TIME  [default: now]")
@click.option("--every", type=Span(60), default="15m", metavar="SPAN", show_default=True,
              help="Assume that the timer runs every SPAN")  # fmt: skip
@click.option("--look-every", type=Span(60), default="4h", metavar="SPAN", show_default=True,
              help="Sample the stored metrics every SPAN; shorter findings may be missed")  # fmt: skip
@click.option("--replay/--no-replay", default=True, show_default=True, help="Show the actions of the past period")
@json_option
def check(
    *, config: Config, file: Path | None, since: datetime, until: datetime, every: float, look_every: float,
    replay: bool, as_json: bool,
) -> int:  # fmt: skip
    """Describe a policy, report errors by line, and replay it over the last week.

    FILE is the policy. [default: zombies.policy, /etc/slurm-affinode/zombies.toml, built-in]
    """
    now = datetime.now(UTC)
    found, faults = site_policy.examine(config, file)
    if faults:
        if as_json:
            print_json({"policy": found.where, "faults": [dataclasses.asdict(one) for one in faults]})
        for fault in () if as_json else faults:
            echo(f"{found.where}:{fault.line}: {fault.message}")
            if fault.hint:
                echo(f"  {fault.hint}")
        return 1
    done, note = _replay(config, found, since, until, every, look_every) if replay else ([], None)
    lines = site_policy.explain(found, now)
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
    echo(f"{found.where}: no mistakes")
    for line in lines:
        echo(f"  {line}")
    if note:
        warn(note)
    elif replay:
        _print_replay(done, since, until)
    return 0


def _replay(  # noqa: PLR0917
    config: Config, found: Policy, since: datetime, until: datetime, every_s: float, look_s: float
) -> tuple[list[site_policy.Replayed], str | None]:  # fmt: skip
    config = site_policy.reaching(config, found)
    samples, problem = [], None
    # The last one is at the end of the interval, whatever its length.
    count = max(0, math.ceil((until - since).total_seconds() / look_s))
    with progress("looking at the history", max(1, count)) as advance:
        for number in range(1, count + 1):
            moment = min(since + timedelta(seconds=number * look_s), until)
            try:
                request = find.Request(until=moment, running_only=False)
                samples.append(find.find(config, request, slurm=None, now=moment).findings)
            except AffinodeError as error:
                problem = str(error)
            advance(1)
    if not samples:
        return [], f"the replay is not possible: {problem or 'the interval is empty'}"
    past = site_policy.episodes(samples)
    return site_policy.replay(past, found, since, until, timedelta(seconds=every_s)), None


def _print_replay(done: list[site_policy.Replayed], since: datetime, until: datetime) -> None:
    echo("", f"From {clock(since)} to {clock(until)} ({zone()}) it would have done:")
    rows = [
        (clock(one.at), one.action.verb if one.action.verb != "none" else f"none ({one.action.code})",
         one.action.number or "", one.action.target, one.action.finding.user, one.action.finding.kind,
         one.action.reason)
        for one in done
    ]  # fmt: skip
    if not rows:
        echo("  nothing")
        return
    print_table(("at", "action", "number", "target", "user", "kind", "why"), rows)
    counts: dict[str, int] = {}
    for one in done:
        counts[one.action.verb] = counts.get(one.action.verb, 0) + 1
    echo("; ".join(f"{verb}: {count}" for verb, count in sorted(counts.items())))


_HISTORY_EPILOG = """\b
Examples:
  slurm-affinode zombies history --since 7d
  slurm-affinode zombies history --job 123 --json       with the evidence of each decision
  slurm-affinode zombies history --verb cancel --result spared
  slurm-affinode zombies history --prune 730d          count older records; --yes deletes them

\b
`nightly` deletes records older than nightly.keep_audit. Each deletion is recorded.
"""


@command(epilog=_HISTORY_EPILOG)
@config_options
@click.option("--since", type=When(), metavar="TIME", help="Begin at TIME")
@click.option("--until", type=When(), metavar="TIME", help="End before TIME")
@click.option("--job", metavar="JOB", help="Select a job, or all tasks of an array")
@click.option("--user", "-u", metavar="NAME", help="Select a user's jobs")
@click.option(
    "--verb", metavar="WORD", help="Select an action: look, warn-user, warn-admin, cancel, suspend, keep, ..."
)
@click.option("--result", type=click.Choice(RESULTS), help="Select a result")
@click.option(
    "--limit", type=click.IntRange(1), default=200, show_default=True, metavar="N", help="Show the newest N records"
)
@click.option("--prune", type=When(), metavar="TIME", help="Delete records older than TIME, such as 730d or 2025-01-01")
@click.option("--yes", is_flag=True, help="Confirm the deletion (with --prune)")
@json_option
def history(
    *, config: Config, since: datetime | None, until: datetime | None, job: str | None, user: str | None,
    verb: str | None, result: str | None, limit: int, prune: datetime | None, yes: bool, as_json: bool,
) -> int:  # fmt: skip
    """Show recorded checks, warnings and actions with evidence and result, oldest first."""
    if prune is not None:
        return _prune(config, prune, yes=yes, as_json=as_json)
    with Repository.open(config.db_url, create=False) as store:
        rows = ZombieLog(store.engine).history(
            since=since, until=until, job=job, user=user, verb=verb, result=result, limit=limit + 1
        )
    if len(rows) > limit:
        rows = rows[1:]
        warn(f"older records are omitted: --limit {10 * limit}, or --since")
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
            count = log.prune(before, Who.am_i(), now, "zombies history --prune")
    if as_json:
        print_json({"before": before, "records": count, "deleted": yes})
        return 0
    done = "deleted" if yes else "would be deleted"
    echo(f"{counted(count, 'record')} from before {clock(before)} ({zone()}) {done}")
    if count and not yes:
        warn("nothing was deleted; add --yes")
    return 0


# --- keep


_KEEP_EPILOG = """\b
Examples:
  slurm-affinode keep 123 --for 2h --why "the debugger is attached, back after lunch"

\b
Exit status: 0 recorded, 1 rejected, 2 unusable input, 3 Slurm does not respond.
"""


@command(epilog=_KEEP_EPILOG)
@config_options
@slurm_options
@click.argument("job")
@click.option(
    "--for", "for_s", type=Span(60), required=True, metavar="SPAN", help="Exempt the job for SPAN from now on"
)
@click.option("--why", required=True, metavar="TEXT", help="State the reason to the administrators")
@json_option
def keep(*, config: Config, job: str, for_s: float, why: str, as_json: bool) -> int:
    """Exempt one of your jobs from clean-up for a while. Once per run of a job.

    The exemption is written into the job's comment, where the clean-up finds it.
    """
    now = datetime.now(UTC)
    found = site_policy.load(config)
    exemption = exemptions.ExemptionRequest(now + timedelta(seconds=for_s), " ".join(why.split()))
    with open_client(config.slurm.backend, warned=warn) as slurm:  # type: ignore[arg-type]
        there = slurm.job(job)
        problem = _against(there, exemption, found, now)
        if problem is not None:
            warn(f"job {there.id}: {problem}")
            return 1
        slurm.set_comment(there.id, exemptions.comment_with(there.comment, exemption))
        cluster = config.cluster.name or slurm.config().get("ClusterName") or "default"
    keep_ = Keep(cluster, there.job_id, there.submit or now, there.user or "?", exemption.why, now, exemption.until)
    written = _write(config, keep_, there.id, now)
    if as_json:
        print_json({"job": there.id, "until": exemption.until, "why": exemption.why, "written": written})
    else:
        echo(f"Job {there.id} is left alone for {span(for_s)}, until {clock(exemption.until)} ({zone()})")
    return 0


def _against(job: Job, exemption: exemptions.ExemptionRequest, found: Policy, now: datetime) -> str | None:
    uid = os.getuid()
    if uid not in (0, job.uid):
        return "it is not yours"
    if not job.allocated:
        return f"it does not run: it is {job.state}"
    if exemptions.has_request(job):
        return "an exemption was requested before; only one is allowed for each attempt"
    try:
        exemptions.check(exemption, found.keep, now)
    except AffinodeError as error:
        return str(error)
    return None


def _write(config: Config, exemption: Keep, job: str, now: datetime) -> bool:
    """Store the exemption in the database right away; ``False`` if this user may not write there."""
    try:
        with Repository.open(config.db_url, create=False) as store:
            log = ZombieLog(store.engine)
            if log.keep(exemption) is None:
                who = Who.am_i()
                log.record([exemptions.record(exemption, job, who.run, who.actor, now)])
    except AffinodeError:
        return False
    return True
