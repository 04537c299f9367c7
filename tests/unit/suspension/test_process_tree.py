"""Processes of a PID namespace are found, stopped and killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from background import started_of
from waiting import wait_until

from slurm_affinode.suspension.process_tree import LinuxProcesses, Member, TreeGoneError


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
    there, sent = [[criu, root, child], []], []
    space = SimpleNamespace(send=lambda number, signum: sent.append(number.pid))
    monkeypatch.setattr(LinuxProcesses, "_space", lambda self, *init: space)
    monkeypatch.setattr(LinuxProcesses, "_all", lambda self, space: there.pop(0))
    assert LinuxProcesses(sleep=lambda seconds: None).end(10, 5, timeout_s=60)
    assert sent == [root.pid, child.pid, criu.pid]
