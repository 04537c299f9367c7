"""The agent's view of processes and of responses from slurmctld."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_stand_ins import NODE, Gpus, Slurm, job, waiting
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.loop import run
from slurm_affinode.agent.throttle import Seldom
from slurm_affinode.base.seats import Seats
from slurm_affinode.core.idle import IdleRule
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.cluster import GpuCount
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import SuspendOption
from slurm_affinode.suspension import slurm_queue as queues
from slurm_affinode.suspension.activity import Watch, by_index
from slurm_affinode.suspension.job.peers import Inspector, NotAShepherd, Peer, has_ended, peer_of, pidfd_of
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.slurm_queue import QueueView, memory_mib, room_of, waiting_of


class Link:
    open = True

    def send(self, message: object) -> bool:
        return True


def watched(**changes: object) -> WatchedJob:
    base = WatchedJob(
        job_id=7, uid=0, gid=0, restarts=0, option=SuspendOption(), init_pid=os.getpid(), init_started=0, root=2,
        link=Link(), since_epoch=0.0, devices=(Device("GPU-0", 0),),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["\\r", "\\f", "\\v", "\\034", "\\302\\205"])
def test_process_name_cannot_forge_ns_pid(end: str) -> None:
    """The kernel writes the name, in which it escapes newlines only, before its own fields."""
    script = f"printf 'x{end}NSpid: 9 1' >/proc/self/comm; echo; read line"
    with subprocess.Popen(("sh", "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert b"NSpid: 9 1" in Path(f"/proc/{process.pid}/status").read_bytes()
        with pytest.raises(NotAShepherd, match="not PID 1"):
            Inspector().identify(Peer(process.pid, os.geteuid(), 0))
        process.stdin.close()


def test_connected_process_differs_from_reused_pid() -> None:
    """It passes its connection on and ends; the pidfd of the socket detects this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # an abstract address
        listener.listen()
        address = listener.getsockname()
        child = os.fork()
        if child == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(address)
                os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        with listener.accept()[0] as sock:
            assert peer_of(sock).pid == child
            pidfd = pidfd_of(sock, peer_of(sock))
            try:
                assert not has_ended(pidfd)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                assert has_ended(pidfd)
            finally:
                os.close(pidfd)


def test_host_activity_of_process_tree() -> None:
    """The CPU time covers all processes below PID 1 of the job, including those that have ended in between."""
    code = (
        "import subprocess, sys\n"
        "print('there', flush=True)\n"
        "sys.stdin.readline()\n"
        "subprocess.run([sys.executable, '-c', 'sum(range(20_000_000))'])\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        (sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        root.stdout.readline()
        watch = Watch(Gpus(), Inspector(), finder=JobFinder())  # type: ignore[arg-type]
        rule = IdleRule(60, host_limits={"cpu": 1.0})
        job = watched(init_pid=root.pid)
        assert watch.sample(job, rule).host == {}
        root.stdin.write("go\n")
        root.stdin.flush()
        root.stdout.readline()
        host = watch.sample(job, rule).host
        root.stdin.write("end\n")
        root.stdin.flush()
    assert host["cpu"] is not None
    assert host["cpu"] > 1.0  # the limit; the CPU share depends on the machine
    assert host["io"] is not None
    assert host["io"] >= 0


def test_stopped_job_is_reported() -> None:
    """As Slurm stops it: with its PID 1."""
    watch, rule = Watch(Gpus(), Inspector()), IdleRule(60)  # type: ignore[arg-type]
    with subprocess.Popen(("sleep", "60")) as root:
        job = watched(init_pid=root.pid)
        assert not watch.sample(job, rule).stopped
        root.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, root.pid, os.WSTOPPED)
        assert watch.sample(job, rule).stopped
        root.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, root.pid, os.WCONTINUED)
        assert not watch.sample(job, rule).stopped
        root.kill()


def test_xid_error_is_a_gpu_fault() -> None:
    """Errors before the start of the watch are ignored: they belong to other jobs."""
    gpus = Gpus()
    watch = Watch(gpus, Inspector())  # type: ignore[arg-type]
    rule = IdleRule(60)
    read = gpus.read
    gpus.read = lambda device: replace(read(device), xid=31)  # type: ignore[method-assign]
    assert watch.sample(watched(), rule).gpus[0].fault is None
    gpus.read = lambda device: replace(read(device), xid=79)  # type: ignore[method-assign]
    assert "XID 79" in str(watch.sample(watched(), rule).gpus[0].fault)


def test_gpus_are_found_by_index() -> None:
    """Slurm's index is that of the device file, whatever order NVML has."""
    devices = [Device("GPU-a", 0, minor=1), Device("GPU-b", 1, minor=0)]
    assert [gpu.uuid for gpu in by_index(devices, (1,)) or ()] == ["GPU-a"]
    assert by_index(devices, (2,)) is None
    assert by_index([Device("GPU-a", 0, minor=0, mig="7")], (0,)) is None


def test_gpus_without_known_device_files_are_found_only_together() -> None:
    """NVML's index may be another number than that of the device file."""
    devices = [Device("GPU-a", 0), Device("GPU-b", 1, minor=0)]
    assert by_index(devices, (0,)) is None
    assert [gpu.uuid for gpu in by_index(devices, (0, 1)) or ()] == ["GPU-a", "GPU-b"]


def test_gpus_are_found_by_processes() -> None:
    """This is the fallback if the GPUs of a job are not known otherwise; the environment is not trusted."""
    gpus = Gpus(holders={1: [4242]})
    finder = JobFinder()
    watch = Watch(gpus, Inspector(), finder=finder)  # type: ignore[arg-type]
    assert watch.by_processes(7) == ()
    finder.find = lambda pid, started=None: JobRefOf(7, "cgroup")  # type: ignore[assignment,method-assign]
    assert [item.index for item in watch.by_processes(7)] == [1]
    finder.find = lambda pid, started=None: JobRefOf(7, "environment")  # type: ignore[assignment,method-assign]
    assert watch.by_processes(7) == ()


def JobRefOf(job_id: int, source: str) -> object:
    """Return a reference to a job."""
    return type("Ref", (), {"job_id": job_id, "source": source})()


# --- slurmctld


def test_needs_of_pending_job_are_per_node() -> None:
    """Its needs per node are rounded up; its reason is cut at the comma."""
    result = waiting_of(
        waiting(
            node_count=2, gpus_requested=GpuCount(3, "h100"), cpus=5, tres_requested={"mem": "3G"},
            reason="Resources, and more", nodes_required=("c2",),
        )
    )  # fmt: skip
    assert (result.gpus, result.cpus, result.memory_mib, result.reason) == (2, 3, 1536, "Resources")
    assert result.required_nodes == ("c2",)


def test_room_of_node() -> None:
    """Its free resources, and whether it accepts jobs."""
    room = room_of(replace(NODE, gpus_used=GpuCount(1)))
    assert (room.free_gpus, room.free_cpus, room.free_memory_mib, room.available) == (1, 6, 15000, True)
    assert not room_of(replace(NODE, flags=frozenset({"DRAIN"}))).available
    assert room_of(replace(NODE, gpus=None, gpus_used=None)).free_gpus == 0


def test_memory_of_tres_string() -> None:
    """A number without unit is in MiB; an unreadable value is 0."""
    assert [memory_mib(text) for text in ("500M", "2G", "300", None, "much")] == [500, 2048, 300, 0, 0]


def test_old_queue_is_unknown() -> None:
    """A queue is discarded after three periods without a response."""
    now = [0.0]
    slurm = Slurm({7: job(), 8: waiting(8), 9: waiting(9, comment="suspended: forged"), 10: waiting(10)})
    view = QueueView(slurm.client, 10.0, clock=lambda: now[0])
    assert view.due()
    queue = view.refresh()
    assert queue is not None
    assert not view.due()
    assert queue.suspended({7, 8, 10})[2] == {"bob": 2}
    assert queue.suspended(())[2] == {}
    assert queue.room("c9") is None
    now[0] = 29.0
    assert view.latest() is queue
    assert view.due()
    slurm.down = True
    assert view.refresh() is None
    now[0] = 31.0
    assert view.latest() is None
    assert view.read_job(7) is None
    assert view.slurm_user() is None


def test_gpu_indices_on_node() -> None:
    """They are known only if Slurm lists all of them."""
    assert queues.indices_on(job(), "c1") == [0]
    assert queues.indices_on(job(), "c2") is None
    assert queues.indices_on(job(node_gpus=None), "c1") is None


# --- the loop


def test_loop_survives_failing_tick() -> None:
    """A failing tick is logged, and the next one follows."""
    stop, poke, seen = threading.Event(), threading.Event(), list[str]()

    def tick() -> None:
        seen.append("tick")
        raise ValueError("a fault")

    def act() -> None:
        seen.append("act")

    thread = threading.Thread(target=run, args=(tick, act, 0.05), kwargs={"stop": stop, "poke": poke}, daemon=True)
    thread.start()
    wait_until("it ticks again", lambda: seen.count("tick"), lambda count: count > 2)
    poke.set()
    wait_until("it acts in between", lambda: "act" in seen)
    stop.set()
    poke.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_window_that_ends_between_samples_is_detected_at_once() -> None:
    """One additional sample is taken then, not too soon for the counters; the regular ones keep their times."""
    now, samples = [100.0], list[float]()

    class Poke(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    ends = [107.3, 110.001]

    def tick() -> None:
        samples.append(now[0] - 100)
        if len(samples) == 6:
            stop.set()

    stop = threading.Event()
    soon = lambda: next((end for end in ends if end > now[0]), None)  # noqa: E731
    run(tick, lambda: None, 5.0, stop=stop, poke=Poke(), soon=soon, clock=lambda: now[0])
    assert samples == pytest.approx([0, 5, 7.31, 10, 10.25, 15])


def test_seats_and_log_messages_are_limited() -> None:
    """The limits apply per holder and in total; root always gets a seat."""
    seats = Seats(total=3, each=2)
    assert [seats.take("a"), seats.take("a"), seats.take("a"), seats.take("b"), seats.take("c")] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert seats.take("root", reserved=True)
    for holder in ("a", "a", "b", "root"):
        seats.leave(holder)
    assert seats.take("c")
    seldom = Seldom(every_s=10.0, clock=time.monotonic, most=2)
    assert [seldom.now("a"), seldom.now("a"), seldom.now("b"), seldom.now("c")] == [True, False, True, False]
