"""``slurm-affinode report users`` and ``report queue``: resource use by user, and pending jobs by waiting time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import polars as pl

from slurm_affinode.analysis import queue_impact, queue_outlook, runs, usage
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import MODEL_FILE, Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted, span
from slurm_affinode.cli.command import Command, command
from slurm_affinode.cli.options import (
    When,
    clock,
    config_options,
    echo,
    json_option,
    print_json,
    print_table,
    slurm_options,
    warn,
    zone,
)
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline import stored_accounting
from slurm_affinode.slurm.accounting.schema import JOBS
from slurm_affinode.slurm.client import open_client
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.zombies import live
from slurm_affinode.zombies.find import COLUMNS, Request, Snapshot

if TYPE_CHECKING:
    from slurm_affinode.analysis.queue_outlook import GpuOutlook
    from slurm_affinode.model.finding import Finding

_USERS_EPILOG = """\b
Examples:
  slurm-affinode report users --since 7d                    most GPU-hours first
  slurm-affinode report users --since 7d --by jobs          all jobs, with and without GPUs, and their final states
  slurm-affinode report users --live --by cores             most CPU cores now
  slurm-affinode report users --live --group job --by gpus  the largest jobs
  slurm-affinode report users --since 30d --group account --by core-hours
"""
_QUEUE_EPILOG = """\b
Examples:
  slurm-affinode report queue                               longest wait first, from stored accounting
  slurm-affinode report queue --live --partition gpu        live
  slurm-affinode report queue --live --gpus --idle          and the idle jobs in front of each job
  slurm-affinode report queue --live --gpus --json
"""


def _filters(function: Any) -> Any:
    options = [
        config_options,
        slurm_options,
        click.option("--cluster", "clusters", multiple=True, metavar="NAME", help="Select a cluster; may be repeated"),
        click.option("--partition", "-p", "partitions", multiple=True, metavar="NAME", help="Select a partition"),
        click.option("--account", "-A", "accounts", multiple=True, metavar="NAME", help="Select an account"),
        click.option("--user", "-u", "users", multiple=True, metavar="NAME", help="Select a user"),
        click.option("--live", "now", is_flag=True, help="Query the live Slurm"),
        click.option(
            "--top", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Show the first N rows"
        ),
        click.option("--wide", is_flag=True, help="Show all columns, whatever the width of the terminal"),
        json_option,
    ]
    return functools.reduce(lambda command, option: option(command), reversed(options), function)


def _snapshot(config: Config) -> Snapshot:
    with open_client(config.slurm.backend, warned=warn) as client:  # type: ignore[arg-type]
        return Snapshot(_cluster(config, client), client.overview(), ())


def _cluster(config: Config, client: SlurmClient) -> str:
    return config.cluster.name or client.config().get("ClusterName") or "default"


def _query(since: datetime, until: datetime, filters: dict[str, tuple[str, ...]]) -> WasteQuery:
    clusters, partitions, accounts, users = (filters[name] for name in ("clusters", "partitions", "accounts", "users"))
    return WasteQuery(since, until, clusters, partitions, accounts, users, zone=zone())


@command(epilog=_USERS_EPILOG)
@_filters
@click.option("--since", type=When(), default="7d", show_default=True, metavar="TIME", help="Begin at TIME")
@click.option("--until", type=When(), default="now", show_default=True, metavar="TIME", help="End before TIME")
@click.option(
    "--group", type=click.Choice(usage.GROUPS), default="user", show_default=True, help="Show one row per GROUP"
)
@click.option(
    "--by", type=click.Choice(tuple(usage.ORDERS)), help="Sort by this column  [default: gpu-hours; gpus with --live]"
)
def users(
    *, config: Config, now: bool, top: int, wide: bool, as_json: bool, since: datetime, until: datetime, group: str,
    by: str | None, **filters: tuple[str, ...],
) -> int:  # fmt: skip
    """Report usage by user, account or job: jobs, GPU-hours, core-hours, running and pending jobs, final states."""
    moment = datetime.now(UTC)
    if now:
        snapshot = _snapshot(config)
        since, until = moment, moment
        jobs, pending = live.frame(snapshot, {}).filter(pl.col("end").is_null()), live.pending(snapshot)
        earliest = jobs["start"].min()
        query = _query(earliest if isinstance(earliest, datetime) else moment, moment, filters)
    else:
        query = _query(since, until, filters)
        with Repository.open(config.db_url, create=False) as store:
            jobs, pending = store.jobs(since, until, columns=COLUMNS), store.pending(until, columns=COLUMNS)
            query = stored_accounting.with_known(query, store, moment)
        stored_accounting.check_known(query, jobs, moment)
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
        minor=(whose, "oom", "timeout", "cancelled", "failed", "completed", "core hours", "cores now", "waiting",
               "gpus now", "running", "gpu jobs"),
        wide=wide,
    )  # fmt: skip
    if not now:
        echo(f"Running, waiting and now: at {clock(until)} ({zone()})")
    if rows.height > top:
        echo(f"{rows.height - top} more: --top {rows.height}")
    return 0


def _amount(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


@command(epilog=_QUEUE_EPILOG)
@_filters
@click.option("--gpus", "gpu_only", is_flag=True, help="Select jobs that request GPUs")
@click.option("--idle", is_flag=True, help="Name the idle jobs whose GPUs a job could use (--live; queries the nodes)")
def queue(
    *, config: Config, now: bool, top: int, wide: bool, as_json: bool, gpu_only: bool, idle: bool,
    **filters: tuple[str, ...],
) -> int:  # fmt: skip
    """Report pending jobs, longest wait first: eligible time, requested resources, and the reason.

    With --live, also when as many GPUs as a job requests become free in its partitions: by the limits of the running
    jobs, and by their predicted run times, if "predict train" has written a model.
    """
    if idle and not now:
        raise click.UsageError("--idle needs --live")
    moment = datetime.now(UTC)
    query, late = _query(moment, moment, filters), ""
    outlook = _Outlook({}, None, None, ())
    if now:
        snapshot, outlook = _outlook(config, moment, idle=idle)
        waits = usage.waits_now(snapshot.jobs, query, moment)
    else:
        with Repository.open(config.db_url, create=False) as store:
            pending = store.pending(moment, columns=tuple(JOBS))
            query = stored_accounting.with_known(query, store, moment)
        waits = usage.waits_of(pending, query, moment)
        late = runs.caution(query, pending, moment)
        if late and not as_json:
            warn(f"{late}; --live queries Slurm")
    waits = [job for job in waits if job.gpus or not gpu_only]
    if as_json:
        print_json({"source": "live" if now else "history", "at": moment, "waiting": len(waits),
                    "notes": [*([late] if late else []), *outlook.notes], "predictor": outlook.predictor,
                    "jobs": [{**dataclasses.asdict(job), **outlook.of(job.id)} for job in waits[:top]]})  # fmt: skip
        return 0
    for note in outlook.notes:
        warn(note)
    if not waits:
        echo("No pending jobs")
        return 0
    columns = outlook.columns(moment)
    print_table(
        ("job", "user", "partition", "qos", "GPUs", "cores", "nodes", "waits", f"submitted ({zone()})", "reason",
         *columns),
        [(job.id, job.user, job.partition, job.qos, job.gpus, job.cores, job.nodes, span(job.waited_s),
          "" if job.submitted is None else clock(job.submitted), job.reason,
          *(texts.get(job.id, "") for texts in columns.values())) for job in waits[:top]],
        right=("GPUs", "cores", "nodes", "waits"),
        whole=(f"submitted ({zone()})",),
        minor=("qos", "nodes", "cores", f"submitted ({zone()})", "partition", "predicted", "reason",
               "GPUs free in"),
        wide=wide,
    )  # fmt: skip
    if len(waits) > top:
        echo(f"{len(waits) - top} more: --top {len(waits)}")
    return 0


@dataclass(frozen=True, slots=True)
class _Outlook:
    """When pending jobs could start, by shown ID."""

    gpus: Mapping[str, GpuOutlook]
    idle: Mapping[str, Sequence[Finding]] | None
    """Idle jobs whose GPUs a job could use; ``None``: not searched for."""
    predictor: str | None
    """``None``: there are no predictions."""
    notes: tuple[str, ...]

    def of(self, shown_id: str) -> dict[str, Any]:
        """Return the keys of a job in the JSON output."""
        gpus = self.gpus.get(shown_id)
        entry: dict[str, Any] = {} if gpus is None else dataclasses.asdict(gpus)
        entry.pop("job_id", None)
        if self.idle is not None:
            entry["idle_jobs"] = [
                {
                    "job": _job_id(finding),
                    "user": finding.user,
                    "idle_gpus": queue_impact.idle_gpus(finding),
                    "since": finding.since,
                }
                for finding in self.idle.get(shown_id, ())
            ]
        return entry

    def columns(self, now: datetime) -> dict[str, dict[str, str]]:
        """Return the columns of the table: heading -> shown ID -> text."""
        texts: dict[str, dict[str, str]] = {}
        if self.gpus:
            texts["GPUs free in"] = {name: _in(outlook.enough_by_limits, now) for name, outlook in self.gpus.items()}
        if self.gpus and self.predictor is not None:
            texts["predicted"] = {name: _in(outlook.enough_by_predictions, now) for name, outlook in self.gpus.items()}
        if self.idle is not None:
            texts["behind idle jobs"] = {
                name: ", ".join(
                    f"{_job_id(finding)} ({finding.user or '?'}, {counted(queue_impact.idle_gpus(finding), 'GPU')})"
                    for finding in findings[:_SHOWN])
                + (f", {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else "")
                for name, findings in self.idle.items()
            }  # fmt: skip
        return texts


_SHOWN = 3


def _job_id(finding: Finding) -> str:
    return "?" if finding.job is None else finding.job.id


def _in(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "no limit"
    return "now" if moment <= now else span((moment - now).total_seconds())


def _outlook(config: Config, now: datetime, *, idle: bool) -> tuple[Snapshot, _Outlook]:
    notes: list[str] = []
    idle_jobs: Mapping[str, Sequence[Finding]] | None = None
    with open_client(config.slurm.backend, warned=warn) as client:  # type: ignore[arg-type]
        snapshot = Snapshot(_cluster(config, client), client.overview(), client.nodes())
    if idle:
        request = Request(kinds=("squatter", "idle-allocation"))
        assessment = live.find_live(config, request, slurm=functools.partial(open_client, config.slurm.backend))  # type: ignore[arg-type]
        notes += assessment.notes
        types = {job.job_id: job.gpus_allocated.kind for job in snapshot.jobs if job.gpus_allocated}
        idle_jobs = queue_impact.blockers(
            assessment.findings, queue_impact.PendingQueue(live.waiting(snapshot.jobs, snapshot.cluster, now)),
            nodes=snapshot.nodes,
            gpu_type=lambda finding: None if finding.job is None else types.get(finding.job.job_id),
        )  # fmt: skip
    expected, predictor, problem = _expected(config, snapshot, now)
    if problem:
        notes.append(problem)
    shown = {job.job_id: job.id for job in snapshot.jobs}
    rows = {
        shown[outlook.job_id]: outlook
        for outlook in queue_outlook.outlooks(snapshot.jobs, snapshot.nodes, now, expected)
    }
    return snapshot, _Outlook(rows, idle_jobs, predictor, tuple(notes))


def _expected(config: Config, snapshot: Snapshot, now: datetime) -> tuple[dict[int, datetime] | None, str | None, str]:
    """Return the expected ends of the running jobs, the predictor, and why there are none although there is a model."""
    path = config.state_dir / MODEL_FILE
    if not path.exists():
        return None, None, ""
    from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - only with a model
    from slurm_affinode.prediction import model_file  # noqa: PLC0415

    try:
        model = model_file.read(path)
        ends = prediction.expected_ends(config, snapshot.jobs, snapshot.cluster, model, now)
    except AffinodeError as error:
        return None, None, f"run times are not predicted: {error}"
    return ends, next(target.predictor for target in model.targets if target.target == "run_s"), ""


def _renamed(current: click.Command, old: str, new: str) -> click.Command:
    """Return ``current`` under its old name, which prints the new one on standard error."""

    def called(**values: Any) -> Any:
        warn(f"slurm-affinode: {old!r} is now {new!r}; the old name will be removed")
        return click.get_current_context().invoke(current, **values)

    return Command(
        old.rsplit(maxsplit=1)[-1],
        params=current.params,
        callback=called,
        help=current.help,
        epilog=current.epilog,
        hidden=True,
    )


zombies_users = _renamed(users, "zombies users", "report users")
zombies_queue = _renamed(queue, "zombies queue", "report queue")
