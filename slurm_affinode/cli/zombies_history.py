"""``slurm-affinode zombies history``."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.text import counted
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import (
    When,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    warn,
    zone,
)
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import RESULTS

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
        print_json([dataclasses.asdict(row) for row in rows])
        return 0
    print_table(
        (f"at ({zone()})", "who", "verb", "result", "job", "user", "node", "what"),
        [
            (clock(row.time, seconds=True), row.actor, row.verb, row.result, row.job, row.user, row.node, row.reason)
            for row in rows
        ],
        whole=(f"at ({zone()})",),
        minor=("who", "node", "user", "verb"),
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
    verb = "deleted" if yes else "would be deleted"
    echo(f"{counted(count, 'record')} from before {clock(before)} ({zone()}) {verb}")
    if count and not yes:
        warn("nothing was deleted; add --yes")
    return 0
