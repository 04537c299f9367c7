"""Senders and refusals of requests to the agent."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Refusal, RefusalCode


class RequestError(AffinodeError):
    """A refused request. ``code`` is machine-readable, ``exit_code`` is for the command that sent the request."""

    def __init__(self, code: str, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as identified by the kernel or munge."""

    uid: int
    name: str
    local: bool
    """Connected over the socket of this node."""


def without_option(job: Job | None) -> Refusal:
    """Return the most permanent reason why a job that no agent watches cannot be suspended.

    The option has no shepherd with ``salloc`` and ``srun``, and one in each batch job. ``None``: a job of which Slurm
    has reported nothing.
    """
    if job is not None and job.het_job_id is not None:
        return Refusal(RefusalCode.HETEROGENEOUS, "it is a heterogeneous job: its parts cannot be suspended as one")
    if job is not None and not job.batch:
        return Refusal(RefusalCode.INTERACTIVE, "it is interactive (salloc, srun): only batch jobs can be suspended")
    return Refusal(RefusalCode.NOT_OPTED_IN, "it was submitted without --gpu-suspend-idle")


def refusal_text(job_id: object, refusal: Refusal) -> str:
    """Return the message for the owner of a job that no agent watches, one line."""
    return f"job {job_id} cannot be suspended: {refusal.code}: {refusal.text}"


def refusal_hint(refusal: Refusal) -> str | None:
    """Return the remedy of the owner of a job that no agent watches, or ``None`` if there is none."""
    return None if refusal.code == RefusalCode.HETEROGENEOUS else "submit it with sbatch --gpu-suspend-idle=15m"
