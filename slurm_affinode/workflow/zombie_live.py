"""``zombies list --live``: Slurm is asked once, and every node with GPUs once.

A reading says what is, not for how long. The time comes from the stored history, where that ends no longer than
``BRIDGE_S`` ago, and from looking again for ``watch_s``; else it is unknown, and counts for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl

from slurm_affinode.analysis import squatters, trailing
from slurm_affinode.analysis.queue import WAITING_REASONS, Queue, Waiting, with_impact
from slurm_affinode.analysis.squatters import Seen
from slurm_affinode.analysis.trailing import NEVER, Pairs, Trailing
from slurm_affinode.config import Config
from slurm_affinode.core.signature import GpuFacts, RunFacts, Signature, judge
from slurm_affinode.core.spans import span
from slurm_affinode.history.schema import ACTIVITY
from slurm_affinode.history.store import SampleStore
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import Finding, GpuEvidence, JobRef
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import zombie_live_misfits as misfits
from slurm_affinode.workflow import zombie_orphans as orphans
from slurm_affinode.workflow import zombies
from slurm_affinode.workflow.zombie_nodes import Ask, LiveGpu, NodeAnswer, ask_all, asker
from slurm_affinode.workflow.zombies import Found, History, Request, Snapshot

BRIDGE_S = 600.0
"""A history that ends longer ago says nothing of now."""
LOOK_S = 2.0


@dataclass(slots=True)
class Watched:
    """One GPU over the looks of this run."""

    gpu: LiveGpu
    idle_since: float | None
    peaks: dict[str, float] = field(default_factory=dict)


def find(
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
) -> Found:
    """Findings as they are now. Raises ``UnreachableError`` where slurmctld does not answer."""
    say = step or (lambda _: None)
    file = zombies.signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    say("asking Slurm")
    with slurm() as client:
        jobs, nodes = client.overview(), client.nodes()
        cluster = config.cluster.name or client.config().get("ClusterName") or "default"
    names = [node.name for node in nodes if node.gpus and node.responding]
    names = [name for name in names if not request.nodes or name in request.nodes]
    notes = [f"{node.name} does not answer slurmctld: unknown" for node in nodes if node.gpus and not node.responding]
    say(f"asking {len(names)} nodes")
    asking = ask or asker(config)
    first = now()
    answers = told = ask_all(names, asking)
    notes += [f"{one.node} is unknown: {one.problem}" for one in answers if not one.by]
    notes += [f"{one.node}: processes are unknown: {one.problem}" for one in answers if one.by == "exporter"]
    limit = max((one.compute.at_most_pct for one in file.signatures), default=5.0)
    watched = {gpu.key: _watched(gpu, first, limit) for one in answers for gpu in one.gpus}
    end = first + (watch_s or 0.0)
    while now() < end:
        sleep(min(LOOK_S, max(0.1, end - now())))
        say(f"looking for {span(max(0.0, end - now()))} more")
        answers = ask_all(names, asking)
        _again(watched, answers, now(), limit)
    moment = datetime.fromtimestamp(now(), UTC)
    snapshot = Snapshot(cluster, jobs, nodes)
    mine = _gpus_of_all(jobs, watched)
    with (history or (lambda: contextlib.closing(SampleStore(config.history_dir))))() as store:
        say("following the GPUs")
        since, seen = _past(config, request, jobs, mine, limit, moment, store, notes)
        found = _jobs(cluster, jobs, mine, watched, seen, file.signatures, moment, watched_s=now() - first)
        looked = misfits.Now(snapshot, told, mine, moment)
        running = {job.job_id: job for job in jobs if job.allocated}
        refs = {number: functools.partial(job_ref, job) for number, job in running.items()}
        shapes, unknown = misfits.find(config, request, looked, store, refs)
    found += shapes
    notes += unknown
    found += orphans.find(cluster, jobs, nodes, answers, moment, completing_s=parse_span_s(config.zombies.completing))
    kinds = {gpu.node: gpu.model for one in answers for gpu in one.gpus}
    types = {job.job_id: job.gpus_allocated.kind for job in jobs if job.gpus_allocated}

    def gpu_type(one: Finding) -> str | None:
        own = types.get(one.job.job_id) if one.job else None
        return own or zombies.type_of(kinds.get(one.nodes[0]) if one.nodes else None)

    features = {node.name: node.features for node in nodes}
    found = with_impact(found, Queue(_waiting(jobs, cluster, moment)), gpu_type=gpu_type, features=features)
    holding = [job for job in jobs if job.allocated and job.gpus_allocated]
    unmeasured = sum(not one.gpu.signals_pct for one in watched.values())
    about = Found((), since, moment, "live", len(holding), len(watched), unmeasured, tuple(notes),
                  snapshot=snapshot)  # fmt: skip
    return zombies.select(about, found, request)


def _watched(gpu: LiveGpu, at: float, limit: float) -> Watched:
    peaks = dict(gpu.signals_pct)
    idle = bool(peaks) and gpu.fault is None and max(peaks.values()) <= limit
    return Watched(gpu, at if idle else None, peaks)


def _again(watched: dict[tuple[str, str], Watched], answers: Iterable[NodeAnswer], at: float, limit: float) -> None:
    """One more look. A GPU that does not answer is unknown from then on."""
    there = {gpu.key: gpu for one in answers for gpu in one.gpus}
    for key, one in watched.items():
        gpu = there.get(key)
        if gpu is None or not gpu.signals_pct or gpu.fault is not None:
            watched[key] = Watched(replace(one.gpu, signals_pct={}), None)
            continue
        peaks = {name: max(value, one.peaks.get(name, 0.0)) for name, value in gpu.signals_pct.items()}
        if max(gpu.signals_pct.values()) > limit:
            watched[key] = Watched(gpu, None, peaks)
        elif one.idle_since is None:
            watched[key] = Watched(gpu, at, dict(gpu.signals_pct))
        else:
            watched[key] = Watched(gpu, one.idle_since, peaks)


@dataclass(frozen=True, slots=True)
class _Past:
    """What the history says of each GPU of a job."""

    row: Mapping[tuple[int, tuple[str, str]], int]
    seen: Trailing
    end_ms: int
    step_ms: np.ndarray[tuple[int], np.dtype[np.int64]]


def gpus_of(job: Job, gpus: Sequence[LiveGpu]) -> list[LiveGpu]:
    """The GPUs that a job has: by Slurm's numbers, by its processes, by the exporter's labels, by whole nodes."""
    found: list[LiveGpu] = []
    told = {one.node: one for one in job.node_gpus or ()}
    names = {str(job.job_id), job.id}
    for node in job.nodes:
        here = [gpu for gpu in gpus if gpu.node == node]
        given = told.get(node)
        if given is not None and given.indices:
            found += [gpu for gpu in here if (gpu.index if gpu.minor is None else gpu.minor) in given.indices]
        elif given is not None and given.count == len(here):
            found += here
        else:
            found += [
                gpu for gpu in here
                if names & set(gpu.jobs)
                or any(one.job == job.job_id and one.source != "environment" for one in gpu.processes or ())
            ]  # fmt: skip
    return found


def _gpus_of_all(jobs: Iterable[Job], watched: Mapping[tuple[str, str], Watched]) -> dict[int, list[LiveGpu]]:
    """Raw id of each job that holds GPUs -> these, as far as they are known."""
    by_node: dict[str, list[LiveGpu]] = {}
    for one in watched.values():
        by_node.setdefault(one.gpu.node, []).append(one.gpu)
    return {
        job.job_id: gpus_of(job, [gpu for node in job.nodes for gpu in by_node.get(node, ())])
        for job in jobs if job.allocated and job.start is not None and job.gpus_allocated
    }  # fmt: skip


def _past(  # noqa: PLR0917
    config: Config,
    request: Request,
    jobs: Sequence[Job],
    mine: Mapping[int, Sequence[LiveGpu]],
    limit: float,
    now: datetime,
    store: SampleStore,
    notes: list[str],
) -> tuple[datetime, _Past | None]:
    since = request.since or now - timedelta(seconds=parse_span_s(config.zombies.look_back))
    covered = store.span()
    if covered is None or (now - covered[1]).total_seconds() > BRIDGE_S:
        ago = "there is none" if covered is None else f"it ends {span((now - covered[1]).total_seconds())} ago"
        notes.append(f"no time is taken from the history: {ago}; --watch looks for longer, --prometheus has more")
        return now, None
    end = min(now, covered[1] + timedelta(milliseconds=1))
    known = store.devices(max(since, covered[0]), end)
    by_name = {
        (node, uuid, mig): (device, step)
        for node, uuid, mig, device, step in known.select("node", "uuid", "mig", "device", "step_ms").iter_rows()
    }
    rows: dict[tuple[int, tuple[str, str]], int] = {}
    devices: list[int] = []
    starts: list[int] = []
    steps: list[int] = []
    for job in jobs:
        if job.start is None:
            continue
        for gpu in mine.get(job.job_id, ()):
            row = by_name.get((gpu.node, gpu.uuid, gpu.mig))
            if row is not None:
                rows[job.job_id, gpu.key] = len(devices)
                devices.append(row[0])
                starts.append(int(job.start.timestamp() * 1000))
                steps.append(int(row[1] or 0))
    end_ms = int(end.timestamp() * 1000) + 1
    count = len(devices)
    pairs = Pairs(
        pl.Series(devices, dtype=pl.UInt64).to_numpy(), np.array(starts, np.int64),
        np.full(count, end_ms), np.array(steps, np.int64),
    )  # fmt: skip
    gap = config.idle.max_gap_steps
    seen = trailing.follow(store, pairs, since, end, limit_pct=limit, max_gap_steps=gap)
    return since, _Past(rows, seen, end_ms, pairs.step)


def _jobs(  # noqa: PLR0917
    cluster: str,
    jobs: Sequence[Job],
    mine: Mapping[int, Sequence[LiveGpu]],
    watched: Mapping[tuple[str, str], Watched],
    past: _Past | None,
    signatures: Sequence[Signature],
    now: datetime,
    *,
    watched_s: float,
) -> list[Finding]:
    found = []
    for job in jobs:
        if job.state != "RUNNING" or job.start is None or not job.gpus_allocated:
            continue
        on = mine.get(job.job_id, ())
        if not any(watched[gpu.key].idle_since is not None for gpu in on):
            continue  # every one computes, or is unknown: no signature fits
        elapsed = (now - job.start).total_seconds()
        run = RunFacts("RUNNING", True, elapsed, job.time_limit_s)
        seen = [_see(job, watched[gpu.key], past, signatures, run, now, watched_s) for gpu in mine.get(job.job_id, ())]
        row = {"cluster": cluster, "user": job.user, "account": job.account, "qos": job.qos,
               "partition": next(iter(job.partitions), None), "gpus": job.gpus_allocated.count}  # fmt: skip
        made = squatters.finding(job_ref(job), row, job.nodes, seen, "live")
        if made is not None:
            found.append(made)
    return found


def job_ref(job: Job) -> JobRef:
    """A live job, named."""
    steps = tuple(one.step for one in job.steps or ())
    return JobRef(job.job_id, job.id, job.submit, job.start, job.end if job.ended else None, job.name, job.state,
                  job.time_limit_s, job.restarts, job.batch, steps)  # fmt: skip


def _see(  # noqa: PLR0917
    job: Job,
    one: Watched,
    past: _Past | None,
    signatures: Sequence[Signature],
    run: RunFacts,
    now: datetime,
    watched_s: float,
) -> Seen:
    facts, since = facts_now(job, one, past, now, watched_s)
    gpu = one.gpu
    shown = GpuEvidence(
        gpu.node, "?" if gpu.index is None else str(gpu.index), gpu.uuid, gpu.model, facts.memory_gib,
        facts.memory_total_gib, max(gpu.signals_pct.values(), default=None), facts.peak_pct, gpu.power_w, gpu.xid,
        facts.idle_s, None, measured=bool(gpu.signals_pct),
    )  # fmt: skip
    for signature in signatures:
        verdict = judge(signature, facts, run)
        if verdict.fits:
            return Seen(replace(shown, flagged=True), verdict, False, since, facts.idle_s or 0.0, now)
    computes = bool(gpu.signals_pct) and one.idle_since is None
    return Seen(shown, None, computes, since, facts.idle_s or 0.0, now)


def facts_now(
    job: Job, one: Watched, past: _Past | None, now: datetime, watched_s: float
) -> tuple[GpuFacts, datetime | None]:
    """A GPU as it is, with the time for which the history and this run's looks say that it was so."""
    gpu = one.gpu
    used = None if gpu.used_mib is None else gpu.used_mib / 1024
    total = None if gpu.total_mib is None else gpu.total_mib / 1024
    facts = GpuFacts(dict(one.peaks), None, used, total, gpu.power_w, None)
    if not gpu.signals_pct:
        return replace(facts, peaks_pct={}), None
    if one.idle_since is None:
        return replace(facts, idle_s=0.0, used_before=True), None
    looked = now.timestamp() - one.idle_since
    row = None if past is None else past.row.get((job.job_id, gpu.key))
    if past is None or row is None or int(past.seen.last[row]) == NEVER:
        # Without a history nothing is known but what this run saw; a single look has no length.
        length = looked if watched_s > 0 and looked > 0 else None
        return replace(facts, idle_s=length, used_before=False if length else None), trailing.moment(
            int(one.idle_since * 1000)
        )
    begun = int(past.seen.since[row])
    before = bool(past.seen.last_active[row] != NEVER)
    # A look that found it idle where the history last saw it busy begins the time; a window that broke does, too.
    if begun == NEVER or one.idle_since * 1000 - int(past.seen.last[row]) > BRIDGE_S * 1000:
        return replace(facts, idle_s=looked, used_before=before), trailing.moment(int(one.idle_since * 1000))
    measured = (min(int(past.seen.last[row]) + int(past.step_ms[row]), past.end_ms) - begun) / 1000
    after = max(0.0, now.timestamp() - max(one.idle_since, int(past.seen.last[row]) / 1000)) if watched_s > 0 else 0.0
    peaks = dict(one.peaks)
    for k, name in enumerate(ACTIVITY):
        value = float(past.seen.peaks[row, k])
        if not np.isnan(value):
            peaks[name] = max(value, peaks.get(name, 0.0))
    known = replace(facts, peaks_pct=peaks, idle_s=measured + after, used_before=before)
    return known, trailing.moment(begun)


def _waiting(jobs: Iterable[Job], cluster: str, now: datetime) -> list[Waiting]:
    return [
        Waiting(job.id, cluster, job.partitions, job.gpus_requested.count, job.eligible or job.submit or now, now,
                job.gpus_requested.kind, job.node_count or 1, job.features, job.priority or 0, job.user)
        for job in jobs
        if job.pending and not job.held and job.gpus_requested and job.reason in WAITING_REASONS
        and (job.eligible or job.submit or now) < now
    ]  # fmt: skip
