"""Processes and namespaces held by descriptors: a reused PID has no effect."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from background import started_of
from hostile_process import huge_arguments
from namespace_job import Job, needs_root
from waiting import wait_until

from slurm_affinode.base import pidfd
from slurm_affinode.base.pidfd import (
    ExhaustedError,
    Id,
    Namespace,
    NotContainedError,
    Number,
    Process,
    ProcessGoneError,
)


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that sleeps."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            wait_until("it is executed", lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"))
            yield process
        finally:
            process.kill()


def test_held_process_is_read_and_signaled() -> None:
    """Files in its /proc directory can be read."""
    with sleeper() as child, Process(child.pid) as held:
        assert held.started == started_of(child.pid)
        assert held.read("cmdline") == b"sleep\x001000\x00"
        assert held.read("cmdline", 3) == b"sle"
        assert held.status()["Name"] == "sleep"
        assert held.facts().st_uid == os.getuid()
        assert "0" in held.names("fd")
        assert not held.ended()
        held.signal(signal.SIGKILL)
        assert held.wait(10)
        assert held.ended()


def test_file_as_large_as_an_address_space_is_not_read_as_a_whole() -> None:
    """The process determines the size; its state is then unknown, and it has not ended."""
    with huge_arguments() as pid, Process(pid) as held:
        with pytest.raises(ExhaustedError, match=rf"/proc/{pid}/cmdline is larger than 256 MiB"):
            held.read("cmdline")
        assert held.variable("SLURM_JOB_ID") is None
        assert held.read("cmdline", 3) == bytes(3)


def test_last_variable_of_a_name_counts(tmp_path: Path) -> None:
    """A name that ends like another one, and the beginning of a value, are no variables."""
    (tmp_path / "7").mkdir()
    environ = tmp_path / "7" / "environ"
    with Process(7, proc=tmp_path) as held:
        for text, value in (
            (b"A=1\0XA=2\0A=3\0B=A=4\0", "3"),
            (b"XA=2\0B=A=4", None),
            (b"A=\xff", "\ufffd"),
            (b"", None),
        ):
            environ.write_bytes(text)
            assert held.variable("A") == value


def test_lines_are_those_of_the_whole_file(tmp_path: Path) -> None:
    """Also at the end of a piece that is read; only newlines end a line."""
    (tmp_path / "7").mkdir()
    text = b"\n".join(b"%d\r\x85" % number * 7 for number in range(5000))
    (tmp_path / "7" / "maps").write_bytes(text)
    with Process(7, proc=tmp_path) as held:
        assert list(held.lines("maps")) == text.split(b"\n")
        assert list(held.text_lines("maps")) == text.decode("utf-8", "replace").split("\n")


def test_reaped_process_is_gone_for_every_method() -> None:
    """A process with its PID is never touched."""
    with sleeper() as child:
        held = Process(child.pid)
        late = Process(child.pid)
        assert not late.ended()
        child.kill()
        child.wait()
        for attempt in (
            lambda: held.read("stat"),
            lambda: held.link("ns/pid"),
            held.facts,
            lambda: held.names("fd"),
            held.stat,
            lambda: held.signal(signal.SIGKILL),
            lambda: late.signal(signal.SIGKILL),
            lambda: held.descriptor(0),
            held.check,
        ):
            with pytest.raises(ProcessGoneError):
                attempt()
        assert held.ended()
        assert held.namespace("pid") is None


def test_process_is_closed_as_garbage_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter empties modules before it removes the last objects."""
    held = Process(os.getpid())
    directory = held._directory
    monkeypatch.setattr(pidfd, "_close_all", None)
    monkeypatch.setattr(pidfd, "os", None)
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(directory)


def test_pid_of_another_process_is_refused() -> None:
    """The start times differ."""
    with sleeper() as child, pytest.raises(ProcessGoneError, match="another process"):
        Process(child.pid, started=started_of(child.pid) + 1)
    with pytest.raises(ProcessGoneError):
        Process(child.pid)


REUSE = """
import os, signal, subprocess, sys
from slurm_affinode.base.pidfd import Process, ProcessGoneError

def fork_as(number):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(number - 1))
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    assert child == number, child
    return child

first = fork_as(200)
late, early = Process(first), Process(first)
early.pidfd
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
second = fork_as(200)
for held in (late, early):
    for attempt in (lambda: held.signal(signal.SIGKILL), lambda: held.read("stat"), held.check):
        try:
            attempt()
        except ProcessGoneError:
            continue
        sys.exit("the other process was reached")
assert os.waitpid(second, os.WNOHANG) == (0, 0)
print("safe")
"""


@needs_root
def test_process_with_the_reused_pid_is_not_signaled() -> None:
    """This is the attack: the PID is reused while the first process is held."""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", REUSE],
        check=False, timeout=240, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(pidfd.__file__).parents[2])},
    )  # fmt: skip
    assert done.stdout.strip() == "safe", done.stderr


@needs_root
def test_namespace_is_killed_except_for_its_first_process(tmp_path: Path) -> None:
    """PID 1 reaps the others and survives."""
    job = Job(tmp_path / "log")
    try:
        held = Namespace(Process(job.init))
        assert len(held.members()) >= 2
        assert held.kill_all()
        assert held.members() == {}
        assert not held.init.ended() or job.outer.wait(10) is not None
    finally:
        job.end()


@needs_root
@pytest.mark.parametrize("calls", [0, 2], ids=["user namespace", "parent"])
def test_namespace_is_not_gone_without_free_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Its owner and its parent are descriptors too."""
    left = [calls]

    def ioctl(fd: int, request: int) -> int:
        if left[0] == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        left[0] -= 1
        return int(fcntl.ioctl(fd, request))

    job = Job(tmp_path / "log")
    try:
        process = Process(job.init)
        with monkeypatch.context() as patched:
            patched.setattr(pidfd, "fcntl", SimpleNamespace(ioctl=ioctl))
            with pytest.raises(ExhaustedError, match="Too many open files"):
                Namespace(process)
    finally:
        job.end()


def test_process_that_ends_while_it_is_listed_is_skipped(tmp_path: Path) -> None:
    """Its status could be read, its start time no more."""
    for number, space, inner in (("self", 1, 0), ("1000", 2, 1), ("1001", 2, 2), ("1002", 2, 3)):
        (tmp_path / number / "ns").mkdir(parents=True)
        (tmp_path / number / "ns" / "pid").symlink_to(f"pid:[{space}]")
        (tmp_path / number / "status").write_text(f"NSpid:\t{number}\t{inner}\n")
        (tmp_path / number / "stat").write_text(f"{number} (x) S 1000 {' '.join('7' * 40)}\n")
    (tmp_path / "1001" / "stat").write_text("")
    held = Namespace(Process(1000, proc=tmp_path), proc=tmp_path)
    assert held.numbers() == [Number(3, 1002, 7)]
    assert held.members() == {3: 1002}


@needs_root
def test_namespace_of_a_dead_first_process_is_gone(tmp_path: Path) -> None:
    """The kernel has ended all its processes; no other processes take their place."""
    job = Job(tmp_path / "log")
    held = pidfd.namespace(Id(job.init, job.started))
    assert pidfd.namespace(Id(job.init, job.started)) is held
    job.end()
    wait_until("its first process is gone", held.init.ended)
    with pytest.raises(ProcessGoneError):
        held.check()
    with pytest.raises(ProcessGoneError):
        pidfd.namespace(Id(job.init, job.started))
    assert held.kill_all()


def test_ancestors_are_held_in_order() -> None:
    """They range from the parent to PID 1; a parent younger than its child is another process."""
    with sleeper() as child:
        above = [(ancestor.pid, ancestor.stat().parent) for ancestor in pidfd.ancestors(Process(child.pid))]
    assert above[0][0] == os.getpid()
    assert [parent for _, parent in above[:-1]] == [pid for pid, _ in above[1:]]
    assert above[-1][1] == 0


ADOPTED = """
import ctypes, os, signal, sys
from pathlib import Path
from slurm_affinode.base import pidfd as pinned
from slurm_affinode.base.pidfd import Process

def fork_as(number, run=signal.pause):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(number - 1))
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    assert child == number, child
    return child

def parent():
    fork_as(300)
    signal.pause()

fork_as(200, parent)
while not Path("/proc/300").exists():
    pass
held, opened = Process(300), []
class Late(Process):
    # The PID of the parent is reused between the inspection of the child and that of the parent.
    def __init__(self, pid, **options):
        if pid == 200 and not opened:
            opened.append(pid)
            os.kill(200, signal.SIGKILL)
            os.waitpid(200, 0)
            fork_as(200)
        super().__init__(pid, **options)
pinned.Process = Late
print([one.pid for one in pinned.ancestors(held)], opened)
"""


@needs_root
def test_process_with_the_reused_pid_of_a_parent_is_not_an_ancestor() -> None:
    """The child was adopted meanwhile."""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", ADOPTED],
        check=False, timeout=240, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(pidfd.__file__).parents[2])},
    )  # fmt: skip
    assert done.stdout.strip() == "[1] [200]", done.stderr


def test_own_namespace_is_refused() -> None:
    """Otherwise a reused PID could get all processes of the node killed."""
    with sleeper() as child:
        for pid in (child.pid, os.getpid()):
            with pytest.raises(NotContainedError):
                Namespace(Process(pid))


@needs_root
def test_namespace_of_a_user_is_refused() -> None:
    """In its own user namespace a user may mount other files over programs."""
    with subprocess.Popen(["unshare", "--user", "--pid", "--fork", "--kill-child", "sleep", "1000"]) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            wait_until("it runs", children.read_text)
            with pytest.raises(NotContainedError, match="user namespace"):
                Namespace(Process(int(children.read_text().split()[0])))
        finally:
            outer.kill()


_NAMED = """import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["x\rNSpid: 9 1", "x\fPPid: 1", "x\vNSpid: 9 1", "NSpid: 9 1"])
def test_process_name_does_not_change_the_process_ids_read(name: str) -> None:
    """The first line of ``status`` has the process name, in which the kernel escapes newlines only."""
    argv = (sys.executable, "-c", _NAMED, name)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        raw = (Path("/proc") / str(process.pid) / "status").read_bytes()
        assert raw.startswith(f"Name:\t{name}\n".encode())
        with Process(process.pid) as held:
            status = held.status()
        for key in ("NSpid", "PPid"):
            value = raw.partition(f"\n{key}:".encode())[2].partition(b"\n")[0].split()
            assert status[key].split() == [word.decode() for word in value]
        process.communicate()


def test_hostile_name_does_not_change_what_is_read() -> None:
    """It has parentheses, newlines, and text that looks like other fields."""
    name = ") R 1 1\n"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with Process(child.pid) as held:
            assert held.stat().parent == os.getpid()
            assert held.stat().name == name
            assert held.status()["PPid"] == str(os.getpid())
        child.kill()
