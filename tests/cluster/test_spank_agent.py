"""Shepherd and agent: the loop of suspension and restore end to end, and agents that are absent, mad or restarted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, wait_until
from cluster.spank import FakeAgent, outcome

pytestmark = pytest.mark.cluster

ON = ("--partition=gpu", "--gpu-suspend-idle=5m,util=2", "--requeue")
COUNT = "trap 'echo got USR1' USR1\nfor i in $(seq 60); do echo $i; sleep 0.2; done\nexit 5\n"
COUNTED = "".join(f"{i}\n" for i in range(1, 61))
AGAIN = """#!/bin/bash
echo run ${SLURM_RESTART_COUNT:-0} ${SLURM_AFFINODE_RESTORE_FAILED:-}
[ -n "$SLURM_RESTART_COUNT" ] || sleep 300
"""
PLUGSTACK = "/etc/slurm/plugstack.conf.d/slurm-affinode.conf"


@pytest.fixture
def agents(cluster: Cluster) -> Iterator[dict[str, FakeAgent]]:
    """One for each node with GPUs; none runs yet. They are gone after the test, and images with them."""
    agents = {node: FakeAgent(cluster, node) for node in ("c1", "c2")}
    for agent in agents.values():
        agent.make_way()
    yield agents
    for agent in agents.values():
        agent.remove()


@pytest.fixture
def short_wait(cluster: Cluster) -> Iterator[None]:
    """The nodes wait two seconds for an agent when there is an image."""
    saved = cluster.exec("c1", "cat", PLUGSTACK)
    for node in ("c1", "c2"):
        cluster.shell(node, f"sed -i 's/$/ agent_wait=2s/' {PLUGSTACK}")
    yield
    for node in ("c1", "c2"):
        cluster.exec(node, "tee", PLUGSTACK, stdin=saved)


def suspended_on_c2(cluster: Cluster, agents: dict[str, FakeAgent]) -> str:
    """A job that has counted a while on c2 and is held in the queue with an image."""
    agents["c2"].start("restore")
    job = cluster.submit(*ON, "--nodelist=c2", script="#!/bin/bash\n" + COUNT)
    cluster.wait_for_output(job, "\n10\n")
    agents["c2"].suspend(job)
    cluster.wait_for_state(job, "PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
    wait_until("the job is held", lambda: cluster.job(job), lambda fields: fields["Priority"] == "0")
    return job


def move_to(cluster: Cluster, job: str, node: str) -> None:
    """Lets a held job run on a node."""
    wait_until("the node is free", lambda: cluster.nodes()[node], lambda state: state == "idle")
    cluster.exec("login", "scontrol", "update", f"jobid={job}", f"reqnodelist={node}")
    cluster.exec("login", "scontrol", "release", job)


def test_suspended_on_one_node_restored_on_the_other(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """One job: it counts on c2, is imaged, requeued, goes on counting on c1; its output and its status are whole."""
    job = suspended_on_c2(cluster, agents)
    agents["c1"].start("restore")
    move_to(cluster, job, "c1")
    assert outcome(cluster, job).exit_code == "5:0", agents["c1"].log()
    assert cluster.output(job) == COUNTED
    assert cluster.job(job)["Restarts"] == "1"
    (hello,) = agents["c1"].heard("hello")
    assert (hello["image"], hello["root"], hello["restarts"], hello["streams"]) == ("1", "0", "1", 3)
    assert agents["c1"].heard("exit")[0]["status"] == str(5 << 8)
    assert [run.state for run in cluster.runs(job, duplicates=True)][-1] == "FAILED"


def test_restored_job_gets_its_signals(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """After a restore `scancel --batch --signal` reaches the script, and scancel ends it."""
    job = suspended_on_c2(cluster, agents)
    agents["c1"].start("restore")
    move_to(cluster, job, "c1")
    cluster.wait_for_output(job, "\n20\n")
    cluster.exec("login", "scancel", "--batch", "--signal=USR1", job, user="alice")
    cluster.wait_for_output(job, "got USR1")
    cluster.exec("login", "scancel", job, user="alice")
    assert outcome(cluster, job).state == "CANCELLED"


def test_image_and_no_agent_is_held_not_begun_anew(
    cluster: Cluster, agents: dict[str, FakeAgent], short_wait: None
) -> None:
    """Where nobody can restore the image the job is put back, held; released to a node with an agent it goes on."""
    job = suspended_on_c2(cluster, agents)
    move_to(cluster, job, "c1")
    wait_until(
        "the job is held again", lambda: cluster.job(job), lambda job: (job["Restarts"], job["Priority"]) == ("2", "0")
    )
    agents["c1"].start("restore")
    move_to(cluster, job, "c1")
    assert outcome(cluster, job).exit_code == "5:0", agents["c1"].log()
    assert cluster.output(job) == COUNTED


def test_image_and_agent_that_comes_late(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """A job with an image waits for an agent that is being restarted."""
    job = suspended_on_c2(cluster, agents)
    move_to(cluster, job, "c1")
    cluster.wait_for_state(job, "RUNNING")
    wait_until("the shepherd waits", lambda: cluster.run("c1", "pgrep", "-f", "affinode-shepherd").stdout)
    agents["c1"].start("restore")
    assert outcome(cluster, job).exit_code == "5:0", agents["c1"].log()


def test_failed_restore_starts_afresh_and_says_so(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The agent may say: start, the restore failed; the script finds that in its environment."""
    agents["c2"].start("start")
    job = cluster.submit(*ON, "--nodelist=c2", script=AGAIN)
    cluster.wait_for_output(job, "run 0")
    cluster.exec("c2", "mkdir", "-p", f"/shared/slurm-affinode/images/affinode.{job}")
    agents["c2"].start("restore")
    cluster.exec("login", "scontrol", "requeue", job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "run 1 1\n"


def test_agent_that_holds(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The job is not started; the reason stands in its output."""
    job = cluster.submit(*ON, "--nodelist=c2", script=AGAIN)
    cluster.wait_for_output(job, "run 0")
    agents["c2"].start("hold")
    cluster.exec("login", "scontrol", "requeue", job)
    wait_until(
        "the job is held", lambda: cluster.job(job), lambda job: (job["Restarts"], job["Priority"]) == ("2", "0")
    )
    assert "slurm-affinode: the job was not started: the image is damaged" in cluster.output(job)
    assert "run 1" not in cluster.output(job)


@pytest.mark.parametrize("behaviour", ["silent", "garbage", "truncated", "close", "flood", "absent"])
def test_mad_agent_does_not_stop_a_job(cluster: Cluster, agents: dict[str, FakeAgent], behaviour: str) -> None:
    """First start and requeued start both run, whatever sits on the socket."""
    if behaviour != "absent":
        agents["c2"].start(behaviour)
    job = cluster.submit(*ON, "--nodelist=c2", script=AGAIN)
    cluster.wait_for_output(job, "run 0")
    cluster.exec("login", "scontrol", "requeue", job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "run 1\n"


def test_agent_is_told_of_start_and_end_and_heard(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """Hello with the option and the root's number, a line and a signal for the job, the wait status at the end."""
    agents["c2"].start("say")
    body = "import signal, sys\nsignal.signal(10, lambda *_: sys.exit(3))\nwhile True:\n    signal.pause()\n"
    job = cluster.submit(*ON, "--nodelist=c2", script="#!/usr/bin/python3\n" + body)
    assert outcome(cluster, job).exit_code == "3:0"
    assert cluster.output(job) == "slurm-affinode: hello from the agent\n"
    (hello,) = agents["c2"].heard("hello")
    assert hello["option"] == "window=300,util=2,mode=requeue,wake=auto,when=pressure"
    assert (hello["job"], hello["root"], hello["image"], hello["streams"]) == (job, "2", "0", 3)
    (ended,) = agents["c2"].heard("exit")
    assert ended["status"] == str(3 << 8)


def test_restarted_agent_hears_again_and_the_job_runs_on(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The connection is made again, with the root's number; the job notices nothing."""
    agents["c2"].start("start")
    job = cluster.submit(*ON, "--nodelist=c2", script="#!/bin/bash\n" + COUNT)
    cluster.wait_for_output(job, "\n5\n")
    wait_until("hello was heard", lambda: agents["c2"].heard("hello"))
    agents["c2"].start("start")
    (hello,) = wait_until("hello was heard again", lambda: agents["c2"].heard("hello"))
    assert hello["root"] == "2"
    assert outcome(cluster, job).exit_code == "5:0"
    assert cluster.output(job) == COUNTED
