"""Processes of a PID namespace are found, stopped and killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from background import started_of
from waiting import wait_until

from slurm_affinode.base.pidfd import Id
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, Member, StoppedJob, TreeGoneError


@pytest.fixture
def namespace(tmp_path):
    """PID 1 of a new namespace, with a shell that counts SIGTERM and a sleeper in another session."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("making a PID namespace needs root and unshare")
    inner = f"trap 'echo term >>{tmp_path}/log' TERM; echo up >>{tmp_path}/log; while :; do sleep 0.05; done"
    script = f'sh -c "{inner}" & setsid sleep 1000 & wait; wait; wait; sleep 1000'
    process = subprocess.Popen(
        ("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script), start_new_session=True
    )
    try:
        wait_until("the shell is up", lambda: (tmp_path / "log").exists() or process.poll() is not None)
        if process.poll() is not None:
            pytest.skip("cannot create a PID namespace here")
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        wait_until("the sleeper is up", lambda: of_init(init), lambda names: names == ["sh", "sleep"])
        yield init, tmp_path / "log"
    finally:
        process.kill()
        process.wait()


def of_init(init):
    """Return the names of the children of PID 1; right after fork, a child still has its parent's name."""
    return sorted(m.name for m in LinuxProcesses().members(init, started_of(init)) if m.parent == init)


def test_all_processes_except_pid_1_are_found(namespace):
    """Processes in another session are included; PIDs of both namespaces are known."""
    init, _ = namespace
    processes = LinuxProcesses()
    members = processes.members(init, started_of(init))
    assert {"sh", "sleep"} <= {member.name for member in members}
    assert init not in {member.pid for member in members}
    assert all(member.pid_ns > 1 for member in members)


def test_reused_pid_is_not_the_shepherd(namespace):
    init, _ = namespace
    processes = LinuxProcesses()
    assert processes.alive(init, started_of(init))
    assert not processes.alive(init, started_of(init) + 1)
    with pytest.raises(TreeGoneError):
        processes.members(init, started_of(init) + 1)


def test_held_process_does_not_run_on_requeue_signals(namespace):
    """SIGCONT and SIGTERM, as sent by slurmd at a requeue, do not run a process that is stopped and held."""
    init, log = namespace
    processes = LinuxProcesses()
    shell = next(m for m in processes.members(init, started_of(init)) if m.name == "sh" and m.parent == init)
    processes.stop([shell])
    wait_until("it is stopped", lambda: processes.read(shell.pid).state == "T")
    with processes.hold([shell]):
        os.kill(shell.pid, signal.SIGTERM)
        os.kill(shell.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert "term" not in log.read_text()
        assert processes.read(shell.pid).state in "tT"
    processes.resume([shell])
    wait_until("it has taken the signal", lambda: "term" in log.read_text())


def test_all_processes_except_pid_1_are_killed(namespace):
    init, _ = namespace
    processes = LinuxProcesses()
    started = started_of(init)
    before = {m.pid for m in processes.members(init, started)}
    members = [m for m in processes.members(init, started) if m.name == "sh"]
    processes.stop(members)
    with processes.hold(members):
        processes.end(init, started, timeout_s=0.5)
    wait_until("all have ended", lambda: not before & {m.pid for m in processes.members(init, started)})


def test_tree_is_killed_before_criu(monkeypatch):
    """A killed agent has left both: without CRIU, which has the higher PID, the tree would run."""
    criu, root, child = (
        Member(pid, pid_ns, 1, 5, "S", name, 1000)
        for pid, pid_ns, name in ((11, 900, "criu"), (12, 7, "root"), (13, 8, "child"))
    )
    listings, sent = [[criu, root, child], []], []
    space = SimpleNamespace(send=lambda number, signum: sent.append(number.pid))
    monkeypatch.setattr(LinuxProcesses, "_space", lambda self, *init: space)
    monkeypatch.setattr(LinuxProcesses, "_all_processes", lambda self, space: listings.pop(0))
    assert LinuxProcesses(sleep=lambda seconds: None).end(10, 5, timeout_s=60)
    assert sent == [root.pid, child.pid, criu.pid]


# --- the stop of a whole job

COUNTING = "import os, time\nwhile True: os.write(1, b'.'); time.sleep(0.002)"
FORKING = "import os, time\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait(); time.sleep(0.001)"
THREADS = (
    "import os, threading, time\n"
    "def run():\n    while True: os.write(1, b'.'); time.sleep(0.002)\n"
    "for _ in range(8): threading.Thread(target=run).start()"
)


@pytest.fixture
def start(tmp_path):
    """Start Python programs in a new PID namespace; return the shepherd's identity and the size of their output."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("making a PID namespace needs root and unshare")
    started = []

    def start(*programs: str):
        log = tmp_path / "out"
        script = "".join(f"'{sys.executable}' -c \"${at}\" >>{log} &\n" for at in range(1, len(programs) + 1))
        argv = ("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", f"{script} wait", "sh", *programs)
        outer = subprocess.Popen(argv)
        started.append(outer)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_until("PID 1 is up", lambda: children.read_text().split())
        init = int(children.read_text().split()[0])
        identity = Id(init, started_of(init))
        wait_until("all are up", lambda: len(LinuxProcesses().members(*identity)), lambda n: n >= len(programs))
        time.sleep(0.3)
        return identity, lambda: log.stat().st_size

    yield start
    for outer in started:
        outer.kill()
        outer.wait()


def states(identity: Id) -> set[str]:
    """Return the states of all threads of a job."""
    result = set()
    for member in LinuxProcesses().all_processes(*identity):
        for stat in Path(f"/proc/{member.pid}/task").glob("*/stat"):
            result.add(stat.read_text().rpartition(")")[2].split()[0])
    return result


@pytest.mark.parametrize("program", [COUNTING, FORKING, THREADS], ids=["writes", "forks", "threads"])
def test_stopped_job_does_not_run_on_sigcont(start, program):
    """A process of the same user, which the agent does not know, sends it all the time."""
    identity, size = start(program)
    stop = StoppedJob(LinuxProcesses(), identity)
    stop.stop(timeout_s=20)
    members = {member.id for member in LinuxProcesses().all_processes(*identity)}
    before = size()
    for _ in range(100):
        for member in members:
            os.kill(member.pid, signal.SIGCONT)
    time.sleep(0.1)
    assert states(identity) == {"t"}
    assert size() == before
    assert {member.id for member in LinuxProcesses().all_processes(*identity)} == members
    stop.release()
    LinuxProcesses().resume(LinuxProcesses().all_processes(*identity))
    if program != FORKING:
        wait_until("it runs again", size, lambda now: now > before)


def test_released_job_stays_stopped_for_another_tracer(start):
    """Nothing runs between the agent's hold and that of CRIU, unless a user sends SIGCONT in that moment."""
    identity, size = start(COUNTING)
    stop = StoppedJob(LinuxProcesses(), identity)
    stop.stop(timeout_s=20)
    stop.release()
    before = size()
    time.sleep(0.1)
    assert (states(identity), size()) == ({"T"}, before)
    stop.hold()
    stop.release()
    assert size() == before


RECORDER = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
while True:
    if signal.sigwaitinfo({signal.SIGCHLD}).si_code == 5:  # CLD_STOPPED
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(child.pid, signal.SIGCONT)
"""
"""Stops when it learns that its child has been stopped, as script(1) does."""


def test_process_that_stops_because_its_child_was_stopped_is_resumed_as_well(start):
    identity, _ = start(RECORDER)
    wait_until("its child is up", lambda: len(LinuxProcesses().members(*identity)), lambda n: n >= 2)
    time.sleep(0.3)  # the child has replaced its program
    stop = StoppedJob(LinuxProcesses(), identity)
    stop.stop(timeout_s=20)
    stop.release()
    LinuxProcesses().resume(LinuxProcesses().all_processes(*identity))
    wait_until("all run", lambda: states(identity), lambda seen: seen == {"S"})
    time.sleep(0.2)
    assert states(identity) == {"S"}


def test_excepted_processes_run_on_while_others_are_stopped(start):
    """Those with GPU memory have to run until it has moved."""
    identity, size = start(COUNTING, "import time; time.sleep(1000)")
    members = LinuxProcesses().members(*identity)
    (writer,) = (m for m in members if "os.write" in Path(f"/proc/{m.pid}/cmdline").read_text() and m.name != "sh")
    stop = StoppedJob(LinuxProcesses(), identity)
    stop.stop(timeout_s=20, but={writer.pid})
    before = size()
    wait_until("it runs on", size, lambda now: now > before)
    others = [LinuxProcesses().read(member.pid) for member in members if member.pid != writer.pid]
    assert {member.state for member in others if member is not None} == {"t"}
    stop.release()


def test_job_is_not_stopped_while_a_parent_waits_for_its_vfork_child(start):
    """Stopped between vfork(2) and exec, the child would block its parent, which no dump could then stop."""
    program = "import subprocess\nwhile True: subprocess.run(['/bin/true'])"
    identity, _ = start(program)
    for _ in range(20):
        stop = StoppedJob(LinuxProcesses(), identity)
        stop.stop(timeout_s=20)
        assert states(identity) <= {"t", "Z"}
        stop.release()
        LinuxProcesses().resume(reversed(LinuxProcesses().all_processes(*identity)))


def test_end_of_the_job_is_no_error_of_the_stop(start):
    """The failure of a dump, whose cause it is, is reported in place of it."""
    identity, _ = start(COUNTING)
    stop = StoppedJob(LinuxProcesses(), identity)
    stop.stop(timeout_s=20)
    stop.release()
    os.kill(identity.pid, signal.SIGKILL)
    wait_until("the job has ended", lambda: not LinuxProcesses().alive(*identity))
    stop.hold()
    stop.release()
