"""The interface to a live Slurm, and the errors of its requests.

There are two implementations: ``commands_client.CommandsClient`` (scontrol, scancel, squeue) and
``pyslurm_client.PyslurmClient``. Both pass on the text of ``slurm_strerror``, so one table of texts identifies the
error. Accounting is not part of it: ``sacct.read`` and ``sacct_command.run_sacct`` serve both.

Every method raises ``BadIdentifierError`` before it sends a request, ``ControllerDownError`` if slurmctld does not
respond (a change then has no effect, unless the response was lost), and, where Slurm refuses, ``UnknownJobError``,
``UnknownNodeError``, ``NotPermittedError``,
``AlreadyDoneError``, ``InvalidStateError`` or, without a name of its own, ``SlurmError``. A job is named ``123``,
``123_4`` or ``123+1``, a step ``123.0``.

Queries may be repeated. Changes that set a value are idempotent (``hold``, ``release``, ``set_*``, ``drain``);
``requeue``, ``cancel`` and ``resume`` report a repetition as an error, without a further effect; ``signal`` and
``notify`` act each time. All implementations, and the fakes of tests, pass ``tests/conformance/slurm_client.py``.

A number is a raw ID and means that one record; text means what it means to Slurm. They differ for the array task whose
raw ID is the number of the array: ``requeue("36")`` requeues every task of array 36, ``requeue(36)`` only one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Literal, Protocol, Self

from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.base.text import last_line, one_line
from slurm_affinode.model.cluster import Job, Node, Partition, Step

_ABOUT = re.compile(
    r"^(?:kill job error on job (?:step )?id \S+: |job notify failure: |slurm_\w+ error: )| for job [\w+\[\],-]+$",
    re.IGNORECASE,
)
"""The job as the messages of each command repeat it."""


class SlurmError(AffinodeError):
    """Slurm refused a request. ``target`` is the job, step or node of the request."""

    def __init__(self, message: str, *, target: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.target = target


class UnknownJobError(SlurmError):
    """slurmctld has no such job or step: it never existed, or ended more than MinJobAge ago."""


class UnknownNodeError(SlurmError):
    """The cluster has no such node."""


class NotPermittedError(SlurmError):
    """The user is not permitted to perform this operation on the job or node."""


class InvalidStateError(SlurmError):
    """The state of the job or node does not permit the operation: signaling or requeuing a pending job, ..."""


class AlreadyDoneError(InvalidStateError):
    """The job has already ended."""


class BadIdentifierError(InputError):
    """The text names no job, step or node. No request was sent to Slurm."""


class ControllerDownError(UnreachableError):
    """slurmctld does not respond, or this machine has no configuration that names it."""


class BackendUnusableError(UnreachableError):
    """The chosen backend does not work on this machine."""


class WorkerDiedError(UnreachableError):
    """The pyslurm process ended during a request; the next request starts a new one."""


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
        r"|timed out after|munge|authentication",
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
    r"^(?:(?:scontrol|scancel|sacct|sacctmgr|python3?|slurm_\w+)\s*:?\s*)?(?:error|fatal)?\s*:?\s*", re.IGNORECASE
)


def refusal(doing: str, output: str, *, target: str | None = None) -> SlurmError | ControllerDownError:
    """Return the error for the operation ``doing`` (``cancel job 12``) and Slurm's output ``output``."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
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
    """Return a message of a Slurm program without the name of the program and of the job."""
    bare = _NOISE.sub("", line, count=1).strip()
    return one_line(_ABOUT.sub("", bare)) or one_line(line)


def complaint(completion: Completed) -> str:
    """Return the last line that a Slurm program wrote to standard error, without the name of the program."""
    return clean(last_line(completion.stderr)) or "no output"


class Runner(Protocol):
    """``process.run``, or a fake in tests."""

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        """Run ``argv``."""
        ...


SignalTo = Literal["steps", "batch", "all"]
"""``steps``: all but the batch script; ``batch``: the batch script alone; ``all``: both."""


class SlurmClient(Protocol):
    """A live Slurm. Not thread-safe."""

    @property
    def backend(self) -> str:
        """``commands`` or ``pyslurm``."""
        ...

    def jobs(self, *, steps: bool = False, gpu_detail: bool = False) -> tuple[Job, ...]:
        """Return every job that slurmctld knows, ended ones included (for MinJobAge), with one request.

        ``steps`` adds the running steps, for one more request. ``gpu_detail`` adds the GPU indices on each node
        (``Job.node_gpus``), for at most one more request.
        """
        ...

    def overview(self) -> tuple[Job, ...]:
        """Return every job that slurmctld knows with its GPU indices, with two requests and little memory.

        Intended for clusters with 100,000 jobs: output files and admin comments are omitted (``None``), and
        ``node_gpus`` is ``None`` if it is not certain. ``tres_requested`` of a pending job is the request.
        """
        ...

    def job(self, job: int | str) -> Job:
        """Return one job, with its steps and GPU indices.

        The ID of an array finds the record of its pending tasks, else its first task; so does a task without a record
        of its own.
        """
        ...

    def steps(self, job: int | str | None = None) -> tuple[Step, ...]:
        """Return the running steps of one job or of all jobs."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """Return every node."""
        ...

    def partitions(self) -> tuple[Partition, ...]:
        """Return every partition, hidden ones included."""
        ...

    def config(self) -> Mapping[str, str]:
        """Return slurmctld's configuration as ``scontrol show config`` prints it.

        The names are spelled as in Slurm (``AccountingStorageTRES``); ``(null)`` is an empty string.
        """
        ...

    def version(self) -> str:
        """Return Slurm's version on this machine: ``26.05.5``."""
        ...

    def ping(self) -> None:
        """Check that a slurmctld responds. Raises ``ControllerDownError``."""
        ...

    def hold(self, job: int | str, *, by_user: bool = False) -> None:
        """Hold a pending job. ``by_user``: as a user hold, which the owner can release, even if root sets it.

        Idempotent. Raises ``NotPermittedError``, ``InvalidStateError`` if the job does not wait.
        """
        ...

    def release(self, job: int | str) -> None:
        """Release a held job; no effect on a pending job that is not held. Raises ``NotPermittedError``."""
        ...

    def requeue(self, job: int | str, *, hold: bool = False, running: bool = False) -> None:
        """Requeue a job, held if ``hold``. Raises ``InvalidStateError`` if it is pending.

        Slurm also requeues jobs that have ended or were canceled a moment ago. ``running``: requeue only a job that
        slurmctld finds running; any other is left as it is, without an error.
        """
        ...

    def cancel(self, job: int | str, *, signal: int | str | None = None) -> None:
        """Cancel a job, array task or step in any state; with ``signal``, see the method ``signal``.

        Raises ``UnknownJobError`` and ``AlreadyDoneError``, also where Slurm's programs report no error.
        """
        ...

    def signal(self, job: int | str, signal: int | str, *, to: SignalTo = "steps") -> None:
        """Send a signal to a running job or step. Raises ``InvalidStateError`` if it is not running."""
        ...

    def set_comment(self, job: int | str, text: str) -> None:
        """Set the comment, which the owner sees and may change. At most 1024 bytes; empty text removes it."""
        ...

    def set_admin_comment(self, job: int | str, text: str) -> None:
        """Set the admin comment, which only administrators may change. At most 64 KiB.

        The system comment is read-only: slurmctld refuses to change it.
        """
        ...

    def set_time_limit(self, job: int | str, minutes: int) -> None:
        """Set the time limit of a pending or running job, and remove its minimum. Idempotent.

        Only administrators may raise it: ``NotPermittedError``.
        """
        ...

    def set_required_nodes(self, job: int | str, nodes: Sequence[str]) -> None:
        """Set the nodes that the allocation of a pending job must include (``--nodelist``); empty: any. Idempotent."""
        ...

    def set_begin(self, job: int | str, when: datetime) -> None:
        """Set the earliest start of a pending job. Idempotent. Raises ``InvalidStateError`` if it does not wait."""
        ...

    def notify(self, job: int | str, message: str) -> None:
        """Write a line to the output of a running batch job, or to the terminal of an interactive one; each time."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """Drain a node: it accepts no new jobs, and running jobs continue. Idempotent. Raises ``UnknownNodeError``."""
        ...

    def resume(self, node: str) -> None:
        """Return a drained or down node to service. Raises ``InvalidStateError`` if it is neither."""
        ...

    def close(self) -> None:
        """End the processes started for this client. Idempotent; the next request starts them again. Never raises."""
        ...

    def __enter__(self) -> Self:
        """Return the client."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        ...
