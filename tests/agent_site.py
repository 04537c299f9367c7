"""A fake site: nodes with processes, a job, Slurm. A crash can be injected before any effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from job_owner import OWNER

from slurm_affinode.checkpoint.interface import CudaState
from slurm_affinode.model.cluster import GpuCount, Job, NodeGpus
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.interface import ControllerDownError, InvalidStateError, UnknownJobError

SUBMIT = datetime(2026, 11, 20, 10, tzinfo=UTC)
STEPS = 4711
"""The progress of the job at the beginning of a scenario."""


class Crash(BaseException):
    """The agent was killed; not caught by ``except Exception``."""


@dataclass
class Process:
    """A process of the job."""

    pid: int
    pid_ns: int
    cuda: CudaState | None = CudaState.RUNNING
    stopped: bool = False
    steps: int = 0
    """Its progress: the memory that must survive."""
    inside: bool = False
    """The process is in a nested PID namespace, as in a container."""


@dataclass
class Node:
    """A node with its shepherd and processes."""

    name: str
    init: int | None = None
    processes: list[Process] = field(default_factory=list)
    next_pid: int = 10_000_000
    """Above any PID of this machine, in case the real ``/proc`` is read."""


@dataclass
class World:
    """Everything outside the agent."""

    root: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    state: str = "RUNNING"
    node: str = "c1"
    restarts: int = 0
    held: bool = False
    kept_stopped: bool = False
    """Its processes are kept stopped even if they get SIGCONT."""
    comment: str = ""
    jobs_on_node: Callable[[], Collection[int]] = lambda: {7}
    """The jobs of the user that accounting knows on the node."""
    required: tuple[str, ...] = ()
    """The nodes that Slurm requires for the job."""
    begin: datetime | None = None
    """Its earliest start."""
    minutes: int | None = None
    """Its time limit."""
    answers: bool = True
    clock: float = SUBMIT.timestamp() + 60
    submit: datetime = SUBMIT
    effects: int = 0
    crash_at: int | None = None
    """Crash before this effect."""
    effect_log: list[str] = field(default_factory=list)
    ran_stopped: int = 0
    """The number of times that a dumped process ran before it was killed."""

    def effect(self, name: str) -> None:
        """Record a change of the world, or crash before it."""
        self.effects += 1
        if self.crash_at is not None and self.effects >= self.crash_at:
            self.crash_at = None
            raise Crash(name)
        self.effect_log.append(name)

    def now(self) -> float:
        self.clock += 0.01
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def start_run(self, node: str) -> None:
        """Have Slurm start the job: a shepherd without children yet."""
        self.state, self.node, self.held = "RUNNING", node, False
        machine = self.nodes.setdefault(node, Node(node))
        machine.next_pid += 100
        machine.init = machine.next_pid
        machine.processes = []

    def start_script(self, node: str, steps: int = 0) -> None:
        machine = self.nodes[node]
        base = machine.next_pid
        machine.processes = [Process(base + 2, 2, cuda=None), Process(base + 3, 3, steps=steps)]

    def copies(self) -> int:
        """Return the number of nodes on which the job can run or resume."""
        return sum(bool(machine.processes) for machine in self.nodes.values())

    def running(self) -> bool:
        """Return whether the job runs with its GPU and its memory."""
        return any(
            len(machine.processes) == 2
            and all(not p.stopped and p.cuda in (None, CudaState.RUNNING) for p in machine.processes)
            for machine in self.nodes.values()
        )

    def steps(self) -> list[int]:
        return [p.steps for machine in self.nodes.values() for p in machine.processes if p.cuda is not None]


class Slurm:
    """A fake slurmctld. A requeue ends the old attempt only when its processes have ended."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _answer(self) -> None:
        if not self.world.answers:
            raise ControllerDownError("slurmctld does not respond")

    def _check(self, job: int | str) -> None:
        target = identifiers.job(job)
        self._answer()
        if target.job_id != 7:
            raise UnknownJobError(f"job {job}")

    def job(self, job: int | str) -> Job:
        self._check(job)
        return make_job(self.world)

    def jobs(self, **_: object) -> tuple[Job, ...]:
        self._answer()
        return (make_job(self.world),)

    def nodes(self) -> tuple[()]:
        self._answer()
        return ()

    def requeue(self, job: int | str, *, hold: bool = False, running: bool = False) -> None:
        self._check(job)
        if running and self.world.state == "COMPLETING":
            return
        if self.world.state != "RUNNING":
            raise InvalidStateError("it is pending")
        self.world.effect("requeue")
        self.world.state, self.world.held = "PENDING", hold
        self.world.restarts += 1
        # slurmd continues and kills all processes: those not held run for a moment.
        for process in self.world.nodes[self.world.node].processes:
            if process.stopped and not self.world.kept_stopped:
                self.world.ran_stopped += 1

    def hold(self, job: int | str, **_: object) -> None:
        self._check(job)
        self.world.held = True

    def release(self, job: int | str) -> None:
        self._check(job)
        self.world.effect("release")
        self.world.held = False

    def set_comment(self, job: int | str, text: str) -> None:
        self._check(job)
        self.world.comment = text

    def set_begin(self, job: int | str, when: datetime) -> None:
        self._check(job)
        if self.world.state != "PENDING":
            raise InvalidStateError("it is no longer pending")
        self.world.effect(f"begin {when.isoformat()}")
        self.world.begin = when

    def set_required_nodes(self, job: int | str, nodes: Sequence[str]) -> None:
        self._check(job)
        self.world.effect(f"required nodes {','.join(nodes)}")
        self.world.required = tuple(nodes)

    def set_time_limit(self, job: int | str, minutes: int) -> None:
        self._check(job)
        self.world.effect(f"time limit {minutes}")
        self.world.minutes = minutes

    def config(self) -> dict[str, str]:
        self._answer()
        return {"ClusterName": "alpha", "SlurmUser": "slurm(64030)"}

    def version(self) -> str:
        return "24.11.5"

    def close(self) -> None:
        return


def make_job(world: World, **changes: object) -> Job:
    values: dict[str, object] = dict.fromkeys(Job.__dataclass_fields__)
    running = world.state == "RUNNING"
    values |= {
        "job_id": 7, "name": "train", "user": "alice", "uid": OWNER.uid, "account": "vision", "partitions": ("gpu",),
        "state": world.state, "is_held": world.held, "submit": world.submit, "start": SUBMIT if running else None,
        "node_count": 1, "requeue": True, "restarts": world.restarts, "tres_requested": {}, "tres_allocated": {},
        "gpus_requested": GpuCount(1), "gpus_allocated": GpuCount(1) if running else None,
        "node_gpus": (NodeGpus(world.node, 1, None, (0,)),) if running else (), "comment": world.comment or None,
        "batch": True, "nodes": (world.node,) if running else (), "steps": (), "nodes_required": world.required,
        "nodes_excluded": (), "expected_start": None if running else world.begin,
        "time_limit_s": None if world.minutes is None else 60 * world.minutes,
    }  # fmt: skip
    return Job(**{**values, **changes})  # type: ignore[arg-type]
