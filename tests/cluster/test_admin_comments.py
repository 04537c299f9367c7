"""The line about a job's GPUs that the agent writes into its AdminComment, as accounting has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.test_agent import CONFIG, restart_agent

pytestmark = pytest.mark.cluster

WORK = f"exec {WORKLOADS}/idle_after.py --busy 8 --idle 6"
OTHERS = "JS1:None"


@pytest.fixture
def enabled(cluster: Cluster) -> Iterator[None]:
    """Enable the line on both GPU nodes; the test's end undoes this."""
    saved = {node: cluster.exec(node, "cat", CONFIG) for node in ("c1", "c2")}
    for node, text in saved.items():
        assert "[agent]\n" in text
        cluster.exec(node, "tee", CONFIG, stdin=text.replace("[agent]\n", "[agent]\nadmin_comment = true\n"))
        restart_agent(cluster, node, "TERM")
    yield
    for node, text in saved.items():
        cluster.exec(node, "tee", CONFIG, stdin=text)
        restart_agent(cluster, node, "TERM")


def comment(cluster: Cluster, job: str) -> str:
    """Return the AdminComment of a job in accounting."""
    return cluster.exec("c1", "sacct", "-nXP", "-j", job, "-o", "AdminComment").strip()


def commented(cluster: Cluster, job: str, good: Callable[[str], bool] = bool) -> str:
    text = wait_until(f"job {job} has an AdminComment", lambda: comment(cluster, job), good)
    assert isinstance(text, str)
    return text


def test_ended_job_has_line_about_its_gpus_in_accounting(cluster: Cluster, enabled: None) -> None:
    """The first node of a job writes about its own GPUs; the text of another program is kept."""
    jobs = [
        cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1", wrap=WORK),
        cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c1", wrap=WORK),
    ]
    cluster.wait_for_state(jobs[1], "RUNNING")
    cluster.exec("c1", "scontrol", "update", f"JobId={jobs[1]}", f"AdminComment={OTHERS}")
    for job in jobs:
        cluster.wait_for_state(job, "COMPLETED")
    text = commented(cluster, jobs[0])
    match = re.fullmatch(
        r"slurm-affinode: c1: 1 GPU, busy ([0-9.]+) % of the measured time, idle 0\.[0-9]+ GPU-h, "
        r"unknown 0\.[0-9]+ GPU-h, memory peak ([0-9.]+) GiB",
        text,
    )
    assert match is not None, text
    busy, peak = map(float, match.groups())
    assert 2 < busy < 90  # about ten seconds of the job, of its prolog, and of the time until its epilog
    assert 0.25 <= peak < 4  # it allocates 256 MiB
    wide = cluster.submit("--partition=gpu", "--nodes=2", "--gres=gpu:1", wrap=f"srun {WORK.removeprefix('exec ')}")
    cluster.wait_for_state(wide, "COMPLETED")
    assert commented(cluster, wide).startswith("slurm-affinode: c1, 1 of 2 nodes: 1 GPU, busy ")
    assert comment(cluster, jobs[1]) == OTHERS
