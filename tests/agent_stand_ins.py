"""Fakes of the daemon's environment: GPUs, Slurm, the orchestration; and a shepherd in Python."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.daemon import Daemon, DaemonParts
from slurm_affinode.agent.requests import Caller
from slurm_affinode.agent.service import CONNECTS_S
from slurm_affinode.base.config import Config, parse
from slurm_affinode.gpu.interface import DriverMissing, GpuLost
from slurm_affinode.model.cluster import GpuCount, Job, Node, NodeGpus
from slurm_affinode.model.gpu import Device, GpuFault, GpuProcess, ProcessUtilization, Reading
from slurm_affinode.model.suspension import JobKey, Mode, Phase, Refusal
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.interface import ControllerDownError, UnknownJobError
from slurm_affinode.suspension.compatibility import Compatibility, CompatibilityRow
from slurm_affinode.suspension.interface import AgentContext, Arrival, Orchestration, SampleAgain
from slurm_affinode.suspension.job.peers import Identity, Inspector, NotAShepherd, Peer
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.job.shepherd import Reply, Restored
from slurm_affinode.suspension.records.record import SuspensionRecord
from slurm_affinode.suspension.records.shared_state import SuspendedJob

NOW = datetime.now(UTC)
ALICE, BOB, ROOT = Caller(2001, "alice", True), Caller(2002, "bob", True), Caller(0, "root", True)


@dataclass
class Gpus:
    """A ``GpuDriver`` with fixed values."""

    count: int = 2
    util_pct: dict[int, float | None] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    missing: bool = False
    holders: dict[int, list[int]] = field(default_factory=dict)
    reads: int = 0

    def devices(self) -> Sequence[Device]:
        self._alive()
        return [Device(f"GPU-{index}", index, model="H100", minor=index) for index in range(self.count)]

    def faults(self) -> Sequence[GpuFault]:
        return ()

    def read(self, device: Device) -> Reading:
        self._open(device)
        self.reads += 1
        util = self.util_pct.get(device.index, 0.0)
        return Reading(
            util_pct=util,
            memory_util_pct=util,
            sm_active=None if util is None else util / 100,
            fb_used_mib=1024.0,
            xid=0,
        )

    def free_mib(self, device: Device) -> float | None:
        return self.read(device).fb_free_mib

    def processes(self, device: Device) -> Sequence[GpuProcess]:
        self._open(device)
        return [GpuProcess(pid, 1024.0, "compute") for pid in self.holders.get(device.index, [])]

    def process_utilization(self, device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
        self._open(device)
        return ()

    def version(self) -> str:
        self._alive()
        return "580.0"

    def close(self) -> None:
        return

    def _alive(self) -> None:
        if self.missing:
            raise DriverMissing("the driver is not loaded")

    def _open(self, device: Device) -> None:
        if device.uuid not in {known.uuid for known in self.devices()} or device.index in self.lost:
            raise GpuLost(f"GPU {device.index}: GPU is lost")


def job(job_id: int = 7, **changes: Any) -> Job:
    """Return a job of alice that has run for an hour on GPU 0 of node c1."""
    base = Job(
        job_id=job_id, array_job_id=None, array_task_id=None, array_tasks=None, array_limit=None, het_job_id=None,
        het_offset=None, name="train", user="alice", uid=os.getuid(), account="vision", partitions=("gpu",),
        qos="normal", state="RUNNING", reason=None, priority=100, is_held=False,
        submit=NOW - timedelta(hours=2), eligible=None, start=NOW - timedelta(hours=1), end=None, expected_start=None,
        time_limit_s=None, nodes=("c1",), batch_host="c1", node_count=1, cpus=1, requeue=True,
        restarts=0, tres_requested={"cpu": "1", "mem": "500M", "gres/gpu": "1"},
        tres_allocated={"cpu": "1", "mem": "500M"},
        gpus_requested=GpuCount(1), gpus_allocated=GpuCount(1), node_gpus=(NodeGpus("c1", 1, "h100", (0,)),),
        features=None, reservation=None, comment=None, admin_comment=None, stdout=None, stderr=None,
        batch=True,
    )  # fmt: skip
    return replace(base, **changes)


def waiting(job_id: int = 99, **changes: Any) -> Job:
    """Return a job of bob that waits for a GPU."""
    changes = {"state": "PENDING", "reason": "Resources", "start": None, "nodes": (), "batch_host": None,
               "node_gpus": None, "user": "bob", "gpus_allocated": None} | changes  # fmt: skip
    return job(job_id, **changes)


NODE = Node(
    name="c1", state="MIXED", flags=frozenset(), reason=None, reason_user=None, reason_time=None,
    gpus=GpuCount(2, "h100"), gpus_used=GpuCount(2, "h100"), partitions=("gpu",), cpus=8, cpus_used=2,
    memory_mib=16000, memory_used_mib=1000,
    features=(), version="24.11",
)  # fmt: skip


@dataclass
class Slurm:
    """A slurmctld with fixed values; the daemon opens ``client``."""

    all: dict[int, Job] = field(default_factory=dict)
    node_list: tuple[Node, ...] = (NODE,)
    down: bool = False
    queries: int = 0

    def client(self) -> Any:
        return self

    def _up(self) -> None:
        self.queries += 1
        if self.down:
            raise ControllerDownError("list jobs: Unable to contact slurm controller")

    def jobs(self, *, steps: bool = False, gpu_detail: bool = False) -> tuple[Job, ...]:
        self._up()
        return tuple(self.all.values())

    def job(self, job: int | str) -> Job:
        number = identifiers.job(job).job_id
        self._up()
        if number not in self.all:
            raise UnknownJobError(f"show job {job}: Invalid job id specified")
        return self.all[number]

    def nodes(self) -> tuple[Node, ...]:
        self._up()
        return self.node_list

    def config(self) -> Mapping[str, str]:
        self._up()
        return {"SlurmUser": "slurm(64030)"}

    def close(self) -> None:
        return


@dataclass
class Acts:
    """A ``Suspender``, ``Restorer``, ``Waker`` and ``Keeper`` that records its calls."""

    context: AgentContext
    refused: list[Refusal] = field(default_factory=list)
    suspended_jobs: list[tuple[int, str]] = field(default_factory=list)
    restored: list[Arrival] = field(default_factory=list)
    woken: list[tuple[int, str]] = field(default_factory=list)
    ended_jobs: list[tuple[int, bool]] = field(default_factory=list)
    registered_jobs: list[int] = field(default_factory=list)
    asleep: list[SuspendedJob] = field(default_factory=list)
    full: str | None = None
    unknown: str | None = None
    reply: Reply = field(default_factory=lambda: Restored(17))
    go: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    """A suspension has been requested; it continues when ``go`` is set."""
    last_samples: list[str | None] = field(default_factory=list)
    recovered: int = 0
    ticks: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        return tuple(self.refused)

    def compatibility(self, job: WatchedJob) -> Compatibility:
        return Compatibility((CompatibilityRow.BATCH,), {Mode.REQUEUE: tuple(self.refusals(job)), Mode.INPLACE: ()})

    def suspend(self, job: WatchedJob, why: str, *, sample_again: SampleAgain, busy: bool = False) -> SuspensionRecord:
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        self.last_samples.append(sample_again())
        self.suspended_jobs.append((job.job_id, why))
        key = job.key or JobKey("test", job.job_id, 0)
        return SuspensionRecord(
            key=key, phase=Phase.QUEUED, phases={}, restarts=job.restarts, uid=job.uid, gid=job.gid, option=job.option,
            why=why, began_epoch=time.time(), init_pid=job.init_pid, init_started=job.init_started, gpus=1, seq=1,
        )  # fmt: skip

    def restore(self, arrival: Arrival) -> Reply:
        assert self.go.wait(DEADLINE_S)
        self.restored.append(arrival)
        return self.reply

    def wake(self, key: JobKey, who: str, *, admin: bool = False, from_start: bool = False) -> bool:
        self.woken.append((key.job_id, who))
        return True

    def tick(self) -> None:
        self.ticks += 1

    def recover(self) -> None:
        self.recovered += 1

    def registered(self, job: WatchedJob) -> None:
        self.registered_jobs.append(job.job_id)

    def identify(self, job: WatchedJob) -> tuple[JobKey, int]:
        return JobKey("test", job.job_id, 1), 0

    def last_restore(self, job: WatchedJob) -> None:
        return None

    def handle_epilog(self, job_id: int, *, requeued: bool) -> None:
        self.ended_jobs.append((job_id, requeued))

    def suspended_ids(self) -> frozenset[int] | None:
        return frozenset(figure.key.job_id for figure in self.suspended())

    def suspended(self) -> Sequence[SuspendedJob]:
        return tuple(self.asleep)

    def unresponsive(self) -> str | None:
        return self.unknown

    def sweep_stopped(self) -> str | None:
        return None

    def room(self) -> str | None:
        return self.full


class Shepherd:
    """A shepherd in Python with the protocol of the C one."""

    made: ClassVar[list[Shepherd]] = []

    def __init__(self, run_dir: Path, **fields: object) -> None:
        self.run_dir = run_dir
        self.fields = {"version": 1, "job": 7, "restarts": 0, "image": 0, "root": 0,
                       "option": "window=1,when=always"} | fields  # fmt: skip
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE_S)
        self.made.append(self)
        self.sock.connect(str(run_dir / "shepherd.sock"))

    def hello(self) -> Shepherd:
        text = "hello\n" + "\n".join(f"{key}={value}" for key, value in self.fields.items())
        null = os.open(os.devnull, os.O_RDWR)
        try:
            self.sock.sendmsg([text.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 3))])
        finally:
            os.close(null)
        return self

    def send(self, text: str) -> None:
        self.sock.send(text.encode())

    def hear(self) -> str:
        """Return the next message, or an empty string if the agent has closed the connection."""
        with contextlib.suppress(ConnectionResetError):
            return self.sock.recv(4096).decode()
        return ""

    def close(self) -> None:
        self.sock.close()


@dataclass
class Node1:
    """A node with an agent."""

    config: Config
    gpus: Gpus
    slurm: Slurm
    daemon: Daemon
    acts: Acts
    thread: threading.Thread

    @property
    def run_dir(self) -> Path:
        return self.config.agent.run_dir

    def watched(self, job_id: int = 7) -> WatchedJob:
        """Return the job once its record from slurmctld and its GPUs are known."""
        return wait_until(
            f"job {job_id} is watched",
            lambda: self.daemon.registry.get(job_id),
            lambda figure: figure is not None and figure.key is not None and figure.devices is not None,
        )  # type: ignore[return-value]


def ask(node: Node1, caller: Caller = ROOT, **request: Any) -> dict[str, Any]:
    """Return the daemon's response. Raises the errors of its refusals."""
    return node.daemon.service.answer(request, caller)


def watched(node: Node1, **fields: object) -> Shepherd:
    """Return a registered shepherd of job 7."""
    shepherd = Shepherd(node.run_dir, **fields).hello()
    node.watched()
    return shepherd


def config_of(directory: Path, *, agent: str = "", suspend: str = "") -> Config:
    """Return the configuration of an agent for node c1 with short periods, with further lines for the two sections."""
    return parse(
        f"""
        [agent]
        node = "c1"
        period = "0.05s"
        queue_period = "0.1s"
        max_gap_periods = 100
        run_dir = "{directory}/run"
        leftovers = "{directory}/leftovers.jsonl"
        {agent if "listen" in agent else 'listen = ""' + chr(10) + agent}
        [suspend]
        min_run = "0s"
        wake_every = "0.05s"
        {suspend}
        """,
        where="test",
    )


def identify(peer: Peer) -> Identity:
    """Identify every process as the shepherd of job 7, or of the job in ``SHEPHERD_OF``, with its real user ID."""
    job_id = int(os.environ.get("SHEPHERD_OF", "7"))
    if job_id == 0:
        raise NotAShepherd("it is of no job")
    started = Inspector().started(peer.pid)
    return Identity(job_id, peer.uid, peer.gid, peer.pid, started or 0)


@contextlib.contextmanager
def agent(config: Config, gpus: Gpus | None = None, slurm: Slurm | None = None) -> Iterator[Node1]:
    """Run an agent in this process."""
    gpus, slurm = gpus or Gpus(), slurm or Slurm({7: job()})
    made: list[Acts] = []

    def build(context: AgentContext) -> Orchestration:
        made.append(Acts(context))
        return Orchestration(made[0], made[0], made[0], made[0], stop=made[0].stopped.set)

    daemon = Daemon(config, DaemonParts(lambda: gpus, slurm.client, build, identify))  # type: ignore[arg-type,return-value]
    daemon.start()
    daemon.service.began -= CONNECTS_S  # shepherds have connected
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    try:
        yield Node1(config, gpus, slurm, daemon, made[0], thread)
    finally:
        made[0].go.set()
        daemon.stop()
        thread.join(DEADLINE_S)
        for shepherd in Shepherd.made:
            shepherd.close()
        Shepherd.made.clear()
        assert not thread.is_alive()
