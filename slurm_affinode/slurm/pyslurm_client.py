"""Slurm through pyslurm, in a separate process (``pyslurm_worker``).

If that process crashes, hangs or lacks slurm.conf, the request raises an error and the next one starts a new process.

pyslurm is used for queries, and for changes of plain jobs and nodes. Slurm's commands do what pyslurm 25.11 cannot do
reliably: GPU indices of jobs, the configuration with Slurm's names, user holds, cancel and signal, and all operations
on arrays, array tasks and heterogeneous jobs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.process import Child, ChildEndedError, Helper, of_module
from slurm_affinode.model.cluster import GpuCount, Job, Node, Partition, Step
from slurm_affinode.slurm import identifiers, interface, live_records
from slurm_affinode.slurm.commands_client import CommandsClient, environment
from slurm_affinode.slurm.interface import SignalTo


def jobs(records: Iterable[Mapping[str, Any]]) -> tuple[Job, ...]:
    """Return the jobs. ``node_gpus`` is ``None``: pyslurm does not provide it."""
    return tuple(_job(record) for record in records if isinstance(record.get("id"), int))


def steps(records: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """Return the steps."""
    return tuple(_step(record) for record in records)


def nodes(records: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Return the nodes."""
    return tuple(_node(record) for record in records)


def _job(job: Mapping[str, Any]) -> Job:
    array, het = job["array_id"] or None, job["heterogeneous_id"] or None
    tasks = live_records.word(job["array_tasks_waiting"]) if array else None
    limit = _minutes(job["time_limit"])
    requested, allocated = _tres(job["tres_requested"]), _tres(job["tres_allocated"])
    step_records = job.get("steps")
    return live_records.job(
        job_id=job["id"],
        array_job_id=array,
        array_task_id=job["array_task_id"] if array else None,
        array_tasks=tasks.partition("%")[0] if tasks else None,
        array_limit=job["array_tasks_parallel"] or None if array else None,
        het_job_id=het,
        het_offset=job["heterogeneous_offset"] or 0 if het else None,
        name=job["name"] or None,
        user=live_records.word(job["user_name"]),
        uid=job["user_id"],
        account=live_records.word(job["account"]),
        partitions=tuple(part for part in str(job["partition"] or "").split(",") if part),
        qos=live_records.word(job["qos"]),
        state=str(job["state"] or "UNKNOWN"),
        reason=live_records.word(job["state_reason"]),
        priority=job["priority"],
        submit=live_records.moment(job["submit_time"]),
        eligible=live_records.moment(job["eligible_time"]),
        start=live_records.moment(job["start_time"]),
        end=live_records.moment(job["end_time"]),
        time_limit_s=limit,
        nodes=live_records.nodes(_joined(job["allocated_nodes"])),
        nodes_required=live_records.nodes(_joined(job.get("required_nodes"))),
        nodes_excluded=live_records.nodes(_joined(job.get("excluded_nodes"))),
        nodes_expected=live_records.nodes(_joined(job.get("scheduled_nodes"))),
        requests_share=live_records.requests_share(*(job.get("gres_per_node") or ())),
        batch_host=live_records.word(job["batch_host"]),
        node_count=job["num_nodes"],
        cpus=job["cpus"],
        requeue=bool(job["is_requeueable"]),
        restarts=job["requeue_count"] or 0,
        tres_requested=requested,
        tres_allocated=allocated,
        gpus_requested=live_records.gpus(requested),
        gpus_allocated=live_records.gpus(allocated),
        node_gpus=None,
        features=live_records.word(_joined(job["constraints"])),
        reservation=live_records.word(job["reservation"]),
        comment=job["comment"] or None,
        admin_comment=job["admin_comment"] or None,
        stdout=None if tasks else job["standard_output"] or None,
        stderr=None if tasks else job["standard_error"] or None,
        batch=bool(job["is_batch_job"]),
        steps=steps(step_records) if step_records is not None else None,
    )


def _step(step: Mapping[str, Any]) -> Step:
    tres = _tres(step["tres"])
    return Step(
        job_id=step["job_id"],
        step=str(step["id"]),
        name=live_records.word(step["name"]),
        state=live_records.word(step["state"]),
        nodes=live_records.nodes(_joined(step["allocated_nodes"])),
        start=live_records.moment(step["start_time"]),
        tasks=step["ntasks"],
        gpus=(live_records.gpus(tres) or GpuCount(0)) if tres else None,
        tres=tres,
    )


def _node(node: Mapping[str, Any]) -> Node:
    words = str(node["state"] or "UNKNOWN").split("+")
    configured = live_records.gpus(_gres(node["configured_gres"]))
    used = live_records.gpus(_gres(node["allocated_gres"])) or GpuCount(0)
    return Node(
        name=node["name"],
        state=words[0],
        flags=frozenset(words[1:]),
        reason=node["reason"] or None,
        reason_user=live_records.word(node["reason_user"]) if node["reason"] else None,
        reason_time=live_records.moment(node["reason_time"]),
        gpus=configured,
        gpus_used=None if configured is None else used,
        partitions=tuple(node["partitions"] or ()),
        cpus=node["total_cpus"] or 0,
        cpus_used=node["allocated_cpus"] or 0,
        memory_mib=node["real_memory"] or 0,
        memory_used_mib=node["allocated_memory"] or 0,
        features=tuple(node["available_features"] or ()),
        version=live_records.word(node["slurm_version"]),
    )


def _tres(amounts: Mapping[str, int] | None) -> dict[str, str]:
    # pyslurm returns memory as a number of MiB; Slurm writes the unit.
    return {name: f"{count}M" if name == "mem" else str(count) for name, count in (amounts or {}).items()}


def _gres(amounts: Mapping[str, int] | None) -> dict[str, str]:
    return {f"gres/{name}": str(count) for name, count in (amounts or {}).items()}


def _minutes(value: object) -> int | None:
    return value * 60 if isinstance(value, int) and not isinstance(value, bool) else None


def _joined(value: str | Sequence[str] | None) -> str | None:
    return value if value is None or isinstance(value, str) else ",".join(value)


TIMEOUT_S = 60.0
HELLO_TIMEOUT_S = 15.0
"""Without a slurm.conf, libslurm itself would search for 60 s."""
MAX_AGE_S = 3600.0
"""Lifetime of a worker process: libslurm reads slurm.conf only once."""
MODULE = "slurm_affinode.slurm.pyslurm_worker"


def start_worker() -> Helper:
    """Start the pyslurm process."""
    return Child(of_module(MODULE), env=environment(os.environ) | {"PYSLURM_DISABLE_AUTO_INIT": "1"})


class PyslurmClient:
    """``SlurmClient`` that uses pyslurm, and ``commands`` for the rest. ``clock`` returns monotonic seconds."""

    backend = "pyslurm"

    def __init__(
        self,
        commands: CommandsClient,
        start: Callable[[], Helper] = start_worker,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commands = commands
        self._start = start
        self._timeout_s = timeout_s
        self._clock = clock
        self._worker: Helper | None = None
        self._born = 0.0
        self.hello: Mapping[str, Any] = {}
        """Response of the worker to its first request: pyslurm's version, path and API version of libslurm."""

    def greet(self) -> None:
        """Start the worker if it is not running. Raises ``BackendUnusableError`` if it cannot import pyslurm."""
        self._ready()

    # --- queries

    def jobs(self, *, steps: bool = False, gpu_detail: bool = False) -> tuple[Job, ...]:
        """See ``SlurmClient``. ``gpu_detail`` takes one more request, with Slurm's commands."""
        records = jobs(self._query("list jobs", "jobs", steps=steps))
        if not gpu_detail:
            return records
        detail = {job.job_id: job.node_gpus for job in self._commands.jobs()}
        return tuple(replace(job, node_gpus=detail.get(job.job_id, ())) for job in records)

    def overview(self) -> tuple[Job, ...]:
        """See ``SlurmClient``. The GPU indices come from Slurm's commands."""
        return self._commands.with_gpu_numbers(self.jobs())

    def job(self, job: int | str) -> Job:
        """See ``SlurmClient``. Uses Slurm's commands for arrays, heterogeneous jobs and held jobs."""
        target = identifiers.job(job)
        record = self._plain(target, f"show job {target}")
        if record is None or record.is_held:  # pyslurm has a description in place of who holds the job
            return self._commands.job(str(target))
        if record.gpus_allocated is None or not record.allocated:
            return replace(record, node_gpus=())
        return replace(record, node_gpus=self._commands.job(str(target)).node_gpus)

    def steps(self, job: int | str | None = None) -> tuple[Step, ...]:
        """See ``SlurmClient``."""
        if job is None:
            return steps(self._query("list steps", "steps"))
        target = identifiers.job(job)
        try:
            record = self._plain(target, f"show steps of {target}")
        except interface.UnknownJobError:
            return ()
        return self._commands.steps(str(target)) if record is None else record.steps or ()

    def nodes(self) -> tuple[Node, ...]:
        """See ``SlurmClient``."""
        return nodes(self._query("list nodes", "nodes"))

    def partitions(self) -> tuple[Partition, ...]:
        """See ``SlurmClient``. Uses Slurm's commands."""
        return self._commands.partitions()

    def config(self) -> Mapping[str, str]:
        """See ``SlurmClient``. Uses Slurm's commands: pyslurm has other names for the settings."""
        return self._commands.config()

    def version(self) -> str:
        """See ``SlurmClient``. Uses Slurm's commands: pyslurm knows only slurmctld's version."""
        return self._commands.version()

    def ping(self) -> None:
        """See ``SlurmClient``. If pyslurm finds the controller down, Slurm's commands try the backup controllers."""
        try:
            answers = self._query("ask slurmctld", "ping")
        except (interface.ControllerDownError, interface.SlurmError):
            answers = []
        if not any(answers):
            self._commands.ping()

    # --- changes

    def hold(self, job: int | str, *, by_user: bool = False) -> None:
        """See ``SlurmClient``. Uses Slurm's commands if ``by_user``: pyslurm crashes."""
        if by_user or not self._act_on_plain("hold", job, "hold"):
            self._commands.hold(job, by_user=by_user)

    def release(self, job: int | str) -> None:
        """See ``SlurmClient``."""
        if not self._act_on_plain("release", job, "release"):
            self._commands.release(job)

    def requeue(self, job: int | str, *, hold: bool = False, running: bool = False) -> None:
        """See ``SlurmClient``. Uses Slurm's commands if ``running``: pyslurm has no such option."""
        if running or not self._act_on_plain("requeue", job, "requeue", hold=hold):
            self._commands.requeue(job, hold=hold, running=running)

    def cancel(self, job: int | str, *, signal: int | str | None = None) -> None:
        """See ``SlurmClient``. Uses Slurm's commands: pyslurm reports no error for an unknown job."""
        self._commands.cancel(job, signal=signal)

    def signal(self, job: int | str, signal: int | str, *, to: SignalTo = "steps") -> None:
        """See ``SlurmClient``. Uses Slurm's commands: pyslurm ignores Slurm's response."""
        self._commands.signal(job, signal, to=to)

    def set_comment(self, job: int | str, text: str) -> None:
        """See ``SlurmClient``. Uses Slurm's commands for empty text: pyslurm would not remove the comment."""
        value = identifiers.text(text, "comment", identifiers.MAX_COMMENT_BYTES)
        if not (_sendable(value) and self._act_on_plain("set the comment of", job, "modify", comment=value)):
            self._commands.set_comment(job, text)

    def set_admin_comment(self, job: int | str, text: str) -> None:
        """See ``SlurmClient``. Uses Slurm's commands for empty text."""
        value = identifiers.text(text, "admin comment", identifiers.MAX_ADMIN_COMMENT_BYTES)
        if not (
            _sendable(value) and self._act_on_plain("set the admin comment of", job, "modify", admin_comment=value)
        ):
            self._commands.set_admin_comment(job, text)

    def set_time_limit(self, job: int | str, minutes: int) -> None:
        """See ``SlurmClient``. Uses Slurm's commands."""
        self._commands.set_time_limit(job, minutes)

    def set_required_nodes(self, job: int | str, nodes: Sequence[str]) -> None:
        """See ``SlurmClient``. Uses Slurm's commands."""
        self._commands.set_required_nodes(job, nodes)

    def set_begin(self, job: int | str, when: datetime) -> None:
        """See ``SlurmClient``."""
        epoch_s = int(when.timestamp())
        if not self._act_on_plain("set the begin time of", job, "modify", begin_time=epoch_s):
            self._commands.set_begin(job, when)

    def notify(self, job: int | str, message: str) -> None:
        """See ``SlurmClient``."""
        value = identifiers.text(message, "message", identifiers.MAX_MESSAGE_BYTES)
        if not (_sendable(value) and self._act_on_plain("notify", job, "notify", message=value)):
            self._commands.notify(job, message)

    def drain(self, node: str, reason: str) -> None:
        """See ``SlurmClient``."""
        name = identifiers.node(node)
        why = identifiers.text(reason, "reason", identifiers.MAX_COMMENT_BYTES)
        if not _sendable(why):
            return self._commands.drain(node, reason)
        return self._act(f"drain {name}", name, "node", node=name, state="DRAIN", reason=why)

    def resume(self, node: str) -> None:
        """See ``SlurmClient``."""
        name = identifiers.node(node)
        self._act(f"resume {name}", name, "node", node=name, state="RESUME")

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    # --- worker process

    def _plain(self, target: identifiers.Target, doing: str) -> Job | None:
        """Return the job, or ``None`` if it is part of an array or a heterogeneous job."""
        if target.task is not None or target.het_offset is not None:
            return None
        (record,) = jobs([self._query(doing, "job", job=target.job_id)])
        return None if record.array_job_id is not None or record.het_job_id is not None else record

    def _act_on_plain(self, doing: str, job: int | str, call: str, **args: Any) -> bool:
        target = identifiers.job(job)
        what = f"{doing} job {target}"
        if self._plain(target, what) is None:
            return False
        self._act(what, str(target), call, job=target.job_id, **args)
        return True

    def _query(self, doing: str, call: str, **args: Any) -> Any:
        try:
            return self._ask(doing, None, call, args)
        except interface.WorkerDiedError:
            return self._ask(doing, None, call, args)  # queries are safe to repeat

    def _act(self, doing: str, target: str, call: str, **args: Any) -> None:
        self._ask(doing, target, call, args)

    def _ask(self, doing: str, target: str | None, call: str, args: Mapping[str, Any]) -> Any:
        worker = self._ready()
        answer = self._exchange(worker, doing, call, args, self._timeout_s)
        if "error" not in answer:
            return answer["ok"]
        raise _error(doing, target, answer["error"])

    def _ready(self) -> Helper:
        if self._worker is not None and self._clock() - self._born > MAX_AGE_S:
            self.close()
        if self._worker is None:
            worker = self._start()
            answer = self._exchange(worker, "start pyslurm", "hello", {}, HELLO_TIMEOUT_S)
            if "error" in answer:
                worker.close()
                raise _error("start pyslurm", None, answer["error"])
            self._worker, self._born, self.hello = worker, self._clock(), answer["ok"]
        return self._worker

    def _exchange(
        self, worker: Helper, doing: str, call: str, args: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        try:
            line = worker.ask(json.dumps({"call": call, "args": args}).encode(), timeout_s=timeout_s)
            answer = json.loads(line)
        except ChildEndedError as error:
            self._worker = None
            raise _death(doing, str(error)) from None
        except ValueError:
            self.close()
            raise interface.WorkerDiedError(f"{doing}: the pyslurm process answered with something else") from None
        if not isinstance(answer, dict) or not answer.keys() & {"ok", "error"}:
            self.close()
            raise interface.WorkerDiedError(f"{doing}: the pyslurm process answered with something else")
        return answer


def _sendable(text: str) -> bool:
    """Return whether pyslurm passes the text on unchanged: it is not empty, and valid UTF-8."""
    return bool(text) and not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _death(doing: str, manner: str) -> AffinodeError:
    lowered = manner.lower()
    if "slurm.conf" in lowered or "s_p_parse_file" in lowered or "configuration" in lowered:
        return interface.ControllerDownError(
            f"{doing}: the pyslurm process {manner}", hint="this machine needs a valid slurm.conf (SLURM_CONF names it)"
        )
    return interface.WorkerDiedError(
        f"{doing}: the pyslurm process {manner}",
        hint="whether it was done is not known; Slurm's commands instead: --slurm-backend commands",
    )


def _error(doing: str, target: str | None, error: Mapping[str, Any]) -> AffinodeError:
    message = str(error.get("message", ""))
    if error.get("kind") == "rpc":
        return interface.refusal(doing, message, target=target)
    if error.get("kind") == "import":
        return interface.BackendUnusableError(
            f"pyslurm cannot be imported: {message}", hint="pip install 'slurm-affinode[pyslurm]', see docs/slurm.md"
        )
    return interface.SlurmError(
        f"{doing}: pyslurm failed: {message}", target=target, hint="Slurm's commands instead: --slurm-backend commands"
    )
