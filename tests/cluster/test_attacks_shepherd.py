"""Attacks by programs of users that pose as a shepherd, started as PID 1 by a setuid program of the site."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import elf
import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import kill_agent, status, wait_for_agents
from cluster.spank import OPTION

pytestmark = pytest.mark.cluster

SOURCES = Path(__file__).resolve().parents[1] / "spank" / "attacks"
DIRECTORY = "/opt/attack"
STARTER, PROGRAM = f"{DIRECTORY}/setuid_starter", f"{DIRECTORY}/false_shepherd.py"
SHEPHERD = "/usr/local/libexec/slurm-affinode-shepherd"
ANNOUNCEMENTS = "/run/slurm-affinode/shepherds"
NODE = "c1"
TAKEN = re.compile(r"job \d+: (?:starts|runs already|starts again)")


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the setuid starter, linked statically because the libc of the node differs from that of this machine."""
    compiler = shutil.which("gcc")
    assert compiler is not None, "gcc is not installed"
    built = tmp_path_factory.mktemp("attack") / "setuid_starter"
    subprocess.run((compiler, "-O2", "-static", "-o", str(built), str(SOURCES / "setuid_starter.c")), check=True)
    return built.read_bytes()


@pytest.fixture(autouse=True)
def node(cluster: Cluster, starter: bytes) -> Iterator[None]:
    """Install the starter on the node, and restart the agent, so that its log has no entries about the user."""
    program = (SOURCES / "false_shepherd.py").read_text()
    cluster.exec(NODE, "mkdir", "-p", DIRECTORY)
    cluster.exec(NODE, "sh", "-c", f"base64 -d >{STARTER}", stdin=base64.b64encode(starter).decode())
    cluster.exec(NODE, "tee", PROGRAM, stdin=program)
    cluster.shell(NODE, f"chmod 4755 {STARTER}; cp {SHEPHERD} {DIRECTORY}/copy; chmod 755 {DIRECTORY}/copy")
    kill_agent(cluster, NODE)
    wait_for_agents(cluster)
    yield
    cluster.shell(NODE, f"rm -rf {DIRECTORY}")


def attack(cluster: Cluster, command: str, *options: str, lead: str = "") -> tuple[str, str]:
    """Run a command of ``PROGRAM`` as PID 1 in a job; return the output of the job and the log of the agent."""
    began = time.time()
    run = f"python3 {PROGRAM} through {STARTER} {command}".replace("JOB", "$SLURM_JOB_ID")
    script = f"#!/bin/bash\n{lead}\n{run}\necho over\n"
    job = cluster.submit("--partition=gpu", f"--nodelist={NODE}", *options, script=script)
    output = cluster.wait_for_output(job, "over\n")
    log = wait_until(
        "the agent has logged the connection", lambda: cluster.logs(began)[NODE],
        lambda text: "connection closed" in text or len(TAKEN.findall(text)) > options.count(OPTION), timeout_s=60,
    )  # fmt: skip
    return output, log


def refusals(log: str) -> list[str]:
    """Return the reasons why the agent has closed connections."""
    return re.findall(r"uid 2001, process \d+: connection closed: (.*)", log)


@pytest.mark.main
def test_false_shepherd_in_a_job_without_the_option_is_refused(cluster: Cluster) -> None:
    """PID 1 of a PID namespace of root, with its own mount namespace, inside a job, but not a shepherd."""
    output, log = attack(cluster, "hello JOB")
    assert "pid 1: the agent replied b''" in output
    assert not TAKEN.search(log)
    assert any("no shepherd was announced for job" in why for why in refusals(log)), log


def test_false_shepherd_below_a_real_one_is_refused(cluster: Cluster) -> None:
    """The job has the option, and its real shepherd remains the only one."""
    output, log = attack(cluster, "hello JOB", OPTION, lead="sleep 2")
    assert "pid 1: the agent replied b''" in output
    assert len(TAKEN.findall(log)) == 1
    assert refusals(log), log


@pytest.mark.parametrize("shepherd", [f"{DIRECTORY}/copy", SHEPHERD], ids=["copy", "installed"])
def test_shepherd_started_by_user_is_refused(cluster: Cluster, shepherd: str) -> None:
    """The user starts the shepherd's own program, or a copy of it, as PID 1."""
    _, log = attack(cluster, f"exec {shepherd} JOB")
    assert not TAKEN.search(log)
    assert any("no shepherd was announced for job" in why for why in refusals(log)), log


@pytest.mark.parametrize("arguments", [("hello",), ("exec", SHEPHERD)], ids=["hello", "exec"])
def test_script_in_place_of_its_shepherd_is_refused(cluster: Cluster, arguments: tuple[str, ...]) -> None:
    """At the process limit of the user, the script is PID 1; it connects to the agent or executes the shepherd."""
    began = time.time()
    words = ", ".join(repr(word) for word in ("python3", PROGRAM, *arguments))
    script = f"#!/usr/bin/python3\nimport os\nos.execv('/usr/bin/python3', ({words}, os.environ['SLURM_JOB_ID']))\n"
    options = ("--propagate=NPROC", "--partition=gpu", f"--nodelist={NODE}", OPTION)
    argv = ("prlimit", "--nproc=1:1", "sbatch", "--parsable", *options)
    cluster.exec("login", *argv, user="alice", stdin=script)
    log = wait_until(
        "the agent has logged the connection", lambda: cluster.logs(began)[NODE],
        lambda text: "connection closed" in text or TAKEN.search(text), timeout_s=60,
    )  # fmt: skip
    assert not TAKEN.search(log)
    assert any("no shepherd was announced for job" in why for why in refusals(log)), log


# --- the announcement


def announcements(cluster: Cluster) -> list[str]:
    """Return owner, mode and name of all files that announce shepherds on the node."""
    script = f"cd {ANNOUNCEMENTS} 2>/dev/null && stat -c '%U %a %n' .[!.]* * 2>/dev/null || true"
    return cluster.shell(NODE, script).splitlines()


@pytest.mark.main
def test_shepherd_is_announced_as_long_as_its_job_runs(cluster: Cluster) -> None:
    """The file belongs to root and is readable by root alone; an agent that starts later accepts the shepherd."""
    job = cluster.submit("--partition=gpu", f"--nodelist={NODE}", OPTION, wrap="echo up; sleep 60")
    cluster.wait_for_output(job, "up")
    assert announcements(cluster) == [f"root 600 {job}"]
    assert cluster.exec(NODE, "stat", "-c", "%U %a", ANNOUNCEMENTS) == "root 700\n"
    kill_agent(cluster, NODE)
    wait_for_agents(cluster)
    wait_until("the next agent accepts it", lambda: status(cluster, job))
    cluster.exec("login", "scancel", job)
    wait_until("the announcement is removed", lambda: announcements(cluster), lambda result: not result)


def test_announcement_of_killed_keeper_is_removed(cluster: Cluster) -> None:
    """The epilog removes the announcement."""
    job = cluster.submit("--partition=gpu", f"--nodelist={NODE}", OPTION, wrap="echo up; sleep 60")
    cluster.wait_for_output(job, "up")
    cluster.shell(NODE, f"kill -KILL $(sed -n 's/^keeper=//p' {ANNOUNCEMENTS}/{job})")
    wait_until("the announcement is removed", lambda: announcements(cluster), lambda result: not result)


def test_job_without_announced_shepherd_runs_without_option(cluster: Cluster) -> None:
    """Users can write to the directory, so the announcements in it are not trusted."""
    cluster.shell(NODE, f"chmod 777 {ANNOUNCEMENTS}")
    try:
        job = cluster.submit("--partition=gpu", f"--nodelist={NODE}", OPTION, wrap="[ $$ -gt 2 ] && echo plain")
        output = cluster.wait_for_output(job, "plain\n")
    finally:
        cluster.shell(NODE, f"chmod 700 {ANNOUNCEMENTS}")
    assert f"--gpu-suspend-idle has no effect: {ANNOUNCEMENTS}: not a directory that only root can change" in output


@pytest.mark.parametrize("path", ["/usr/local/lib/slurm/slurm_affinode.so", SHEPHERD], ids=["plugin", "shepherd"])
def test_binaries_are_hardened(cluster: Cluster, path: str) -> None:
    data = base64.b64decode(cluster.exec(NODE, "base64", path))
    result = elf.read(data)
    assert (result.shared, result.relro, result.now, result.executable_stack) == (True, True, True, False)
    assert not result.interpreted
    assert b"__stack_chk_fail" in data or b"stack smashing detected" in data
    assert b"__snprintf_chk" in data or b"buffer overflow detected" in data
