"""Live sampling of the GPUs of running jobs, once or for a while, combined with stored samples.

A reading shows the current state, not its duration. The idle time comes from stored samples, if the newest is at most
``BRIDGE_S`` old, and from repeated readings; otherwise it is unknown and is not counted.

A shared GPU (gres/shard, gres/mps) is judged separately for each job, by the memory and activity of the job's own
processes. If the driver does not report activity per process, the job's share is unknown, unless the whole GPU is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import numpy as np
import polars as pl

from slurm_affinode.analysis import idle_windows
from slurm_affinode.analysis.idle_windows import NEVER, Pairs, Trailing
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.base.config import Config
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.base.text import span
from slurm_affinode.base.times import epoch_ms, parse_span_s
from slurm_affinode.core.signatures import GpuFacts
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import ACTIVITY
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import FLOORS_PCT, of_slurm, total_mib, without_noise
from slurm_affinode.zombies.find import Request
from slurm_affinode.zombies.nodes import Ask, LiveGpu, LiveProcess, NodeAnswer, ask_all

BRIDGE_S = 600.0
"""Maximum age, seconds, of the newest stored sample for which stored and live samples are combined."""
SAMPLING_S = 2.0
PROCESS_SIGNALS = ("process_sm", "process_memory")
"""SM and memory utilization of a job's processes on a GPU."""


@dataclass(slots=True)
class Watched:
    """One GPU, or a job's share of it, over the readings of this run."""

    gpu: LiveGpu
    idle_since: float | None
    peaks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeSamples:
    """The readings of this run."""

    first_answers: tuple[NodeAnswer, ...]
    """The first responses; they also have the jobs' use of cores and host memory."""
    answers: tuple[NodeAnswer, ...]
    """The last responses."""
    watched: Mapping[tuple[str, str], Watched]
    by_job: Mapping[int, Sequence[LiveGpu]]
    """Raw ID of each job that holds GPUs or a share of one -> these, as far as they are known."""
    watched_s: float

    @property
    def whole(self) -> tuple[Watched, ...]:
        """Return the whole GPUs, without the shares of jobs."""
        return tuple(watched for watched in self.watched.values() if watched.gpu.part_of is None)


@dataclass(frozen=True, slots=True)
class NodeSampler:
    """How GPUs are sampled. ``on_round`` is called after each round with its time and readings."""

    ask: Ask
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = lambda _: None
    on_round: Callable[[float, Iterable[LiveGpu]], None] = lambda _time_s, _gpus: None


def observe(
    names: Mapping[str, int],
    jobs: Sequence[Job],
    sampler: NodeSampler,
    *,
    watch_s: float,
    limit_pct: float,
    floors_pct: Mapping[str, float] = FLOORS_PCT,
) -> NodeSamples:
    """Query the nodes ``names`` (node -> GPUs configured in Slurm), repeatedly for ``watch_s``.

    A GPU above ``limit_pct`` is active; a signal at or below its floor counts as 0.
    """
    sharing = [job for job in jobs if job.allocated and job.start is not None and not job.gpus_allocated]

    def once() -> tuple[tuple[NodeAnswer, ...], tuple[LiveGpu, ...]]:
        with without_collection():
            raw = ask_all(tuple(names), sampler.ask)
            answers = tuple(replace(answer, gpus=_without_noise(answer.gpus, floors_pct)) for answer in raw)
            whole = [gpu for answer in answers for gpu in answer.gpus]
            gpus = (*whole, *_without_noise(parts(sharing, whole, limit_pct), floors_pct))
        sampler.on_round(sampler.now(), gpus)
        return answers, gpus

    first = sampler.now()
    first_answers, gpus = once()
    answers = first_answers
    with without_collection():
        watched = {gpu.key: _watched(gpu, first, limit_pct) for gpu in gpus}
    end = first + (watch_s if names else 0.0)
    while sampler.now() < end:
        sampler.sleep(min(SAMPLING_S, max(0.1, end - sampler.now())))
        sampler.say(f"looking for {span(max(0.0, end - sampler.now()))} more")
        answers, gpus = once()
        _add_round(watched, gpus, sampler.now(), limit_pct)
    return NodeSamples(
        first_answers,
        answers,
        watched,
        _gpus_of_all(jobs, watched, names),
        sampler.now() - first if end > first else 0.0,
    )


def _without_noise(gpus: Iterable[LiveGpu], floors_pct: Mapping[str, float]) -> tuple[LiveGpu, ...]:
    return tuple(_gpu_without_noise(gpu, floors_pct) for gpu in gpus)


def _gpu_without_noise(gpu: LiveGpu, floors_pct: Mapping[str, float]) -> LiveGpu:
    signals = without_noise(gpu.signals_pct, floors_pct)
    return gpu if signals == gpu.signals_pct else replace(gpu, signals_pct=signals)


def parts(jobs: Iterable[Job], gpus: Sequence[LiveGpu], limit_pct: float) -> list[LiveGpu]:
    """Return the shares of GPUs that ``jobs`` without whole GPUs use, as shown by their processes.

    If all processes on a node's GPUs are known and none belongs to a job with a share, its share is idle.
    """
    by_id = {job.job_id: job for job in jobs}
    whole_or_parts = []
    for gpu in gpus:
        by_job: dict[int, list[LiveProcess]] = {}
        for process in gpu.processes or ():
            if process.job in by_id and process.source != "environment":
                by_job.setdefault(process.job, []).append(process)
        whole_or_parts += [_part(gpu, job, processes, limit_pct) for job, processes in by_job.items()]
    by_node: dict[str, list[LiveGpu]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node, []).append(gpu)
    used = {(part.node, part.part_of) for part in whole_or_parts}
    return whole_or_parts + [
        LiveGpu(node, None, None, signals_pct=dict.fromkeys(PROCESS_SIGNALS, 0.0), used_mib=0.0, processes=(),
                part_of=number, mapping="processes")
        for number, job in by_id.items() if job.shares_gpus
        for node in job.nodes if (node, number) not in used and _unused(job, by_node.get(node, ()))
    ]  # fmt: skip


def _unused(job: Job, gpus: Sequence[LiveGpu]) -> bool:
    """Return whether no process on ``gpus`` belongs, or may belong, to the job."""
    return bool(gpus) and all(
        gpu.processes is not None
        and gpu.fault is None
        and not any(
            process.job == job.job_id
            # The job in its environment may be any.
            or ((process.job is None or process.source == "environment") and process.may_be_of(job.uid))
            for process in gpu.processes
        )
        for gpu in gpus
    )


def _part(gpu: LiveGpu, job: int, processes: Sequence[LiveProcess], limit_pct: float) -> LiveGpu:
    signals: Mapping[str, float] = {}
    if processes and all(process.sm_pct is not None and process.memory_pct is not None for process in processes):
        sm, memory = PROCESS_SIGNALS
        signals = {
            sm: max(process.sm_pct or 0.0 for process in processes),
            memory: max(process.memory_pct or 0.0 for process in processes),
        }
    elif gpu.signals_pct and max(gpu.signals_pct.values()) <= limit_pct:
        signals = gpu.signals_pct  # if the whole GPU is idle, so is every share
    return replace(
        gpu,
        part_of=job,
        mapping="processes",
        signals_pct=signals,
        used_mib=total_mib(process.used_mib for process in processes),
        power_w=None,
        processes=tuple(processes),
        jobs=(),
    )


def _watched(gpu: LiveGpu, time_s: float, limit: float) -> Watched:
    peaks = dict(gpu.signals_pct)
    idle = bool(peaks) and gpu.fault is None and max(peaks.values()) <= limit
    return Watched(gpu, time_s if idle else None, peaks)


def _add_round(watched: dict[tuple[str, str], Watched], gpus: Iterable[LiveGpu], time_s: float, limit: float) -> None:
    """Add a round of readings. A GPU without a reading is unknown until it has one again."""
    by_key = {gpu.key: gpu for gpu in gpus}
    for key, previous in watched.items():
        gpu = by_key.get(key)
        if gpu is None or not gpu.signals_pct or gpu.fault is not None:
            watched[key] = Watched(replace(previous.gpu, signals_pct={}), None)
            continue
        peaks = previous.peaks | {
            name: max(value, previous.peaks.get(name, 0.0)) for name, value in gpu.signals_pct.items()
        }
        if max(gpu.signals_pct.values()) > limit:
            watched[key] = Watched(gpu, None, peaks)
        elif previous.idle_since is None:
            watched[key] = Watched(gpu, time_s, dict(gpu.signals_pct))
        else:
            watched[key] = Watched(gpu, previous.idle_since, peaks)


@dataclass(frozen=True, slots=True)
class Past:
    """Stored samples of each GPU of a job."""

    row: Mapping[tuple[int, tuple[str, str]], int]
    trailing: Trailing
    used: np.ndarray[tuple[int], np.dtype[np.int64]]
    """``idle_windows.used_before``."""


def gpus_of(job: Job, by_node: Mapping[str, Sequence[LiveGpu]], configured: Mapping[str, int]) -> list[LiveGpu]:
    """Return the GPUs of a job: by Slurm's indices, whole nodes, the exporter's labels, or the job's processes.

    ``by_node``: node -> its GPUs; ``configured``: node -> GPUs configured in Slurm. If a node shows fewer, the
    whole-node mapping does not apply: it is unknown which of them the job has. Labels of more GPUs than the job has,
    and those of MIG instances with several jobs, are ambiguous: dcgm-exporter labels each instance with all jobs of
    its GPU.
    """
    gpus: list[LiveGpu] = []
    allocated = {allocation.node: allocation for allocation in job.node_gpus or ()}
    for node in job.nodes:
        node_gpus = by_node.get(node, ())
        node_allocation = allocated.get(node)
        complete = len(node_gpus) == configured.get(node, len(node_gpus))
        # Slurm's indices do not number MIG instances by device file.
        numbered = node_allocation is not None and node_allocation.indices and all(gpu.mig is None for gpu in node_gpus)
        indexed = of_slurm(node_gpus, node_allocation.indices) if node_allocation is not None and numbered else None
        if indexed is not None and (complete or all(gpu.minor is not None for gpu in node_gpus)):
            gpus += [gpu.mapped("slurm") for gpu in indexed]
        elif node_allocation is not None and node_allocation.count == len(node_gpus) and complete:
            gpus += [gpu.mapped("whole-node") for gpu in node_gpus]
        else:
            names = {str(job.job_id), job.id}
            labelled = _unambiguous(job, [gpu for gpu in node_gpus if names & set(gpu.jobs)], node)
            gpus += [gpu.mapped("labels") for gpu in labelled]
            gpus += [
                gpu.mapped("processes") for gpu in node_gpus
                if gpu not in labelled
                and any(process.job == job.job_id and process.source != "environment"
                        for process in gpu.processes or ())
            ]  # fmt: skip
    return gpus


def _unambiguous(job: Job, labelled: list[LiveGpu], node: str) -> list[LiveGpu]:
    """Return the labeled GPUs of the job on a node if the labels decide which GPUs it has there, else none."""
    most = next((allocation.count for allocation in job.node_gpus or () if allocation.node == node), None)
    if most is None and job.gpus_allocated is not None:
        most = max(job.gpus_allocated.count - len(job.nodes) + 1, 1)
    shared = any(gpu.mig is not None and len(gpu.jobs) > 1 for gpu in labelled)
    return [] if shared or (most and len(labelled) > most) else labelled


@without_collection()
def _gpus_of_all(
    jobs: Iterable[Job], watched: Mapping[tuple[str, str], Watched], configured: Mapping[str, int]
) -> dict[int, list[LiveGpu]]:
    """Return raw ID of each job that holds GPUs or a share of one -> these, as far as they are known."""
    by_node: dict[str, list[LiveGpu]] = {}
    part: dict[int, list[LiveGpu]] = {}
    for observed in watched.values():
        if observed.gpu.part_of is None:
            by_node.setdefault(observed.gpu.node, []).append(observed.gpu)
        else:
            part.setdefault(observed.gpu.part_of, []).append(observed.gpu)
    whole = {
        job.job_id: gpus_of(job, by_node, configured)
        for job in jobs if job.allocated and job.start is not None and job.gpus_allocated
    }  # fmt: skip
    return whole | part


def still(samples: NodeSamples, before: Iterable[Job], after: Iterable[Job]) -> NodeSamples:
    """Drop the GPUs of jobs that ended or restarted during the readings: they may belong to another job now."""
    runs = {(job.job_id, job.start) for job in before} & {(job.job_id, job.start) for job in after}
    numbers = {number for number, _ in runs}
    return replace(samples, by_job={number: gpus for number, gpus in samples.by_job.items() if number in numbers})


def timed(samples: NodeSamples) -> dict[int, Sequence[LiveGpu]]:
    """Return, for each job, the GPUs to which stored samples apply; these are of whole GPUs.

    They apply to a share only while the whole GPU is idle: then the share is idle as well.
    """

    def idle(gpu: LiveGpu) -> bool:
        whole = samples.watched.get(gpu.whole)
        return whole is not None and whole.idle_since is not None

    shared = {watched.gpu.part_of for watched in samples.watched.values() if watched.gpu.part_of is not None}
    applying = {
        job: [gpu for gpu in samples.by_job[job] if gpu.part_of is None or idle(gpu)]
        for job in shared & samples.by_job.keys()
    }
    return {**samples.by_job, **applying}


def idle(samples: NodeSamples) -> dict[int, Sequence[LiveGpu]]:
    """Return, for each job, those of its ``timed`` GPUs that were idle in these readings.

    The idle time of the others is 0, whatever the stored samples have.
    """
    watched = samples.watched
    gpus = {job: [gpu for gpu in on if watched[gpu.key].idle_since is not None] for job, on in timed(samples).items()}
    return {job: on for job, on in gpus.items() if on}


@without_collection()
def past(  # noqa: PLR0917
    config: Config,
    request: Request,
    jobs: Sequence[Job],
    by_job: Mapping[int, Sequence[LiveGpu]],
    limit: float,
    now: datetime,
    store: SampleStore,
    notes: list[str],
) -> tuple[datetime, Past | None]:
    """Return the begin of the interval and the stored samples of the GPUs of ``jobs``.

    The samples are ``None``, with an entry in ``notes``, if there are none or they are too old. ``by_job``: job ID ->
    its GPUs (``idle``); ``limit``: percentage up to which a GPU is idle.
    """
    since = request.since or now - timedelta(seconds=parse_span_s(config.zombies.look_back))
    covered = store.span()
    if covered is None or (now - covered[1]).total_seconds() > BRIDGE_S:
        ago = "none are stored" if covered is None else f"they end {span((now - covered[1]).total_seconds())} ago"
        notes.append(
            f"past idle time is unknown without GPU metrics ({ago}); --watch samples for longer, --prometheus has more"
        )
        return now, None
    end = min(now, covered[1] + timedelta(milliseconds=1))
    device_rows = store.devices(max(since, covered[0]), end)
    by_name = {
        (node, uuid, mig, index if uuid is None else None): (device, step)
        for node, uuid, mig, index, device, step in device_rows.select(
            "node", "uuid", "mig", "index", "device", "step_ms"
        ).iter_rows()
        if uuid is not None or index is not None
    }
    rows: dict[tuple[int, tuple[str, str]], int] = {}
    devices: list[int] = []
    starts: list[int] = []
    steps: list[int] = []
    for job in jobs:
        if job.start is None:
            continue
        for gpu in by_job.get(job.job_id, ()):
            row = by_name.get((gpu.node, gpu.uuid, gpu.mig, gpu.index if gpu.uuid is None else None))
            if row is not None:
                rows[job.job_id, gpu.key] = len(devices)
                devices.append(row[0])
                starts.append(epoch_ms(job.start))
                steps.append(int(row[1] or 0))
    end_ms = epoch_ms(end) + 1
    count = len(devices)
    pairs = Pairs(
        pl.Series(devices, dtype=pl.UInt64).to_numpy(), np.array(starts, np.int64),
        np.full(count, end_ms), np.array(steps, np.int64),
    )  # fmt: skip
    rules = Thresholds(max_gap_steps=config.idle.max_gap_steps, floors_pct=config.agent.floors_pct)
    trailing = idle_windows.follow(store, pairs, since, end, limit, rules)
    used = idle_windows.used_before(store, pairs, trailing, pairs.start, since, rules, limit)
    return since, Past(rows, trailing, used)


def facts_now(
    job: Job, watched: Watched, past: Past | None, now: datetime, watched_s: float
) -> tuple[GpuFacts, datetime | None]:
    """Return the current facts about a GPU, with the idle time from stored samples and this run's readings."""
    gpu = watched.gpu
    used = None if gpu.used_mib is None else gpu.used_mib / 1024
    total = None if gpu.total_mib is None else gpu.total_mib / 1024
    facts = GpuFacts(dict(watched.peaks), None, used, total, gpu.power_w, None)
    if not gpu.signals_pct:
        return replace(facts, peaks_pct={}), None
    if watched.idle_since is None:
        return replace(facts, idle_s=0.0, used_before=True), None
    looked = now.timestamp() - watched.idle_since
    row = None if past is None else past.row.get((job.job_id, gpu.key))
    if past is None or row is None or int(past.trailing.last[row]) == NEVER:
        # Without stored samples only this run's readings count; a single one has no duration.
        length = looked if watched_s > 0 and looked > 0 else None
        unseen = watched.idle_since - (job.start.timestamp() if job.start else 0.0)
        before = False if length and unseen * 1000 <= idle_windows.UNSEEN_MS else None
        return replace(facts, idle_s=length, used_before=before), idle_windows.moment(int(watched.idle_since * 1000))
    begun = int(past.trailing.since[row])
    before = None if past.used[row] == idle_windows.UNSEEN else bool(past.used[row] == idle_windows.USED)
    if before and gpu.part_of is not None:
        before = None  # which job was active on the GPU is unknown
    # If the last stored sample was not idle, or is too old, the idle time starts with the readings.
    if begun == NEVER or watched.idle_since * 1000 - int(past.trailing.last[row]) > BRIDGE_S * 1000:
        return replace(facts, idle_s=looked, used_before=before), idle_windows.moment(int(watched.idle_since * 1000))
    measured = (int(past.trailing.until[row]) - begun) / 1000
    after = (
        max(0.0, now.timestamp() - max(watched.idle_since, int(past.trailing.last[row]) / 1000))
        if watched_s > 0
        else 0.0
    )
    peaks = dict(watched.peaks)
    for k, name in enumerate(ACTIVITY):
        value = float(past.trailing.peaks[row, k])
        if not np.isnan(value):
            peaks[name] = max(value, peaks.get(name, 0.0))
    extended_facts = replace(facts, peaks_pct=peaks, idle_s=measured + after, used_before=before)
    return extended_facts, idle_windows.moment(begun)
