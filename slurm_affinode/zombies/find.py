"""``zombies list``: findings from stored samples, with their impact on the queue.

One read of accounting and one pass over the samples serve all jobs. Slurm is queried once for its nodes, if available,
and not at all with ``slurm=None``.

Averages per run (ClusterCockpit, jobstats) are accepted too. Only an average of exactly 0 proves that every moment was
0, so the limit of activity is 0 there, whatever the signatures say.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from slurm_affinode.analysis import leftover_memory, misfits, squatters
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.queue_impact import PendingJob, PendingQueue, waits, with_impact
from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.base.config import Config, NodeClass, read_small
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.spread import Spread, Spreading
from slurm_affinode.base.text import span
from slurm_affinode.base.times import named, parse_span_s, shown
from slurm_affinode.base.toml_schema import TomlError
from slurm_affinode.core import signatures
from slurm_affinode.core.signatures import Signature, SignatureFile
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics import averages
from slurm_affinode.metrics.averages import NOTE
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers import clustercockpit as cockpit
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import CPU_KINDS, KINDS, LIVE_KINDS, USER_KINDS, Finding
from slurm_affinode.model.gpu import FREE_MIB
from slurm_affinode.pipeline import stored_accounting
from slurm_affinode.slurm import identifiers, units
from slurm_affinode.slurm.accounting.schema import JOB_KEY, JOBS, conform
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.times import site_zone

History = Callable[[], AbstractContextManager[SampleStore]]
Slurm = Callable[[], SlurmClient]

NO_HISTORY = "there are no GPU metrics: whether GPUs are idle is unknown"
FRESH_S = 900.0
"""If the newest sample is older than this, a note says so."""
HELD_S = 3600.0
"""Minimum time for which GPU memory without a job is held before it is reported."""
_UNREAD = frozenset({"comment", "admin_comment", "work_dir"})
COLUMNS = tuple(name for name in JOBS if name not in _UNREAD)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for findings. Empty filters do not filter."""

    since: datetime | None = None
    """``None``: ``zombies.look_back`` before the end."""
    until: datetime | None = None
    """``None``: the end of the stored samples, at the latest now."""
    clusters: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    variants: frozenset[str] = frozenset()
    """Restrict idle allocations to these variants."""
    min_score: float = 0.0
    window_s: float | None = None
    """Overrides the windows of the signatures."""
    running_only: bool = False

    @property
    def requested_kinds(self) -> frozenset[str]:
        """Return the kinds to look for: the requested ones, else all that concern GPUs."""
        return frozenset(self.kinds) or frozenset(KINDS) - CPU_KINDS


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Slurm's jobs and nodes, queried once per run."""

    cluster: str
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Assessment:
    """Findings, and the coverage of the data behind them."""

    findings: tuple[Finding, ...]
    since: datetime
    until: datetime
    source: str
    jobs: int = 0
    """Attempts with GPUs that were examined."""
    gpus: int = 0
    """Pairs of attempt and GPU that were examined."""
    unmeasured: int = 0
    """Allocated GPUs that were not measured."""
    notes: tuple[str, ...] = ()
    """Gaps in the data, as messages to the user."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Kind -> findings, before ``min_score`` and filters by kind."""
    snapshot: Snapshot | None = None
    """Only set for live findings."""


def site_signatures(config: Config, path: Path | None = None) -> SignatureFile:
    """Return the signatures of ``path``, else of the site, else the built-in ones. Raises ``TomlError``."""
    where = path or config.zombies.signatures or asset_dir("reports") / "signatures.toml"
    file = signatures.parse(read_signatures(where))
    if file.faults:
        raise TomlError(str(where), file.faults)
    return file


def read_signatures(where: Path) -> str:
    """Read the text of a signature file. Raises ``InputError``."""
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
    spreading: Spreading | None = None,
) -> Assessment:
    """Return the findings from stored data, ordered by GPU-hours held. ``spreading``: to machines that read samples.

    Raises ``AffinodeError`` if no job ran in the interval, ``UnreachableError`` if the database does not respond.
    """
    moment = now or datetime.now(UTC)
    say = step or (lambda _: None)
    file = site_signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as samples:
        query, notes = interval(config, request, samples, moment)
        spread = None if spreading is None else spreading(query.since, query.until)
        say("reading accounting")
        with Repository.open(config.db_url, create=False) as store:
            jobs = store.jobs(query.since, query.until, columns=COLUMNS)
            gpus = store.allocation_gpus(query.since, query.until)
            pending = store.pending(query.until, columns=COLUMNS, since=query.since)
            query = stored_accounting.with_known(query, store, moment)
            stored_accounting.check_known(query, jobs, moment)
            if jobs.is_empty():
                raise AffinodeError(
                    f"no job ran between {shown(query.since, query.zone)} and {named(query.until, query.zone)}",
                    hint="ingest accounting first: slurm-affinode ingest sacct --since 2d",
                )
        say("following the GPUs")
        held_gpus = hold(query, jobs, gpus, samples, file.signatures, moment, spread=spread)
        nodes, trouble = slurm_nodes(slurm)
        names = frozenset(node.name for node in nodes)
        rule = leftover_memory.LeftoverSearch(
            FREE_MIB, request.window_s or HELD_S, {name: query.end_of(name) for name in jobs["cluster"].unique()}, names
        )
        leftovers = (
            leftover_memory.find(held_gpus, samples, rule, spread) if "orphan-memory" in request.requested_kinds else []
        )
    assessment = judge(config, request, held_gpus, file.signatures, waiting_jobs(jobs, pending, query), nodes,
                  notes=(*notes, *trouble, *strangers(request, nodes), *_only_live(request)),
                  more=leftovers)  # fmt: skip
    late = job_runs.caution(query, jobs, moment)
    return replace(assessment, notes=(*assessment.notes, late)) if late else assessment


def strangers(request: Request, nodes: Sequence[Node]) -> list[str]:
    """Return a note for each requested node that Slurm does not know; none if ``nodes`` is empty."""
    node_names = {node.name for node in nodes}
    return [
        f"{name}: Slurm knows no node of that name" for name in request.nodes if node_names and name not in node_names
    ]


def _only_live(request: Request) -> list[str]:
    """Return a note if the request names kinds that stored data do not show."""
    names = [kind for kind in request.kinds if kind in LIVE_KINDS]
    return [f"{', '.join(names)}: searched only with --live"] if names else []


def interval(config: Config, request: Request, history: SampleStore, now: datetime) -> tuple[WasteQuery, list[str]]:
    """Return the interval to examine, and notes. It ends by default at the last sample, so that old data is not
    presented as current."""
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
                notes.append(f"the GPU metrics end {ago} ago: findings are as of {named(until, zone)}")
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
    only: pl.DataFrame | None = None,
    spread: Spread | None = None,
) -> HeldGpus:
    """Join jobs and samples, and follow the GPUs of the attempts that pass the filters.

    CPU time and host memory of running jobs are set to unknown: accounting counts only their steps that have ended.
    For ``only`` and ``spread`` see ``squatters.hold``.
    """
    ended = pl.col("end").is_not_null()
    jobs = jobs.with_columns(pl.when(ended).then(name).alias(name) for name in ("total_cpu_s", "max_rss_bytes"))
    limits = [signature.compute.at_most_pct for signature in chosen]
    return squatters.hold(query, jobs, gpus, history, limits, now, only, spread)


def judge(  # noqa: PLR0917
    config: Config,
    request: Request,
    held_gpus: HeldGpus,
    chosen: Sequence[Signature],
    queue: Iterable[PendingJob] | None,
    nodes: Sequence[Node],
    *,
    notes: Iterable[str] = (),
    more: Iterable[Finding] = (),
) -> Assessment:
    """Return the findings among ``held_gpus``, and ``more``. ``queue``: ``None`` if the waiting jobs are unknown."""
    requested_kinds = request.requested_kinds
    classes = {**config.zombies.nodes, **node_classes(nodes)}
    rules = config.zombies.misfits
    findings = [*squatters.find(held_gpus, chosen), *more]
    findings += misfits.find(held_gpus, rules, classes, min_run_s=parse_span_s(rules.min_run), kinds=requested_kinds,
                          gpu_partitions=gpu_partitions(nodes))  # fmt: skip
    by_run = {tuple(key): kind for *key, kind in held_gpus.runs.select(*JOB_KEY, "gpu_type").iter_rows()}

    def gpu_type(finding: Finding) -> str | None:
        named = by_run.get((finding.cluster, finding.job.job_id, finding.job.submit)) if finding.job else None
        return named or types_of(finding)

    if queue is not None:
        findings = with_impact(findings, PendingQueue(queue), gpu_type=gpu_type, nodes=nodes)
    about = held_gpus.runs.filter(pl.col("selected") & (pl.col("gpus").fill_null(0) > 0))
    pairs = held_gpus.pairs.filter(pl.col("run").is_in(about["run"].implode()))
    measured = int((held_gpus.any.samples > 0).sum())
    return select(
        Assessment((), held_gpus.query.since, held_gpus.query.until, "history", about.height, pairs.height,
              max(0, int(about["gpus"].sum() or 0) - measured), tuple(notes)),
        findings, request,
    )  # fmt: skip


def select(about: Assessment, findings: Iterable[Finding], request: Request) -> Assessment:
    """Return ``about`` with the requested findings, ordered by GPU-hours held.

    Its counts cover all ``findings`` of the requested clusters.
    """
    counts: dict[str, int] = {}
    remaining: list[Finding] = []
    filters = {"clusters": request.clusters, "partitions": request.partitions, "accounts": request.accounts,
             "users": request.users}  # fmt: skip
    for finding in findings:
        if request.clusters and finding.cluster not in request.clusters:
            continue
        counts[finding.kind] = counts.get(finding.kind, 0) + 1
        if finding.kind not in request.requested_kinds or finding.score < request.min_score:
            continue
        if request.variants and finding.kind == "idle-allocation" and finding.variant not in request.variants:
            continue
        if request.nodes and not set(finding.nodes) & set(request.nodes):
            continue
        if request.running_only and finding.job is not None and not finding.job.running:
            continue
        # A finding about a user has no partition: it is already based on jobs in the requested ones.
        applicable = {
            key: names for key, names in filters.items() if finding.kind not in USER_KINDS or key != "partitions"
        }
        if any(
            names and not {*(getattr(finding, key[:-1]) or "").split(",")} & {*names}
            for key, names in applicable.items()
        ):
            continue
        remaining.append(finding)
    order = list(KINDS)
    remaining.sort(
        key=lambda finding: (-(finding.held_gpu_hours or 0.0), order.index(finding.kind), -finding.score, finding.key)
    )
    return replace(about, findings=tuple(remaining), counts=counts)


def type_of(model: str | None) -> str | None:
    """Return the likely GRES type of a model: ``a100`` for ``NVIDIA A100-SXM4-80GB``."""
    if model is None:
        return None
    words = model.lower().replace("-", " ").split()
    return next((word for word in words if any(c.isdigit() for c in word)), None)


def types_of(finding: Finding, models: Mapping[str, Collection[str | None]] = MappingProxyType({})) -> str | None:
    """Return the likely GRES types of the idle GPUs of a finding, joined by ``+``; ``None`` if that of one is unknown.

    ``models``: node -> the models of its GPUs, for a finding that names no GPUs.
    """
    flagged = {gpu.model for gpu in finding.flagged_gpus}
    gpu_models = flagged or {model for node in finding.nodes for model in models.get(node) or (None,)}
    kinds = [type_of(model) for model in gpu_models]
    return "+".join(sorted({kind for kind in kinds if kind})) if kinds and all(kinds) else None


def slurm_nodes(slurm: Slurm | None) -> tuple[tuple[Node, ...], list[str]]:
    """Return Slurm's nodes (one request), and a note if the request failed."""
    if slurm is None:
        return (), []
    try:
        with slurm() as client:
            return client.nodes(), []
    except AffinodeError as error:
        return (), [f"Slurm's nodes are unknown: {error}"]


def node_classes(nodes: Iterable[Node]) -> dict[str, NodeClass]:
    """Return the cores, GPUs and memory of each node, as configured in Slurm."""
    return {
        node.name: NodeClass(node.cpus, 0 if node.gpus is None else node.gpus.count, node.memory_mib / 1024)
        for node in nodes
    }


def gpu_partitions(nodes: Iterable[Node]) -> frozenset[str]:
    """Return the partitions in which every node has GPUs; none if every node of the cluster has."""
    all_nodes = tuple(nodes)
    if all(node.gpus for node in all_nodes):
        return frozenset()
    without = {name for node in all_nodes if not node.gpus for name in node.partitions}
    return frozenset(name for node in all_nodes for name in node.partitions) - without


def waiting_jobs(jobs: pl.DataFrame, pending: pl.DataFrame, query: WasteQuery) -> list[PendingJob] | None:
    """Return the GPU jobs in accounting that waited: started since, canceled, or still pending.

    ``None``: unknown, because accounting was ingested without eligible times.
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
    columns = frame.select("job_id", "array_job_id", "array_task_id", "array_spec", "cluster", "partition", "req_gpus",
                          "gpus", "eligible", "start", "end", "req_tres", "nodes", "constraints", "user",
                          "reason")  # fmt: skip
    return [
        _waiting(row, query.end_of(row["cluster"])) for row in columns.iter_rows(named=True) if waits(row["reason"])
    ]


def _waiting(row: dict[str, Any], until: datetime) -> PendingJob:
    task = row["array_task_id"]
    requested = units.parse_tres(row["req_tres"] or "")
    kinds = {name.split(":")[1] for name in requested if name.startswith("gres/gpu:")}
    together = row["array_spec"] if task is None and row["start"] is None else None
    tasks, most = identifiers.tasks_in(together)
    plain = str(row["job_id"]) if together is None else f"{row['array_job_id'] or row['job_id']}_[{together}]"
    return PendingJob(
        id=plain if task is None else f"{row['array_job_id']}_{task}",
        cluster=row["cluster"],
        partitions=tuple((row["partition"] or "").split(",")),
        gpus=row["req_gpus"] or row["gpus"] or 0,
        eligible=row["eligible"],
        until=min(row["start"] or row["end"] or until, until),
        gpu_type=next(iter(kinds)) if len(kinds) == 1 else None,
        nodes=row["nodes"] or _number(requested.get("node")) or 1,
        constraint=row["constraints"],
        user=row["user"],
        tasks=tasks,
        most=most,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def find_in_averages(config: Config, request: Request, jobs: pl.DataFrame, per_run: pl.DataFrame) -> Assessment:
    """Return the findings among ``jobs`` (``JOBS``) with averages ``per_run`` (``averages.AVERAGES``).

    The interval is the whole time span of the jobs.
    """
    file = site_signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    strict = [replace(signature, compute=replace(signature.compute, at_most_pct=0.0)) for signature in file.signatures]
    started = jobs.drop_nulls("start")
    first, last = started["start"].min(), started["end"].max()
    now = datetime.now(UTC)
    since = first if isinstance(first, datetime) else now
    until = last if isinstance(last, datetime) else now
    query = WasteQuery(since, max(until, since), request.clusters, request.partitions, request.accounts, request.users,
                       Thresholds(floors_pct={}))  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        history = SampleStore(Path(directory))
        try:
            averages.fill(history, per_run)
            held_gpus = hold(query, jobs, averages.allocation_gpus(per_run), history, strict, now)
            waiting = waiting_jobs(jobs, jobs.head(0), query)
            return judge(config, request, held_gpus, strict, waiting, (), notes=(NOTE,))
        finally:
            history.close()


def clustercockpit(config: Config, request: Request, path: Path) -> Assessment:
    """Return the findings in a job database of ClusterCockpit. Raises ``InputError``."""
    read = cockpit.read(path)
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in read.jobs)}
    jobs = conform(pl.DataFrame(read.jobs, schema_overrides=types, infer_schema_length=None), JOBS)
    assessment = find_in_averages(config, request, jobs, read.averages)
    return replace(assessment, notes=(*assessment.notes, *read.notes, *read.problems))
