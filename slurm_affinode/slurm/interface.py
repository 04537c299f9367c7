"""What the product asks of a live Slurm, whoever carries it out.

Two implementations: ``commands_client.CommandsClient`` (scontrol, scancel, sinfo) and ``pyslurm_client.PyslurmClient``.
Accounting is not here: ``sacct.read`` and ``commands.run_sacct`` are the same for both.

Every method raises ``BadIdentifierError`` before anything is asked, ``ControllerDownError`` where slurmctld does not
answer, and where Slurm refuses ``UnknownJobError``, ``UnknownNodeError``, ``NotPermittedError``, ``AlreadyDoneError``,
``InvalidStateError`` or, for what has no name, ``SlurmError`` (module ``faults``). A job is named ``123``, ``123_4`` or
``123+1``, a step ``123.0``.

A number is a raw id and means that one record; text means what it means to Slurm. They differ for the task of an array
that has the array's own number as its raw id: ``requeue("36")`` requeues every task of array 36, ``requeue(36)`` one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Literal, Protocol, Self

from slurm_affinode.model.cluster import Job, Node, Partition, Step

SignalTo = Literal["steps", "batch", "all"]
"""``steps``: all but the batch script; ``batch``: the batch script alone; ``all``: both."""


class SlurmClient(Protocol):
    """A live Slurm. Not for use by several threads at once."""

    @property
    def backend(self) -> str:
        """``commands`` or ``pyslurm``."""
        ...

    def jobs(self, *, steps: bool = False, gpu_detail: bool = False) -> tuple[Job, ...]:
        """Every job that slurmctld knows, ended ones too (for MinJobAge), in one request.

        ``steps``: with the steps that run, for one more request. ``gpu_detail``: with the numbers of the GPUs on each
        node (``Job.node_gpus``), for at most one more request.
        """
        ...

    def overview(self) -> tuple[Job, ...]:
        """Every job that slurmctld knows with the numbers of its GPUs, in two requests and little memory.

        Made for a hundred thousand jobs: output files and administrators' comments are left out (``None``), and
        ``node_gpus`` is ``None`` where there is a doubt about it. For a pending job ``tres_requested`` is what it asks
        for.
        """
        ...

    def job(self, job: int | str) -> Job:
        """One job, with steps and the numbers of its GPUs.

        The id of an array finds the record of its waiting tasks, else its first task; so does a task that has no
        record of its own.
        """
        ...

    def steps(self, job: int | str | None = None) -> tuple[Step, ...]:
        """The steps that run now, of one job or of all."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """Every node."""
        ...

    def partitions(self) -> tuple[Partition, ...]:
        """Every partition, hidden ones too."""
        ...

    def config(self) -> Mapping[str, str]:
        """slurmctld's configuration as ``scontrol show config`` has it.

        The names are as Slurm writes them (``AccountingStorageTRES``); ``(null)`` is an empty text.
        """
        ...

    def version(self) -> str:
        """Slurm's version on this machine: ``26.05.5``."""
        ...

    def ping(self) -> None:
        """Return where a slurmctld answers. Raises ``ControllerDownError``."""
        ...

    def hold(self, job: int | str, *, by_user: bool = False) -> None:
        """Keep a pending job from starting. ``by_user``: so that its owner can release it, also where root holds it."""
        ...

    def release(self, job: int | str) -> None:
        """Undo a hold."""
        ...

    def requeue(self, job: int | str, *, hold: bool = False, running: bool = False) -> None:
        """End a run and put the job back into the queue, held where asked. ``InvalidStateError``: it is pending.

        Slurm does so with a job that has ended, or that was cancelled a moment ago, too. ``running``: only with one
        that runs, by Slurm's own look at it; with any other nothing is done, and nothing is said of that.
        """
        ...

    def cancel(self, job: int | str, *, signal: int | str | None = None) -> None:
        """End a job, array task or step, in whatever state; with ``signal``, see ``signal``.

        ``UnknownJobError`` and ``AlreadyDoneError`` are raised where Slurm's own programs stay silent.
        """
        ...

    def signal(self, job: int | str, signal: int | str, *, to: SignalTo = "steps") -> None:
        """Send a signal to a running job or step. ``InvalidStateError`` where it does not run."""
        ...

    def set_comment(self, job: int | str, text: str) -> None:
        """The comment that its owner sees and may change. At most 1024 bytes; empty text takes it away."""
        ...

    def set_admin_comment(self, job: int | str, text: str) -> None:
        """The comment that only administrators change. At most 64 KiB.

        The third one, the system comment, can only be read: slurmctld refuses to change it.
        """
        ...

    def set_begin(self, job: int | str, when: datetime) -> None:
        """A pending job does not start before ``when``."""
        ...

    def notify(self, job: int | str, message: str) -> None:
        """Write a line to the output of a running batch job, or to the terminal of an interactive one."""
        ...

    def drain(self, node: str, reason: str) -> None:
        """No new jobs on the node; those there run on."""
        ...

    def resume(self, node: str) -> None:
        """Take a drained or downed node into service again. ``InvalidStateError`` where it is neither."""
        ...

    def close(self) -> None:
        """End what was started for this client."""
        ...

    def __enter__(self) -> Self:
        """The client."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        ...
