"""Real processes, also forking ones, are frozen and thawed; a freezer cgroup is used only if it fits exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from namespace_job import Job, needs_root
from stopping import stop
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base.pidfd import Process
from slurm_affinode.suspension.inplace.freezer import CGROUP_NAME, SIGNALS, FreezeError, LinuxFreezer
from slurm_affinode.suspension.job import cgroup as cgroup_module
from slurm_affinode.suspension.job.process_tree import (
    LinuxProcesses,
    Member,
    TreeGoneError,
    parents_first,
    send,
    stopped,
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "log")
    yield made
    made.end()


def sleeper(job: Job, freezer: LinuxFreezer) -> Member:
    """Return the sleeping child once it exists: it is forked after the writer of the log."""
    return wait_until(
        "it sleeps", lambda: [member for member in freezer.members(job.init, job.started) if member.name == "sleep"]
    )[0]


@needs_root
def test_forking_job_is_frozen_and_thawed(job: Job) -> None:
    """No process of the job runs, except for its PID 1; processes stopped earlier stay stopped."""
    freezer = LinuxFreezer()
    sleeping = sleeper(job, freezer)
    stop(sleeping.pid)
    before = stopped(freezer.members(job.init, job.started))
    assert sleeping.pid in before
    how = freezer.mechanism(freezer.members(job.init, job.started), job.init)
    assert how == SIGNALS
    freezer.freeze(job.init, job.started, how, timeout_s=DEADLINE_S)
    members = freezer.members(job.init, job.started)
    assert {member.state for member in members} <= {"T", "D"}
    assert freezer.moving((member.pid for member in members), how) is None
    init = LinuxProcesses().read(job.init)
    assert init is not None
    assert init.state != "T"
    size = job.size()
    assert job.size() == size
    freezer.thaw(job.init, job.started, how, stay=before)
    job.goes_on()
    assert freezer.moving([sleeping.pid], how) is None
    freezer.thaw(job.init, job.started, how, stay=(), going=before)
    assert freezer.moving([sleeping.pid], how) is None


def test_busy_processes_are_detected(tmp_path: Path) -> None:
    """Processes that run or wait for a disk are busy; sleeping, stopped and ended ones are not."""
    freezer = fake(tmp_path, {7: "S", 8: "T", 9: "R", 10: "D"}, "0::/job\n")
    assert not freezer.busy([7, 8, 11])
    assert freezer.busy([7, 9])
    assert freezer.busy([10, 8])


@needs_root
def test_sigcont_is_detected(job: Job) -> None:
    """A running process is named after SIGCONT to the whole job."""
    freezer = LinuxFreezer()
    freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
    pids = [member.pid for member in freezer.members(job.init, job.started)]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_until("one is seen moving", lambda: freezer.moving(pids, SIGNALS) is not None)


@needs_root
def test_pending_signal_of_stopped_process_is_detected(job: Job) -> None:
    """The receiver is reported as well; SIGCHLD, pending for every parent of a stopped process, does not count."""
    freezer = LinuxFreezer()
    sleeping = sleeper(job, freezer).pid
    freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
    pids = [member.pid for member in freezer.members(job.init, job.started)]
    os.kill(pids[0], signal.SIGCHLD)
    assert freezer.calls(pids) == frozenset()
    os.kill(sleeping, signal.SIGTERM)
    assert freezer.calls(pids) == {(sleeping, signal.SIGTERM)}
    assert freezer.find_ended(pids) is None
    os.kill(sleeping, signal.SIGKILL)
    assert wait_until("one has ended", lambda: freezer.find_ended(pids)) == sleeping


@needs_root
def test_suspension_by_slurm_is_detected_by_shepherd(job: Job) -> None:
    """Slurm stops the whole job with the PID 1 of its namespace, which our own freeze spares."""
    freezer = LinuxFreezer()
    freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
    assert not freezer.is_stopped_by_slurm(job.init)
    os.kill(job.init, signal.SIGSTOP)
    wait_until("it is held", lambda: freezer.is_stopped_by_slurm(job.init))
    os.kill(job.init, signal.SIGCONT)
    wait_until("it is not held", lambda: not freezer.is_stopped_by_slurm(job.init))


@needs_root
def test_nested_namespace_is_frozen(tmp_path: Path) -> None:
    """A container of the job is frozen with it."""
    nested = 'unshare --pid --fork --kill-child sh -c "while :; do echo x >>$0; sleep 0.01; done"'
    job = Job(tmp_path / "log", nested)
    try:
        freezer = LinuxFreezer()
        freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
        members = freezer.members(job.init, job.started)
        spaces = {Path(f"/proc/{member.pid}/ns/pid").readlink() for member in members}
        assert len(spaces) == 2
        assert {member.state for member in members} <= {"T", "D"}
    finally:
        job.end()


# Starts programs one after the other with vfork(2), as shells and Python do.
SPAWNING = '''exec python3 -c "
import os, sys
while True:
    os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
    open(sys.argv[1], 'a').write('x')
" "$0"'''


@needs_root
def test_parent_in_vfork_is_frozen(tmp_path: Path) -> None:
    """The child may be stopped before it executes its program: its parent then waits in the kernel."""
    job = Job(tmp_path / "log", SPAWNING)
    try:
        freezer, deadline, seen = LinuxFreezer(), time.monotonic() + 10, set()
        while "D" not in seen and time.monotonic() < deadline:  # depends on timing
            freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
            members = freezer.members(job.init, job.started)
            seen |= {member.state for member in members}
            assert freezer.moving([member.pid for member in members], SIGNALS) is None
            freezer.thaw(job.init, job.started, SIGNALS, stay=())
            job.goes_on()
        assert seen <= {"T", "D"}
    finally:
        job.end()


# A shell with job control, which continues with its next command when its program has stopped.
INTERACTIVE = """exec bash -c '
set -m
sh -c "while :; do echo x; sleep 0.01; done" >>"$0"
echo "$?" >"$0.status"
' "$0"
"""
TIMES = 30


@needs_root
def test_shell_with_job_control_does_not_notice_stop(tmp_path: Path) -> None:
    job = Job(tmp_path / "log", INTERACTIVE)
    try:
        freezer = LinuxFreezer()
        for _ in range(TIMES):
            freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
            freezer.thaw(job.init, job.started, SIGNALS, stay=())
            job.goes_on()
        assert not (tmp_path / "log.status").exists()
    finally:
        job.end()


# A program whose first thread has ended while another one keeps writing.
HEADLESS = '''exec python3 -c "
import ctypes, sys, threading, time
def write():
    while True:
        open(sys.argv[1], 'a').write('x')
        time.sleep(0.01)
threading.Thread(target=write).start()
ctypes.CDLL(None).pthread_exit(None)
" "$0"'''


@needs_root
def test_program_without_first_thread_is_frozen(tmp_path: Path) -> None:
    """It looks like an ended process."""
    job = Job(tmp_path / "log", HEADLESS)
    try:
        freezer = LinuxFreezer()
        stat = Path(f"/proc/{freezer.members(job.init, job.started)[0].pid}/stat")
        wait_until("its first thread has ended", lambda: stat.read_text().split()[2] == "Z")
        freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
        [member] = freezer.members(job.init, job.started)
        assert (member.state, LinuxProcesses().alive(member.pid, member.started)) == ("T", True)
        freezer.thaw(job.init, job.started, SIGNALS, stay=())
        job.goes_on()
    finally:
        job.end()


@pytest.fixture
def task_cgroup() -> Iterator[Path]:
    """A cgroup of version 2 as Slurm makes it for the task of a batch job."""
    tops = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
    top = next((top for top in tops if (top / "cgroup.controllers").exists()), None)
    if top is None or not os.access(top, os.W_OK) or os.geteuid() != 0:
        pytest.skip("no cgroup of version 2 can be created here")
    scope = top / f"test{os.getpid()}_slurmstepd.scope"
    path = scope / "job_7/step_batch/user/task_0"
    path.mkdir(parents=True)
    yield path
    for directory in (path / CGROUP_NAME, path, *path.parents):
        if directory == top:
            break
        wait_until("it is empty", lambda directory=directory: _removed(directory))  # type: ignore[misc]


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def enter(group: Path, job: Job) -> None:
    """Move a job into a cgroup, with its PID 1."""
    freezer = LinuxFreezer()
    for _ in range(3):  # it forks meanwhile
        for pid in (job.init, *(member.pid for member in freezer.members(job.init, job.started))):
            try:
                (group / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                continue


@needs_root
def test_job_in_cgroup_of_slurm_is_frozen_without_signals(task_cgroup: Path, job: Job) -> None:
    """All of it, although it forks, and not its PID 1. A process that the job has stopped itself remains stopped."""
    freezer = LinuxFreezer()
    sleeping = sleeper(job, freezer)
    enter(task_cgroup, job)
    stop(sleeping.pid)
    before = stopped(freezer.members(job.init, job.started))
    how = freezer.mechanism(freezer.members(job.init, job.started), job.init)
    assert how == str(task_cgroup / CGROUP_NAME)
    freezer.freeze(job.init, job.started, how, timeout_s=DEADLINE_S)
    members = freezer.members(job.init, job.started)
    assert {member.pid for member in members} == set(
        map(int, (task_cgroup / CGROUP_NAME / "cgroup.procs").read_text().split())
    )
    assert (task_cgroup / "cgroup.procs").read_text().split() == [str(job.init)]
    assert stopped(members) == before
    assert freezer.moving((member.pid for member in members), how) is None
    assert not freezer.is_stopped_by_slurm(job.init)
    size = job.size()
    time.sleep(0.2)
    assert job.size() == size
    # Parents stay frozen at first, as when a job wakes.
    above = {member.parent for member in members} & {member.pid for member in members}
    freezer.thaw(job.init, job.started, how, stay={*before, *above})
    assert set(map(int, (task_cgroup / CGROUP_NAME / "cgroup.procs").read_text().split())) == above
    freezer.thaw(job.init, job.started, how, stay=before, going=())
    assert not (task_cgroup / CGROUP_NAME).exists()
    job.goes_on()
    assert stopped(freezer.members(job.init, job.started)) == before
    freezer.thaw(job.init, job.started, how, stay=before)


@needs_root
def test_job_that_is_killed_while_frozen_leaves_no_cgroup(task_cgroup: Path, job: Job) -> None:
    """SIGKILL ends frozen processes with version 2, also while no agent is running."""
    freezer = LinuxFreezer()
    sleeper(job, freezer)
    enter(task_cgroup, job)
    how = freezer.mechanism(freezer.members(job.init, job.started), job.init)
    freezer.freeze(job.init, job.started, how, timeout_s=DEADLINE_S)
    pids = [member.pid for member in freezer.members(job.init, job.started)]
    os.kill(job.init, signal.SIGKILL)
    wait_until("all of it ends", lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
    freezer.clear(how)
    assert not (task_cgroup / CGROUP_NAME).exists()
    freezer.clear(how)


@needs_root
def test_job_with_cgroups_of_its_own_is_stopped_by_signals(task_cgroup: Path, job: Job) -> None:
    """Processes of a container, for example, would lose their cgroups."""
    freezer = LinuxFreezer()
    sleeping = sleeper(job, freezer)
    enter(task_cgroup, job)
    container = task_cgroup / "container"
    container.mkdir()
    (container / "cgroup.procs").write_text(str(sleeping.pid))
    try:
        assert freezer.mechanism(freezer.members(job.init, job.started), job.init) == SIGNALS
    finally:
        (task_cgroup / "cgroup.procs").write_text(str(sleeping.pid))
        container.rmdir()


def test_signal_is_not_sent_to_reused_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PID that now belongs to another process, or to none, is spared."""
    child = subprocess.Popen(("sleep", "100"))
    try:
        member = LinuxProcesses().read(child.pid)
        assert member is not None
        gone = replace(member, pid=1 << 22)
        send([replace(member, started=member.started - 1), gone], signal.SIGKILL)
        signals = signals_of(monkeypatch)
        send([replace(member, started=member.started - 1), gone], signal.SIGKILL)
        assert signals == []
        send([member], signal.SIGKILL)
        assert signals == [(child.pid, signal.SIGKILL)]
        monkeypatch.undo()
        assert child.poll() is None
        send([member], signal.SIGTERM)
        assert child.wait(DEADLINE_S) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


@needs_root
def test_job_without_shepherd_cannot_be_frozen(job: Job) -> None:
    """Its PID may have been reused."""
    with pytest.raises(TreeGoneError):
        LinuxFreezer().freeze(job.init, job.started + 1, SIGNALS, timeout_s=1)


def fake(tmp_path: Path, states: dict[int, str], cgroup: str) -> LinuxFreezer:
    """Return a freezer on a fake ``/proc`` with these processes, whose threads never change."""
    proc = tmp_path / "proc"
    (proc / "1" / "ns").mkdir(parents=True)
    space = tmp_path / "space"
    space.touch()
    for pid, state in {1: "S", **states}.items():
        base = proc / str(pid)
        for directory in (base, base / "task" / str(pid)):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "stat").write_text(f"{pid} (x) {state} {0 if pid == 1 else 1} " + "0 " * 17 + "7 0")
        (base / "ns").mkdir(exist_ok=True)
        (base / "ns" / "pid").symlink_to(space)
        (base / "status").write_text(f"NSpid:\t{pid}\nUid:\t0\t0\t0\t0\n")
        (base / "cgroup").write_text(cgroup)
    ticks = iter(range(1000))
    return LinuxFreezer(proc, tmp_path / "cgroup", now=lambda: float(next(ticks)), sleep=lambda _: None)


def signals_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the signals sent."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(Process, "signal", lambda process, number: signals.append((process.pid, number)))
    return signals


@pytest.fixture
def of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the file system of this test as that of cgroups."""
    fd = os.open(tmp_path, os.O_PATH)
    monkeypatch.setattr(cgroup_module, "_FILE_SYSTEMS", {cgroup_module.file_system(fd)})
    os.close(fd)


def make_cgroup(path: Path, pids: list[int], **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in {"cgroup.procs": "\n".join(map(str, pids)), **files}.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_process_that_does_not_stop_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error after the deadline gives its PID and name."""
    signals_of(monkeypatch)
    freezer = fake(tmp_path, {7: "D"}, "0::/job\n")
    with pytest.raises(FreezeError, match=r"process 7 \(x\) does not stop within 3 s"):
        freezer.freeze(1, 7, SIGNALS, timeout_s=3)


@pytest.mark.usefixtures("of_files")
@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_of_job_alone_is_frozen(tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions of cgroups are supported; the freezer file is set and reset."""
    signals = signals_of(monkeypatch)
    line, files, top = (
        ("4:freezer:/job/inside\n", {"freezer.state": "THAWED"}, "cgroup/freezer")
        if version == 1
        else ("0::/job/inside\n", {"cgroup.freeze": "0"}, "cgroup")
    )
    freezer = fake(tmp_path, {7: "S", 8: "S"}, line)
    group = make_cgroup(tmp_path / top / "job" / "inside", [7], **files)
    make_cgroup(group / "deeper", [8])
    how = freezer.mechanism(freezer.members(1, 7), 1)
    assert how == str(group)
    if version == 2:
        (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    freezer.freeze(1, 7, how, timeout_s=3)
    knob = group / ("freezer.state" if version == 1 else "cgroup.freeze")
    assert knob.read_text() == ("FROZEN" if version == 1 else "1")
    assert freezer.moving([7, 8], how) is None
    if version == 2:
        (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert version == 1 or freezer.moving([7, 8], how) == 7
    if version == 1:  # blocks even SIGKILL
        (tmp_path / "proc" / "8" / "status").write_text("NSpid:\t8\nUid:\t0\t0\t0\t0\nShdPnd:\t0000000000000100\n")
        assert freezer.moving([7, 8], how) == 8
    freezer.thaw(1, 7, how, stay=(7,))  # 7 stays stopped: it would run with the cgroup
    assert signals == [(7, signal.SIGSTOP), (8, signal.SIGCONT)]
    freezer.thaw(1, 7, how, stay=())
    assert knob.read_text() == ("THAWED" if version == 1 else "0")
    assert signals[2:] == [(8, signal.SIGCONT), (7, signal.SIGCONT)]


@pytest.mark.usefixtures("of_files")
def test_cgroup_with_other_processes_is_not_used(tmp_path: Path) -> None:
    """Slurm's own cgroup also holds the shepherd, which must receive signals."""
    freezer = fake(tmp_path, {7: "S"}, "0::/job\n")
    make_cgroup(tmp_path / "cgroup" / "job", [1, 7], **{"cgroup.freeze": "0"})
    assert freezer.mechanism(freezer.members(1, 7), 1) == SIGNALS


@pytest.mark.usefixtures("of_files")
def test_suspension_by_freezer_cgroup_is_detected(tmp_path: Path) -> None:
    """proctrack/cgroup freezes the shepherd's own cgroup or a parent of it."""
    freezer = fake(tmp_path, {1: "S", 7: "S"}, "0::/slurm/step\n")
    group = make_cgroup(tmp_path / "cgroup" / "slurm" / "step", [1, 7], **{"cgroup.freeze": "0"})
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert not freezer.is_stopped_by_slurm(1)
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert freezer.is_stopped_by_slurm(1)


@pytest.mark.usefixtures("of_files")
def test_cgroup_that_does_not_freeze_is_an_error(tmp_path: Path) -> None:
    """So is one that does not exist."""
    freezer = fake(tmp_path, {7: "S"}, "0::/job\n")
    group = make_cgroup(tmp_path / "cgroup" / "job", [7], **{"cgroup.freeze": "0", "cgroup.events": "frozen 0\n"})
    with pytest.raises(FreezeError, match="not frozen in time"):
        freezer.freeze(1, 7, str(group), timeout_s=3)
    with pytest.raises(FreezeError, match="nobody: No such file"):
        freezer.freeze(1, 7, str(tmp_path / "cgroup" / "nobody"), timeout_s=3)


@pytest.mark.usefixtures("of_files")
@pytest.mark.parametrize("line", ["0::/../outside/job\n", "4:freezer:/../../outside/job\n", "0::/link/job\n"])
def test_path_outside_cgroups_is_not_followed(tmp_path: Path, line: str) -> None:
    """The kernel shows such paths for processes above the agent's cgroup namespace; symbolic links are another case."""
    freezer = fake(tmp_path, {7: "S"}, line)
    (tmp_path / "cgroup" / "freezer").mkdir(parents=True)
    (tmp_path / "cgroup" / "link").symlink_to(tmp_path / "outside")
    knobs = {"cgroup.freeze": "0", "cgroup.events": "frozen 1\n", "freezer.state": "FROZEN"}
    group = make_cgroup(tmp_path / "outside" / "job", [7], **knobs)
    assert freezer.mechanism(freezer.members(1, 7), 1) == SIGNALS
    assert not freezer.is_stopped_by_slurm(1)
    for path in (group, tmp_path / "cgroup" / ".." / "outside" / "job", tmp_path / "cgroup" / "link" / "job"):
        with pytest.raises(FreezeError, match="job: "):
            freezer.freeze(1, 7, str(path), timeout_s=3)
    assert (group / "cgroup.freeze").read_text() == "0"


def test_directory_on_another_file_system_is_rejected(tmp_path: Path) -> None:
    """Nothing is written to files outside cgroupfs."""
    freezer = fake(tmp_path, {7: "S"}, "0::/job\n")
    group = make_cgroup(tmp_path / "cgroup" / "job", [7], **{"cgroup.freeze": "0", "cgroup.events": "frozen 1\n"})
    assert freezer.mechanism(freezer.members(1, 7), 1) == SIGNALS
    with pytest.raises(FreezeError, match="not on a file system of cgroups"):
        freezer.freeze(1, 7, str(group), timeout_s=3)
    assert (group / "cgroup.freeze").read_text() == "0"


def test_parents_come_before_their_children() -> None:
    """PIDs do not matter; a loop of parents, which can result from reused PIDs, is harmless."""

    def member(pid: int, parent: int) -> Member:
        return Member(pid, pid, parent, 0, "S", "x", 0)

    assert [process.pid for process in parents_first([member(5, 9), member(9, 7), member(7, 1)])] == [7, 9, 5]
    assert len(parents_first([member(5, 6), member(6, 5)])) == 2
    began, deep = time.process_time(), 20000  # A user could create such a deep tree to block the agent.
    assert [process.pid for process in parents_first([member(pid, pid - 1) for pid in range(deep, 0, -1)])][:2] == [
        1,
        2,
    ]
    assert time.process_time() - began < 5
