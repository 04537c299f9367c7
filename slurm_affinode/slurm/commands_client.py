"""Slurm through its commands: one process per request, JSON from a data parser that every supported release has."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from signal import SIGKILL
from types import TracebackType
from typing import Self

from slurm_affinode.base import process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.garbage import without_collection
from slurm_affinode.base.process import Completed
from slurm_affinode.model.cluster import ALLOCATED_STATES, GpuCount, Job, Node, NodeGpus, Partition, Step
from slurm_affinode.slurm import identifiers, interface, scontrol, squeue
from slurm_affinode.slurm.identifiers import Target
from slurm_affinode.slurm.interface import Runner, SignalTo

TIMEOUT_S = 60.0
"""Longer than the retries of Slurm's own commands at the usual MessageTimeout of 10 s."""

_JOB_QUERY_WORDS = 3
"""``show job 12`` has three words, ``show jobs`` two."""

MOST_SINGLE = 20
"""Limit of the jobs that are looked up one by one because the listing leaves their GPU indices uncertain."""

NAMED_STEPS = ("batch", "extern", "interactive")
"""Steps that scancel does not accept by name."""

_SETTINGS = ("SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SCONTROL_ALL", "SCONTROL_FEDERATION", "SCONTROL_FUTURE",
             "SCONTROL_LOCAL", "SCONTROL_SIBLING", "SLURM_JSON", "SLURM_YAML")  # fmt: skip
_SETTING_PREFIXES = ("SCANCEL_", "SQUEUE_", "SINFO_")
"""Environment variables that would change the behavior or the output of the commands."""


class CommandsClient:
    """``SlurmClient`` that runs scontrol, scancel and squeue. ``run`` is ``process.run``, or a fake in tests."""

    backend = "commands"

    def __init__(
        self, run: Runner = process.run, *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._run = run
        self._env = environment(os.environ if env is None else env)
        self._timeout_s = timeout_s
        self._parser: str | None = None

    # --- queries

    def jobs(self, *, steps: bool = False, gpu_detail: bool = False) -> tuple[Job, ...]:
        """See ``SlurmClient``. The GPU indices are always included, at no extra cost."""
        records = scontrol.jobs(self._json("jobs", "list jobs", "show", "jobs"))
        return with_steps(records, self.steps()) if steps else records

    def overview(self) -> tuple[Job, ...]:
        """See ``SlurmClient``. Uses squeue, and scontrol for the GPU indices."""
        mark = f"|{secrets.token_hex(6)}|"
        completion = self._call(*squeue.argv(mark), more={"SLURM_TIME_FORMAT": "%s"})
        if completion.returncode != 0:
            raise interface.refusal("list jobs", completion.stderr or completion.stdout.decode("utf-8", "replace"))
        return self._complete(squeue.jobs(completion.stdout, mark, self._node_gpus()))

    def with_gpu_numbers(self, jobs: Iterable[Job]) -> tuple[Job, ...]:
        """Return the jobs with their GPU indices per node; ``None`` where these are uncertain.

        Takes one request, and up to ``MOST_SINGLE`` lookups of single jobs.
        """
        node_gpus = self._node_gpus()
        return self._complete(
            replace(job, node_gpus=node_gpus(job.job_id, job.state, job.nodes, job.gpus_allocated)) for job in jobs
        )

    def _node_gpus(self) -> squeue.NodeGpusOf:
        """Return a function that returns the GPUs of a job per node. The first job with GPUs takes one request."""

        @cache
        def details() -> scontrol.Details:
            completion = self._call(*scontrol.ARGV)
            if completion.returncode != 0:
                raise interface.refusal("list jobs", completion.stderr or completion.stdout.decode("utf-8", "replace"))
            return scontrol.Details(completion.stdout)

        def node_gpus(
            job_id: int, state: str, nodes: tuple[str, ...], allocated: GpuCount | None
        ) -> tuple[NodeGpus, ...] | None:
            if state not in ALLOCATED_STATES or allocated is None or not allocated.count:
                return ()
            return details().node_gpus(job_id, nodes, allocated)

        return node_gpus

    def _complete(self, jobs: Iterable[Job]) -> tuple[Job, ...]:
        """Return the jobs; look up the first ``MOST_SINGLE`` of those whose GPU indices are uncertain."""
        with without_collection():
            job_list = list(jobs)
        uncertain = [place for place, job in enumerate(job_list) if job.node_gpus is None]
        for place in uncertain[:MOST_SINGLE]:
            with contextlib.suppress(interface.SlurmError):  # the job has ended meanwhile
                job_list[place] = replace(job_list[place], node_gpus=self.job(job_list[place].job_id).node_gpus or ())
        return tuple(job_list)

    def job(self, job: int | str) -> Job:
        """See ``SlurmClient``."""
        target = identifiers.job(job)
        doing = f"show job {target}"
        record = pick(scontrol.jobs(self._json("jobs", doing, "show", "job", str(target))), target)
        return with_steps((record,), self.steps(target.job))[0]

    def steps(self, job: int | str | None = None) -> tuple[Step, ...]:
        """See ``SlurmClient``."""
        if job is None:
            return scontrol.steps(self._json("steps", "list steps", "show", "steps"))
        target = identifiers.job(job)
        return scontrol.steps(self._json("steps", f"show steps of {target}", "show", "steps", str(target)))

    def nodes(self) -> tuple[Node, ...]:
        """See ``SlurmClient``."""
        return scontrol.nodes(self._json("nodes", "list nodes", "show", "nodes"))

    def partitions(self) -> tuple[Partition, ...]:
        """See ``SlurmClient``."""
        return scontrol.partitions(self._text("list partitions", "scontrol", "--oneliner", "--all", "show", "part"))

    def config(self) -> Mapping[str, str]:
        """See ``SlurmClient``."""
        return scontrol.config(self._text("read the configuration", "scontrol", "show", "config"))

    def version(self) -> str:
        """See ``SlurmClient``."""
        output = self._text("read the version", "scontrol", "--version")
        release = scontrol.version(output)
        if release is None:
            raise UnreachableError(f"scontrol --version says {output.strip()[:80]!r}: this is not Slurm's scontrol")
        return release

    def ping(self) -> None:
        """See ``SlurmClient``."""
        completion = self._call("scontrol", "ping")
        output = completion.stdout.decode("utf-8", "replace")
        if " is UP" not in output:
            down = [line.strip() for line in (output + completion.stderr).splitlines() if line.strip()]
            raise interface.ControllerDownError(
                f"slurmctld does not respond: {down[0] if down else 'scontrol ping prints nothing'}",
                hint="is slurmctld running, and does this machine have its slurm.conf? try: scontrol ping",
            )

    # --- changes

    def hold(self, job: int | str, *, by_user: bool = False) -> None:
        """See ``SlurmClient``."""
        target = self._exactly(identifiers.job(job), job)
        self._act(f"hold job {target}", target, "scontrol", "--", "uhold" if by_user else "hold", str(target))

    def release(self, job: int | str) -> None:
        """See ``SlurmClient``."""
        target = self._exactly(identifiers.job(job), job)
        self._act(f"release job {target}", target, "scontrol", "--", "release", str(target))

    def requeue(self, job: int | str, *, hold: bool = False, running: bool = False) -> None:
        """See ``SlurmClient``."""
        target = self._exactly(identifiers.job(job), job)
        verb = "requeuehold" if hold else "requeue"
        which = ("incomplete",) if running else ()
        self._act(f"requeue job {target}", target, "scontrol", "--", verb, *which, str(target))

    def cancel(self, job: int | str, *, signal: int | str | None = None) -> None:
        """See ``SlurmClient``."""
        if signal is not None:
            return self.signal(job, signal)
        target = self._exactly(identifiers.target(job), job)
        if target.step in NAMED_STEPS:
            return self._signal(f"cancel {called(target)}", target, int(SIGKILL), "steps")
        doing = f"cancel {called(target)}"
        if target.step is not None:  # scancel reports no error for a step of a job that is not running
            demand_running(doing, self._records(doing, target), self.steps(target.job), target)
        return self._act(doing, target, "scancel", "--verbose", "--", str(target))

    def signal(self, job: int | str, signal: int | str, *, to: SignalTo = "steps") -> None:
        """See ``SlurmClient``."""
        target, number = self._exactly(identifiers.target(job), job), identifiers.signal(signal)
        self._signal(f"signal {called(target)}", target, number, to)

    def _signal(self, doing: str, target: Target, number: int, to: SignalTo) -> None:
        # scancel waits without limit for a pending job to start, and reports no error for an unknown step: check first.
        jobs = self._records(doing, target)
        steps = self.steps(target.job) if target.step is not None else ()
        demand_running(doing, jobs, steps, target)
        if target.step in NAMED_STEPS:
            to = "batch"
        options = [f"--signal={number}", *({"batch": ["--batch"], "all": ["--full"]}.get(to, []))]
        name = target.job if target.step in NAMED_STEPS else str(target)
        self._act(doing, target, "scancel", "--verbose", *options, "--", name)

    def set_comment(self, job: int | str, text: str) -> None:
        """See ``SlurmClient``."""
        value = identifiers.text(text, "comment", identifiers.MAX_COMMENT_BYTES)
        self._update(job, "set the comment of", f"Comment={value}")

    def set_admin_comment(self, job: int | str, text: str) -> None:
        """See ``SlurmClient``."""
        value = identifiers.text(text, "admin comment", identifiers.MAX_ADMIN_COMMENT_BYTES)
        self._update(job, "set the admin comment of", f"AdminComment={value}")

    def set_time_limit(self, job: int | str, minutes: int) -> None:
        """See ``SlurmClient``."""
        # The user's minimum (--time-min) would prevent a lower limit.
        self._update(job, "set the time limit of", "TimeMin=0", f"TimeLimit={int(minutes)}")

    def set_required_nodes(self, job: int | str, nodes: Sequence[str]) -> None:
        """See ``SlurmClient``."""
        names = ",".join(identifiers.node(node) for node in nodes)
        self._update(job, "set the required nodes of", f"ReqNodeList={names}")

    def set_begin(self, job: int | str, when: datetime) -> None:
        """See ``SlurmClient``."""
        # "uts" and epoch seconds: the only form that depends neither on slurmctld's time zone nor on the local one.
        self._update(job, "set the begin time of", f"StartTime=uts{int(when.timestamp())}")

    def notify(self, job: int | str, message: str) -> None:
        """See ``SlurmClient``."""
        target = self._exactly(identifiers.job(job), job)
        text = identifiers.text(message, "message", identifiers.MAX_MESSAGE_BYTES)
        self._act(f"notify job {target}", target, "scontrol", "--", "notify", str(target), text)

    def drain(self, node: str, reason: str) -> None:
        """See ``SlurmClient``."""
        name = identifiers.node(node)
        why = identifiers.text(reason, "reason", identifiers.MAX_COMMENT_BYTES)
        self._act(f"drain {name}", name, "scontrol", "--", "update", f"NodeName={name}", "State=DRAIN", f"Reason={why}")

    def resume(self, node: str) -> None:
        """See ``SlurmClient``."""
        name = identifiers.node(node)
        self._act(f"resume {name}", name, "scontrol", "--", "update", f"NodeName={name}", "State=RESUME")

    def close(self) -> None:
        """Do nothing: no process outlives a request."""

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    # --- commands

    def _records(self, doing: str, target: Target) -> tuple[Job, ...]:
        return scontrol.jobs(self._json("jobs", doing, "show", "job", target.job))

    def _exactly(self, target: Target, job: int | str) -> Target:
        """Return the target of exactly one record.

        One task of each array has the raw ID of the array; as text, that ID means all tasks.
        """
        if not isinstance(job, int):
            return target
        record = pick(self._records(f"show job {job}", target), target)
        if record.job_id != job or record.array_job_id is None or record.array_task_id is None:
            return target
        return Target(record.array_job_id, task=record.array_task_id)

    def _update(self, job: int | str, doing: str, *changes: str) -> None:
        target = self._exactly(identifiers.job(job), job)
        self._act(f"{doing} job {target}", target, "scontrol", "--", "update", f"JobId={target}", *changes)

    def _act(self, doing: str, target: Target | str, *argv: str) -> None:
        completion = self._call(*argv)
        errors = completion.stderr
        if argv[0] == "scancel":  # exits with 0 for unknown and ended jobs; --verbose reports them
            errors = "\n".join(line for line in errors.splitlines() if "error:" in line)
        if completion.returncode != 0 or (argv[0] == "scancel" and errors.strip()):
            raise interface.refusal(doing, errors or completion.stdout.decode("utf-8", "replace"), target=str(target))

    def _json(self, key: str, doing: str, *words: str) -> list[Mapping[str, object]]:
        records, answered = self._ask_json(key, doing, *words)
        if answered:
            return records
        self.ping()  # raises if slurmctld is down
        records, answered = self._ask_json(key, doing, *words)
        if not answered and len(words) < _JOB_QUERY_WORDS:
            raise interface.ControllerDownError(f"{doing}: slurmctld did not respond", hint="try: scontrol ping")
        return records

    def _ask_json(self, key: str, doing: str, *words: str) -> tuple[list[Mapping[str, object]], bool]:
        if self._parser is None:
            parsers = self._call(*scontrol.LIST_PARSERS)
            if parsers.returncode != 0:
                raise interface.refusal(doing, parsers.stderr or parsers.stdout.decode("utf-8", "replace"))
            self._parser = scontrol.parser(parsers.stdout)
        completion = self._call("scontrol", "--all", f"--json={self._parser}", "--", *words)
        if completion.returncode != 0 and (
            completion.stderr.strip() or not completion.stdout.lstrip().startswith(b"{")
        ):
            self._parser = None  # an upgrade of Slurm may have removed it
            raise interface.refusal(doing, completion.stderr or completion.stdout.decode("utf-8", "replace"))
        return scontrol.document(completion.stdout, key)

    def _text(self, doing: str, *argv: str) -> str:
        completion = self._call(*argv)
        if completion.returncode != 0:
            raise interface.refusal(doing, completion.stderr or completion.stdout.decode("utf-8", "replace"))
        return completion.stdout.decode("utf-8", "backslashreplace")

    def _call(self, *argv: str, more: Mapping[str, str] | None = None) -> Completed:
        return self._run(list(argv), timeout_s=self._timeout_s, env={**self._env, **(more or {})}, check=False)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without variables that change the behavior of the commands; times are in UTC."""
    kept_environment = {
        name: value
        for name, value in environ.items()
        if name not in _SETTINGS and not name.startswith(_SETTING_PREFIXES)
    }
    # SLURM_BITSTR_LEN=0: do not truncate the task list of a pending array after 64 characters.
    return {
        **kept_environment,
        "TZ": "UTC",
        "SLURM_TIME_FORMAT": "standard",
        "SLURM_BITSTR_LEN": "0",
        "LC_ALL": "C.UTF-8",
    }


def called(target: Target) -> str:
    """Return the target as written in messages."""
    return f"job {target}" if target.step is None else f"step {target}"


def with_steps(jobs: Sequence[Job], steps: Sequence[Step]) -> tuple[Job, ...]:
    """Return the jobs, each with its steps."""
    of: dict[int, list[Step]] = {}
    for step in steps:
        of.setdefault(step.job_id, []).append(step)
    return tuple(replace(job, steps=tuple(of.get(job.job_id, ()))) for job in jobs)


def pick(jobs: Sequence[Job], target: Target) -> Job:
    """Return the job of ``target``: of an array, its task or its first record. Raises ``UnknownJobError``."""

    def fits(job: Job) -> int | None:
        if target.task is not None:
            exact = job.array_job_id == target.job_id and job.array_task_id == target.task
            shared = job.array_job_id == target.job_id and job.array_task_id is None and _has(job, target.task)
            return 0 if exact else 1 if shared else None
        if target.het_offset is not None:
            return 0 if (job.het_job_id, job.het_offset or 0) == (target.job_id, target.het_offset) else None
        if job.job_id == target.job_id:
            return 0
        return 1 if target.job_id in (job.array_job_id, job.het_job_id) else None

    ranked = [(rank, job.array_task_id or 0, job) for job in jobs if (rank := fits(job)) is not None]
    if not ranked:
        raise interface.UnknownJobError(
            f"show job {target}: slurmctld has no such job", target=str(target), hint="see: squeue"
        )
    return min(ranked, key=lambda entry: entry[:2])[2]


def _has(job: Job, task: int) -> bool:
    for part in (job.array_tasks or "").split(","):
        first, _, rest = part.partition("-")
        last, _, stride = rest.partition(":")
        if first.isdigit() and int(first) <= task <= int(last or first):
            return (task - int(first)) % int(stride or 1) == 0
    return False


def demand_running(doing: str, jobs: Sequence[Job], steps: Sequence[Step], target: Target) -> None:
    """Raise ``AlreadyDoneError``, ``InvalidStateError`` or ``UnknownJobError`` if a signal would reach no process."""
    job = next((candidate for candidate in jobs if candidate.allocated), None) if target.task is None else None
    job = job or pick(jobs, target)
    if job.has_ended:
        raise interface.AlreadyDoneError(f"{doing}: it has ended ({job.state})", target=str(target))
    if not job.allocated:
        raise interface.InvalidStateError(f"{doing}: it does not run ({job.state})", target=str(target))
    if target.step is not None and not any(step.step == target.step for step in steps):
        raise interface.UnknownJobError(f"{doing}: the job has no such step now", target=str(target))
    if target.step in NAMED_STEPS and target.step != "batch":
        raise interface.InvalidStateError(
            f"{doing}: Slurm signals the {target.step} step only with its whole job", target=str(target)
        )
