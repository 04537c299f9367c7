"""Slurm through pyslurm, which runs in a process of its own (``pyslurm_worker``).

Whatever happens there, here is an error: a crash, a hang, a missing slurm.conf. The next request starts a new process.

pyslurm does the looking, and the acting on plain jobs and nodes. Slurm's commands do what pyslurm 25.11 cannot do, or
not in a way that can be trusted: the numbers of a job's GPUs, partitions and configuration in Slurm's own words, hold
by the user, cancel and signal, and whatever is about an array, a task of one or a heterogeneous job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol, Self

from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.cluster import Job, Node, Partition, Step
from slurm_affinode.process import Child, ChildEndedError, of_module
from slurm_affinode.slurm import faults, identifiers, live_pyslurm
from slurm_affinode.slurm.commands_client import CommandsClient, environment
from slurm_affinode.slurm.interface import SignalTo

TIMEOUT_S = 60.0
HELLO_TIMEOUT_S = 15.0
"""libslurm itself looks for a missing slurm.conf for 60 s."""
MAX_AGE_S = 3600.0
"""A worker is replaced after this time: libslurm reads slurm.conf once."""
MODULE = "slurm_affinode.slurm.pyslurm_worker"


class Worker(Protocol):
    """``process.Child``, or a stand-in for it."""

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        """Ask."""
        ...

    def close(self) -> None:
        """End it."""
        ...


def start_worker() -> Worker:
    """Start the process in which pyslurm runs."""
    return Child(of_module(MODULE), env=environment(os.environ) | {"PYSLURM_DISABLE_AUTO_INIT": "1"})


class PyslurmClient:
    """``SlurmClient`` by pyslurm; ``commands`` does the rest. ``clock`` gives seconds that only grow."""

    backend = "pyslurm"

    def __init__(
        self,
        commands: CommandsClient,
        start: Callable[[], Worker] = start_worker,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commands = commands
        self._start = start
        self._timeout_s = timeout_s
        self._clock = clock
        self._worker: Worker | None = None
        self._born = 0.0
        self.hello: Mapping[str, Any] = {}
        """What the worker said when it started: pyslurm's version, the path and number of libslurm."""

    def greet(self) -> None:
        """Start the worker where it does not run. Raises ``BackendUnusableError`` where it cannot import pyslurm."""
        self._ready()

    # --- looking

    def jobs(self, *, steps: bool = False, gpu_detail: bool = False) -> tuple[Job, ...]:
        """See ``SlurmClient``. ``gpu_detail`` is one request more, of Slurm's commands."""
        found = live_pyslurm.jobs(self._look("list jobs", "jobs", steps=steps))
        if not gpu_detail:
            return found
        detail = {job.job_id: job.node_gpus for job in self._commands.jobs()}
        return tuple(replace(job, node_gpus=detail.get(job.job_id, ())) for job in found)

    def overview(self) -> tuple[Job, ...]:
        """See ``SlurmClient``. The numbers of the GPUs by Slurm's commands."""
        return self._commands.with_gpu_numbers(self.jobs())

    def job(self, job: int | str) -> Job:
        """See ``SlurmClient``. Of an array, a heterogeneous and a held job: by Slurm's commands."""
        target = identifiers.job(job)
        found = self._plain(target, f"show job {target}")
        if found is None or found.held:  # pyslurm has Slurm's description in place of who holds it
            return self._commands.job(str(target))
        if found.gpus_allocated is None or not found.allocated:
            return replace(found, node_gpus=())
        return replace(found, node_gpus=self._commands.job(str(target)).node_gpus)

    def steps(self, job: int | str | None = None) -> tuple[Step, ...]:
        """See ``SlurmClient``."""
        if job is None:
            return live_pyslurm.steps(self._look("list steps", "steps"))
        target = identifiers.job(job)
        try:
            found = self._plain(target, f"show steps of {target}")
        except faults.UnknownJobError:
            return ()
        return self._commands.steps(str(target)) if found is None else found.steps or ()

    def nodes(self) -> tuple[Node, ...]:
        """See ``SlurmClient``."""
        return live_pyslurm.nodes(self._look("list nodes", "nodes"))

    def partitions(self) -> tuple[Partition, ...]:
        """See ``SlurmClient``. By Slurm's commands."""
        return self._commands.partitions()

    def config(self) -> Mapping[str, str]:
        """See ``SlurmClient``. By Slurm's commands: pyslurm has other names for the settings."""
        return self._commands.config()

    def version(self) -> str:
        """See ``SlurmClient``. By Slurm's commands: pyslurm knows only slurmctld's."""
        return self._commands.version()

    def ping(self) -> None:
        """See ``SlurmClient``. Where the first controller is down, Slurm's commands ask the others."""
        try:
            answers = self._look("ask slurmctld", "ping")
        except (faults.ControllerDownError, faults.SlurmError):
            answers = []
        if not any(answers):
            self._commands.ping()

    # --- acting

    def hold(self, job: int | str, *, by_user: bool = False) -> None:
        """See ``SlurmClient``. ``by_user`` by Slurm's commands: pyslurm crashes."""
        if by_user or not self._act_on_plain("hold", job, "hold"):
            self._commands.hold(job, by_user=by_user)

    def release(self, job: int | str) -> None:
        """See ``SlurmClient``."""
        if not self._act_on_plain("release", job, "release"):
            self._commands.release(job)

    def requeue(self, job: int | str, *, hold: bool = False, running: bool = False) -> None:
        """See ``SlurmClient``. By Slurm's commands where only what runs is meant: pyslurm cannot say so."""
        if running or not self._act_on_plain("requeue", job, "requeue", hold=hold):
            self._commands.requeue(job, hold=hold, running=running)

    def cancel(self, job: int | str, *, signal: int | str | None = None) -> None:
        """See ``SlurmClient``. By Slurm's commands: pyslurm says nothing of an unknown job."""
        self._commands.cancel(job, signal=signal)

    def signal(self, job: int | str, signal: int | str, *, to: SignalTo = "steps") -> None:
        """See ``SlurmClient``. By Slurm's commands: pyslurm does not see Slurm's answer."""
        self._commands.signal(job, signal, to=to)

    def set_comment(self, job: int | str, text: str) -> None:
        """See ``SlurmClient``. Empty text by Slurm's commands: pyslurm leaves the comment as it is."""
        value = identifiers.text(text, "comment", identifiers.MAX_COMMENT_BYTES)
        if not (_sendable(value) and self._act_on_plain("set the comment of", job, "modify", comment=value)):
            self._commands.set_comment(job, text)

    def set_admin_comment(self, job: int | str, text: str) -> None:
        """See ``SlurmClient``. Empty text by Slurm's commands."""
        value = identifiers.text(text, "admin comment", identifiers.MAX_ADMIN_COMMENT_BYTES)
        if not (
            _sendable(value) and self._act_on_plain("set the admin comment of", job, "modify", admin_comment=value)
        ):
            self._commands.set_admin_comment(job, text)

    def set_begin(self, job: int | str, when: datetime) -> None:
        """See ``SlurmClient``."""
        at = int(when.timestamp())
        if not self._act_on_plain("set the begin time of", job, "modify", begin_time=at):
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
        """The client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # --- the worker

    def _plain(self, target: identifiers.Target, doing: str) -> Job | None:
        """The job where it is no part of an array or a heterogeneous job, else ``None``."""
        if target.task is not None or target.het_offset is not None:
            return None
        (found,) = live_pyslurm.jobs([self._look(doing, "job", job=target.job_id)])
        return None if found.array_job_id is not None or found.het_job_id is not None else found

    def _act_on_plain(self, doing: str, job: int | str, call: str, **args: Any) -> bool:
        target = identifiers.job(job)
        what = f"{doing} job {target}"
        if self._plain(target, what) is None:
            return False
        self._act(what, str(target), call, job=target.job_id, **args)
        return True

    def _look(self, doing: str, call: str, **args: Any) -> Any:
        try:
            return self._ask(doing, None, call, args)
        except faults.WorkerDiedError:
            return self._ask(doing, None, call, args)  # looking twice does no harm

    def _act(self, doing: str, target: str, call: str, **args: Any) -> None:
        self._ask(doing, target, call, args)

    def _ask(self, doing: str, target: str | None, call: str, args: Mapping[str, Any]) -> Any:
        worker = self._ready()
        answer = self._exchange(worker, doing, call, args, self._timeout_s)
        if "error" not in answer:
            return answer["ok"]
        raise _error(doing, target, answer["error"])

    def _ready(self) -> Worker:
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
        self, worker: Worker, doing: str, call: str, args: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        try:
            line = worker.ask(json.dumps({"call": call, "args": args}).encode(), timeout_s=timeout_s)
            answer = json.loads(line)
        except ChildEndedError as error:
            self._worker = None
            raise _death(doing, str(error)) from None
        except ValueError:
            self.close()
            raise faults.WorkerDiedError(f"{doing}: the pyslurm process answered with something else") from None
        if not isinstance(answer, dict) or not answer.keys() & {"ok", "error"}:
            self.close()
            raise faults.WorkerDiedError(f"{doing}: the pyslurm process answered with something else")
        return answer


def _sendable(text: str) -> bool:
    """Whether it reaches Slurm through pyslurm as it is: text that is not empty, and all of it UTF-8."""
    return bool(text) and not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _death(doing: str, how: str) -> AffinodeError:
    lowered = how.lower()
    if "slurm.conf" in lowered or "s_p_parse_file" in lowered or "configuration" in lowered:
        return faults.ControllerDownError(
            f"{doing}: the pyslurm process {how}", hint="this machine needs a valid slurm.conf (SLURM_CONF names it)"
        )
    return faults.WorkerDiedError(
        f"{doing}: the pyslurm process {how}",
        hint="whether it was done is not known; Slurm's commands instead: --slurm-backend commands",
    )


def _error(doing: str, target: str | None, error: Mapping[str, Any]) -> AffinodeError:
    message = str(error.get("message", ""))
    if error.get("kind") == "rpc":
        return faults.refusal(doing, message, target=target)
    if error.get("kind") == "import":
        return faults.BackendUnusableError(
            f"pyslurm cannot be imported: {message}", hint="pip install 'slurm-affinode[pyslurm]', see docs/slurm.md"
        )
    return faults.SlurmError(
        f"{doing}: pyslurm failed: {message}", target=target, hint="Slurm's commands instead: --slurm-backend commands"
    )
