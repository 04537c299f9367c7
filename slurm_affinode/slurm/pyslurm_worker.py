"""The pyslurm process: ``python -m slurm_affinode.slurm.pyslurm_worker``.

Requests are lines of JSON on standard input, ``{"call": NAME, "args": {...}}``; the response is one line on standard
output, ``{"ok": ...}`` or ``{"error": {"kind": ..., "message": ...}}``. The process exits at the end of its input.

It is a separate process because libslurm exits without a valid slurm.conf, and because some calls of pyslurm crash.
Only calls known to work are made: not ``get_resource_layout_per_node`` and ``hold(mode="user")`` (segmentation faults),
nor ``cancel`` and ``send_signal`` (they report a stale errno as Slurm's response, and no error for an unknown job).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

_LIBRARY = re.compile(r"/\S*/libslurm[\w-]*\.so[.\d]*")

JOB = (
    "id", "array_id", "array_task_id", "array_tasks_waiting", "array_tasks_parallel", "heterogeneous_id",
    "heterogeneous_offset", "name", "user_name", "user_id", "account", "partition", "qos", "state", "state_reason",
    "priority", "submit_time", "eligible_time", "start_time", "end_time", "time_limit", "allocated_nodes", "batch_host",
    "num_nodes", "cpus", "is_requeueable", "requeue_count", "constraints", "reservation", "comment", "admin_comment",
    "standard_output", "standard_error", "is_batch_job",
)  # fmt: skip
JOB_NODES = ("required_nodes", "excluded_nodes", "scheduled_nodes")
STEP = ("job_id", "id", "name", "state", "allocated_nodes", "start_time", "ntasks")
NODE = (
    "name", "state", "reason", "reason_user", "reason_time", "configured_gres", "allocated_gres", "partitions",
    "total_cpus", "allocated_cpus", "real_memory", "allocated_memory", "available_features", "slurm_version",
)  # fmt: skip


def main() -> None:
    """Answer requests until the end of standard input."""
    # Keep other output (pyslurm prints for some TRES) out of the responses.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = RequestExecutor()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(worker.answer(line), separators=(",", ":"), default=str).encode() + b"\n")
        answers.flush()


class RequestExecutor:
    """Executor of requests. pyslurm is loaded at the first one."""

    def __init__(self, load: Callable[[str], Any] = importlib.import_module) -> None:
        self._load = load
        self._module: Any = None

    @property
    def _pyslurm(self) -> Any:
        if self._module is None:
            os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
            module = self._load("pyslurm")
            module.slurm_init()
            self._module = module
        return self._module

    def answer(self, line: bytes) -> dict[str, Any]:
        """Return the response to one request. Does not raise: errors are part of the response."""
        try:
            request = json.loads(line)
            call = CALLS[request["call"]]
            return {"ok": call(self._pyslurm, **request.get("args", {}))}
        except ImportError as error:
            return _error("import", error)
        except Exception as error:
            # pyslurm raises RPCError if Slurm refuses; its message is the text of slurm_strerror.
            return _error("rpc" if type(error).__name__ == "RPCError" else "bug", error)


def _error(kind: str, error: Exception) -> dict[str, Any]:
    name = "" if kind == "rpc" else f"{type(error).__name__}: "
    return {"error": {"kind": kind, "message": f"{name}{error}", "errno": getattr(error, "errno", None)}}


# --- queries


def _hello(pyslurm: Any) -> dict[str, Any]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 - no path of ours
        match = _LIBRARY.search(maps.read())
    library = match[0] if match else None
    return {"pyslurm": pyslurm.__version__, "library": library, "api": _api(library)}


def _api(library: str | None) -> int | None:
    """Return the API version of libslurm: 42 in Slurm 24.11, 45 in 26.05. pyslurm knows only its build's version."""
    try:
        ask = ctypes.CDLL(library).slurm_api_version
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_long
    return int(ask()) >> 16


def _jobs(pyslurm: Any, steps: bool = False) -> list[dict[str, Any]]:
    jobs = pyslurm.Jobs.load(preload_passwd_info=False)
    if steps:
        jobs.load_steps()
    return [_job(job, steps) for job in jobs.values()]


def _with_steps(pyslurm: Any, job: int) -> dict[str, Any]:
    return _job(pyslurm.Job.load(job), True)


def _job(job: Any, steps: bool) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in JOB}
    values |= {name: getattr(job, name, None) for name in JOB_NODES}
    values["gres_per_node"] = list(getattr(job, "gres_per_node", None) or ())
    values["tres_requested"], values["tres_allocated"] = _tres(job.requested_tres), _tres(job.allocated_tres)
    if steps:
        values["steps"] = [_step(step) for step in job.steps.values()]
    return values


def _step(step: Any) -> dict[str, Any]:
    return {**{name: getattr(step, name) for name in STEP}, "tres": _tres(step.tres)}


def _tres(tres: Any) -> dict[str, int]:
    """Return name -> amount; memory in MiB."""
    if tres is None:
        return {}
    values = tres.to_dict(recursive=True)
    counts: dict[str, int] = {}
    for name, value in values.items():
        if not isinstance(value, dict):
            continue
        many = value.values() if "count" not in value else [value]
        counts.update((entry.get("type_and_name") or name, entry["count"]) for entry in many if isinstance(entry, dict))
    return counts


def _steps(pyslurm: Any) -> list[dict[str, Any]]:
    return [_step(step) for steps in pyslurm.JobSteps.load_all().values() for step in steps.values()]


def _nodes(pyslurm: Any) -> list[dict[str, Any]]:
    return [{name: getattr(node, name) for name in NODE} for node in pyslurm.Nodes.load().values()]


def _ping(pyslurm: Any) -> list[bool]:
    return [bool(controller.is_responding) for controller in pyslurm.slurmctld.ping_all()]


# --- changes: of a plain job by its raw ID, or of a node


def _hold(pyslurm: Any, job: int) -> None:
    pyslurm.Job(job).hold()


def _release(pyslurm: Any, job: int) -> None:
    pyslurm.Job(job).release()


def _requeue(pyslurm: Any, job: int, hold: bool) -> None:
    pyslurm.Job(job).requeue(hold=hold)


def _modify(pyslurm: Any, job: int, **changes: Any) -> None:
    pyslurm.Job(job).modify(pyslurm.JobSubmitDescription(**changes))


def _notify(pyslurm: Any, job: int, message: str) -> None:
    pyslurm.Job(job).notify(message)


def _node_state(pyslurm: Any, node: str, **changes: Any) -> None:
    pyslurm.Node(node).modify(pyslurm.Node(**changes))


CALLS: Mapping[str, Callable[..., Any]] = {
    "hello": _hello, "jobs": _jobs, "job": _with_steps, "steps": _steps, "nodes": _nodes, "ping": _ping,
    "hold": _hold, "release": _release, "requeue": _requeue, "modify": _modify, "notify": _notify,
    "node": _node_state,
}  # fmt: skip
"""All calls that a request may name."""


if __name__ == "__main__":
    main()
