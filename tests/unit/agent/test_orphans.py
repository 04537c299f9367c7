"""Processes on GPUs without a job or server: only these are killed, and never another process with a reused PID."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from agent_stand_ins import NODE, Gpus, Slurm, agent, config_of, job
from waiting import DEADLINE_S

from slurm_affinode.agent import hooks
from slurm_affinode.agent.orphan_requests import OrphanVerbs
from slurm_affinode.agent.orphans import NotAnOrphanError, Orphans
from slurm_affinode.agent.requests import Caller, RequestError
from slurm_affinode.base.pidfd import Process
from slurm_affinode.gpu.interface import NotSupported
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.gpu.server_trees import LostServer, ServerPort, ServerTrees
from slurm_affinode.model.gpu import GpuProcess, JobRef, ProcessUtilization
from slurm_affinode.suspension.slurm_queue import SlurmQueue

ROOT, ALICE, FAR_ROOT = Caller(0, "root", True), Caller(2001, "alice", True), Caller(0, "root", False)
STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
WILLING = "import time; print(1, flush=True); time.sleep(600)"


@dataclass
class World:
    """A node with one process on GPU 0."""

    gpus: Gpus = field(default_factory=Gpus)
    queue: SlurmQueue | None = field(default_factory=lambda: SlurmQueue(0.0, (), (NODE,)))
    made: list[subprocess.Popen[str]] = field(default_factory=list)
    queries: int = 0

    def process(
        self, text: str = WILLING, device: int = 0, *, program: str = sys.executable, **env: str
    ) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        child = subprocess.Popen(
            (program, "-c", text), executable=sys.executable, env={**clean, **env}, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        self.made.append(child)
        self.gpus.holders.setdefault(device, []).append(child.pid)
        return child

    def orphans(self, **more: Any) -> Orphans:
        @contextlib.contextmanager
        def driver() -> Iterator[Gpus]:
            for pids in self.gpus.holders.values():
                pids[:] = [
                    pid for pid in pids if any(process.pid == pid and process.poll() is None for process in self.made)
                ]
            yield self.gpus

        def queue() -> SlurmQueue | None:
            self.queries += 1
            return self.queue

        return Orphans(driver, queue, "c1", **{"first_user": 0, **more})  # type: ignore[arg-type]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(Orphans._end, "__defaults__", (DEADLINE_S, DEADLINE_S))
    made = World()
    yield made
    for child in made.made:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def started(child: subprocess.Popen[str]) -> int:
    result = JobFinder().started(child.pid)
    assert result is not None
    return result


def refused(world: World, child: subprocess.Popen[str], **more: Any) -> str:
    """Return the code of the refusal; check that the process still runs."""
    with pytest.raises(NotAnOrphanError) as caught:
        world.orphans(**more).end(child.pid, started(child), "root")
    assert child.poll() is None
    return caught.value.code


def test_process_without_job_is_killed(world: World) -> None:
    child = world.process()
    done = world.orphans().end(child.pid, started(child), "root")
    assert done["ended_by"] == "SIGTERM"
    assert child.wait(DEADLINE_S) == -15


@pytest.fixture
def stepd() -> Iterator[None]:
    """A slurmstepd of job 9 on this node."""
    child = subprocess.Popen(
        ("slurmstepd: [9.batch]", "-c", WILLING), executable=sys.executable, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield
    child.kill()
    child.wait()
    child.stdout.close()


def test_no_orphans_while_slurmctld_lacks_local_jobs(world: World, stepd: None) -> None:
    """A slurmctld without its state has an empty queue, which does not make processes orphans."""
    finder = JobFinder(trusted_uid=os.getuid())
    for child in (world.process(), world.process(SLURM_JOB_ID="7")):
        assert refused(world, child, finder=finder) == "unknown"
    world.queue = SlurmQueue(0.0, (job(9, uid=4711),), (NODE,))
    assert world.orphans(finder=finder).end(child.pid, started(child), "root")["ended_by"] == "SIGTERM"


def test_epilog_spares_unnamed_processes_of_unlisted_job(world: World) -> None:
    """The process may belong to another job of the user, also lost by slurmctld."""
    child = world.process()
    uid = os.getuid()
    report = world.orphans().leftovers(7, uid, [0], kill=True, wait_s=0.1)
    assert report["left"] == []
    assert child.poll() is None
    world.queue = SlurmQueue(0.0, (job(7, uid=uid, state="COMPLETING"),), (NODE,))
    assert [leftover["pid"] for leftover in world.orphans().leftovers(7, uid, [0], kill=True, wait_s=1)["left"]] == [
        child.pid
    ]


def test_stubborn_process_gets_sigkill(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Orphans._end, "__defaults__", (0.2, DEADLINE_S))
    child = world.process(STUBBORN)
    assert world.orphans().end(child.pid, started(child), "root")["ended_by"] == "SIGKILL"
    assert child.wait(DEADLINE_S) == -9


def test_process_of_ended_job_is_an_orphan(world: World) -> None:
    """Its environment names job 7, which slurmctld shows as ended, or no longer knows."""
    world.queue = SlurmQueue(0.0, (job(7, state="COMPLETED"),), (NODE,))
    child = world.process(SLURM_JOB_ID="7")
    assert world.orphans().end(child.pid, started(child), "root")["job"] == 7


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "SUSPENDED", "PENDING", "CONFIGURING"])
def test_process_of_active_job_is_spared(world: World, state: str) -> None:
    """Pending jobs are included: their image may be restored."""
    world.queue = SlurmQueue(0.0, (job(7, state=state, nodes=("c2",)),), (NODE,))
    assert refused(world, world.process(SLURM_JOB_ID="7")) == "has-job"


def test_job_id_of_another_user_does_not_protect(world: World) -> None:
    """Every user can set an environment; that of a container's unnamed user is trusted."""
    other = job(7, uid=os.getuid() + 1)
    world.queue = SlurmQueue(0.0, (other,), (NODE,))
    child = world.process(SLURM_JOB_ID="7")
    assert refused(world, child, name_of=str) == "has-job"
    world.queue = SlurmQueue(0.0, (other, job(8)), (NODE,))
    assert refused(world, child) == "maybe-job"
    world.queue = SlurmQueue(0.0, (other,), (NODE,))
    assert world.orphans().end(child.pid, started(child), "root")["ended_by"] == "SIGTERM"


def test_ended_job_in_environment_counts_only_if_it_is_known_to_be_the_users(world: World) -> None:
    """Otherwise the process may be of the job that its user has here."""
    here = job(8)
    child = world.process(SLURM_JOB_ID="7")
    for ended in ((), (job(7, uid=os.getuid() + 1, state="COMPLETED"),)):
        world.queue = SlurmQueue(0.0, (here, *ended), (NODE,))
        assert refused(world, child) == "maybe-job"
    world.queue = SlurmQueue(0.0, (here, job(7, state="COMPLETED")), (NODE,))
    assert world.orphans().end(child.pid, started(child), "root")["ended_by"] == "SIGTERM"


def test_unnamed_process_of_user_with_local_job_is_spared(world: World) -> None:
    """It may have cleared its environment and still belong to that job."""
    world.queue = SlurmQueue(0.0, (job(7),), (NODE,))
    assert refused(world, world.process()) == "maybe-job"
    world.queue = SlurmQueue(0.0, (job(7, nodes=("c2",)),), (NODE,))
    child = world.made[0]
    assert world.orphans().end(child.pid, started(child), "root")


def test_unnamed_container_user_may_belong_to_any_local_job(world: World) -> None:
    """Its container runtime moved it out of the job's cgroup and mapped it to an unnamed user ID."""
    world.queue = SlurmQueue(0.0, (job(7, uid=os.getuid() + 1),), (NODE,))
    child = world.process()
    assert refused(world, child, name_of=str) == "maybe-job"
    assert world.orphans().end(child.pid, started(child), "root")


def test_process_is_spared_if_facts_are_unknown(world: World) -> None:
    """If slurmctld does not respond, or the process belongs to the system or uses no GPU."""
    child = world.process()
    assert refused(world, child, first_user=1 << 30) == "system"
    world.queue = None
    assert refused(world, child) == "unknown"
    world.gpus.holders.clear()
    assert refused(world, child) == "not-on-gpu"


def test_process_with_reused_pid_is_spared(world: World) -> None:
    """Its start time differs."""
    child = world.process()
    with pytest.raises(NotAnOrphanError) as caught:
        world.orphans().end(child.pid, started(child) - 1, "root")
    assert caught.value.code == "gone"
    assert child.poll() is None


@pytest.mark.parametrize("epilog", [False, True])
def test_process_listed_by_driver_only_before_hold_is_spared(world: World, epilog: bool) -> None:
    """The driver reported a process that has ended; its PID was reused by one that uses no GPU."""
    child = world.process(SLURM_JOB_ID="7")
    processes = world.gpus.processes
    answers = iter((processes,))

    def once(device: Any) -> Any:
        return next(answers, lambda _: [])(device)

    world.gpus.processes = once  # type: ignore[method-assign]
    if epilog:
        world.gpus.count = 1
        assert world.orphans().leftovers(7, os.getuid(), [0], kill=True, wait_s=0.1)["left"] == []
    else:
        with pytest.raises(NotAnOrphanError) as caught:
            world.orphans().end(child.pid, started(child), "root")
        assert caught.value.code == "not-on-gpu"
    assert child.poll() is None


def test_process_below_slurmstepd_is_spared(world: World, tmp_path: Path) -> None:
    """The records of slurmctld do not matter."""
    child = world.process()
    entry = tmp_path / "4321"
    for pid, parent, line in ((child.pid, 4321, "python"), (4321, 1, "slurmstepd: [7.batch]")):
        directory = tmp_path / str(pid)
        directory.mkdir()
        stat = f"{pid} (x) S {parent} " + "0 " * 17 + f"{started(child) - (pid == 4321)} 0\n"
        (directory / "stat").write_text(stat)
        (directory / "cmdline").write_text(line)
    assert entry.is_dir()
    orphans = world.orphans(finder=JobFinder(tmp_path), proc=tmp_path)
    with pytest.raises(NotAnOrphanError) as caught:
        orphans.end(child.pid, started(child), "root")
    assert caught.value.code == "has-job"


# --- leftovers


def test_leftovers_on_gpus_are_killed_and_reported(world: World) -> None:
    """Processes of other jobs and on other GPUs are spared; slurmctld is queried at most once."""
    world.queue = SlurmQueue(0.0, (job(7, state="COMPLETING"), job(8)), (NODE,))
    world.gpus.count = 2
    leftover, other, elsewhere = (
        world.process(SLURM_JOB_ID="7"), world.process(SLURM_JOB_ID="8"), world.process(device=1, SLURM_JOB_ID="7"),
    )  # fmt: skip
    orphans = world.orphans()
    report = orphans.leftovers(7, os.getuid(), [0], kill=True, wait_s=DEADLINE_S)
    assert [process["pid"] for process in report["left"]] == [leftover.pid]
    assert report["left"][0]["ended_by"] == "SIGTERM"
    assert leftover.wait(DEADLINE_S) == -15
    assert (other.poll(), elsewhere.poll()) == (None, None)
    assert orphans.reports.all() == [report]
    assert world.queries == 0


def test_leftovers_are_searched_on_all_gpus_if_unknown(world: World) -> None:
    """MIG instances have no indices in Slurm. Processes of others there are not leftovers."""
    world.gpus.count = 3
    world.gpus.lost.add(2)
    leftover, other = world.process(device=1, SLURM_JOB_ID="7"), world.process(SLURM_JOB_ID="8")
    for indices in ([], [9]):
        report = world.orphans().leftovers(7, os.getuid(), indices, kill=True, wait_s=DEADLINE_S)
        assert ([process["pid"] for process in report["left"]], report["dirty"]) == ([leftover.pid], [])
        assert other.poll() is None
        leftover.wait(DEADLINE_S)
        leftover = world.process(device=1, SLURM_JOB_ID="7")
    assert "is still there" in world.orphans().leftovers(7, os.getuid(), [], kill=False, wait_s=0.1)["dirty"][0]


def test_process_of_another_user_is_not_a_leftover(world: World) -> None:
    """An environment is easily copied; that of a container's unnamed user is trusted."""
    child = world.process(SLURM_JOB_ID="7")
    assert world.orphans().leftovers(7, os.getuid() + 1, [0], kill=True, wait_s=0.1)["left"] == []
    assert child.poll() is None
    [left] = world.orphans(name_of=str).leftovers(7, os.getuid() + 1, [0], kill=True, wait_s=5.0)["left"]
    assert (left["pid"], left["ended_by"]) == (child.pid, "SIGTERM")


def test_unnamed_process_is_leftover_of_only_job_of_user(world: World) -> None:
    """Otherwise it may belong to another job of the user."""
    child = world.process()
    world.queue = SlurmQueue(0.0, (job(7, state="COMPLETING"), job(8)), (NODE,))
    assert world.orphans().leftovers(7, os.getuid(), [0], kill=True, wait_s=1)["left"] == []
    assert child.poll() is None
    world.queue = SlurmQueue(0.0, (job(7, state="COMPLETING"),), (NODE,))
    world.queries = 0
    assert world.orphans().leftovers(7, os.getuid(), [0], kill=True, wait_s=1)["left"]
    assert world.queries == 1


def test_gpu_that_is_not_freed_is_dirty(world: World) -> None:
    """Memory without a process, a process that must not be killed, a GPU that does not respond."""
    read = Gpus.read

    def full(self: Gpus, device: Any) -> Any:
        from dataclasses import replace

        return replace(read(self, device), fb_used_mib=4000.0)

    orphans = world.orphans()
    assert orphans.leftovers(7, os.getuid(), [0], kill=True, wait_s=0.1)["dirty"] == [
        "GPU 0: 1024 MiB are held and no process holds them"
    ]
    world.process(SLURM_JOB_ID="7")
    report = orphans.leftovers(7, os.getuid(), [0], kill=False, wait_s=0.1)
    assert "is still there" in report["dirty"][0]
    world.gpus.lost.add(1)
    assert "lost" in orphans.leftovers(7, os.getuid(), [1], kill=True, wait_s=0.1)["dirty"][0]


def test_utilization_of_processes_is_reported(world: World) -> None:
    """The values cover the last seconds of the node's clock; a process not listed by the driver computed nothing."""
    busy, idle = world.process(), world.process()
    starts_us: list[int] = []

    def used(device: Any, since_us: int = 0) -> list[ProcessUtilization]:
        starts_us.append(since_us)
        if device.index:
            raise NotSupported("GPU 1 does not tell")
        return [ProcessUtilization(busy.pid, since_us + 1, 70.0, 20.0)]

    world.gpus.process_utilization = used  # type: ignore[method-assign]
    world.process(device=1)
    first, second = world.orphans(now=lambda: 1000.0).gpus(each=True)[:2]
    known = {row["pid"]: (row["sm_pct"], row["memory_pct"]) for row in first["processes"]}
    assert known == {busy.pid: (70.0, 20.0), idle.pid: (0.0, 0.0)}
    assert [row["sm_pct"] for row in second["processes"]] == [None]
    assert set(starts_us) == {995_000_000}
    assert {row["sm_pct"] for row in world.orphans().gpus()[0]["processes"]} == {None}


@pytest.mark.parametrize(
    ("of_gpu", "of_listed", "of_server", "known"),
    [
        (90.0, 0.0, None, None),
        (90.0, 0.0, 85.0, None),
        (90.0, 85.0, None, 0.0),
        (0.0, 0.0, None, 0.0),
        (None, 0.0, None, 0.0),
    ],
)
def test_process_is_idle_only_if_others_explain_the_activity_of_the_gpu(
    world: World, of_gpu: float | None, of_listed: float, of_server: float | None, known: float | None
) -> None:
    """With MPS, or in other PID namespaces, the driver attributes the activity to none of the jobs' processes."""
    listed, unlisted = world.process(), world.process()
    server = world.process(program="nvidia-cuda-mps-server")
    usages = [ProcessUtilization(listed.pid, 1, of_listed, 0.0)]
    if of_server is not None:
        usages.append(ProcessUtilization(server.pid, 1, of_server, 0.0))
    world.gpus.process_utilization = lambda device, since_us=0: usages  # type: ignore[method-assign]
    world.gpus.util_pct[0] = of_gpu
    rows = world.orphans().gpus(each=True)[0]["processes"]
    values = {row["pid"]: (row["sm_pct"], row["memory_pct"]) for row in rows}
    assert values[unlisted.pid] == (known, known)
    assert values[listed.pid] == ((of_listed, 0.0) if of_listed else (known, known))


def test_leftovers_are_killed_in_parallel(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epilog does not wait for each rank in turn."""
    together = threading.Barrier(3)
    monkeypatch.setattr(Orphans, "_end", lambda *_: str(together.wait(DEADLINE_S)))
    for _ in range(3):
        world.process(SLURM_JOB_ID="7")
    report = world.orphans().leftovers(7, os.getuid(), [0], kill=True, wait_s=0.1)
    assert sorted(item["ended_by"] for item in report["left"]) == ["0", "1", "2"]


# --- processes without their server


class InJob(JobFinder):
    """A job finder that assigns every process to one job by its cgroup."""

    def __init__(self, job_id: int = 7, source: str = "cgroup") -> None:
        super().__init__()
        self._ref = JobRef(job_id, "0", source)

    def of(self, process: Process) -> JobRef | None:
        return self._ref


class Lost(ServerTrees):
    """Reports that the server of every process has ended, as long as ``ended`` is true."""

    ended = True

    def lost(self, process: Process, job: int) -> LostServer | None:
        port = ServerPort(1, job, 8000, "127.0.0.1:8000", "alice", (("vllm", "m", None),))
        return LostServer(port, (99,), 1000.0) if self.ended else None


def serving(world: World, finder: JobFinder | None = None, **changes: Any) -> Orphans:
    """Return the orphans of a node on which job 7 runs and has lost its server."""
    world.queue = SlurmQueue(0.0, (job(**changes),), (NODE,))
    return world.orphans(finder=finder or InJob(), servers=Lost(finder or InJob()))


def test_process_that_lost_its_server_is_reported_and_ended(world: World) -> None:
    child, other = world.process(), world.process()
    orphans = serving(world)
    row = next(row for row in orphans.gpus()[0]["processes"] if row["pid"] == child.pid)
    names = [{"engine": "vllm", "model": "m", "rank": None}]
    assert row["server"] == {"address": "127.0.0.1:8000", "engines": names, "pids": [99], "ended": 1000.0}
    assert orphans.end(child.pid, started(child), "root", 7)["ended_by"] == "SIGTERM"
    assert child.wait(DEADLINE_S) == -15
    assert other.poll() is None


@pytest.mark.parametrize(
    ("code", "finder", "changes"),
    [
        ("other-job", InJob(8), {}),
        ("other-job", InJob(source="environment"), {}),
        ("other-job", None, {"uid": 4242}),
        ("other-job", None, {"state": "SUSPENDED"}),
        ("ended", None, {"state": "COMPLETING"}),
        ("ended", None, {"state": "COMPLETED"}),
        ("ended", None, {"job_id": 9}),
        ("ended", None, {"nodes": ("c2",)}),
    ],
)
def test_process_of_another_or_ended_job_is_spared(
    world: World, code: str, finder: JobFinder | None, changes: dict[str, Any]
) -> None:
    child, orphans = world.process(), serving(world, finder, **changes)
    with pytest.raises(NotAnOrphanError) as caught:
        orphans.end(child.pid, started(child), "root", 7)
    assert (caught.value.code, child.poll()) == (code, None)


@pytest.mark.parametrize(
    ("used", "reason"),
    [((0.0, 0.0), "no GPU memory"), ((None, None), "an unknown amount"), ((512.0, None), "an unknown amount")],
)
def test_process_without_gpu_memory_is_spared(world: World, used: tuple[float | None, ...], reason: str) -> None:
    """It has contexts on both GPUs, with no memory or an unknown amount."""
    child, orphans = world.process(), serving(world)
    world.gpus.processes = lambda device: [  # type: ignore[method-assign]
        GpuProcess(child.pid, used[device.index], "compute")
    ]
    with pytest.raises(NotAnOrphanError, match=reason) as caught:
        orphans.end(child.pid, started(child), "root", 7)
    assert (caught.value.code, child.poll()) == ("no-memory", None)


def test_process_is_spared_while_its_server_runs_or_slurm_does_not_respond(world: World) -> None:
    """The server may have been restarted since the decision."""
    child, orphans = world.process(), serving(world)
    assert isinstance(orphans.servers, Lost)
    orphans.servers.ended = False
    for code in ("served", "unknown"):
        with pytest.raises(NotAnOrphanError) as caught:
            orphans.end(child.pid, started(child), "root", 7)
        assert (caught.value.code, child.poll()) == (code, None)
        world.queue = None
    world.queue = SlurmQueue(0.0, (job(),), (NODE,))
    orphans.servers.ended, orphans.first_user = True, os.getuid() + 1
    with pytest.raises(NotAnOrphanError, match="system"):
        orphans.end(child.pid, started(child), "root", 7)
    assert child.poll() is None


def test_process_without_server_is_not_treated_as_one_without_job(world: World) -> None:
    """A request without a job, as for other orphans, is refused."""
    child, orphans = world.process(), serving(world)
    with pytest.raises(NotAnOrphanError) as caught:
        orphans.end(child.pid, started(child), "root")
    assert (caught.value.code, child.poll()) == ("has-job", None)


# --- through the agent


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    slurm = Slurm({7: job()})
    with agent(config_of(tmp_path), slurm=slurm) as node:
        yield lambda caller=ROOT, **request: node.daemon.service.answer(request, caller)


def test_requests_are_limited_to_administrators(ask: Callable[..., dict[str, Any]]) -> None:
    """Leftovers can only be requested by the node's own epilog."""
    assert [gpu["uuid"] for gpu in ask(verb="processes")["gpus"]] == ["GPU-0", "GPU-1"]
    assert ask(verb="processes", since=0)["gpus"][0]["busy_pct"] == 0.0
    assert ask(verb="leftover-reports")["reports"] == []
    for request in ({"verb": "processes"}, {"verb": "kill-orphan", "pid": 5, "start_ticks": 5}):
        with pytest.raises(RequestError, match="administrators"):
            ask(ALICE, **request)
    with pytest.raises(RequestError, match="on the node itself"):
        ask(FAR_ROOT, verb="leftovers", job=7, uid=1, gpus=[0])


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"pid": 1, "start_ticks": 5},
        {"pid": -5, "start_ticks": 5},
        {"pid": "5", "start_ticks": 5},
        {"pid": 5},
        {"pid": 5, "start_ticks": 5, "job": "7"},
        {"pid": 5, "start_ticks": 5, "job": 0},
        {"pid": 5, "start_ticks": 5, "job": None},
    ],
)
def test_process_is_identified_by_pid_and_start_time(
    ask: Callable[..., dict[str, Any]], request_: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(verb="kill-orphan", **request_)
    assert caught.value.code == "bad-request"


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (None, True),
        (b"[epilog]\nwait = '2s'\n", True),
        (b"[epilog]\nkill = false\n", False),
        (b"[epilog]\nkill = false\n[limit]\n", False),
        (b"\xff", False),
    ],
)
def test_epilog_kills_only_if_policy_permits(world: World, tmp_path: Path, text: bytes | None, ends: bool) -> None:
    """A mistake anywhere in the file, or an unreadable file, never permits a forbidden kill."""
    policy, child = tmp_path / "zombies.toml", world.process(SLURM_JOB_ID="7")
    if text is not None:
        policy.write_bytes(text)
    verbs = OrphanVerbs(world.orphans(), policy, lambda reason: False, str)
    request = {"verb": "leftovers", "job": 7, "uid": os.getuid(), "gpus": [0]}
    [left] = verbs.answer(request, ROOT, admin=True)["left"]
    assert (left["pid"], left["ended_by"] is not None, child.poll() is not None) == (child.pid, ends, ends)


def test_epilog_drains_dirty_node_if_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that setting it is only reported; the fake GPUs always hold 1 GiB. An existing drain reason is kept."""
    policy = tmp_path / "zombies.toml"
    monkeypatch.setattr("slurm_affinode.base.config.DEFAULT_POLICY", policy)
    slurm = Slurm({7: job()})
    drained: list[tuple[str, str]] = []
    monkeypatch.setattr(Slurm, "drain", lambda self, node, why: drained.append((node, why)), raising=False)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "2001", "SLURM_JOB_GPUS": "0"}
    with agent(config_of(tmp_path), slurm=slurm) as node:
        settings = {"run_dir": str(node.run_dir)}
        assert hooks.run("epilog", settings, env) == ["GPU 0: 1024 MiB are held and no process holds them"]
        assert drained == []
        policy.write_text('[epilog]\ndirty = "drain"\n')
        assert hooks.run("epilog", settings, env) == []
        assert len(drained) == 1  # before the epilog returns and the next job may start
        slurm.node_list = (replace(NODE, flags=frozenset({"DRAIN"}), reason="disk is full"),)
        assert hooks.run("epilog", settings, env) == []
        slurm.down = True
        assert "c1 could not be drained" in hooks.run("epilog", settings, env)
        slurm.down = False
        policy.write_text('[epilog]\ndirty = "dry"\n')
        assert hooks.run("epilog", settings, env) != []
    assert drained == [("c1", "slurm-affinode: after job 7: GPU 0: 1024 MiB are held and no process holds them")]
