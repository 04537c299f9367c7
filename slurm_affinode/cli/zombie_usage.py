"""``slurm-affinode zombies users`` and ``queue``: who uses how much, and who waits for how long."""

from __future__ import annotations

import dataclasses
import functools
from datetime import UTC, datetime
from typing import Any

import click
import polars as pl

from slurm_affinode.analysis import runs, usage
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.cli.options import (
    When,
    clock,
    config_options,
    json_option,
    print_json,
    print_table,
    slurm_options,
    warn,
    zone,
)
from slurm_affinode.config import Config
from slurm_affinode.core.spans import span
from slurm_affinode.slurm.backends import open_client
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.schema import JOBS
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import intake
from slurm_affinode.workflow import zombie_live_misfits as live
from slurm_affinode.workflow.zombies import COLUMNS, Snapshot

_USERS_EPILOG = """\b
Examples:
  slurm-affinode zombies users --since 7d                    most GPU-hours first
  slurm-affinode zombies users --since 7d --by jobs          every job, with and without GPUs, and how they ended
  slurm-affinode zombies users --live --by cores             who has the most CPU cores now
  slurm-affinode zombies users --live --group job --by gpus  the largest jobs
  slurm-affinode zombies users --since 30d --group account --by core-hours
"""
_QUEUE_EPILOG = """\b
Examples:
  slurm-affinode zombies queue                               the longest wait first, by stored accounting
  slurm-affinode zombies queue --live --partition gpu        as it is now
  slurm-affinode zombies queue --live --gpus --json
"""


def _filters(function: Any) -> Any:
    options = [
        config_options,
        slurm_options,
        click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Only this cluster. Repeatable."),
        click.option("--partition", "-p", "partitions", multiple=True, metavar="NAME", help="Only this partition."),
        click.option("--account", "-A", "accounts", multiple=True, metavar="NAME", help="Only this account."),
        click.option("--user", "-u", "users", multiple=True, metavar="NAME", help="Only this user."),
        click.option("--live", "now", is_flag=True, help="As it is now: Slurm is asked."),
        click.option("--top", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="The first N."),
        json_option,
    ]
    return functools.reduce(lambda made, option: option(made), reversed(options), function)


def _snapshot(config: Config) -> Snapshot:
    with open_client(config.slurm.backend) as client:  # type: ignore[arg-type]
        return Snapshot(_cluster(config, client), client.overview(), ())


def _cluster(config: Config, client: SlurmClient) -> str:
    return config.cluster.name or client.config().get("ClusterName") or "default"


def _query(since: datetime, until: datetime, filters: dict[str, tuple[str, ...]]) -> WasteQuery:
    clusters, partitions, accounts, users = (filters[name] for name in ("clusters", "partitions", "accounts", "users"))
    return WasteQuery(since, until, clusters, partitions, accounts, users, zone=zone())


@click.command(epilog=_USERS_EPILOG)
@_filters
@click.option("--since", type=When(), default="7d", show_default=True, metavar="TIME", help="Begin.")
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End, not included.")
@click.option("--group", type=click.Choice(usage.GROUPS), default="user", show_default=True, help="A row for each.")
@click.option("--by", type=click.Choice(tuple(usage.ORDERS)), help="Order.  [default: gpu-hours; with --live gpus]")
def users(
    *, config: Config, now: bool, top: int, as_json: bool, since: datetime, until: datetime, group: str,
    by: str | None, **filters: tuple[str, ...],
) -> int:  # fmt: skip
    """Who uses how much: jobs with and without GPUs, GPU-hours, core-hours, what runs, what waits, how jobs ended."""
    moment = datetime.now(UTC)
    if now:
        seen = _snapshot(config)
        since, until = moment, moment
        jobs, pending = live.frame(seen, {}).filter(pl.col("end").is_null()), live.pending(seen)
        earliest = jobs["start"].min()
        query = _query(earliest if isinstance(earliest, datetime) else moment, moment, filters)
    else:
        query = _query(since, until, filters)
        with Repository.open(config.db_url, create=False) as store:
            jobs, pending = store.jobs(since, until, columns=COLUMNS), store.pending(until, columns=COLUMNS)
            query = intake.with_known(query, store, moment)
        intake.check_known(query, jobs, moment)
    late = runs.caution(query, pl.concat([jobs.select("cluster"), pending.select("cluster")]), moment)
    order = usage.ORDERS[by or ("gpus" if now else "gpu-hours")]
    rows = usage.usage(jobs, pending, query, moment, group=group)
    rows = rows.sort(order, "jobs", group, descending=[True, True, False], nulls_last=True)
    if as_json:
        print_json({"source": "live" if now else "history", "since": since, "until": until, "group": group,
                    "notes": [late] if late else [], "rows": rows.head(top).to_dicts()})  # fmt: skip
        return 0
    if late:
        warn(late)
    shown = ["jobs", "gpu_jobs", "running", "waiting", "gpus_now", "cores_now"]
    shown += [] if now else ["gpu_hours", "core_hours", *usage.STATES]
    whose = "user" if group == "job" else "partitions"
    print_table(
        [group, *(name.replace("_", " ") for name in shown), whose],
        [[row[group] or "?", *(_amount(row[name]) for name in shown), row["users" if group == "job" else "partitions"]]
         for row in rows.head(top).iter_rows(named=True)],
        right=[name.replace("_", " ") for name in shown],
    )  # fmt: skip
    if rows.height > top:
        click.echo(f"{rows.height - top} more: --top {rows.height}")
    return 0


def _amount(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


@click.command(epilog=_QUEUE_EPILOG)
@_filters
@click.option("--gpus", "gpu_only", is_flag=True, help="Only jobs that ask for GPUs.")
def queue(
    *, config: Config, now: bool, top: int, as_json: bool, gpu_only: bool, **filters: tuple[str, ...]
) -> int:  # fmt: skip
    """Who waits, the longest wait first: since when a job could have started, for what, and why it does not."""
    moment = datetime.now(UTC)
    query, late = _query(moment, moment, filters), ""
    if now:
        found = usage.waits_now(_snapshot(config).jobs, query, moment)
    else:
        with Repository.open(config.db_url, create=False) as store:
            pending = store.pending(moment, columns=tuple(JOBS))
            query = intake.with_known(query, store, moment)
        found = usage.waits_of(pending, query, moment)
        late = runs.caution(query, pending, moment)
        if late and not as_json:
            warn(f"{late}; --live asks Slurm")
    found = [one for one in found if one.gpus or not gpu_only]
    if as_json:
        print_json({"source": "live" if now else "history", "at": moment, "waiting": len(found),
                    "notes": [late] if late else [],
                    "jobs": [dataclasses.asdict(one) for one in found[:top]]})  # fmt: skip
        return 0
    if not found:
        click.echo("Nobody waits.")
        return 0
    print_table(
        ("job", "user", "partition", "qos", "GPUs", "cores", "nodes", "waits", f"submitted ({zone()})", "reason"),
        [(one.id, one.user, one.partition, one.qos, one.gpus, one.cores, one.nodes, span(one.waited_s),
          "" if one.submitted is None else clock(one.submitted), one.reason) for one in found[:top]],
        right=("GPUs", "cores", "nodes", "waits"),
    )  # fmt: skip
    if len(found) > top:
        click.echo(f"{len(found) - top} more: --top {len(found)}")
    return 0
