"""Slurm's queue for the policy: queried rarely, never by the loop's own thread, and ignored when stale."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.core.policy import NodeRoom, Waiting
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.units import parse_memory

log = logging.getLogger(__name__)
T = TypeVar("T")

MIB = 1 << 20
STALE_PERIODS = 3.0
"""An answer older than this many periods is ignored."""
MOST_OF_CPU = 0.004
"""Share of a core that reading the queue may use: the period grows with the queue."""
WAITS = 4.0
"""The next query follows after at least this many times the duration of the last one, since slurmctld is busy then."""


@dataclass(frozen=True, slots=True)
class SlurmQueue:
    """One answer of slurmctld."""

    at_s: float
    """Time of the query, on the clock of the view."""
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]

    def job(self, job_id: int) -> Job | None:
        """Return a job by its raw ID, or ``None``."""
        return next((job for job in self.jobs if job.job_id == job_id), None)

    def waiting(self) -> tuple[Waiting, ...]:
        """Return the pending jobs that request GPUs."""
        return tuple(waiting_of(job) for job in self.jobs if job.pending and job.gpus_requested)

    def room(self, node: str) -> NodeRoom | None:
        """Return the properties and free resources of a node; ``None`` if Slurm does not know it."""
        match = next((candidate for candidate in self.nodes if candidate.name == node), None)
        return None if match is None else room_of(match)

    def suspended(self, noted: Collection[int]) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Count the suspended jobs of the cluster by partition, account and user.

        They are pending, and ``noted``: IDs of the jobs with a note of an agent.
        """
        counts: tuple[Counter[str], Counter[str], Counter[str]] = (Counter(), Counter(), Counter())
        for job in self.jobs:
            if job.pending and job.job_id in noted:
                counts[0].update(job.partitions)
                counts[1].update([job.account] if job.account else [])
                counts[2].update([job.user] if job.user else [])
        return counts


def waiting_of(job: Job) -> Waiting:
    """Return a pending job as the policy sees it. Its requests are divided by its nodes, rounded up."""
    nodes = max(1, job.node_count or 1)
    gpus = job.gpus_requested
    return Waiting(
        job_id=job.job_id,
        shown_id=job.id,
        partitions=job.partitions,
        reason=None if job.reason is None else job.reason.partition(",")[0].strip(),
        is_held=job.is_held,
        priority=job.priority or 0,
        gpus=0 if gpus is None else -(-gpus.count // nodes),
        gpu_kind=None if gpus is None else gpus.kind,
        cpus=-(-(job.cpus or 0) // nodes),
        memory_mib=-(-memory_mib(job.tres_requested.get("mem")) // nodes),
        features=job.features,
        reservation=job.reservation,
        required_nodes=job.nodes_required,
        excluded_nodes=job.nodes_excluded,
        tasks=tasks_of(job),
    )


def tasks_of(job: Job) -> int:
    """Return the tasks of a pending array record that may run at once; 1 for all other jobs.

    Slurm abbreviates long lists (``1-9,12,...``); only the listed tasks count then.
    """
    count = 0
    for part in (job.array_tasks or "").split(","):
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        if first.isdecimal() and (not rest or last.isdecimal()):
            count += 1 if not rest else max(0, int(last) - int(first)) // max(1, int(step or "1")) + 1
    return max(1, min(count, job.array_limit or count))


def room_of(node: Node) -> NodeRoom:
    """Return a node as the policy sees it."""
    gpus, used = node.gpus, node.gpus_used
    return NodeRoom(
        name=node.name,
        partitions=node.partitions,
        gpu_kind=None if gpus is None else gpus.kind,
        free_gpus=0 if gpus is None else max(0, gpus.count - (0 if used is None else used.count)),
        free_cpus=max(0, node.cpus - node.cpus_used),
        free_memory_mib=max(0, node.memory_mib - node.memory_used_mib),
        features=node.features,
        available=node.responding and not node.draining,
    )


def memory_mib(text: str | None) -> int:
    """Return the ``mem`` of a TRES string in MiB; 0 if it is absent."""
    try:
        amount = None if text is None else parse_memory(text, bare="M")
    except ValueError:
        return 0
    return 0 if amount is None else amount.size_bytes // MIB


class QueueView:
    """Keeps the last answer. Thread-safe: one thread at a time queries slurmctld."""

    def __init__(
        self,
        open_client: Callable[[], SlurmClient],
        period_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open = open_client
        self._client: SlurmClient | None = None
        self._period_s = period_s
        self._clock = clock
        self._cpu_s = self._wall_s = 0.0
        self._tried_s = -1e9
        self._latest: SlurmQueue | None = None
        self._logged = False
        """slurmctld did not respond to the last query, which was logged."""
        self._lock = threading.Lock()
        """Guards the client, for the duration of a query."""

    @property
    def every_s(self) -> float:
        """The minimum time between queries: the period, or longer if answers are slow."""
        return max(self._period_s, self._cpu_s / MOST_OF_CPU, self._wall_s * WAITS)

    def due(self) -> bool:
        """Return whether the next query is due."""
        return self._clock() - self._tried_s >= self.every_s

    def latest(self) -> SlurmQueue | None:
        """Return the last answer; ``None`` if it is too old to act on."""
        queue = self._latest
        if queue is None or self._clock() - queue.at_s > STALE_PERIODS * self.every_s:
            return None
        return queue

    def refresh(self) -> SlurmQueue | None:
        """Query jobs and nodes; ``None`` if slurmctld does not respond, which is logged once."""
        self._tried_s = began = self._clock()
        cpu_s = time.thread_time()
        queue = self._ask("list jobs and nodes", lambda client: SlurmQueue(began, client.jobs(), tuple(client.nodes())))
        if queue is not None:
            self._cpu_s, self._wall_s = time.thread_time() - cpu_s, self._clock() - began
            self._latest = queue
        return queue

    def read_job(self, job_id: int) -> Job | None:
        """Return a job with its steps; ``None`` if slurmctld does not respond or does not know it."""
        return self._ask(f"show job {job_id}", lambda client: client.job(job_id))

    def slurm_user(self) -> str | None:
        """Return the name of SlurmUser; ``None`` if slurmctld does not respond."""
        config = self._ask("read the configuration", lambda client: client.config())
        value = "" if config is None else config.get("SlurmUser", "")
        return value.partition("(")[0] or None

    def drain(self, node: str, reason: str) -> bool:
        """Drain a node; one that is drained already keeps its reason. ``False``: it failed (logged)."""

        def unless_it_is(client: SlurmClient) -> bool:
            present = next((candidate for candidate in client.nodes() if candidate.name == node), None)
            if present is not None and present.draining:
                log.warning("%s is drained already (%s), not for: %s", node, present.reason, reason)
            else:
                client.drain(node, reason)
            return True

        return self._ask(f"drain {node}", unless_it_is) is True

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def _ask(self, what: str, question: Callable[[SlurmClient], T]) -> T | None:
        with self._lock:
            try:
                if self._client is None:
                    self._client = self._open()
                answer = question(self._client)
            except AffinodeError as error:
                if not self._logged:
                    log.warning("%s: %s", what, error)
                self._logged = True
                return None
            if self._logged:
                log.info("slurmctld responds again")
            self._logged = False
            return answer


def run_s(job: Job | None, now_epoch: float) -> float | None:
    """Return how long a job has run, in seconds; ``None`` if unknown."""
    if job is None or job.start is None:
        return None
    return max(0.0, now_epoch - job.start.timestamp())


def indices_on(job: Job, node: str) -> Sequence[int] | None:
    """Return Slurm's indices of the job's GPUs on a node; ``None`` if Slurm does not report them."""
    node_gpus = [node_gpu for node_gpu in job.node_gpus or () if node_gpu.node == node]
    numbers = [index for gpus in node_gpus for index in gpus.indices]
    return numbers if node_gpus and len(numbers) == sum(gpus.count for gpus in node_gpus) else None
