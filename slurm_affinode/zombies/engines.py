"""Findings about model servers in running jobs, from the stored samples of their engines and the GPUs now.

Engines that outlived their server are found on the nodes (``orphans``), where each of their processes is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import NoStoreError
from slurm_affinode.base.text import span
from slurm_affinode.core.cleanup_policy import ACTION_DIAGNOSES
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.finding import Evidence, Finding, GpuEvidence, JobAttempt
from slurm_affinode.model.serving import PROBLEMS, Diagnosis, EngineHealth
from slurm_affinode.pipeline import servers
from slurm_affinode.pipeline.servers import ServerQuery
from slurm_affinode.zombies.nodes import LiveGpu, NodeAnswer

FRESH = timedelta(hours=1)
"""Engines without a sample for longer are left out. A policy has a limit of its own (``evidence.max_age``)."""
KINDS = frozenset(PROBLEMS) - {"orphaned-engine"}


def find(
    config: Config, cluster: str, jobs: Mapping[int, tuple[Job, JobAttempt]], answers: Iterable[NodeAnswer],
    now: datetime,
) -> list[Finding]:  # fmt: skip
    """Return one finding for each job and diagnosis that holds at the engine's last sample, of several the surest.

    ``jobs``: the jobs that run, by raw ID.
    """
    query = ServerQuery(now - servers.PERIOD, now, (), jobs=tuple(map(str, jobs)))
    try:
        known = servers.find(config, query).engines if jobs else ()
    except NoStoreError:
        return []
    gpus = {gpu.uuid: gpu for answer in answers for gpu in answer.gpus if gpu.uuid}
    found: dict[str, Finding] = {}
    for health in known:
        if health.key.cluster not in (None, cluster, config.cluster.name_or_default) or health.until < now - FRESH:
            continue
        job, attempt = jobs[int(health.job or 0)]
        if attempt.start is not None and health.until < attempt.start:
            continue
        for diagnosis in health.current if not _asleep(health) else ():
            if diagnosis.kind in KINDS:
                one = _finding(cluster, job, attempt, health, diagnosis, gpus)
                if one.key not in found or found[one.key].score < one.score:
                    found[one.key] = one
    return list(found.values())


def _asleep(health: EngineHealth) -> bool:
    """Return whether the engine sleeps: it has given its GPU memory back."""
    return any(one.kind == "asleep" for one in health.current)


def _finding(  # noqa: PLR0917
    cluster: str, job: Job, attempt: JobAttempt, health: EngineHealth, diagnosis: Diagnosis,
    gpus: Mapping[str, LiveGpu],
) -> Finding:  # fmt: skip
    since = max(diagnosis.since, attempt.start or diagnosis.since)
    lasting = max(0.0, (health.until - since).total_seconds())
    which = f"{health.key.engine} {health.key.model or ''}".strip()
    figures = dict(diagnosis.figures)
    idle = diagnosis.kind in ACTION_DIAGNOSES["suspend"]
    evidence = (
        Evidence("server", diagnosis.kind, "", None, 0.0, f"{which} at {health.key.address}: {diagnosis.summary}",
                 met=True),
        *diagnosis.evidence,
        Evidence("time", lasting, "s", None, 0.0, f"for {span(lasting)}"),
    )  # fmt: skip
    held = figures.get("gpu_hours")
    shown = tuple(_gpu(uuid, health, gpus.get(uuid), lasting, flagged=idle) for uuid in health.gpus)
    return Finding(
        "model-server", cluster, attempt, job.user, job.account, job.partitions[0] if job.partitions else None, job.qos,
        tuple(job.nodes), shown, since, lasting, diagnosis.confidence, evidence, held, figures.get("gib_hours"), None,
        "live", health.until, variant=diagnosis.kind, advice=diagnosis.advice, allocated_gpus=_count(job, shown),
    )  # fmt: skip


def _count(job: Job, shown: Sequence[GpuEvidence]) -> int:
    return len(shown) if job.gpus_allocated is None else job.gpus_allocated.count


def _gpu(
    uuid: str, health: EngineHealth, now: LiveGpu | None, idle_s: float, *, flagged: bool
) -> GpuEvidence:  # fmt: skip
    base = GpuEvidence(health.key.node, uuid, uuid, flagged=flagged, mapping="labels")
    if now is None:
        return base
    gib = [None if mib is None else mib / 1024 for mib in (now.used_mib, now.total_mib)]
    return replace(
        base, node=now.node, gpu=uuid if now.index is None else str(now.index), model=now.model, held_gib=gib[0],
        total_gib=gib[1], activity_pct=max(now.signals_pct.values(), default=None), power_w=now.power_w, xid=now.xid,
        idle_s=idle_s if flagged else None, measured=bool(now.signals_pct),
    )  # fmt: skip
