"""Storing of the exemptions that owners have requested in the comments of their jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from slurm_affinode.base.times import named
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.model.cleanup import Keep, KeepPolicy
from slurm_affinode.model.cluster import Job
from slurm_affinode.zombies import exemptions
from slurm_affinode.zombies.outcomes import HOLD


def collect(
    jobs: Iterable[Job], cluster: str, policy: KeepPolicy, log: ZombieLog, *, now: datetime, run: str
) -> list[Keep]:
    """Store the requests in the comments of running jobs and return the new ones.

    A request for longer than the policy allows is shortened to the maximum, counted from now.
    """
    recorded: list[Keep] = []
    keeps = log.ledger(now).keeps
    for job in jobs:
        exemption = exemptions.parse(job.comment) if job.allocated else None
        if exemption is None or job.submit is None or not policy.allow or exemption.until <= now:
            continue
        stored = keeps.get((cluster, job.job_id))
        if stored is not None and int(stored.submit.timestamp()) == int(job.submit.timestamp()):
            continue
        until = min(exemption.until, now + timedelta(seconds=policy.max_s))
        keep = Keep(cluster, job.job_id, job.submit, job.user or "?", exemption.why[: exemptions.MAX_WHY], now, until)
        if len(exemption.why) < policy.min_why:
            continue
        actor = f"{job.user} (comment of the job)"
        earlier = log.keep(keep)
        if earlier is None:
            recorded.append(keep)
            log.record([exemptions.record(keep, job.id, run, actor, now)])
            continue
        claim = f"keep|{cluster}|{job.job_id}|{int(job.submit.timestamp())}|{int(exemption.until.timestamp())}"
        if log.claim(claim, run, now, HOLD):
            refused = exemptions.record(keep, job.id, run, actor, now)
            why = f"it was kept until {named(earlier.until, UTC)} already, and only one exemption is allowed"
            log.record([replace(refused, result="refused", reason=f"{refused.reason}; {why}")])
            log.settle(claim, run, now, None)
    return recorded
