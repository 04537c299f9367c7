"""Processes as the agent sees them, and what it makes of slurmctld's answers."""

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

from slurm_affinode.agent import queue as queues
from slurm_affinode.agent.loop import run
from slurm_affinode.agent.peers import Inspector, NotAShepherd, Peer, has_ended, peer_of, pidfd_of
from slurm_affinode.agent.queue import QueueView, memory_mib, room_of, waiting_of
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.throttle import Seats, Seldom
from slurm_affinode.agent.watch import Watch, by_index
from slurm_affinode.core.idle import IdleRule
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.cluster import GpuCount
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import SuspendOption


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
def test_a_process_cannot_name_itself_a_shepherd(end: str) -> None:
    """The kernel writes its name, in which only a newline is escaped, in front of what it tells of it itself."""
    script = f"printf 'x{end}NSpid: 9 1' >/proc/self/comm; echo; read line"
    with subprocess.Popen(("sh", "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert b"NSpid: 9 1" in Path(f"/proc/{process.pid}/status").read_bytes()
        with pytest.raises(NotAShepherd, match="not PID 1"):
            Inspector().identify(Peer(process.pid, os.geteuid(), 0))
        process.stdin.close()


def test_process_that_connected_is_told_from_those_that_get_its_number() -> None:
    """It passes its connection on and ends; the descriptor knows."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # an abstract address
        listener.listen()
        address = listener.getsockname()
        child = os.fork()
        if child == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
                mine.connect(address)
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


def test_host_activity_of_a_tree() -> None:
    """CPU time of all processes below PID 1 of the job, also of those that have ended in between."""
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
    assert host["cpu"] > 1.0  # the limit; how much of a CPU it got is the machine's matter
    assert host["io"] is not None
    assert host["io"] >= 0


def test_xid_error_makes_a_gpu_unknown() -> None:
    """From when the job is watched: what was before was another job's."""
    gpus = Gpus()
    watch = Watch(gpus, Inspector())  # type: ignore[arg-type]
    rule = IdleRule(60)
    read = gpus.read
    gpus.read = lambda device: replace(read(device), xid=31)  # type: ignore[method-assign]
    assert watch.sample(watched(), rule).gpus[0].fault is None
    gpus.read = lambda device: replace(read(device), xid=79)  # type: ignore[method-assign]
    assert "XID 79" in str(watch.sample(watched(), rule).gpus[0].fault)


def test_gpus_by_their_numbers() -> None:
    """Slurm's number is that of the device file, whatever order NVML has."""
    devices = [Device("GPU-a", 0, minor=1), Device("GPU-b", 1, minor=0)]
    assert [one.uuid for one in by_index(devices, (1,)) or ()] == ["GPU-a"]
    assert by_index(devices, (2,)) is None
    assert by_index([Device("GPU-a", 0, minor=0, mig="7")], (0,)) is None


def test_gpus_by_the_processes_on_them() -> None:
    """Where nobody says which GPUs a job was given; the environment's word does not count."""
    gpus = Gpus(holders={1: [4242]})
    finder = JobFinder()
    watch = Watch(gpus, Inspector(), finder=finder)  # type: ignore[arg-type]
    assert watch.by_processes(7) == ()
    finder.find = lambda pid, started=None: JobRefOf(7, "cgroup")  # type: ignore[assignment,method-assign]
    assert [one.index for one in watch.by_processes(7)] == [1]
    finder.find = lambda pid, started=None: JobRefOf(7, "environment")  # type: ignore[assignment,method-assign]
    assert watch.by_processes(7) == ()


def JobRefOf(job_id: int, source: str) -> object:
    """A job of a process."""
    return type("Ref", (), {"job_id": job_id, "source": source})()


# --- slurmctld


def test_pending_job_is_divided_by_its_nodes() -> None:
    """What it needs on each, rounded up; its reason without what follows the comma."""
    found = waiting_of(
        waiting(
            node_count=2, gpus_requested=GpuCount(3, "h100"), cpus=5, tres_requested={"mem": "3G"},
            reason="Resources, and more", nodes_required=("c2",),
        )
    )  # fmt: skip
    assert (found.gpus, found.cpus, found.memory_mib, found.reason) == (2, 3, 1536, "Resources")
    assert found.required_nodes == ("c2",)


def test_room_of_a_node() -> None:
    """What is free, and whether it takes jobs at all."""
    room = room_of(replace(NODE, gpus_used=GpuCount(1)))
    assert (room.free_gpus, room.free_cpus, room.free_memory_mib, room.available) == (1, 6, 15000, True)
    assert not room_of(replace(NODE, flags=frozenset({"DRAIN"}))).available
    assert room_of(replace(NODE, gpus=None, gpus_used=None)).free_gpus == 0


def test_memory_of_a_tres_string() -> None:
    """A number without unit is in MiB; what cannot be read is none."""
    assert [memory_mib(text) for text in ("500M", "2G", "300", None, "much")] == [500, 2048, 300, 0, 0]


def test_answers_grow_old() -> None:
    """A queue that could not be asked again for three periods is not known any more."""
    now = [0.0]
    slurm = Slurm({7: job(), 8: waiting(8, comment="suspended: idle 15m"), 9: waiting(9, comment="not restored: x")})
    view = QueueView(slurm.client, 10.0, clock=lambda: now[0])
    assert view.due()
    queue = view.refresh()
    assert queue is not None
    assert not view.due()
    assert queue.suspended()[2] == {"bob": 2}
    assert queue.room("c9") is None
    now[0] = 29.0
    assert view.latest() is queue
    assert view.due()
    slurm.down = True
    assert view.refresh() is None
    now[0] = 31.0
    assert view.latest() is None
    assert view.look(7) is None
    assert view.slurm_user() is None


def test_numbers_of_gpus_on_a_node() -> None:
    """Only where Slurm names them all."""
    assert queues.indices_on(job(), "c1") == [0]
    assert queues.indices_on(job(), "c2") is None
    assert queues.indices_on(job(node_gpus=None), "c1") is None


# --- what holds the loop together


def test_loop_survives_its_own_faults() -> None:
    """A tick that fails is logged, and the next one comes."""
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


def test_a_window_that_is_full_between_two_looks_is_seen_at_once() -> None:
    """One more look is made then, and the others stay where they were; but not so soon that counters say nothing."""
    now, looks = [100.0], list[float]()

    class Poke(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    ends = [107.3, 110.001]

    def tick() -> None:
        looks.append(now[0] - 100)
        if len(looks) == 6:
            stop.set()

    stop = threading.Event()
    soon = lambda: next((end for end in ends if end > now[0]), None)  # noqa: E731
    run(tick, lambda: None, 5.0, stop=stop, poke=Poke(), soon=soon, clock=lambda: now[0])
    assert looks == pytest.approx([0, 5, 7.31, 10, 10.25, 15])


def test_seats_and_words_are_limited() -> None:
    """For each holder, in all, and root is not kept out."""
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
