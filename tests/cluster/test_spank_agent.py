"""Shepherd and agent: suspension and restore end to end, and agents that are absent, faulty or restarted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import end
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
    """Yield one fake agent per GPU node, not started yet; the test's end removes agents and images."""
    agents = {node: FakeAgent(cluster, node) for node in ("c1", "c2")}
    for agent in agents.values():
        agent.stop_node_agent()
    yield agents
    for agent in agents.values():
        agent.remove()


@pytest.fixture
def short_wait(cluster: Cluster) -> Iterator[None]:
    """Configure the nodes to wait only two seconds for an agent if there is an image."""
    saved = cluster.exec("c1", "cat", PLUGSTACK)
    for node in ("c1", "c2"):
        cluster.shell(node, f"sed -i 's/$/ agent_wait=2s/' {PLUGSTACK}")
    yield
    for node in ("c1", "c2"):
        cluster.exec(node, "tee", PLUGSTACK, stdin=saved)


def suspended_on_c2(cluster: Cluster, agents: dict[str, FakeAgent]) -> str:
    """Return a job that has counted on c2 and is held in the queue with an image."""
    agents["c2"].start("restore")
    job = cluster.submit(*ON, "--nodelist=c2", script="#!/bin/bash\n" + COUNT)
    cluster.wait_for_output(job, "\n10\n")
    agents["c2"].suspend(job)
    cluster.wait_for_state(job, "PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
    wait_until("the job is held", lambda: cluster.job(job), lambda fields: fields["Priority"] == "0")
    return job


def release_to(cluster: Cluster, job: str, node: str) -> None:
    """Release a held job, so that it starts on the node."""
    wait_until("the node is free", lambda: cluster.nodes()[node], lambda state: state == "idle")
    cluster.exec("login", "scontrol", "update", f"jobid={job}", f"reqnodelist={node}")
    cluster.exec("login", "scontrol", "release", job)


def test_job_suspended_on_one_node_is_restored_on_another(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The job counts on c2, is dumped and requeued, and continues on c1; its output and exit status are complete."""
    job = suspended_on_c2(cluster, agents)
    agents["c1"].start("restore")
    release_to(cluster, job, "c1")
    assert outcome(cluster, job).exit_code == "5:0", agents["c1"].log()
    assert cluster.output(job) == COUNTED
    assert cluster.job(job)["Restarts"] == "1"
    (hello,) = agents["c1"].received("hello")
    assert (hello["image"], hello["root"], hello["restarts"], hello["streams"]) == ("1", "0", "1", 3)
    assert agents["c1"].received("exit")[0]["status"] == str(5 << 8)
    assert [run.state for run in cluster.runs(job, duplicates=True)][-1] == "FAILED"


def test_restored_job_receives_signals(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """After a restore, `scancel --batch --signal` reaches the script, and scancel ends it."""
    job = suspended_on_c2(cluster, agents)
    agents["c1"].start("restore")
    release_to(cluster, job, "c1")
    cluster.wait_for_output(job, "\n20\n")
    cluster.exec("login", "scancel", "--batch", "--signal=USR1", job, user="alice")
    cluster.wait_for_output(job, "got USR1")
    cluster.exec("login", "scancel", job, user="alice")
    assert outcome(cluster, job).state == "CANCELLED"


def test_job_with_image_but_without_agent_is_held(
    cluster: Cluster, agents: dict[str, FakeAgent], short_wait: None
) -> None:
    """Without an agent, the job with an image is requeued and held; on a node with an agent it resumes."""
    job = suspended_on_c2(cluster, agents)
    release_to(cluster, job, "c1")
    wait_until(
        "the job is held again", lambda: cluster.job(job), lambda job: (job["Restarts"], job["Priority"]) == ("2", "0")
    )
    agents["c1"].start("restore")
    release_to(cluster, job, "c1")
    assert outcome(cluster, job).exit_code == "5:0", agents["c1"].log()
    assert cluster.output(job) == COUNTED


def test_job_with_image_waits_for_agent(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """A job with an image waits for an agent that is restarting."""
    job = suspended_on_c2(cluster, agents)
    release_to(cluster, job, "c1")
    cluster.wait_for_state(job, "RUNNING")
    wait_until("the shepherd waits", lambda: cluster.run("c1", "pgrep", "-f", "affinode-shepherd").stdout)
    agents["c1"].start("restore")
    assert outcome(cluster, job).exit_code == "5:0", agents["c1"].log()


def test_job_starts_afresh_after_failed_restore(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """If the agent reports a failed restore and starts the job, the script finds that in its environment."""
    agents["c2"].start("start")
    job = cluster.submit(*ON, "--nodelist=c2", script=AGAIN)
    cluster.wait_for_output(job, "run 0")
    cluster.exec("c2", "mkdir", "-p", f"/shared/slurm-affinode/images/affinode.{job}")
    agents["c2"].start("restore")
    cluster.exec("login", "scontrol", "requeue", job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "run 1 1\n"


def test_agent_can_hold_job(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The job is not started; its output contains the reason."""
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
def test_faulty_agent_does_not_stop_job(cluster: Cluster, agents: dict[str, FakeAgent], behaviour: str) -> None:
    """The first start and the start after a requeue both run."""
    if behaviour != "absent":
        agents["c2"].start(behaviour)
    job = cluster.submit(*ON, "--nodelist=c2", script=AGAIN)
    cluster.wait_for_output(job, "run 0")
    cluster.exec("login", "scontrol", "requeue", job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "run 1\n"


def test_agent_and_shepherd_exchange_messages(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The agent receives the option, the root's PID and the wait status, and sends a line and a signal."""
    agents["c2"].start("say")
    body = "import signal, sys\nsignal.signal(10, lambda *_: sys.exit(3))\nwhile True:\n    signal.pause()\n"
    job = cluster.submit(*ON, "--nodelist=c2", script="#!/usr/bin/python3\n" + body)
    assert outcome(cluster, job).exit_code == "3:0"
    assert cluster.output(job) == "slurm-affinode: hello from the agent\n"
    (hello,) = agents["c2"].received("hello")
    assert hello["option"] == "window=300,util=2,mode=requeue,wake=auto,when=pressure"
    assert (hello["job"], hello["image"], hello["streams"]) == (job, "0", 3)
    assert int(hello["root"]) > 1
    (ended,) = agents["c2"].received("exit")
    assert ended["status"] == str(3 << 8)


def test_shepherd_reconnects_to_restarted_agent(cluster: Cluster, agents: dict[str, FakeAgent]) -> None:
    """The shepherd reconnects with the root's PID; the job is not affected."""
    agents["c2"].start("start")
    until_end = "until [ -e slurm-$SLURM_JOB_ID-end.out ]; do sleep 0.2; done"
    job = cluster.submit(*ON, "--nodelist=c2", script=f"#!/bin/bash\necho begins\n{until_end}\necho ends\nexit 5\n")
    cluster.wait_for_output(job, "begins")
    wait_until("hello was received", lambda: agents["c2"].received("hello"))
    agents["c2"].start("start")
    (hello,) = wait_until("hello was received again", lambda: agents["c2"].received("hello"))
    assert int(hello["root"]) > 1
    end(cluster, job)
    assert outcome(cluster, job).exit_code == "5:0"
    assert cluster.output(job) == "begins\nends\n"
