"""Jobs asleep in place that are stopped, killed or signaled by Slurm, the kernel or an administrator."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.servers import BY_HAND, NODE, ask, frozen, in_place, put_to_sleep, serve, wait_awake
from cluster.sleepers import agent_pid, status, wait_for_agents

pytestmark = pytest.mark.cluster

MEMORY_MIB = 200
# The script reports SIGTERM and the exit status of its server.
SCRIPT = f"""trap 'echo got TERM' TERM
{WORKLOADS}/model_server.py --memory-mib {MEMORY_MIB} --port {{port}} &
while wait $!; status=$?; kill -0 $! 2>/dev/null; do :; done
echo ended with $status"""

# Pending signals of alice's processes with this command line, as the kernel prints them.
PENDING = 'for pid in $(pgrep -u alice -f "$1"); do grep ShdPnd: /proc/$pid/status; done'


def wait_for_pending(cluster: Cluster, number: signal.Signals, command: str) -> None:
    """Wait until this signal is pending for a process of alice whose command line matches the pattern."""
    wait_until(
        f"{number.name} is pending",
        lambda: cluster.run(NODE, "sh", "-c", PENDING, "sh", command).stdout.split()[1::2],
        lambda masks: any(int(mask, 16) >> (number - 1) & 1 for mask in masks),
    )


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def scripted(cluster: Cluster, port: int) -> str:
    """Return a sleeping job: a server below a script that supervises it."""
    script = "#!/bin/bash\n" + SCRIPT.format(port=port)
    job = cluster.submit("--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", BY_HAND, script=script)
    cluster.wait_for_output(job, "listening")
    put_to_sleep(cluster, job)
    return job


def test_sleeper_suspended_by_slurm_wakes_after_resume(cluster: Cluster) -> None:
    """A request waits, also in the two seconds between Slurm's SIGTSTP and SIGSTOP, and status gives the reason.

    Meanwhile no process runs; after the resume the request is answered.
    """
    server = serve(cluster, 8001, memory_mib=MEMORY_MIB)
    put_to_sleep(cluster, server.job)
    cluster.exec("login", "scontrol", "suspend", server.job)
    wait_for_pending(cluster, signal.SIGTSTP, "[m]odel_server.py.*--port 8001")
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(ask, cluster, server.url)
        seen = wait_until(
            "the request is seen, and Slurm stops it",
            lambda: in_place(cluster, server.job),
            lambda item: bool(item and item["suspended_by_slurm"] and item["waits"]),
        )
        assert seen is not None
        assert not seen["overdue"]
        resume = f"an operator resumes it with: scontrol resume {server.job}"
        assert seen["waits"] in (f"Slurm {does} it; {resume}" for does in ("has suspended", "is about to suspend"))
        assert frozen(cluster, server.job)
        cluster.exec("login", "scontrol", "resume", server.job)
        assert request.result()[0] == {"prediction": server.prediction, "number": 2}
    wait_awake(cluster, server.job)


def test_sleeper_with_killed_process_wakes(cluster: Cluster) -> None:
    """The script detects that its server was killed, as by the OOM killer, and ends."""
    job = scripted(cluster, 8001)
    cluster.shell(NODE, "kill -KILL $(pgrep -u alice -f '[m]odel_server.py.*--port 8001')")
    cluster.wait_for_state(job, "COMPLETED")
    assert "ended with 137" in cluster.output(job)


def test_signal_without_agent_is_delivered_later(cluster: Cluster) -> None:
    """The next agent detects the pending signal and wakes the job."""
    job = scripted(cluster, 8001)
    agent = agent_pid(cluster, NODE)
    cluster.shell(NODE, f"kill -STOP {agent}")
    try:
        cluster.exec("login", "scancel", "--batch", "--signal=TERM", job, user="alice")
        wait_for_pending(cluster, signal.SIGTERM, "[s]lurm_script")
    finally:
        cluster.shell(NODE, f"kill -KILL {agent}")
    cluster.wait_for_output(job, "got TERM")
    wait_for_agents(cluster)
    wait_awake(cluster, job)
    assert status(cluster, job)["jobs"][0]["last"]["text"].startswith("awake after ")
