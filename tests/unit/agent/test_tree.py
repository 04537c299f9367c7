"""Processes of a PID namespace: found, held against signals, ended."""

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

from slurm_affinode.agent.tree import LinuxProcesses, Member, TreeGoneError


@pytest.fixture
def namespace(tmp_path):
    """PID 1 of a namespace of its own, with a shell that counts SIGTERM and a sleeper that has left its session."""
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
            pytest.skip("no PID namespace can be made here")
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        wait_until("the sleeper is up", lambda: of_init(init), lambda names: names == ["sh", "sleep"])
        yield init, tmp_path / "log"
    finally:
        process.kill()
        process.wait()


def of_init(init):
    """Names of the children of PID 1: one that was only forked yet has its parent's."""
    return sorted(m.name for m in LinuxProcesses().members(init, started_of(init)) if m.parent == init)


def test_all_but_pid_1_are_found(namespace):
    """Also what has left its session; PIDs of both namespaces are known."""
    init, _ = namespace
    processes = LinuxProcesses()
    members = processes.members(init, started_of(init))
    assert {"sh", "sleep"} <= {member.name for member in members}
    assert init not in {member.pid for member in members}
    assert all(member.pid_ns > 1 for member in members)


def test_another_process_with_that_number_is_not_the_shepherd(namespace):
    init, _ = namespace
    processes = LinuxProcesses()
    assert processes.alive(init, started_of(init))
    assert not processes.alive(init, started_of(init) + 1)
    with pytest.raises(TreeGoneError):
        processes.members(init, started_of(init) + 1)


def test_a_held_process_does_not_go_on_when_slurm_continues_and_ends_it(namespace):
    """SIGCONT and SIGTERM, as slurmd sends them at a requeue, run nothing of a process that is stopped and held."""
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


def test_everything_ends_but_pid_1(namespace):
    init, _ = namespace
    processes = LinuxProcesses()
    started = started_of(init)
    before = {m.pid for m in processes.members(init, started)}
    members = [m for m in processes.members(init, started) if m.name == "sh"]
    processes.stop(members)
    with processes.hold(members):
        processes.end(init, started, timeout_s=0.5)
    wait_until("all have ended", lambda: not before & {m.pid for m in processes.members(init, started)})


def test_a_tree_ends_before_the_criu_that_holds_it(monkeypatch):
    """An agent that was killed has left both: without CRIU, whose number is above, the tree would run."""
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
