"""A slurmctld in memory, behind Slurm's programs and behind pyslurm: what they print, raise and leave out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from slurm_affinode.base.process import Completed
from slurm_affinode.slurm import pyslurm_worker


class RPCError(Exception):
    """The exception of pyslurm: the text of ``slurm_strerror``."""


@dataclass
class ControlledJob:
    """A job of the controller."""

    job_id: int
    state: str
    held_by: str | None = None
    """``JobHeldAdmin``, ``JobHeldUser``."""
    comment: str = ""
    begin: int = 0
    required: str = ""
    minutes: int = 60
    restarts: int = 0

    def change(self, name: str, value: Any) -> None:
        """Change a field, as slurmctld does. Raises ``RPCError``."""
        if name == "begin" and self.state != "PENDING":
            raise RPCError("Job is no longer pending execution")
        setattr(self, name, value)


@dataclass
class Controller:
    """The slurmctld: one node, c1."""

    jobs: dict[int, ControlledJob] = field(default_factory=dict)
    down: bool = False

    def submit(self, state: str) -> int:
        """Add a job in this state; return its ID."""
        number = 5 + len(self.jobs)
        self.jobs[number] = ControlledJob(number, state)
        return number

    def job(self, number: int) -> ControlledJob:
        """Return a job. Raises ``RPCError``."""
        if self.down:
            raise RPCError("Unable to contact slurm controller (connect failure)")
        if number not in self.jobs:
            raise RPCError("Invalid job id specified")
        return self.jobs[number]

    def requeue(self, number: int, *, hold: bool) -> None:
        """Requeue a running job. Raises ``RPCError``."""
        job = self.job(number)
        if job.state != "RUNNING":
            raise RPCError("Job is pending execution")
        job.state, job.restarts = "PENDING", job.restarts + 1
        job.held_by = "JobRequeueHold" if hold else None


_CHANGES = {"Comment": "comment", "StartTime": "begin", "ReqNodeList": "required", "TimeLimit": "minutes"}


class Programs:
    """``process.run`` for scontrol."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        try:
            text = self._answer(list(argv))
        except RPCError as error:
            return Completed(tuple(argv), 1, b"", f"{error}\n")
        return Completed(tuple(argv), 0, text.encode(), "")

    def _answer(self, argv: list[str]) -> str:
        controller = self._controller
        if "--json=list" in argv:
            return "data_parser/v0.0.42\n"
        if "ping" in argv:
            return f"Slurmctld(primary) at head is {'DOWN' if controller.down else 'UP'}\n"
        if "show" in argv:
            return self._shown(argv[argv.index("show") + 1 :])
        verb, *words = argv[argv.index("--") + 1 :]
        number = int(words[0].removeprefix("JobId=") if verb == "update" else words[-1])
        job = controller.job(number)
        if verb in ("hold", "uhold"):
            job.held_by = "JobHeldUser" if verb == "uhold" else "JobHeldAdmin"
        elif verb == "release":
            job.held_by = None
        elif verb in ("requeue", "requeuehold"):
            controller.requeue(number, hold=verb == "requeuehold")
        else:
            for word in words[1:]:
                name, _, value = word.partition("=")
                if name in _CHANGES:
                    changed: Any = int(value.removeprefix("uts")) if name in ("StartTime", "TimeLimit") else value
                    job.change(_CHANGES[name], changed)
        return ""

    def _shown(self, words: list[str]) -> str:
        controller = self._controller
        if words == ["config"]:
            if controller.down:
                raise RPCError("slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)")
            return "Configuration data as of 2026-01-01T00:00:00\nSlurmUser               = slurm(64030)\n"
        # scontrol exits with 0 and an empty list if slurmctld is down, and if there is no such job.
        jobs = [] if controller.down else list(controller.jobs.values())
        if words[0] in ("job", "steps") and len(words) > 1:
            jobs = [job for job in jobs if job.job_id == int(words[1])]
        key = {"job": "jobs"}.get(words[0], words[0])
        shown: dict[str, list[Any]] = {
            "jobs": [_record(job) for job in jobs], "steps": [],
            "nodes": [] if controller.down else [{"name": "c1", "state": ["IDLE"]}],
        }  # fmt: skip
        number = 0 if controller.down else int(time.time())
        return json.dumps({key: shown[key], "last_update": {"set": True, "infinite": False, "number": number}})


def _record(job: ControlledJob) -> dict[str, Any]:
    """Return a job as scontrol prints it."""
    return {
        "job_id": job.job_id, "job_state": [job.state], "state_reason": job.held_by or "None", "comment": job.comment,
        "priority": {"set": True, "infinite": False, "number": 0 if job.held_by else 5}, "restart_cnt": job.restarts,
        "start_time": {"set": True, "infinite": False, "number": job.begin}, "required_nodes": job.required,
        "time_limit": {"set": True, "infinite": False, "number": job.minutes}, "batch_flag": True, "requeue": True,
    }  # fmt: skip


def pyslurm(controller: Controller) -> Any:
    """Return a module with the parts of pyslurm that the worker uses."""

    class Job:
        def __init__(self, number: int) -> None:
            self._number = number

        @staticmethod
        def load(number: int) -> Any:
            return _loaded(controller.job(number))

        def hold(self) -> None:
            controller.job(self._number).held_by = "JobHeldAdmin"

        def release(self) -> None:
            controller.job(self._number).held_by = None

        def requeue(self, hold: bool) -> None:
            controller.requeue(self._number, hold=hold)

        def modify(self, changes: dict[str, Any]) -> None:
            for name, value in changes.items():
                controller.job(self._number).change({"begin_time": "begin"}.get(name, name), value)

    class Jobs(dict[int, Any]):
        def load_steps(self) -> None:
            """Add no steps."""

    def reached(value: Any) -> Any:
        if controller.down:
            raise RPCError("Unable to contact slurm controller (connect failure)")
        return value

    node = dict.fromkeys(pyslurm_worker.NODE) | {"name": "c1", "state": "IDLE"}
    return SimpleNamespace(
        __version__="25.11.2",
        slurm_init=lambda: None,
        Job=Job,
        Jobs=SimpleNamespace(
            load=lambda **_: reached(Jobs({number: _loaded(job) for number, job in controller.jobs.items()}))
        ),
        JobSteps=SimpleNamespace(load_all=lambda: reached({})),
        JobSubmitDescription=lambda **changes: changes,
        Nodes=SimpleNamespace(load=lambda: reached({"c1": SimpleNamespace(**node)})),
        slurmctld=SimpleNamespace(ping_all=lambda: [SimpleNamespace(is_responding=not controller.down)]),
    )


def _loaded(job: ControlledJob) -> Any:
    """Return a job as pyslurm has it."""
    values = dict.fromkeys(pyslurm_worker.JOB) | {
        "id": job.job_id, "state": job.state, "state_reason": job.held_by, "comment": job.comment,
        "priority": 0 if job.held_by else 5, "requeue_count": job.restarts, "start_time": job.begin,
        "required_nodes": job.required, "time_limit": job.minutes, "is_batch_job": True, "is_requeueable": True,
    }  # fmt: skip
    return SimpleNamespace(**values, requested_tres=None, allocated_tres=None, steps={})


class InProcess:
    """The pyslurm worker without its process."""

    def __init__(self, module: Any) -> None:
        def load(name: str) -> Any:
            if module is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            return module

        self.worker = pyslurm_worker.RequestExecutor(load)
        self.closed = False

    def ask(self, line: bytes, *, timeout_s: float) -> bytes:
        return json.dumps(self.worker.answer(line), default=str).encode()

    def close(self) -> None:
        self.closed = True
