"""What a job's owner sees of it in Slurm: our part of its comment."""

from __future__ import annotations

from slurm_affinode.agent import words
from slurm_affinode.agent.parts import Parts
from slurm_affinode.errors import AffinodeError


def comment(parts: Parts, job_id: int, own: str | None) -> None:
    """Put ``own`` before what the owner had put there; ``None``: nothing of ours. What fails is logged.

    Slurm takes no comment for a job that is over: what is there then stays, in accounting too.
    """
    try:
        before = parts.slurm.job(job_id).comment
        after = words.theirs(before) if own is None else words.comment(own, before)
        if after != (before or ""):
            parts.slurm.set_comment(job_id, after)
    except AffinodeError as error:
        parts.log.warning("job %s: its comment is not set: %s", job_id, error)
