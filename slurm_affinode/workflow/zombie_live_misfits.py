"""Misfits as they are now: the jobs that slurmctld knows, what the agents say that they use, and the history so far.

What ended within the time looked back at comes from stored accounting, where there is any, and for a few minutes from
slurmctld itself. Without a history of the GPUs nothing is said of what they did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import polars as pl

from slurm_affinode.analysis import misfits, squatters
from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.config import Config
from slurm_affinode.core.spans import span
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history.store import SampleStore
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import MISFIT_KINDS, USER_KINDS, Finding, JobRef
from slurm_affinode.slurm import units
from slurm_affinode.slurm.schema import ALLOCATION_GPUS, JOBS, conform
from slurm_affinode.store.repository import Repository
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow.zombie_nodes import JobUse, LiveGpu, NodeAnswer
from slurm_affinode.workflow.zombies import COLUMNS, Request, Snapshot, gpu_partitions, node_classes


@dataclass(frozen=True, slots=True)
class Now:
    """What was seen in this run."""

    snapshot: Snapshot
    answers: Sequence[NodeAnswer]
    gpus: Mapping[int, Sequence[LiveGpu]]
    """Raw id -> the GPUs of a running job, as far as they are known."""
    at: datetime


def find(
    config: Config, request: Request, seen: Now, history: SampleStore, refs: Mapping[int, Callable[[], JobRef]]
) -> tuple[list[Finding], list[str]]:
    """Findings and what is not known. ``refs``: running jobs, named."""
    wanted = request.wanted & MISFIT_KINDS
    if not wanted:
        return [], []
    since = request.since or seen.at - timedelta(seconds=parse_span_s(config.zombies.look_back))
    stored, recorded, notes = _stored(config, since, seen.at, seen.snapshot.cluster)
    jobs = frame(seen.snapshot, _uses(seen))
    jobs = _together(stored, jobs)
    gpus = pl.concat([recorded, _allocations(seen)])
    rules = config.zombies.misfits
    gaps = Thresholds(max_gap_steps=config.idle.max_gap_steps, floors_pct=config.agent.floors_pct)
    query = WasteQuery(since, seen.at, request.clusters, request.partitions, request.accounts, request.users,
                       thresholds=gaps)  # fmt: skip
    held = squatters.hold(query, jobs, gpus, history, [misfits.IDLE_PCT], seen.at)
    classes = {**config.zombies.nodes, **node_classes(seen.snapshot.nodes)}
    found = misfits.find(
        held, rules, classes, min_run_s=parse_span_s(rules.min_run), kinds=wanted,
        gpu_partitions=gpu_partitions(seen.snapshot.nodes),
    )  # fmt: skip
    return [_live(one, refs) for one in found], [*notes, *_silent(seen, wanted, history, since)]


BY_GPUS = ("gpu-too-powerful", "low-efficiency-user")
"""Kinds that go by what GPUs did over a time: a look does not tell."""
BY_USE = ("cpu-cores-per-gpu", "memory-per-gpu")
"""Kinds that go by what a job uses of cores and host memory, which the agents tell."""
FRESH_S = 600.0


def _silent(seen: Now, wanted: Collection[str], history: SampleStore, since: datetime) -> list[str]:
    """Rules that say nothing, and what they would need."""
    notes = []
    blind = " and ".join(kind for kind in BY_GPUS if kind in wanted)
    covered = history.span()
    if blind and (covered is None or covered[1] < since):
        there = "there is none of this time" if covered else "there is none"
        notes.append(f"{blind}: not looked for: a history of the GPUs is needed, and {there}; --prometheus, ingest gpu")
    elif blind and covered is not None and (seen.at - covered[1]).total_seconds() > FRESH_S:
        notes.append(f"{blind}: from the history, which ends {span((seen.at - covered[1]).total_seconds())} ago")
    mute = " and ".join(kind for kind in BY_USE if kind in wanted)
    running = [job for job in seen.snapshot.jobs if job.state == "RUNNING" and job.gpus_allocated]
    told = _uses(seen)
    unknown = sum(job.job_id not in told for job in running)
    if mute and unknown:
        notes.append(f"{mute}: unknown of {unknown} of {len(running)} jobs: the agents of their nodes do not tell "
                     "what they use of cores and host memory")  # fmt: skip
    return notes


def _live(one: Finding, refs: Mapping[int, Callable[[], JobRef]]) -> Finding:
    if one.kind in USER_KINDS or one.job is None:
        return replace(one, source="live")
    named = refs.get(one.job.job_id)
    return replace(one, source="live", subject=one.job if named is None else named())


def frame(snapshot: Snapshot, uses: Mapping[int, JobUse | None]) -> pl.DataFrame:
    """The jobs of slurmctld that have started, as ``JOBS``."""
    rows = [_row(snapshot.cluster, job, uses.get(job.job_id)) for job in snapshot.jobs if job.start is not None]
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows[:1])}
    return conform(pl.DataFrame(rows, schema=types, orient="row") if rows else pl.DataFrame(schema=JOBS), JOBS)


def pending(snapshot: Snapshot) -> pl.DataFrame:
    """The jobs of slurmctld that wait, as ``JOBS``."""
    rows = [
        {**_row(snapshot.cluster, job, None), "partition": ",".join(job.partitions), "reason": job.reason,
         "req_gpus": None if job.gpus_requested is None else job.gpus_requested.count}
        for job in snapshot.jobs if job.pending
    ]  # fmt: skip
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows[:1])}
    return conform(pl.DataFrame(rows, schema=types, orient="row") if rows else pl.DataFrame(schema=JOBS), JOBS)


def _row(cluster: str, job: Job, use: JobUse | None) -> dict[str, Any]:
    memory = _bytes(job.tres_allocated.get("mem"))
    gpus = job.gpus_allocated
    return {
        "cluster": cluster, "job_id": job.job_id, "submit": job.submit, "array_job_id": job.array_job_id,
        "array_task_id": job.array_task_id, "het_job_id": job.het_job_id, "het_offset": job.het_offset,
        "job_name": job.name, "user": job.user, "account": job.account,
        "partition": next(iter(job.partitions), None), "qos": job.qos, "state": job.state, "eligible": job.eligible,
        "start": job.start, "end": job.end, "timelimit_s": job.time_limit_s, "nodes": job.node_count,
        "node_list": ",".join(job.nodes) or None, "cpus": job.cpus, "alloc_mem_bytes": memory,
        "gpus": (0 if job.tres_allocated else None) if gpus is None else gpus.count,
        "gpu_type": None if gpus is None else gpus.kind, "constraints": job.features,
        "total_cpu_s": None if use is None else use.cpu_s,
        "max_rss_bytes": None if use is None else int(use.memory_mib * 2**20),
    }  # fmt: skip


def _bytes(text: str | None) -> int | None:
    try:
        found = units.parse_memory(text or "", bare="M")
    except ValueError:
        return None
    return None if found is None else found.size_bytes


def _uses(seen: Now) -> dict[int, JobUse | None]:
    """CPU time of the whole job and memory of the node where it has most, where every node of the job told."""
    by_node = {one.node: one.uses for one in seen.answers}
    found: dict[int, JobUse | None] = {}
    for job in seen.snapshot.jobs:
        if job.state != "RUNNING" or not job.nodes:
            continue
        told = [None if (uses := by_node.get(node)) is None else uses.get(job.job_id) for node in job.nodes]
        known = [one for one in told if one is not None]
        if len(known) == len(told):
            found[job.job_id] = JobUse(sum(one.cpu_s for one in known), max(one.memory_mib for one in known))
    return found


def _allocations(seen: Now) -> pl.DataFrame:
    rows = [
        (seen.snapshot.cluster, number, None, gpu.node, gpu.uuid or str(gpu.index))
        for number, gpus in seen.gpus.items() for gpu in gpus
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=ALLOCATION_GPUS, orient="row")


def _stored(
    config: Config, since: datetime, until: datetime, cluster: str
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    try:
        with Repository.open(config.db_url, create=False, upgrade=False) as store:
            jobs = conform(store.jobs(since, until, clusters=(cluster,), columns=COLUMNS), JOBS)
            return jobs, conform(store.allocation_gpus(since, until), ALLOCATION_GPUS), []
    except AffinodeError as error:
        note = f"jobs that ended before the last few minutes are not known: {error}"
        return pl.DataFrame(schema=JOBS), pl.DataFrame(schema=ALLOCATION_GPUS), [note]


def _together(stored: pl.DataFrame, live: pl.DataFrame) -> pl.DataFrame:
    """What runs is what slurmctld says; what accounting believes to run and slurmctld does not know has ended."""
    ended = stored.filter(pl.col("end").is_not_null())
    return pl.concat([ended.join(live, on=["job_id", "submit"], how="anti", maintain_order="left"), live])
