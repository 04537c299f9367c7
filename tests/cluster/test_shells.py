"""The shells that run commands on nodes, tested on this machine with a local Python in place of the node's."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster.shells import Shells

ME = getpass.getuser()


@pytest.fixture
def shells() -> Iterator[Shells]:
    """Run commands on this machine; the container's name becomes an environment variable."""
    made = Shells(python=lambda container: ("env", f"CONTAINER={container}", sys.executable, "-I", "-S"))
    yield made
    made.close()


def run(
    shells: Shells, *argv: str, home: str = "/", stdin: str = "", timeout_s: float = 30.0, container: str = "here"
) -> subprocess.CompletedProcess[str]:
    return shells.run(container, argv, user=ME, home=home, stdin=stdin, timeout_s=timeout_s)


def test_command_returns_output_and_status(shells: Shells, tmp_path: Path) -> None:
    """Separate streams, exit status, input, directory, user and environment."""
    script = 'cat; pwd; echo "$HOME $USER $CONTAINER é"; printf "a\\r\\n" >&2; exit 7'
    done = run(shells, "bash", "-c", script, home=str(tmp_path), stdin="given\n")
    assert done.stdout == f"given\n{tmp_path}\n{tmp_path} {ME} here é\n"
    assert done.stderr == "a\n"
    assert done.returncode == 7


def test_server_is_reused_per_container(shells: Shells) -> None:
    """Sequential commands have the same parent; concurrent ones and those on another node have another."""
    parent = ("sh", "-c", "echo $PPID $CONTAINER")
    first = run(shells, *parent).stdout
    assert run(shells, *parent).stdout == first
    assert run(shells, *parent, container="there").stdout.endswith(" there\n")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run(shells, "sh", "-c", "sleep 0.2; echo $PPID").stdout, range(2)))
    assert len(set(both)) == 2


def test_signal_and_missing_program_are_exit_statuses(shells: Shells) -> None:
    """Exit statuses are those of shells and Docker."""
    assert run(shells, "sh", "-c", "kill -TERM $$").returncode == 128 + 15
    missing = run(shells, "no-such-program")
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr
    assert run(shells, "/etc").returncode == 126


def test_background_process_is_not_waited_for(shells: Shells) -> None:
    """The background process keeps running, although it holds the output open."""
    began = time.monotonic()
    done = run(shells, "bash", "-c", "sleep 60 & echo $!")
    assert time.monotonic() - began < 30
    os.kill(int(done.stdout), 9)
    assert run(shells, "echo", "next").stdout == "next\n"


def test_command_that_times_out_is_killed(shells: Shells) -> None:
    """The server remains available for the next command."""
    parent = run(shells, "sh", "-c", "echo $PPID").stdout
    with pytest.raises(subprocess.TimeoutExpired):
        run(shells, "sh", "-c", "sleep 61", timeout_s=0.2)
    assert run(shells, "sh", "-c", "echo $PPID").stdout == parent


def test_input_and_output_may_exceed_pipe_capacity(shells: Shells) -> None:
    """This also holds if the command does not read its input."""
    text = "0123456789abcde\n" * 65536
    assert run(shells, "cat", stdin=text).stdout == text
    assert run(shells, "true", stdin=text).returncode == 0
    assert run(shells, "echo", "next").stdout == "next\n"


def test_command_is_not_repeated_after_death_of_node(shells: Shells) -> None:
    """The command fails and is not run again; the next command runs."""
    done = run(shells, "bash", "-c", "echo printed; kill -KILL $PPID")
    assert done.returncode not in (0, 1)
    assert run(shells, "echo", "next").stdout == "next\n"


def test_command_runs_once_after_restart_of_node(shells: Shells, tmp_path: Path) -> None:
    """The command runs once, on another server."""
    server = int(run(shells, "sh", "-c", "echo $PPID").stdout)
    os.kill(server, 9)
    run(shells, "bash", "-c", f"echo once >>{tmp_path / 'told'}")
    assert (tmp_path / "told").read_text() == "once\n"


def test_unreachable_node_is_exit_status() -> None:
    """The output contains the error of the container."""
    shells = Shells(python=lambda container: ("bash", "-c", f"echo {container} does not run >&2; exit 1"))
    done = run(shells, "true")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "here does not run\n")


def test_aborted_wait_leaves_no_stale_answer(shells: Shells, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next command gets its own answer."""
    monkeypatch.setattr("cluster.shells.MORE_S", -1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        run(shells, "sh", "-c", "sleep 1; echo late", timeout_s=1.0)
    monkeypatch.undo()
    assert run(shells, "echo", "next").stdout == "next\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_other_user_has_own_groups_and_no_capabilities(shells: Shells) -> None:
    """The command runs with the privileges of ``docker exec --user``."""
    done = shells.run(
        "here", ("sh", "-c", "id; grep CapEff /proc/self/status"), user="nobody", home="/", stdin="", timeout_s=30
    )
    assert "(nobody)" in done.stdout
    assert "0(root)" not in done.stdout
    assert done.stdout.endswith("CapEff:\t0000000000000000\n")
