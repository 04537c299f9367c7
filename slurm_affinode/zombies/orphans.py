"""Leftovers on nodes: processes and GPU memory without a job, processes of jobs without their server, jobs that do not
complete, drained nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from slurm_affinode.base.garbage import without_collection
from slurm_affinode.core.finding_texts import advice, evidence, xid
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import EPILOG, Evidence, Finding, JobAttempt, NodeRef, ProcessRef
from slurm_affinode.model.gpu import FREE_MIB, total_mib
from slurm_affinode.zombies.nodes import EndedServer, LiveGpu, LiveProcess, NodeAnswer

KINDS = ("orphan-process", "orphan-memory")
"""Kinds of findings with no known start time."""
KILL_FAILED = "kill task failed"


def find(  # noqa: PLR0917
    cluster: str, jobs: Sequence[Job], nodes: Iterable[Node], first_answers: Iterable[NodeAnswer],
    answers: Iterable[NodeAnswer], now: datetime, *, before: Sequence[Job], completing_s: float,
) -> list[Finding]:  # fmt: skip
    """Return findings about processes, GPUs and nodes, and about jobs that are COMPLETING for ``completing_s``.

    ``first_answers`` and ``answers`` are the first and the last responses of the nodes, ``before`` the jobs before the
    first and ``jobs`` those after the last. Only what both responses show is reported, and only if it fits neither list
    of jobs: jobs may have started or ended in between.
    """
    findings = _strays(cluster, _known_jobs(jobs if before is jobs else (*before, *jobs)), first_answers, answers, now)
    findings += _engines(cluster, jobs, first_answers, answers, now)
    findings += [finding for job in jobs if (finding := _completing(cluster, job, now, completing_s)) is not None]
    findings += [finding for node in nodes if (finding := _drained(cluster, node, now)) is not None]
    return findings


def _engines(
    cluster: str, jobs: Sequence[Job], first_answers: Iterable[NodeAnswer], answers: Iterable[NodeAnswer], now: datetime
) -> list[Finding]:
    """Return the processes of running jobs that have lost their server, according to both responses of their node."""
    running = {job.job_id: job for job in jobs if job.state == "RUNNING"}
    first = {
        (answer.node, process.pid, process.start_ticks)
        for answer in first_answers for gpu in answer.gpus for process in gpu.processes or ()
        if process.server is not None
    }  # fmt: skip
    findings: list[Finding] = []
    for answer in answers if first else ():
        for process, gpus in _by_process(answer):
            job = running.get(process.job) if process.job is not None else None
            lasts = (answer.node, process.pid, process.start_ticks) in first
            if process.server is None or process.system or job is None or answer.node not in job.nodes or not lasts:
                continue
            findings.append(_engine(process, process.server, job, gpus, cluster=cluster, now=now))
    return findings


def _engine(
    process: LiveProcess, server: EndedServer, job: Job, gpus: Sequence[LiveGpu], *, cluster: str, now: datetime
) -> Finding:
    used_gib, node = _gib(process.used_mib), gpus[0].node
    lasting = max(0.0, (now - server.end).total_seconds())
    proof = (
        evidence(
            "orphaned-engine.server", "ended", 0.6, engines=", ".join(server.engines) or None,
            unnamed=None if server.engines else True, address=server.address, pids=", ".join(map(str, server.pids)),
        ),
        evidence("orphaned-engine.memory", used_gib, 0.4, met=bool(used_gib)),
        evidence("orphaned-engine.job", job.id),
        evidence("orphaned-engine.time", lasting, met=False),
    )  # fmt: skip
    subject = ProcessRef(node, process.pid, process.start_ticks, process.command, process.uid, str(job.job_id),
                         JobAttempt.of(job))  # fmt: skip
    orphan = _finding("orphaned-engine", cluster, subject, proof, now, user=job.user, node=node, gpus=gpus)
    return replace(
        orphan, account=job.account, partition=job.partitions[0] if job.partitions else None, qos=job.qos,
        since=server.end, window_s=lasting,  # the GPU-hours are unknown: the job may compute on the GPU
        held_gib_hours=None if used_gib is None else used_gib * lasting / 3600,
        allocated_gpus=len(gpus) if job.gpus_allocated is None else job.gpus_allocated.count,
    )  # fmt: skip


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024


def _by_process(answer: NodeAnswer) -> list[tuple[LiveProcess, list[LiveGpu]]]:
    """Return each process on the GPUs of a node, with its memory on all of them, and its GPUs."""
    on: dict[int, list[tuple[LiveProcess, LiveGpu]]] = {}
    for gpu in answer.gpus:
        for process in gpu.processes or ():
            on.setdefault(process.pid, []).append((process, gpu))
    return [
        (
            rows[0][0]
            if len(rows) == 1
            else replace(rows[0][0], used_mib=total_mib(process.used_mib for process, _ in rows)),
            [gpu for _, gpu in rows],
        )
        for rows in on.values()
    ]


@dataclass(frozen=True, slots=True)
class _KnownJobs:
    """The jobs that processes are checked against."""

    alive: Mapping[int, int | None]
    """Raw ID of each job that has not ended -> UID of its user."""
    ended_jobs: Mapping[int, int | None]
    """The same of the jobs that have ended, as far as Slurm still lists them."""
    on: Mapping[str, Sequence[Job]]
    """Node -> the jobs on it."""


def _known_jobs(jobs: Iterable[Job]) -> _KnownJobs:
    alive: dict[int, int | None] = {}
    ended: dict[int, int | None] = {}
    on: dict[str, list[Job]] = {}
    for job in jobs:
        (ended if job.has_ended else alive)[job.job_id] = job.uid
        for name in job.nodes if job.allocated else ():
            on.setdefault(name, []).append(job)
    return _KnownJobs(alive, ended, on)


def orphan(process: LiveProcess, jobs: Iterable[Job], node: str) -> str | None:
    """Return why a process on ``node`` belongs to no job; ``None`` if it does or may."""
    code = _orphan(process, _known_jobs(jobs), node)
    return None if code is None else evidence(code, "none", job=process.job).text


def _orphan(process: LiveProcess, owners: _KnownJobs, node: str) -> str | None:
    """Return the code of the evidence that a process belongs to no job. When in doubt, it is not an orphan."""
    if process.system or process.source == "slurmstepd":
        return None
    over = process.job is not None and process.job not in owners.alive
    # The environment names any job: that it is one of its user's must be known.
    if over and process.job is not None:
        owner = owners.ended_jobs.get(process.job)
        if process.source != "environment" or (owner is not None and owner == process.uid):
            return "orphan-process.job-ended"
    # The job in the environment does not count if it is another user's.
    if (
        process.job is not None
        and not over
        and (process.source != "environment" or process.may_be_of(owners.alive[process.job]))
    ):
        return None
    if any(process.may_be_of(job.uid) for job in owners.on.get(node, ())):
        return None
    if over:
        return "orphan-process.job-ended"
    return "orphan-process.job-none" if process.job is None else "orphan-process.job-foreign"


@without_collection()
def seem(jobs: Iterable[Job], first_answers: Iterable[NodeAnswer], answers: Iterable[NodeAnswer]) -> bool:
    """Return whether a process or memory belongs to none of ``jobs``. A job started since may own it."""
    return bool(_strays("", _known_jobs(jobs), first_answers, answers, datetime.fromtimestamp(0, UTC)))


def _strays(
    cluster: str, owners: _KnownJobs, first_answers: Iterable[NodeAnswer], answers: Iterable[NodeAnswer], now: datetime
) -> list[Finding]:
    """Return processes and memory without a job that are in both the first and the last response of their node."""
    first = [gpu for answer in first_answers for gpu in answer.gpus]
    first_processes = {(gpu.node, process.pid, process.start_ticks) for gpu in first for process in gpu.processes or ()}
    earlier_keys = {gpu.key for gpu in first if _unowned(gpu)}
    findings: list[Finding] = []
    for answer in answers:
        if answer.by != "agent":
            continue
        findings += _processes(cluster, answer, first_processes, owners, now)
        lasting = [gpu for gpu in answer.gpus if _unowned(gpu) and gpu.key in earlier_keys]
        claims = _Claims.of(answer.node, owners.on.get(answer.node, ())) if lasting else None
        findings += [_memory(cluster, gpu, now) for gpu in lasting if claims is not None and not claims.may_cover(gpu)]
    return findings


def _processes(
    cluster: str,
    answer: NodeAnswer,
    first_processes: Collection[tuple[str, int, int]],
    owners: _KnownJobs,
    now: datetime,
) -> list[Finding]:
    findings = []
    for process, gpus in _by_process(answer):
        code = _orphan(process, owners, answer.node)
        if code is None or (answer.node, process.pid, process.start_ticks) not in first_processes:
            continue
        used_gib = _gib(process.used_mib)
        proof = (
            evidence(code, "none", 0.5, job=process.job),
            evidence(
                "orphan-process.processes", float(process.pid), 0.3, command=process.command or "?",
                gpus=", ".join(str(gpu.index) for gpu in gpus),
            ),
            evidence("orphan-process.memory", used_gib, 0.2, met=bool(used_gib)),
        )  # fmt: skip
        claims = None if process.job is None else str(process.job)
        subject = ProcessRef(answer.node, process.pid, process.start_ticks, process.command, process.uid, claims)
        findings.append(
            _finding("orphan-process", cluster, subject, proof, now, user=process.user, node=answer.node, gpus=gpus)
        )
    return findings


def _unowned(gpu: LiveGpu) -> bool:
    """Return whether memory is held although the driver shows no process on the GPU."""
    return gpu.used_mib is not None and gpu.used_mib > FREE_MIB and gpu.processes == () and not gpu.fault


def _memory(cluster: str, gpu: LiveGpu, now: datetime) -> Finding:
    proof = (
        evidence("orphan-memory.memory", (gpu.used_mib or 0.0) / 1024, 0.4, least=FREE_MIB / 1024),
        evidence("orphan-memory.processes", 0.0, 0.4),
        evidence("orphan-memory.job", "none", 0.2),
        xid(gpu.xid),
    )
    subject = NodeRef(gpu.node, gpu.uuid or str(gpu.index))
    return _finding("orphan-memory", cluster, subject, proof, now, node=gpu.node, gpus=[gpu])


@dataclass(frozen=True, slots=True)
class _Claims:
    """The GPUs of a node that its jobs have or may have."""

    every: bool
    """A job shares GPUs, or its GPUs are unknown: it may have any of them."""
    minors: Set[int]

    @classmethod
    def of(cls, node: str, jobs: Iterable[Job]) -> _Claims:
        minors: set[int] = set()
        for job in jobs:
            if job.shares_gpus or (job.node_gpus is None and job.gpus_allocated):
                return cls(every=True, minors=minors)
            for gpu in job.node_gpus or ():
                if gpu.node == node and not gpu.indices:
                    return cls(every=True, minors=minors)
                if gpu.node == node:
                    minors.update(gpu.indices)
        return cls(every=False, minors=minors)

    def may_cover(self, gpu: LiveGpu) -> bool:
        """Return whether a job has the GPU or a share of it, or its GPUs are unknown."""
        if gpu.minor is None or gpu.mig is not None:  # Slurm does not number MIG instances by device file
            return self.every or bool(self.minors)
        return self.every or gpu.minor in self.minors


def _completing(cluster: str, job: Job, now: datetime, longer_s: float) -> Finding | None:
    if job.state != "COMPLETING" or job.end is None:
        return None
    lasting = (now - job.end).total_seconds()
    if lasting < longer_s:
        return None
    proof = (
        evidence("completing.state", "COMPLETING", 0.5),
        evidence("completing.time", lasting, 0.5, least=longer_s),
    )
    count = None if job.gpus_allocated is None else job.gpus_allocated.count
    return Finding(
        "completing", cluster, JobAttempt.of(job), job.user, job.account,
        job.partitions[0] if job.partitions else None, job.qos, job.nodes, (), job.end, lasting, 1.0, proof,
        None if count is None else count * lasting / 3600, None, None, "live", now,
        advice=advice("completing.advice"),
        allocated_gpus=count,
    )  # fmt: skip


def _drained(cluster: str, node: Node, now: datetime) -> Finding | None:
    """Return a finding if a process that did not end, or a GPU that was still held, has drained the node."""
    reason = node.reason or ""
    by_epilog = reason.startswith(EPILOG)
    kind, begin = ("drained-by-epilog", EPILOG) if by_epilog else ("drained-kill-failed", "Kill task failed")
    if not node.draining or not (by_epilog or KILL_FAILED in reason.lower()):
        return None
    lasting = 0.0 if node.reason_time is None else max(0.0, (now - node.reason_time).total_seconds())
    count = None if node.gpus is None else node.gpus.count
    proof = (
        evidence("drained.state", "DRAIN", 0.5, lasting=lasting),
        evidence("drained.reason", node.reason, 0.5, begin=begin),
    )
    subject = NodeRef(node.name, None, node.reason, node.reason_user, node.reason_time)
    return Finding(
        kind, cluster, subject, None, None, ",".join(node.partitions) or None, None,
        (node.name,), (), node.reason_time, lasting, 1.0, proof,
        None if count is None else count * lasting / 3600, None, None, "live", now,
        advice=advice(f"{kind}.advice"),
        allocated_gpus=count,
    )  # fmt: skip


def _finding(
    kind: str,
    cluster: str,
    subject: ProcessRef | NodeRef,
    proof: tuple[Evidence, ...],
    now: datetime,
    *,
    node: str,
    gpus: Sequence[LiveGpu],
    user: str | None = None,
) -> Finding:
    shown = tuple(replace(gpu.evidence(), flagged=True) for gpu in gpus)
    return Finding(
        kind, cluster, subject, user, None, None, None, (node,), shown, None, 0.0,
        min(1.0, sum(item.points for item in proof)), proof, None, None, None, "live", now,
        advice=advice(f"{kind}.advice"), allocated_gpus=len(gpus),
    )  # fmt: skip
