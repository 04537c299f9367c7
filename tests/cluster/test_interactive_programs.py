"""Interactive programs in batch jobs: a terminal and a notebook server keep their state when the job moves."""

from __future__ import annotations

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.programs import ATTACH, CELL, CELL_AGAIN, TERMINAL, connection, notebook_server, run_cell, type_lines
from cluster.sleepers import BY_HAND, suspend, wait_asleep, wait_for_agents, wake

pytestmark = pytest.mark.cluster

ON_C1 = ("--partition=gpu", "--gres=gpu:1", "--nodelist=c1")


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def move(cluster: Cluster, job: str) -> None:
    """Suspend a job on c1 and restore it on c2."""
    suspend(cluster, job)
    wait_asleep(cluster, job)
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    wake(cluster, job)
    wait_until(
        "it is restored on c2",
        lambda: cluster.output(job),
        lambda printed: "slurm-affinode: restored on c2" in printed,
    )


# --- a terminal


def test_terminal_in_batch_job_moves_with_its_programs(cluster: Cluster) -> None:
    """A shell keeps its variable and its program with GPU memory; the terminal is attached on the new node."""
    job = cluster.submit(BY_HAND, *ON_C1, script=TERMINAL)
    cluster.wait_for_output(job, "ready")
    result = "/home/alice/slurm-terminal.out"
    program = f"{WORKLOADS}/idle_after.py --busy 0 --idle 20 --again 1 >{result}"
    type_lines(cluster, job, "answer=41", f"{program}; echo answer $((answer + 1)) in $(tty) >>{result}")
    wait_until(
        "the program runs", lambda: cluster.run("login", "cat", result).stdout, lambda printed: "step" in printed
    )
    move(cluster, job)
    printed = wait_until(
        "the shell continues", lambda: cluster.run("login", "cat", result).stdout, lambda printed: "answer" in printed
    )
    assert "memory=intact" in printed
    assert "answer 42 in /dev/pts/" in printed
    type_lines(cluster, job, f"echo attached on $(cat /etc/hostname) with $answer >>{result}", "stty size")
    assert "with 41\n" in cluster.exec("login", "cat", result)
    cluster.exec("login", "scancel", job, user="alice")


def test_attached_terminal_prevents_suspension(cluster: Cluster) -> None:
    """A job with an attached terminal is in use."""
    job = cluster.submit(BY_HAND, *ON_C1, script=TERMINAL)
    cluster.wait_for_output(job, "ready")
    attach = f'(sleep 60 | TERM=xterm script --quiet --command "{ATTACH}" /dev/null >/dev/null 2>&1 &)'
    cluster.shell("login", attach, job, user="alice")
    done = wait_until(
        "the step is known",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
        lambda done: "it runs srun steps" in done.stderr,
    )
    assert done.returncode == 1
    assert cluster.job(job)["Restarts"] == "0"
    cluster.exec("login", "scancel", job, user="alice")


# --- a notebook


def test_notebook_kernel_moves_with_its_variables(cluster: Cluster) -> None:
    """A Jupyter server with a kernel that holds GPU memory, started with the scripts of the guide for Open OnDemand.

    A client reconnects at the address of the new node, and all links of its pages lead there.
    """
    job = notebook_server(cluster, BY_HAND, *ON_C1)
    before = connection(cluster, "c1")
    kernel, printed = run_cell(cluster, before, "new", CELL)
    assert printed == "ready\n"
    move(cluster, job)
    after = connection(cluster, "c2")
    assert (after["port"], after["password"]) == (before["port"], before["password"])
    assert run_cell(cluster, after, kernel, CELL_AGAIN) == (kernel, "42 True True\n")
    assert run_cell(cluster, after, "new", "print(6 * 7)")[1] == "42\n"
    page = cluster.exec("login", "curl", "--silent", "http://c2:8899/node/c2/8899/login")
    assert "/node/c2/8899/static/" in page
    assert "/node/c1/" not in page
    cluster.exec("login", "scancel", job, user="alice")
