"""Findings about model servers in running jobs, from the stored samples of their engines and the GPUs now.

Engines that have outlived their server are found on the nodes (``orphans``), where each of their processes is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import NoStoreError
from slurm_affinode.core.cleanup_policy import ACTION_DIAGNOSES
from slurm_affinode.core.finding_texts import evidence
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import Finding, GpuEvidence, JobAttempt
from slurm_affinode.model.serving import PROBLEMS, Diagnosis, EngineHealth
from slurm_affinode.pipeline import servers
from slurm_affinode.pipeline.servers import ServerQuery
from slurm_affinode.zombies.nodes import LiveGpu

FRESH = timedelta(hours=1)
"""Engines without a sample for longer are left out. A policy has a limit of its own (``evidence.max_age``)."""
KINDS = frozenset(PROBLEMS) - {"orphaned-engine"}


def find(
    config: Config, cluster: str, jobs: Iterable[Job], gpus: Mapping[int, Sequence[LiveGpu]], now: datetime
) -> list[Finding]:
    """Return one finding for each job and diagnosis that holds at the last sample of its engine.

    If it holds for several engines of a job, the finding is about the one with the highest confidence. ``jobs``: the
    running jobs; ``gpus``: raw ID of each job -> its GPUs, or its shares of them.
    """
    by_id = {str(job.job_id): job for job in jobs}
    try:
        query = ServerQuery(now - servers.PERIOD, now, jobs=tuple(by_id))
        engines = servers.find(config, query).engines if by_id else ()
    except NoStoreError:
        return []
    by_key: dict[str, Finding] = {}
    for health in engines:
        if health.key.cluster not in (None, cluster, config.cluster.name_or_default) or health.until < now - FRESH:
            continue
        job = by_id[health.job or ""]
        if job.start is not None and health.until < job.start:
            continue
        for diagnosis in health.current if not _asleep(health) else ():
            if diagnosis.kind in KINDS:
                finding = _finding(health, diagnosis, job, gpus.get(job.job_id, ()), cluster=cluster)
                if finding.key not in by_key or by_key[finding.key].score < finding.score:
                    by_key[finding.key] = finding
    return list(by_key.values())


def _asleep(health: EngineHealth) -> bool:
    """Return whether the engine sleeps: it has given its GPU memory back."""
    return any(diagnosis.kind == "asleep" for diagnosis in health.current)


def _finding(health: EngineHealth, diagnosis: Diagnosis, job: Job, gpus: Sequence[LiveGpu], *, cluster: str) -> Finding:
    since = max(diagnosis.since, job.start or diagnosis.since)
    lasting = max(0.0, (health.until - since).total_seconds())
    engine = f"{health.key.engine} {health.key.model or ''}".strip()
    # A diagnosis counts whole GPUs; the hours of a share are unknown.
    figures = dict(diagnosis.figures) if job.gpus_allocated else {}
    idle = diagnosis.kind in ACTION_DIAGNOSES["suspend"]
    proof = (
        evidence("model-server.server", diagnosis.kind, engine=engine, address=health.key.address,
                 summary=diagnosis.summary),
        *diagnosis.evidence,
        evidence("model-server.time", lasting, met=False),
    )  # fmt: skip
    shown = tuple(
        replace(_gpu(uuid, health, job, gpus), flagged=idle, idle_s=lasting if idle else None) for uuid in health.gpus
    )
    return Finding(
        "model-server", cluster, JobAttempt.of(job), job.user, job.account,
        job.partitions[0] if job.partitions else None, job.qos, tuple(job.nodes), shown, since, lasting,
        diagnosis.confidence, proof, figures.get("gpu_hours"), figures.get("gib_hours"), None, "live", health.until,
        variant=diagnosis.kind, advice=diagnosis.advice,
        allocated_gpus=len(shown) if job.gpus_allocated is None else job.gpus_allocated.count,
    )  # fmt: skip


def _gpu(uuid: str, health: EngineHealth, job: Job, gpus: Sequence[LiveGpu]) -> GpuEvidence:
    unmeasured = GpuEvidence(health.key.node, uuid, uuid, mapping="labels", shared=not job.gpus_allocated)
    return next((gpu.evidence() for gpu in gpus if gpu.uuid == uuid), unmeasured)
