"""Requests about the node's GPUs and the processes on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_affinode.agent.orphans import NotAnOrphanError, Orphans
from slurm_affinode.agent.requests import Caller, RequestError
from slurm_affinode.base.text import one_line
from slurm_affinode.base.toml_schema import TomlError
from slurm_affinode.core.cleanup_policy import parse_policy
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.cleanup import EpilogPolicy
from slurm_affinode.model.finding import EPILOG

log = logging.getLogger(__name__)

MAX_PID = 1 << 22
VERBS = ("processes", "kill-orphan", "leftovers", "leftover-reports", "leftovers-taken")


@dataclass(slots=True)
class OrphanVerbs:
    """Handles the requests of root and administrators. Thread-safe."""

    orphans: Orphans
    policy: Path
    """The policy file, which may be missing."""
    drain: Callable[[str], bool]
    """Drains this node with a reason; returns whether that succeeded."""
    name_of: Callable[[int], str]

    def answer(self, request: Mapping[str, Any], caller: Caller, *, admin: bool) -> dict[str, Any]:
        """Return the reply to a request. Raises ``RequestError``."""
        verb = request["verb"]
        if not admin:
            raise RequestError("not-permitted", f"{verb} is for root and administrators")
        try:
            if verb == "processes":
                return self._processes(request)
            if verb == "leftover-reports":
                return {"node": self.orphans.node, "reports": self.orphans.reports.all()}
            if verb == "leftovers-taken":
                return self._drop_reports(request.get("ids"))
            if verb == "kill-orphan":
                return self._kill(request, caller)
            if caller.uid != 0 or not caller.local:
                raise RequestError("not-permitted", "leftovers is for root on the node itself")
            return self._leftovers(request)
        except GpuError as error:
            raise RequestError("no-driver", str(error), exit_code=3) from error

    def _processes(self, request: Mapping[str, Any]) -> dict[str, Any]:
        since_us = request.get("since")
        if since_us is not None and not _whole(since_us):
            raise RequestError("bad-request", "since is no time", exit_code=2)
        rows = self.orphans.gpus(since_us, each=request.get("each") is True)
        for row in rows:
            for process in row["processes"] or ():
                process["user"] = self.name_of(process["uid"])
        answer = {"node": self.orphans.node, "at": self.orphans.now(), "gpus": rows}
        if request.get("use") is True:
            answer["jobs"] = self.orphans.uses()
        return answer

    def _drop_reports(self, ids: object) -> dict[str, Any]:
        if not isinstance(ids, list) or not all(isinstance(job_id, str) for job_id in ids):
            raise RequestError("bad-request", "ids are needed", exit_code=2)
        return {"node": self.orphans.node, "taken": self.orphans.reports.drop(ids)}

    def _kill(self, request: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        pid, started = request.get("pid"), request.get("start_ticks")
        if not _whole(pid) or not 1 < pid <= MAX_PID or not _whole(started):  # type: ignore[operator]
            raise RequestError("bad-request", "pid and start_ticks are needed", exit_code=2)
        job = request.get("job")
        if "job" in request and not (_whole(job) and job):
            raise RequestError("bad-request", "job is not a job ID", exit_code=2)
        try:
            return self.orphans.end(pid, started, caller.name, job)  # type: ignore[arg-type]
        except NotAnOrphanError as error:
            raise RequestError(error.code, str(error)) from error

    def _leftovers(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job, uid, gpus = request.get("job"), request.get("uid"), request.get("gpus")
        if not _whole(job) or not _whole(uid) or not isinstance(gpus, list) or not all(_whole(gpu) for gpu in gpus):
            raise RequestError("bad-request", "job, uid and gpus are needed", exit_code=2)
        rule = self._rule()
        report = self.orphans.leftovers(job, uid, gpus, kill=rule.kill, wait_s=rule.wait_s)  # type: ignore[arg-type]
        drained = False
        if report["dirty"]:
            reason = f"{EPILOG} {job}: {'; '.join(report['dirty'])}"
            log.error("%s", one_line(reason))
            if rule.dirty == "drain":
                drained = self.drain(one_line(reason, 200))
                if not drained:
                    report["dirty"] = [*report["dirty"], f"{self.orphans.node} could not be drained"]
                self.orphans.reports.add({**report, "drained": drained})
        report["drained"] = drained
        return report

    def _rule(self) -> EpilogPolicy:
        """Return the epilog section of the policy file. If the file has errors, no process is ended."""
        try:
            return parse_policy(self.policy.read_text(encoding="utf-8"), where=str(self.policy)).epilog
        except FileNotFoundError:
            return EpilogPolicy()
        except (OSError, ValueError) as error:
            log.warning("%s: %s; the epilog ends no process", self.policy, getattr(error, "strerror", None) or error)
            return EpilogPolicy(kill=False)
        except TomlError as error:
            faults = error.lines
        for line in faults:
            log.error("%s; the epilog ends no process", line)
        return EpilogPolicy(kill=False)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
