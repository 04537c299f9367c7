"""Why a job cannot be suspended of which no shepherd has told: what kind of job it is, by Slurm's word."""

from __future__ import annotations

from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Refusal


def reason(job: Job) -> Refusal:
    """The most lasting reason. The option has no shepherd with ``salloc`` and ``srun``, and one in each batch job."""
    if job.het_job_id is not None:
        return Refusal("heterogeneous", "it is a heterogeneous job: its parts cannot be suspended as one")
    if not job.batch:
        return Refusal("interactive", "it is interactive (salloc, srun): only batch jobs can be suspended")
    return Refusal("not-opted-in", "it was submitted without --gpu-suspend-idle")


def text(job_id: object, refusal: Refusal) -> str:
    """One line for the owner."""
    return f"job {job_id} cannot be suspended: {refusal.text}"


def hint(refusal: Refusal) -> str | None:
    """What its owner can do."""
    return None if refusal.code == "heterogeneous" else "submit it with sbatch --gpu-suspend-idle=15m"
