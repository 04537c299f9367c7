"""``zombies list --live``: findings from one request to Slurm and one to each node with GPUs.

``sampling`` determines for how long a GPU has been idle. Misfits combine live jobs, the usage reported by agents,
stored samples, and jobs that ended recently (from stored accounting, and for some minutes from slurmctld). Without
stored samples there is no statement about past GPU activity.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from slurm_affinode.analysis import misfits, squatters
from slurm_affinode.analysis.queue_impact import PendingJob, PendingQueue, waits, with_impact
from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.analysis.squatters import ObservedGpu
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.base.text import counted, span
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.core.signatures import GpuFacts, RunFacts, Signature, SignatureVerdict, judge
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import MISFIT_KINDS, USER_KINDS, Finding, JobAttempt
from slurm_affinode.slurm import identifiers, units
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, RECORDED_GPUS, conform
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.zombies import engines, find, orphans, sampling
from slurm_affinode.zombies.find import COLUMNS, Assessment, History, Request, Snapshot, gpu_partitions, node_classes
from slurm_affinode.zombies.nodes import Ask, JobUse, LiveGpu, NodeAnswer, asker
from slurm_affinode.zombies.sampling import NodeSampler, NodeSamples, Past, Watched


@dataclass(frozen=True, slots=True)
class Now:
    """The live data of this run."""

    snapshot: Snapshot
    answers: Sequence[NodeAnswer]
    gpus: Mapping[int, Sequence[LiveGpu]]
    """Raw ID of a running job -> its GPUs, as far as they are known."""
    time: datetime


def find_live_misfits(
    config: Config, request: Request, observed: Now, history: SampleStore, holding: Mapping[int, Job]
) -> tuple[list[Finding], list[str]]:
    """Return findings about misfits, and notes on gaps in the data.

    ``holding``: raw ID of each job that holds nodes -> the job.
    """
    requested = request.requested_kinds & MISFIT_KINDS
    if not requested:
        return [], []
    since = request.since or observed.time - timedelta(seconds=parse_span_s(config.zombies.look_back))
    ended, recorded, notes = _ended_runs(config, since, observed.time, observed.snapshot.cluster)
    uses = _uses(observed)
    jobs = _combine(ended, frame(observed.snapshot, uses))
    gpus = pl.concat([recorded, _allocations(observed)])
    rules = config.zombies.misfits
    gaps = Thresholds(max_gap_steps=config.idle.max_gap_steps, floors_pct=config.agent.floors_pct)
    query = WasteQuery(since, observed.time, request.clusters, request.partitions, request.accounts, request.users,
                       thresholds=gaps)  # fmt: skip
    held_gpus = squatters.hold(query, jobs, gpus, history, [misfits.IDLE_PCT], observed.time)
    classes = {**config.zombies.nodes, **node_classes(observed.snapshot.nodes)}
    live_misfits = misfits.find(
        held_gpus, rules, classes, min_run_s=parse_span_s(rules.min_run), kinds=requested,
        gpu_partitions=gpu_partitions(observed.snapshot.nodes),
    )  # fmt: skip
    notes = [*notes, *_unsampled(observed, uses, requested, history, since)]
    return [_live(finding, holding) for finding in live_misfits], notes


BY_GPUS = ("gpu-too-powerful", "low-efficiency-user")
"""Kinds that are based on GPU activity over time: live readings are not enough."""
BY_USE = ("cpu-cores-per-gpu", "memory-per-gpu")
"""Kinds that are based on a job's use of cores and host memory, as reported by the agents."""
FRESH_S = 600.0


def _unsampled(
    observed: Now, uses: Collection[int], requested: Collection[str], history: SampleStore, since: datetime
) -> list[str]:
    """Return a note for each rule that cannot be evaluated, with the data that it needs."""
    notes = []
    blind = " and ".join(kind for kind in BY_GPUS if kind in requested)
    covered = history.span()
    if blind and (covered is None or covered[1] < since):
        availability = "none are stored for this time" if covered else "none are stored"
        notes.append(f"{blind}: not searched for: GPU metrics are needed, and {availability}; --prometheus, ingest gpu")
    elif blind and covered is not None and (observed.time - covered[1]).total_seconds() > FRESH_S:
        notes.append(
            f"{blind}: from the stored GPU metrics, which end {span((observed.time - covered[1]).total_seconds())} ago"
        )
    mute = " and ".join(kind for kind in BY_USE if kind in requested)
    running = [job for job in observed.snapshot.jobs if job.state == "RUNNING" and job.gpus_allocated]
    unknown = sum(job.job_id not in uses for job in running)
    if mute and unknown:
        notes.append(f"{mute}: unknown of {unknown} of {len(running)} jobs: the agents of their nodes do not report "
                     "their use of cores and host memory")  # fmt: skip
    return notes


def _live(finding: Finding, holding: Mapping[int, Job]) -> Finding:
    if finding.kind in USER_KINDS or finding.job is None:
        return replace(finding, source="live")
    job = holding.get(finding.job.job_id)
    return replace(finding, source="live", subject=finding.job if job is None else JobAttempt.of(job))


def frame(snapshot: Snapshot, uses: Mapping[int, JobUse | None]) -> pl.DataFrame:
    """Return slurmctld's jobs that have started, as ``JOBS``."""
    return _frame(_columns(snapshot.cluster, [job for job in snapshot.jobs if job.start is not None], uses))


def pending(snapshot: Snapshot) -> pl.DataFrame:
    """Return slurmctld's pending jobs, as ``JOBS``."""
    jobs = [job for job in snapshot.jobs if job.pending]
    return _frame({
        **_columns(snapshot.cluster, jobs, {}),
        "partition": [",".join(job.partitions) for job in jobs],
        "reason": [job.reason for job in jobs],
        "req_gpus": [None if job.gpus_requested is None else job.gpus_requested.count for job in jobs],
    })  # fmt: skip


def _frame(columns: Mapping[str, Sequence[Any]]) -> pl.DataFrame:
    types = {name: dtype for name, dtype in JOBS.items() if name in columns}
    return conform(pl.DataFrame({name: columns[name] for name in types}, schema=types), JOBS)


def _columns(cluster: str, jobs: Sequence[Job], uses: Mapping[int, JobUse | None]) -> dict[str, Sequence[Any]]:
    """Return the columns of ``JOBS`` that slurmctld knows; rows of 100,000 jobs would take twice as long."""
    gpus, used = [job.gpus_allocated for job in jobs], [uses.get(job.job_id) for job in jobs]
    return {
        "cluster": [cluster] * len(jobs), "job_id": [job.job_id for job in jobs],
        "submit": [job.submit for job in jobs],
        "array_job_id": [job.array_job_id for job in jobs], "array_task_id": [job.array_task_id for job in jobs],
        "het_job_id": [job.het_job_id for job in jobs], "het_offset": [job.het_offset for job in jobs],
        "job_name": [job.name for job in jobs], "user": [job.user for job in jobs], "uid": [job.uid for job in jobs],
        "account": [job.account for job in jobs],
        "partition": [job.partitions[0] if job.partitions else None for job in jobs],
        "qos": [job.qos for job in jobs], "state": [job.state for job in jobs],
        "eligible": [job.eligible for job in jobs], "start": [job.start for job in jobs],
        "end": [job.end for job in jobs], "timelimit_s": [job.time_limit_s for job in jobs],
        "nodes": [job.node_count for job in jobs], "node_list": [",".join(job.nodes) or None for job in jobs],
        "cpus": [job.cpus for job in jobs],
        "alloc_mem_bytes": [_bytes(job.tres_allocated.get("mem")) for job in jobs],
        "gpus": [
            (0 if job.tres_allocated else None) if allocated is None else allocated.count
            for job, allocated in zip(jobs, gpus, strict=True)
        ],
        "gpu_type": [None if allocated is None else allocated.kind for allocated in gpus],
        "constraints": [job.features for job in jobs],
        "total_cpu_s": [None if use is None else use.cpu_s for use in used],
        "max_rss_bytes": [None if use is None else int(use.memory_mib * 2**20) for use in used],
    }  # fmt: skip


@functools.lru_cache(maxsize=4096)  # thousands of jobs have the same amount
def _bytes(text: str | None) -> int | None:
    try:
        memory = units.parse_memory(text or "", bare="M")
    except ValueError:
        return None
    return None if memory is None else memory.size_bytes


def _uses(observed: Now) -> dict[int, JobUse | None]:
    """Return total CPU time and the largest memory use on one node, for each job reported by all of its nodes."""
    by_node = {answer.node: answer.uses for answer in observed.answers}
    by_job: dict[int, JobUse | None] = {}
    for job in observed.snapshot.jobs:
        if job.state != "RUNNING" or not job.nodes:
            continue
        shares = [None if (uses := by_node.get(node)) is None else uses.get(job.job_id) for node in job.nodes]
        measured = [share for share in shares if share is not None]
        if len(measured) == len(shares):
            by_job[job.job_id] = JobUse(
                sum(share.cpu_s for share in measured), max(share.memory_mib for share in measured)
            )
    return by_job


def _allocations(observed: Now) -> pl.DataFrame:
    starts = {job.job_id: job.start for job in observed.snapshot.jobs}
    rows = [
        (observed.snapshot.cluster, number, starts.get(number), gpu.node, gpu.uuid or str(gpu.index))
        for number, gpus in observed.gpus.items() for gpu in gpus
    ]  # fmt: skip
    return conform(pl.DataFrame(rows, schema=ALLOCATION_GPUS, orient="row"), RECORDED_GPUS)


def _ended_runs(
    config: Config, since: datetime, until: datetime, cluster: str
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """Return the runs that have ended according to stored accounting, recorded GPUs, and notes on gaps."""
    try:
        with Repository.open(config.db_url, create=False, upgrade=False) as store:
            ended = conform(store.jobs(since, until, ended_only=True, clusters=(cluster,), columns=COLUMNS), JOBS)
            return ended, store.allocation_gpus(since, until), []
    except AffinodeError as error:
        note = f"jobs that ended before the last few minutes are not known: {error}"
        return pl.DataFrame(schema=JOBS), pl.DataFrame(schema=RECORDED_GPUS), [note]


def _combine(ended: pl.DataFrame, live: pl.DataFrame) -> pl.DataFrame:
    """Combine ended runs of accounting with the runs of slurmctld, which knows all that have not ended."""
    return pl.concat([ended.join(live, on=["job_id", "submit"], how="anti", maintain_order="left"), live])


@dataclass(frozen=True, slots=True)
class Observed:
    """The data of a live observation."""

    snapshot: Snapshot
    """Taken at the end of the observation."""
    before: Sequence[Job]
    """The jobs at the start of the observation."""
    samples: NodeSamples
    signatures: Sequence[Signature]
    past: Past | None
    since: datetime
    time: datetime
    notes: tuple[str, ...]
    history: SampleStore
    """Open during the observation."""

    def facts(self, job: Job, watched: Watched) -> tuple[GpuFacts, datetime | None]:
        """Return the facts about a GPU of a job, and the time since which it has been idle."""
        return sampling.facts_now(job, watched, self.past, self.time, self.samples.watched_s)

    def run(self, job: Job) -> RunFacts:
        """Return the facts about the current attempt of a job."""
        elapsed = None if job.start is None else (self.time - job.start).total_seconds()
        return RunFacts(job.state, job.state == "RUNNING", elapsed, job.time_limit_s)


def find_live(
    config: Config,
    request: Request,
    *,
    slurm: Callable[[], SlurmClient],
    ask: Ask | None = None,
    watch_s: float | None = None,
    history: History | None = None,
    step: Callable[[str], None] | None = None,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Assessment:
    """Return the current findings. Raises ``UnreachableError`` if slurmctld does not respond."""
    sampler = NodeSampler(ask or asker(config), now, sleep, step or (lambda _: None))
    with observe(config, request, sampler, slurm=slurm, watch_s=watch_s, history=history) as observed:
        return judged(config, request, observed)


@contextlib.contextmanager
def observe(
    config: Config,
    request: Request,
    sampler: NodeSampler,
    *,
    slurm: Callable[[], SlurmClient],
    watch_s: float | None = None,
    history: History | None = None,
    only: Callable[[Sequence[Job]], Sequence[Job]] | None = None,
) -> Iterator[Observed]:
    """Query Slurm once, the nodes for ``watch_s``, and the stored samples. ``only``: select the jobs to observe.

    Slurm's jobs are queried again if the observation took time, to leave out jobs that ended meanwhile, and if a
    process or memory seems to belong to no job: the job may have started meanwhile.
    """
    file = find.site_signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    sampler.say("asking Slurm")
    with slurm() as client:
        jobs, nodes = client.overview(), client.nodes()
        cluster = config.cluster.name or client.config().get("ClusterName") or "default"
    required = set(request.nodes) or {node.name for node in nodes}
    if only is not None:
        required = {name for job in only(jobs) for name in job.nodes}
    required_nodes = [node for node in nodes if node.gpus and node.powered and node.name in required]
    notes = find.strangers(request, nodes)
    notes += [f"{node.name} does not respond to slurmctld: unknown" for node in required_nodes if not node.responding]
    names = {node.name: node.gpus.count for node in required_nodes if node.responding and node.gpus}
    sampler.say(f"asking {counted(len(names), 'node')}")
    limit = max((signature.compute.at_most_pct for signature in file.signatures), default=5.0)
    samples = sampling.observe(names, jobs, sampler, watch_s=watch_s or 0.0, limit_pct=limit,
                         floors_pct=config.agent.floors_pct)  # fmt: skip
    later = jobs
    if watch_s or orphans.seem(jobs, samples.first_answers, samples.answers):
        try:
            with slurm() as client:
                later = client.overview()
        except AffinodeError as error:
            notes.append(f"jobs that began or ended during the observation are unknown: {error}")
        samples = sampling.still(samples, jobs, later)
    notes += [f"{answer.node} is unknown: {answer.problem}" for answer in samples.first_answers if not answer.by]
    notes += [
        f"{answer.node}: processes are unknown: {answer.problem}"
        for answer in samples.first_answers
        if answer.by == "exporter"
    ]
    moment = datetime.fromtimestamp(sampler.now(), UTC)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as store:
        sampler.say("following the GPUs")
        since, past = sampling.past(config, request, later, sampling.idle(samples), limit, moment, store, notes)
        snapshot = Snapshot(cluster, later, nodes)
        yield Observed(snapshot, jobs, samples, file.signatures, past, since, moment, tuple(notes), store)


@without_collection()
def judged(config: Config, request: Request, observed: Observed) -> Assessment:
    """Return the findings of a live observation."""
    (cluster, jobs, nodes), moment, samples = _parts(observed.snapshot), observed.time, observed.samples
    findings = [finding for job in jobs if (finding := _job(job, observed)) is not None]
    looked = Now(observed.snapshot, samples.first_answers, sampling.timed(samples), moment)
    by_id = {job.job_id: job for job in jobs if job.allocated}
    shapes, unknown = find_live_misfits(config, request, looked, observed.history, by_id)
    findings += shapes
    completing_s = parse_span_s(config.zombies.completing)
    findings += orphans.find(
        cluster,
        jobs,
        nodes,
        samples.first_answers,
        samples.answers,
        moment,
        before=observed.before,
        completing_s=completing_s,
    )
    if "model-server" in request.requested_kinds:
        running = [
            job for job in jobs if job.state == "RUNNING" and (job.gpus_allocated or samples.by_job.get(job.job_id))
        ]  # fmt: skip
        findings += engines.find(config, cluster, running, samples.by_job, moment)
    models = {answer.node: {gpu.model for gpu in answer.gpus} for answer in samples.answers}
    types = {job.job_id: job.gpus_allocated.kind for job in jobs if job.gpus_allocated}

    def gpu_type(finding: Finding) -> str | None:
        return (types.get(finding.job.job_id) if finding.job else None) or find.types_of(finding, models)

    findings = with_impact(findings, PendingQueue(waiting(jobs, cluster, moment)), gpu_type=gpu_type, nodes=nodes)
    holding = [job for job in jobs if job.allocated and (job.gpus_allocated or samples.by_job.get(job.job_id))]
    unmeasured = sum(not watched.gpu.signals_pct for watched in samples.whole)
    about = Assessment((), observed.since, moment, "live", len(holding), len(samples.whole), unmeasured,
                  (*observed.notes, *unknown, *_unseen(observed)), snapshot=observed.snapshot)  # fmt: skip
    return find.select(about, findings, request)


def _parts(snapshot: Snapshot) -> tuple[str, Sequence[Job], Sequence[Node]]:
    return snapshot.cluster, snapshot.jobs, snapshot.nodes


def _unseen(observed: Observed) -> Iterator[str]:
    """Yield a note on the jobs whose share of a GPU is not measured."""
    sharing = [job for job in observed.snapshot.jobs if job.state == "RUNNING" and job.shares_gpus]
    by_job, watched = observed.samples.by_job, observed.samples.watched
    parts = {job.id: by_job.get(job.job_id, ()) for job in sharing if not job.gpus_allocated}
    dark = [name for name, on in parts.items() if not any(watched[gpu.key].gpu.signals_pct for gpu in on)]
    if dark:
        more = f" and {len(dark) - 3} more" if len(dark) > 3 else ""
        yield f"{', '.join(dark[:3])}{more}: activity on shared GPUs is unknown: it is not reported per process"


def _job(job: Job, observed: Observed) -> Finding | None:
    """Return the finding about a job's idle GPUs, if there is one."""
    on, watched = observed.samples.by_job.get(job.job_id, ()), observed.samples.watched
    if job.state != "RUNNING" or job.start is None or not on:
        return None
    if not any(watched[gpu.key].idle_since is not None for gpu in on):
        return None  # every GPU is active or unknown: no signature matches
    sights = [see(job, watched[gpu.key], observed, gpu.mapping) for gpu in on]
    row = {"cluster": observed.snapshot.cluster, "user": job.user, "account": job.account, "qos": job.qos,
           "partition": next(iter(job.partitions), None),
           "gpus": None if job.gpus_allocated is None else job.gpus_allocated.count}  # fmt: skip
    return squatters.finding(JobAttempt.of(job), row, job.nodes, sights, "live")


def see(job: Job, watched: Watched, observed: Observed, mapping: str | None) -> ObservedGpu:
    """Return the evidence about a job's GPU, with the first signature that matches. ``mapping``: see ``LiveGpu``."""
    facts, since = observed.facts(job, watched)
    gpu = watched.gpu
    fits = next((verdict for verdict in _judge_each(job, facts, observed) if verdict.fits), None)
    shown = replace(
        gpu.evidence(), peak_pct=facts.peak_pct, idle_s=facts.idle_s, mapping=mapping, flagged=fits is not None
    )
    computes = fits is None and bool(gpu.signals_pct) and watched.idle_since is None
    return ObservedGpu(shown, fits, computes, since, facts.idle_s or 0.0, observed.time)


def verdicts(job: Job, watched: Watched, observed: Observed) -> tuple[SignatureVerdict, ...]:
    """Return the verdict of every signature about a job's GPU."""
    return tuple(_judge_each(job, observed.facts(job, watched)[0], observed))


def _judge_each(job: Job, facts: GpuFacts, observed: Observed) -> Iterator[SignatureVerdict]:
    run = observed.run(job)
    return (judge(signature, facts, run) for signature in observed.signatures)


def waiting(jobs: Iterable[Job], cluster: str, now: datetime) -> list[PendingJob]:
    """Return the pending jobs that lack only free GPUs or priority."""
    return [
        PendingJob(job.id, cluster, job.partitions, job.gpus_requested.count, job.eligible or job.submit or now, now,
                job.gpus_requested.kind, job.node_count or 1, job.features, job.priority or 0, job.user,
                identifiers.tasks_in(job.array_tasks)[0], job.array_limit, job.nodes_required, job.nodes_excluded)
        for job in jobs
        if job.pending and not job.is_held and job.gpus_requested and waits(job.reason)
        and (job.eligible or job.submit or now) < now
    ]  # fmt: skip
