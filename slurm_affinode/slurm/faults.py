"""What a request to Slurm can end with, by name, the same whoever asked: pyslurm or Slurm's own commands.

Both pass on the text of ``slurm_strerror``, so one table of texts says which error it is.
"""

from __future__ import annotations

import re

from slurm_affinode.errors import AffinodeError, InputError, UnreachableError

_ABOUT = re.compile(
    r"^(?:kill job error on job (?:step )?id \S+: |job notify failure: |slurm_\w+ error: )| for job [\w+\[\],-]+$",
    re.IGNORECASE,
)
"""The job named again, in the words of each command."""


class SlurmError(AffinodeError):
    """Slurm refused a request. ``target`` is the job, step or node that it was about."""

    def __init__(self, message: str, *, target: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.target = target


class UnknownJobError(SlurmError):
    """slurmctld has no such job or step: never was, or ended more than MinJobAge ago."""


class UnknownNodeError(SlurmError):
    """The cluster has no such node."""


class NotPermittedError(SlurmError):
    """This user may not do that to this job or node."""


class InvalidStateError(SlurmError):
    """Not in this state of the job or node: signal to a pending job, requeue of one that is pending, ..."""


class AlreadyDoneError(InvalidStateError):
    """The job has ended, so there is nothing left to do."""


class BadIdentifierError(InputError):
    """A text that is no job, step or node. Nothing was asked of Slurm."""


class ControllerDownError(UnreachableError):
    """slurmctld does not answer, or this machine does not know where it is."""


class BackendUnusableError(UnreachableError):
    """The way of talking to Slurm that was asked for does not work on this machine."""


class WorkerDiedError(UnreachableError):
    """The process in which pyslurm runs ended in the middle of a request; the next request starts a new one."""


_TABLE: tuple[tuple[type[SlurmError] | type[ControllerDownError], str, str | None], ...] = (
    (
        InvalidStateError,
        r"not permitted on individual component",
        "name the whole heterogeneous job by its first id",
    ),
    (
        ControllerDownError,
        r"unable to contact slurm controller|connect failure|connection refused|connection timed out|socket timed out"
        r"|zero bytes were transmitted|unexpected message received|slurm backup controller in standby"
        r"|communication (?:connection failure|shutdown)|no response|resource temporarily unavailable"
        r"|configuration source|cannot stat file|unable to process configuration|dns srv|unable to resolve"
        r"|no answer within|munge|authentication",
        "is slurmctld running, and does this machine have its slurm.conf? try: scontrol ping",
    ),
    (UnknownJobError, r"invalid job id|job \S+ not found|no job steps? .*found|invalid step", "see: squeue --all"),
    (UnknownNodeError, r"invalid node name|node \S+ not found", "see: sinfo --Node"),
    (
        NotPermittedError,
        r"access/permission denied|invalid user id|operation not permitted|permission denied|not (?:an? )?authorized",
        "only the owner, a Slurm operator or root may",
    ),
    (AlreadyDoneError, r"already completing or completed|already (?:finished|completed)|job/step already", None),
    (
        InvalidStateError,
        r"presently disabled",
        "a requeue needs a batch job that allows it (--requeue, JobRequeue=1), a message a job that runs",
    ),
    (
        InvalidStateError,
        r"pending execution|no longer pending|invalid node state|can ?not be altered|finishing"
        r"|not (?:running|suspended|pending)|not supported|in use by|busy|held|transition|batch job|disabled",
        None,
    ),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE), hint) for kind, pattern, hint in _TABLE)

_NOISE = re.compile(
    r"^(?:(?:scontrol|scancel|sacctmgr|python3?|slurm_\w+)\s*:?\s*)?(?:error|fatal)?\s*:?\s*", re.IGNORECASE
)


def refusal(doing: str, said: str, *, target: str | None = None) -> SlurmError | ControllerDownError:
    """The error for ``doing`` (``cancel job 12``) where Slurm said ``said`` (any number of lines)."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for kind, pattern, hint in _COMPILED:
        line = next((line for line in lines if pattern.search(line)), None)
        if line is None:
            continue
        if issubclass(kind, ControllerDownError):
            return ControllerDownError(f"{doing}: {clean(line)}", hint=hint)
        return kind(f"{doing}: {clean(line)}", target=target, hint=hint)
    last = clean(lines[-1]) if lines else "Slurm refused without saying why"
    return SlurmError(f"{doing}: {last}", target=target)


def clean(line: str) -> str:
    """A line of a Slurm program without the program's name and without the job, which our own text names."""
    bare = _NOISE.sub("", line, count=1).strip()
    return _ABOUT.sub("", bare).strip() or line.strip()
