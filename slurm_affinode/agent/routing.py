"""Routing of requests to the agent of a job: this node's, the batch host's, or one that sees its image."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_affinode.agent import client
from slurm_affinode.agent.client import AnswerError
from slurm_affinode.agent.requests import refusal_hint, refusal_text, without_option
from slurm_affinode.agent.settings import node_name
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.node_config import DEFAULT_PORT, listen_address
from slurm_affinode.base.threads import pool
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.interface import SlurmClient, SlurmError, UnknownJobError

MOST_NODES = 32
"""Number of agents queried about a suspended job before it counts as unknown."""
AT_ONCE = 16
CONNECT_S = 10.0
UNRESPONSIVE_S = 5.0
"""An agent that does not respond in this time is not queried again.

A refused connection fails at once, and the agent may be back for the next request.
"""
SLOW_S = {"kill-orphan": 30.0}
"""The agent queries slurmctld, then a process may take its time to end before it is killed."""
SHOWN_PROBLEMS = 3
_LOCAL_NODE = ""
_NOT_KNOWN = ("unknown-job", "starting")
"""Codes with which an agent says that it does not know a job, or not yet."""


@dataclass(slots=True)
class Reach:
    """Sends requests to agents for a user. ``slurm`` opens a client, once, when first needed."""

    config: Config
    slurm: Callable[[], SlurmClient]
    ask_local: Callable[..., dict[str, Any]] = client.ask_local
    ask_node: Callable[..., dict[str, Any]] = client.ask_node
    clock: Callable[[], float] = time.monotonic
    _client: SlurmClient | None = None
    _routes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Job as named by the user -> node of the agent that knows it (empty: this node) and its raw ID."""
    _unresponsive: dict[str, str] = field(default_factory=dict)
    """Node or ``_LOCAL_NODE`` -> error of its agent that did not respond."""

    def about(self, job: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request about one job from the agent that knows it.

        Raises ``AnswerError`` if that agent refuses it, ``UnreachableError`` if no agent could be reached, and
        ``SlurmError`` for a job that Slurm does not know.
        """
        target = identifiers.job(job)
        route = self._routes.get(job)
        if route is not None:
            return self._ask(route[0], {**request, "job": route[1]})
        problems: list[str] = []
        if target.task is None and target.het_offset is None:
            # A plain number is a raw ID (of an array: of its last task) and needs no request to slurmctld.
            try:
                return self._remember(job, "", target.job_id, request)
            except AnswerError as error:
                if error.code not in _NOT_KNOWN:
                    raise
            except UnreachableError as error:
                problems.append(str(error))
        record = self._slurm_job(job)
        return self._of(job, record, request, problems)

    def everywhere(self, nodes: Iterable[str], uid: int, *, user: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """Yield the status of each of ``nodes``; without any, of this node's agent, or else of the relevant nodes.

        These are the nodes of the user's jobs; for root and administrators, all nodes with GPUs. Yields the node and
        its reply or the error message.
        """
        named = list(nodes)
        if not named:
            try:
                answer = self._send_locally({"verb": "status"})
            except UnreachableError:
                everybodys = uid == 0 or user in self.config.agent.admins
                named = self._nodes_of(None if everybodys else user)
            else:
                yield str(answer.get("node")), answer
                return
        with pool("status", AT_ONCE) as executor:
            yield from zip(named, executor.map(self._status_of, named), strict=True)

    def _status_of(self, node: str) -> dict[str, Any] | str:
        try:
            return self._ask(node, {"verb": "status"})
        except AffinodeError as error:
            return str(error)

    # --- one job

    def _of(self, job: str, record: Job, request: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        if record.has_ended:
            raise AnswerError("ended", f"job {record.id} has ended: {record.state}", hint=None, exit_code=1)
        if record.het_offset or (record.het_job_id is None and not record.batch):
            raise _cannot(record)  # also while it is pending: without a script, no agent knows more
        running = record.allocated and record.batch_host is not None
        answered, starting = False, None
        for node in self._candidates(record):
            try:
                return self._remember(job, node, record.job_id, request)
            except AnswerError as error:
                if error.code not in _NOT_KNOWN:
                    raise
                answered = True
                starting = error if error.code == "starting" else starting
            except UnreachableError as error:
                problems.append(str(error))
        if answered and running:
            raise starting or _cannot(record)
        if running and self._without_gpus(record):
            text = f"job {record.id} runs on {record.batch_host} without a GPU, and no agent watches it there"
            raise AnswerError("no-gpu", text, hint="only jobs with GPUs are suspended when idle", exit_code=1)
        if record.het_job_id is not None and answered:
            raise _cannot(record)
        if answered or not problems:
            raise AnswerError(
                "not-suspended", f"job {record.id} is {record.state.lower()}, and not suspended", hint=None, exit_code=1
            )
        raise UnreachableError(
            f"no agent responded about job {record.id}: {'; '.join(problems[-SHOWN_PROBLEMS:])}",
            hint="does slurm-affinode agent run on the nodes?",
        )

    def _candidates(self, job: Job) -> list[str]:
        if job.allocated and job.batch_host is not None:
            return [job.batch_host]
        # Every agent sees the shared store, even if the user has moved the job to a partition without one. The job's
        # comment names the node where it was suspended, which is tried first.
        words = (job.comment or "").replace(",", " ").split()
        nodes = sorted(
            self._gpu_nodes(), key=lambda node: (node.name not in words, not set(node.partitions) & set(job.partitions))
        )
        return [node.name for node in nodes[:MOST_NODES]]

    def _remember(self, job: str, node: str, job_id: int, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._ask(node, {**request, "job": job_id})
        self._routes[job] = (node, job_id)
        return answer

    def ask(self, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply of one node's agent. Raises ``AnswerError`` and ``UnreachableError``.

        An agent that timed out (a stopped process, an unreachable node) is not queried again.
        """
        if node in self._unresponsive:
            raise UnreachableError(self._unresponsive[node])
        began = self.clock()
        try:
            return self._ask(node, request)
        except UnreachableError as error:
            if self.clock() - began >= UNRESPONSIVE_S:
                self._unresponsive[node] = str(error)
            raise

    def _ask(self, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if not node:
            return self._send_locally(request)
        if node == node_name(self.config):
            try:
                return self._send_locally(request)
            except UnreachableError:
                if _LOCAL_NODE in self._unresponsive:
                    raise
        port = listen_address(self.config.agent.listen)[1] if self.config.agent.listen else DEFAULT_PORT
        return self.ask_node(node, port, node, request, timeout_s=_wait_s(request))

    def _send_locally(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send the request to this node's agent over its socket."""
        if _LOCAL_NODE in self._unresponsive:
            raise UnreachableError(self._unresponsive[_LOCAL_NODE])
        began = self.clock()
        try:
            return self.ask_local(self.config.agent.run_dir, request, timeout_s=_wait_s(request))
        except UnreachableError as error:
            if self.clock() - began >= UNRESPONSIVE_S:
                self._unresponsive[_LOCAL_NODE] = str(error)
            raise

    # --- Slurm

    def _open(self) -> SlurmClient:
        if self._client is None:
            self._client = self.slurm()
        return self._client

    def _slurm_job(self, job: str) -> Job:
        try:
            return self._open().job(job)
        except UnknownJobError as error:
            text = f"Slurm knows no job {job}: there was none, or it ended a while ago"
            raise AnswerError("unknown-job", text, hint=f"see: sacct --jobs={job}", exit_code=1) from error
        except SlurmError as error:
            raise AnswerError("unknown-job", f"job {job}: {error}", hint=error.hint, exit_code=1) from error

    def _gpu_nodes(self) -> list[Node]:
        return [node for node in self._open().nodes() if node.gpus and node.responding and node.powered]

    def _without_gpus(self, job: Job) -> bool:
        """Return whether a job has no GPUs by any of Slurm's data: counts, GPU numbers, and GPUs of its node.

        The last is needed for shards, which Slurm does not count as GPUs.
        """
        counts = (job.gpus_allocated, job.gpus_requested)
        if job.node_gpus or any(count is not None and count.count for count in counts):
            return False
        return not any(node.gpus for node in self._open().nodes() if node.name == job.batch_host)

    def _nodes_of(self, user: str | None) -> list[str]:
        """Return the nodes to query for a user's jobs; ``None``: for all jobs."""
        if user is None:
            return [node.name for node in self._gpu_nodes()]
        jobs = [job for job in self._open().jobs() if job.user == user]
        hosts = {job.batch_host: bool(job.gpus_allocated) for job in jobs if job.allocated and job.batch_host}
        nodes = {host for host, gpus in hosts.items() if gpus}
        if len(nodes) < len(hosts):  # Slurm does not count shards as GPUs, so the GPUs of the node decide
            nodes |= hosts.keys() & {node.name for node in self._gpu_nodes()}
        if any(job.pending and job.restarts for job in jobs):
            # One of them may be suspended, whatever its comment is. Every agent sees the shared store.
            nodes |= {node.name for node in self._gpu_nodes()[:2]}
        return sorted(nodes)

    def close(self) -> None:
        """Close the Slurm client."""
        if self._client is not None:
            self._client.close()


def _wait_s(request: Mapping[str, Any]) -> float:
    return SLOW_S.get(str(request.get("verb")), CONNECT_S)


def _cannot(job: Job) -> AnswerError:
    """Return the error for a job that no agent watches."""
    refusal = without_option(job)
    return AnswerError(refusal.code, refusal_text(job.id, refusal), hint=refusal_hint(refusal), exit_code=1)
