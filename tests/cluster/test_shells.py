"""The way in which tests run commands on nodes, tried on this machine: a Python of its own is in the node's place."""

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
    """Commands on this machine; the container's name becomes a variable of the environment."""
    made = Shells(python=lambda container: ("env", f"CONTAINER={container}", sys.executable, "-I", "-S"))
    yield made
    made.close()


def run(
    shells: Shells, *argv: str, home: str = "/", stdin: str = "", timeout_s: float = 30.0, container: str = "here"
) -> subprocess.CompletedProcess[str]:
    return shells.run(container, argv, user=ME, home=home, stdin=stdin, timeout_s=timeout_s)


def test_what_a_command_says_and_how_it_ends(shells: Shells, tmp_path: Path) -> None:
    """Both streams apart, its status, its input, its directory, user and environment."""
    script = 'cat; pwd; echo "$HOME $USER $CONTAINER é"; printf "a\\r\\n" >&2; exit 7'
    done = run(shells, "bash", "-c", script, home=str(tmp_path), stdin="given\n")
    assert done.stdout == f"given\n{tmp_path}\n{tmp_path} {ME} here é\n"
    assert done.stderr == "a\n"
    assert done.returncode == 7


def test_a_server_serves_many_and_each_container_has_its_own(shells: Shells) -> None:
    """One after the other they have the same parent; side by side, and on another node, they have not."""
    parent = ("sh", "-c", "echo $PPID $CONTAINER")
    first = run(shells, *parent).stdout
    assert run(shells, *parent).stdout == first
    assert run(shells, *parent, container="there").stdout.endswith(" there\n")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run(shells, "sh", "-c", "sleep 0.2; echo $PPID").stdout, range(2)))
    assert len(set(both)) == 2


def test_a_signal_and_a_missing_program_are_a_status(shells: Shells) -> None:
    """As shells and docker give them."""
    assert run(shells, "sh", "-c", "kill -TERM $$").returncode == 128 + 15
    missing = run(shells, "no-such-program")
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr
    assert run(shells, "/etc").returncode == 126


def test_what_is_left_running_is_not_waited_for(shells: Shells) -> None:
    """Though it holds the output open; it goes on."""
    began = time.monotonic()
    done = run(shells, "bash", "-c", "sleep 60 & echo $!")
    assert time.monotonic() - began < 30
    os.kill(int(done.stdout), 9)
    assert run(shells, "echo", "next").stdout == "next\n"


def test_a_command_that_takes_too_long_is_ended(shells: Shells) -> None:
    """The server is there for the next one."""
    parent = run(shells, "sh", "-c", "echo $PPID").stdout
    with pytest.raises(subprocess.TimeoutExpired):
        run(shells, "sh", "-c", "sleep 61", timeout_s=0.2)
    assert run(shells, "sh", "-c", "echo $PPID").stdout == parent


def test_more_input_and_output_than_a_pipe_holds(shells: Shells) -> None:
    """Input that nobody reads, too."""
    text = "0123456789abcde\n" * 65536
    assert run(shells, "cat", stdin=text).stdout == text
    assert run(shells, "true", stdin=text).returncode == 0
    assert run(shells, "echo", "next").stdout == "next\n"


def test_a_node_that_dies_while_a_command_runs(shells: Shells) -> None:
    """The command failed, once: it is not run again. The next one is."""
    done = run(shells, "bash", "-c", "echo said; kill -KILL $PPID")
    assert done.returncode not in (0, 1)
    assert run(shells, "echo", "next").stdout == "next\n"


def test_a_node_that_was_started_anew_since(shells: Shells, tmp_path: Path) -> None:
    """The command is run, once, by another server."""
    server = int(run(shells, "sh", "-c", "echo $PPID").stdout)
    os.kill(server, 9)
    run(shells, "bash", "-c", f"echo once >>{tmp_path / 'told'}")
    assert (tmp_path / "told").read_text() == "once\n"


def test_a_node_that_cannot_be_reached_is_a_status() -> None:
    """With what was said of it."""
    shells = Shells(python=lambda container: ("bash", "-c", f"echo {container} does not run >&2; exit 1"))
    done = run(shells, "true")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "here does not run\n")


def test_a_wait_that_is_broken_off_leaves_no_answer_behind(shells: Shells, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next command gets its own."""
    monkeypatch.setattr("cluster.shells.MORE_S", -1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        run(shells, "sh", "-c", "sleep 1; echo late", timeout_s=1.0)
    monkeypatch.undo()
    assert run(shells, "echo", "next").stdout == "next\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_has_his_groups_and_no_rights_of_root(shells: Shells) -> None:
    """As with ``docker exec --user``."""
    done = shells.run(
        "here", ("sh", "-c", "id; grep CapEff /proc/self/status"), user="nobody", home="/", stdin="", timeout_s=30
    )
    assert "(nobody)" in done.stdout
    assert "0(root)" not in done.stdout
    assert done.stdout.endswith("CapEff:\t0000000000000000\n")
