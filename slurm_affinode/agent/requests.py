"""Senders of requests to the agent, their rights, and refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Refusal, RefusalCode

_QUERY_AGAIN_S = 30.0
"""Interval of queries for SlurmUser while slurmctld does not respond."""


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


class Admins:
    """Users with root's rights here: root, the site's list, and SlurmUser once slurmctld has reported it."""

    def __init__(
        self, names: tuple[str, ...], slurm_user: Callable[[], str | None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        """``slurm_user``: queries slurmctld; ``None``: it does not respond. ``later`` runs a call in the background."""
        self._names = frozenset(names)
        self._query = slurm_user
        self._later = later
        self._slurm_user: str | None = None
        self._queried_s = -1e9

    def replace(self, names: tuple[str, ...]) -> None:
        """Replace the site's list."""
        self._names = frozenset(names)

    def __call__(self, caller: Caller) -> bool:
        """Return whether ``caller`` is one of them, without waiting for slurmctld."""
        if caller.uid == 0 or caller.name in self._names:
            return True
        if self._slurm_user is None and time.monotonic() - self._queried_s > _QUERY_AGAIN_S:
            self._queried_s = time.monotonic()
            self._later(self._read_slurm_user)
        return self._slurm_user is not None and caller.name == self._slurm_user

    def _read_slurm_user(self) -> None:
        self._slurm_user = self._query()


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
