"""What ``zombies list`` shows: findings from the stored history, with what they keep from the queue.

One read of accounting and one pass over the GPU history for a whole run of the command, however many jobs there are;
Slurm is asked once for its nodes, where it can be asked, and not at all with ``slurm=None``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from slurm_affinode.analysis import leftover_memory, misfits, squatters
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.queue import Queue, Waiting, waits, with_impact
from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.analysis.squatters import Held
from slurm_affinode.config import Config, read_small
from slurm_affinode.core import signature_file
from slurm_affinode.core.signature import Signature
from slurm_affinode.core.signature_file import SignatureFile
from slurm_affinode.core.spans import span
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.history.store import SampleStore
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import CPU_KINDS, KINDS, USER_KINDS, Finding
from slurm_affinode.model.signals import FREE_MIB
from slurm_affinode.resources import asset_dir
from slurm_affinode.slurm import jobid, units
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.schema import JOBS
from slurm_affinode.slurm.times import site_zone
from slurm_affinode.store.repository import Repository
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import intake
from slurm_affinode.workflow.zombie_orphans import XIDS
from slurm_affinode.zombieconfig import NodeClass
from slurm_affinode.zones import named, shown

History = Callable[[], AbstractContextManager[SampleStore]]
Slurm = Callable[[], SlurmClient]

NO_HISTORY = "there is no GPU history: whether GPUs are idle is unknown"
FRESH_S = 900.0
"""A history that ends longer ago than this is said to be old."""
HELD_S = 3600.0
"""GPU memory that no job has is told of when it is held for so long."""
_UNREAD = frozenset({"comment", "admin_comment", "work_dir"})
COLUMNS = tuple(name for name in JOBS if name not in _UNREAD)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. Empty filters do not filter."""

    since: datetime | None = None
    """``None``: ``zombies.look_back`` before the end."""
    until: datetime | None = None
    """``None``: the end of the history, and now at the latest."""
    clusters: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    variants: frozenset[str] = frozenset()
    """Of idle allocations: only these."""
    min_score: float = 0.0
    window_s: float | None = None
    """In place of the windows of the signatures."""
    running_only: bool = False

    @property
    def wanted(self) -> frozenset[str]:
        """Kinds to look for: those asked for, else all that concern GPUs."""
        return frozenset(self.kinds) or frozenset(KINDS) - CPU_KINDS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What Slurm said, once for the whole run."""

    cluster: str
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What was found, and how well it could be looked."""

    findings: tuple[Finding, ...]
    since: datetime
    until: datetime
    source: str
    jobs: int = 0
    """Runs with GPUs that were looked at."""
    gpus: int = 0
    """Pairs of run and GPU that were looked at."""
    unmeasured: int = 0
    """GPUs of runs that nothing is known of."""
    notes: tuple[str, ...] = ()
    """What is not known, for people."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Kind -> findings, before ``min_score`` and filters by kind."""
    snapshot: Snapshot | None = None
    """Of a live look."""


def signatures(config: Config, path: Path | None = None) -> SignatureFile:
    """The signatures of ``path``, else of the site, else those that come with the package. Raises ``InputError``."""
    where = path or config.zombies.signatures or asset_dir("reports") / "signatures.toml"
    file = signature_file.parse(read_signatures(where))
    if file.faults:
        first = file.faults[0]
        more = f" (and {len(file.faults) - 1} more)" if len(file.faults) > 1 else ""
        hint = (
            first.hint
            if len(file.faults) == 1 and first.hint
            else f"all of them: slurm-affinode zombies signatures check {where}"
        )
        raise InputError(f"{first.text}{more}", where=f"{where}:{first.line}", hint=hint)
    return file


def read_signatures(where: Path) -> str:
    """The text of a file of signatures. Raises ``InputError``."""
    try:
        return read_small(where).decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(where)) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=str(where)) from error


def find(
    config: Config,
    request: Request,
    *,
    history: History | None = None,
    slurm: Slurm | None = None,
    now: datetime | None = None,
    step: Callable[[str], None] | None = None,
) -> Found:
    """Findings from what is stored, the most GPU-hours held first.

    Raises ``AffinodeError`` where there is nothing to look at, ``UnreachableError`` where the store does not answer.
    """
    moment = now or datetime.now(UTC)
    say = step or (lambda _: None)
    file = signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as samples:
        query, notes = interval(config, request, samples, moment)
        say("reading accounting")
        with Repository.open(config.db_url, create=False) as store:
            jobs = store.jobs(query.since, query.until, columns=COLUMNS)
            gpus = store.allocation_gpus(query.since, query.until)
            pending = store.pending(query.until, columns=COLUMNS, since=query.since)
            query = intake.with_known(query, store, moment)
            intake.check_known(query, jobs, moment)
            if jobs.is_empty():
                raise AffinodeError(
                    f"no job ran between {shown(query.since, query.zone)} and {named(query.until, query.zone)}",
                    hint="take accounting in first: slurm-affinode ingest sacct --since 2d",
                )
        say("following the GPUs")
        held = hold(query, jobs, gpus, samples, file.signatures, moment)
        nodes, trouble = slurm_nodes(slurm)
        names = frozenset(node.name for node in nodes)
        rule = leftover_memory.Rule(
            FREE_MIB, request.window_s or HELD_S, min(map(query.end_of, jobs["cluster"].unique())), XIDS, names
        )
        left = leftover_memory.find(held, samples, rule) if "orphan-memory" in request.wanted else []
    found = judge(config, request, held, file.signatures, waiting(jobs, pending, query), nodes,
                  notes=(*notes, *trouble, *strangers(request, nodes)), more=left)  # fmt: skip
    late = job_runs.caution(query, jobs, moment)
    return replace(found, notes=(*found.notes, late)) if late else found


def strangers(request: Request, nodes: Sequence[Node]) -> list[str]:
    """What is said of names of nodes that Slurm, where it was asked, does not know: nothing is found there."""
    known = {node.name for node in nodes}
    return [f"{name}: Slurm knows no node of that name" for name in request.nodes if known and name not in known]


def interval(config: Config, request: Request, history: SampleStore, now: datetime) -> tuple[WasteQuery, list[str]]:
    """The interval to look at: by default up to the last sample, so that what is old is not taken for new."""
    notes: list[str] = []
    span_ = history.span()
    until, zone = request.until, site_zone(config.cluster.timezone)
    if until is None:
        until = now
        if span_ is not None and span_[1] < now:
            step_ms = history.devices(span_[1] - timedelta(hours=1))["step_ms"].median()
            grace = timedelta(milliseconds=float(step_ms) if isinstance(step_ms, int | float) else 0.0)
            until = min(now, span_[1] + max(grace, timedelta(seconds=1)))
            if (now - until).total_seconds() > FRESH_S:
                ago = span((now - until).total_seconds())
                notes.append(f"the GPU history ends {ago} ago: this is how it was at {named(until, zone)}")
    if span_ is None:
        notes.append(NO_HISTORY)
    since = request.since or until - timedelta(seconds=parse_span_s(config.zombies.look_back))
    if until <= since:
        raise AffinodeError("the interval ends before it begins", hint="choose --since before --until")
    filters: dict[str, Any] = {"clusters": request.clusters, "partitions": request.partitions,
                               "accounts": request.accounts, "users": request.users}  # fmt: skip
    gaps = Thresholds(max_gap_steps=config.idle.max_gap_steps, floors_pct=config.agent.floors_pct)
    return WasteQuery(since, until, **filters, thresholds=gaps, zone=zone), notes


def hold(  # noqa: PLR0917
    query: WasteQuery,
    jobs: pl.DataFrame,
    gpus: pl.DataFrame,
    history: SampleStore,
    chosen: Sequence[Signature],
    now: datetime,
) -> Held:
    """Join, and follow the GPUs of the runs that pass the filters.

    What accounting says of the use of cores and host memory of a run that goes on is of those of its steps that have
    ended: of the run it is unknown.
    """
    ended = pl.col("end").is_not_null()
    jobs = jobs.with_columns(pl.when(ended).then(name).alias(name) for name in ("total_cpu_s", "max_rss_bytes"))
    return squatters.hold(query, jobs, gpus, history, [one.compute.at_most_pct for one in chosen], now)


def judge(  # noqa: PLR0917
    config: Config,
    request: Request,
    held: Held,
    chosen: Sequence[Signature],
    queue: Iterable[Waiting] | None,
    nodes: Sequence[Node],
    *,
    notes: Iterable[str] = (),
    more: Iterable[Finding] = (),
) -> Found:
    """The findings of what is held, and ``more``. ``queue``: ``None`` where it is not known who waited."""
    wanted = request.wanted
    classes = {**config.zombies.nodes, **node_classes(nodes)}
    rules = config.zombies.misfits
    found = [*squatters.find(held, chosen), *more]
    found += misfits.find(held, rules, classes, min_run_s=parse_span_s(rules.min_run), kinds=wanted,
                          gpu_partitions=gpu_partitions(nodes))  # fmt: skip
    types = {node: kind for node, kind in held.devices.select("node", "model").iter_rows() if kind is not None}
    by_run = {
        (cluster, job): kind for cluster, job, kind in held.runs.select("cluster", "job_id", "gpu_type").iter_rows()
    }

    def gpu_type(one: Finding) -> str | None:
        named = by_run.get((one.cluster, one.job.job_id)) if one.job else None
        return named if named is not None else type_of(types.get(one.nodes[0])) if one.nodes else None

    if queue is not None:
        found = with_impact(found, Queue(queue), gpu_type=gpu_type, nodes=nodes)
    about = held.runs.filter(pl.col("wanted") & (pl.col("gpus").fill_null(0) > 0))
    pairs = held.pairs.filter(pl.col("run").is_in(about["run"].implode()))
    measured = int((held.any.samples > 0).sum())
    return select(
        Found((), held.query.since, held.query.until, "history", about.height, pairs.height,
              max(0, int(about["gpus"].sum() or 0) - measured), tuple(notes)),
        found, request,
    )  # fmt: skip


def select(about: Found, found: Iterable[Finding], request: Request) -> Found:
    """``about`` with the findings that the request asks for, most GPU-hours first; its counts are of all ``found``."""
    counts: dict[str, int] = {}
    kept: list[Finding] = []
    asked = {"clusters": request.clusters, "partitions": request.partitions, "accounts": request.accounts,
             "users": request.users}  # fmt: skip
    for one in found:
        counts[one.kind] = counts.get(one.kind, 0) + 1
        if one.kind not in request.wanted or one.score < request.min_score:
            continue
        if request.variants and one.kind == "idle-allocation" and one.variant not in request.variants:
            continue
        if request.nodes and not set(one.nodes) & set(request.nodes):
            continue
        if request.running_only and one.job is not None and not one.job.running:
            continue
        # A finding about a user is of no partition: it was made of the jobs of those that were asked for.
        given = {key: names for key, names in asked.items() if one.kind not in USER_KINDS or key != "partitions"}
        if any(names and not {*(getattr(one, key[:-1]) or "").split(",")} & {*names} for key, names in given.items()):
            continue
        kept.append(one)
    order = list(KINDS)
    kept.sort(key=lambda one: (-(one.held_gpu_hours or 0.0), order.index(one.kind), -one.score, one.key))
    return replace(about, findings=tuple(kept), counts=counts)


def type_of(model: str | None) -> str | None:
    """The GRES type that a model most likely has: ``a100`` for ``NVIDIA A100-SXM4-80GB``."""
    if model is None:
        return None
    words = model.lower().replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), None)


def slurm_nodes(slurm: Slurm | None) -> tuple[tuple[Node, ...], list[str]]:
    """Slurm's nodes by one request, and what went wrong."""
    if slurm is None:
        return (), []
    try:
        with slurm() as client:
            return client.nodes(), []
    except AffinodeError as error:
        return (), [f"Slurm was not asked for its nodes: {error}"]


def node_classes(nodes: Iterable[Node]) -> dict[str, NodeClass]:
    """What Slurm says its GPU nodes have."""
    return {
        node.name: NodeClass(node.cpus, 0 if node.gpus is None else node.gpus.count, node.memory_mib / 1024)
        for node in nodes
    }


def gpu_partitions(nodes: Iterable[Node]) -> frozenset[str]:
    """Partitions all of whose nodes have GPUs; none where every node of the cluster has."""
    all_nodes = tuple(nodes)
    if all(node.gpus for node in all_nodes):
        return frozenset()
    without = {name for node in all_nodes if not node.gpus for name in node.partitions}
    return frozenset(name for node in all_nodes for name in node.partitions) - without


def waiting(jobs: pl.DataFrame, pending: pl.DataFrame, query: WasteQuery) -> list[Waiting] | None:
    """The GPU jobs of accounting that waited: those that have started since, that were cancelled, that still wait.

    ``None``: nobody knows, since accounting was taken in without the time from which on a job could have started.
    """
    if (
        jobs.height
        and jobs["eligible"].null_count() == jobs.height
        and pending["eligible"].null_count() == pending.height
    ):
        return None
    frame = pl.concat([jobs, pending]).filter(
        (pl.coalesce("req_gpus", "gpus").fill_null(0) > 0)
        & pl.col("eligible").is_not_null()
        & (pl.col("start").is_null() | (pl.col("start") > pl.col("eligible")))
    )
    wanted = frame.select("job_id", "array_job_id", "array_task_id", "array_spec", "cluster", "partition", "req_gpus",
                          "gpus", "eligible", "start", "end", "req_tres", "nodes", "constraints", "user",
                          "reason")  # fmt: skip
    return [_waiting(row, query.end_of(row["cluster"])) for row in wanted.iter_rows(named=True) if waits(row["reason"])]


def _waiting(row: dict[str, Any], until: datetime) -> Waiting:
    task = row["array_task_id"]
    asked = units.parse_tres(row["req_tres"] or "")
    kinds = {name.split(":")[1] for name in asked if name.startswith("gres/gpu:")}
    together = row["array_spec"] if task is None and row["start"] is None else None
    tasks, most = jobid.tasks_in(together)
    plain = str(row["job_id"]) if together is None else f"{row['array_job_id'] or row['job_id']}_[{together}]"
    return Waiting(
        id=plain if task is None else f"{row['array_job_id']}_{task}",
        cluster=row["cluster"],
        partitions=tuple((row["partition"] or "").split(",")),
        gpus=row["req_gpus"] or row["gpus"] or 0,
        eligible=row["eligible"],
        until=min(row["start"] or row["end"] or until, until),
        gpu_type=next(iter(kinds)) if len(kinds) == 1 else None,
        nodes=row["nodes"] or _number(asked.get("node")) or 1,
        constraint=row["constraints"],
        user=row["user"],
        tasks=tasks,
        most=most,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
