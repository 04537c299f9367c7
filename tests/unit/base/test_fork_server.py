"""Programs started by the fork server."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stalling import Stalling
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base import process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.fork_server import Starter
from slurm_affinode.base.process import run


@pytest.fixture
def starter() -> Iterator[Starter]:
    """Return a fork server that starts all programs."""
    made = Starter()
    process.run_by(made.run)
    yield made
    process.run_by(None)
    made.close()


def test_program_behaves_as_if_started_directly(starter: Starter) -> None:
    """That includes input, output, status, environment, and inherited descriptors with their numbers."""
    readable, writable = os.pipe()
    try:
        argv = ["sh", "-c", f'cat; echo "$WORD" >/dev/fd/{writable}; echo told >&2; exit 3']
        env = {"PATH": os.environ["PATH"], "WORD": "hello"}
        done = run(argv, timeout_s=DEADLINE_S, env=env, stdin=b"\xff\0in", pass_fds=(writable,), check=False)
        assert (done.returncode, done.stdout, done.stderr) == (3, b"\xff\0in", "told\n")
        assert os.read(readable, 99) == b"hello\n"
    finally:
        os.close(readable)
        os.close(writable)


def test_hundreds_of_descriptors_are_passed(starter: Starter) -> None:
    """There are more than one message to the kernel can hold; their numbers are kept."""
    process.raise_file_limit()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(600)]
    readable, writable = os.pipe()
    try:
        script = 'for fd; do [ -e "/dev/fd/$fd" ] || exit 9; done; echo all >&1'
        argv = ["bash", "-c", script, "bash", *map(str, (*fds, writable))]
        done = run(argv, timeout_s=DEADLINE_S, pass_fds=(*fds, writable), check=False)
        assert (done.returncode, done.stdout) == (0, b"all\n")
    finally:
        for fd in (*fds, readable, writable):
            os.close(fd)


@pytest.mark.parametrize(
    ("argv", "timeout_s", "message"),
    [
        (["no-such-program"], DEADLINE_S, "no such program"),
        (["sleep", "600"], 0.5, "timed out after"),
        (["false"], DEADLINE_S, "ended with status 1"),
    ],
)
def test_failures_are_reported(starter: Starter, argv: list[str], timeout_s: float, message: str) -> None:
    """The texts are the same as without the fork server."""
    with pytest.raises(UnreachableError, match=message):
        run(argv, timeout_s=timeout_s, group=True)


def test_program_is_started_directly_if_the_server_has_ended(starter: Starter) -> None:
    starter._child._process.kill()
    starter._child._process.wait()
    assert run(["echo", "there"], timeout_s=DEADLINE_S).stdout == b"there\n"


def test_concurrent_programs_have_their_own_results(starter: Starter) -> None:
    result: dict[int, bytes] = {}

    def respond(number: int) -> None:
        result[number] = run(["echo", str(number)], timeout_s=DEADLINE_S).stdout

    threads = [threading.Thread(target=respond, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == {number: f"{number}\n".encode() for number in range(8)}


def test_file_that_cannot_be_closed_does_not_block(
    starter: Starter, stalling: Callable[..., Stalling], tmp_path: Path
) -> None:
    """It is a copy to a tier that stalls, or the output of a job."""
    shared = stalling(tmp_path / "shared")
    fd = os.open(shared.path / "image", os.O_WRONLY | os.O_CREAT)
    shared.stall()
    try:
        assert run(["echo", "there"], timeout_s=DEADLINE_S).stdout == b"there\n"
    finally:
        shared.resume()
        os.close(fd)


def test_program_outlives_the_process_that_requested_it(tmp_path: Path) -> None:
    """Inherited locks are kept until it ends: a CRIU whose agent was killed still writes its image."""
    program = (
        "import fcntl, os, sys\n"
        "from slurm_affinode.base import fork_server as starter\n"
        "fd = os.open('held', os.O_RDONLY | os.O_DIRECTORY)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "script = 'touch begun; until [ -e go ]; do sleep 0.05; done; touch done'\n"
        "starter.Starter().run(['sh', '-c', script], timeout_s=60, pass_fds=(fd,), group=True)\n"
    )
    (tmp_path / "held").mkdir()
    agent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, start_new_session=True)
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_DIRECTORY)
    try:
        wait_until("it has begun", (tmp_path / "begun").exists)
        agent.kill()
        agent.wait()
        time.sleep(0.2)
        with pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (tmp_path / "go").touch()
        wait_until("it is done", (tmp_path / "done").exists)
        fcntl.flock(held, fcntl.LOCK_EX)  # no process holds it
    finally:
        agent.kill()
        agent.wait()
        (tmp_path / "go").touch()
        os.close(held)
