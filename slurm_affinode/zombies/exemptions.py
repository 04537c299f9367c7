"""Requests of owners to exempt a job for a while (``slurm-affinode keep``).

The comment of a job is the only place that its owner can write and the administrators' tool reads. The request stays
there until the next run stores it in the database. Each attempt of a job can be exempted once: the first request that
is seen counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import span
from slurm_affinode.base.times import utc
from slurm_affinode.model.cleanup import AuditEntry, Keep, KeepPolicy
from slurm_affinode.model.cluster import Job

MAX_WHY = 400
_MARK = re.compile(r"\[keep until=(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z) why=([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class ExemptionRequest:
    """A request for exemption, as found in a job's comment."""

    until: datetime
    why: str


def parse(comment: str | None) -> ExemptionRequest | None:
    """Return the request in a comment; ``None`` if there is none in the expected form."""
    match = _MARK.search(comment or "")
    if match is None:
        return None
    try:
        return ExemptionRequest(datetime.fromisoformat(match[1]), match[2].strip())
    except ValueError:
        return None


def has_request(job: Job) -> bool:
    """Return whether the comment has a request for this attempt, that is, one that ends after its submit time."""
    exemption = parse(job.comment)
    return exemption is not None and (job.submit is None or exemption.until > job.submit)


def comment_with(comment: str | None, exemption: ExemptionRequest) -> str:
    """Return the comment with the request appended, replacing an earlier one.

    Raises ``AffinodeError`` if the result is longer than 1024 bytes.
    """
    comment = _MARK.sub("", comment or "").strip()
    why = " ".join(exemption.why.replace("[", "(").replace("]", ")").split())
    until = utc(exemption.until)
    mark = f"[keep until={until} why={why}]"
    marked_comment = f"{comment} {mark}" if comment else mark
    if len(marked_comment.encode()) > 1024:
        raise AffinodeError("the reason is too long for the job's comment", hint="shorten the reason")
    return marked_comment


def check(exemption: ExemptionRequest, policy: KeepPolicy, now: datetime) -> None:
    """Raise ``AffinodeError`` if the policy does not grant the request."""
    if not policy.allow:
        raise AffinodeError("this site does not allow exemptions (keep.allow)")
    if len(exemption.why) < policy.min_why:
        raise AffinodeError(
            f"the reason has {len(exemption.why)} characters, and {policy.min_why} are needed", hint='--why "..."'
        )
    if len(exemption.why) > MAX_WHY:
        raise AffinodeError(f"the reason is longer than {MAX_WHY} characters")
    longest = timedelta(seconds=policy.max_s)
    if exemption.until - now > longest + timedelta(minutes=1):
        raise AffinodeError(f"at most {span(policy.max_s)} can be requested", hint="see keep.max of the policy")


def record(keep: Keep, job: str, run: str, actor: str, now: datetime) -> AuditEntry:
    """Return the audit record of an exemption."""
    until = utc(keep.until)
    return AuditEntry(
        now, run, actor, "keep", "done", f"until {until}: {keep.why}", cluster=keep.cluster, job_id=keep.job_id,
        job=job, user=keep.user,
    )  # fmt: skip
