"""Jobs that hold a connection to a service of the node, such as SSSD, are suspended and connect again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.driver import GPU_NODES, WORKLOADS, Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    UNTIL_FINISH,
    configured,
    finish,
    status,
    suspend,
    wait_asleep,
    wait_for_agents,
    wake,
)

pytestmark = pytest.mark.cluster

SSSD = "/var/lib/sss/pipes/nss"
OTHER = "/run/other-service/socket"
PROGRAM = "/run/name_service.py"
PROGRAMS = Path(__file__).parent
JOB = f"""#!/bin/bash
#SBATCH --partition=gpu
#SBATCH --gres=gpu:1
#SBATCH {BY_HAND}
python3 slurm-client.out SOCKET &
exec {WORKLOADS}/idle_after.py --busy 0 --idle 1 {UNTIL_FINISH} --again 0
"""


@pytest.fixture(autouse=True)
def services(cluster: Cluster) -> Iterator[None]:
    """Run both services on the GPU nodes; wait until the agents respond."""
    for node in GPU_NODES:
        cluster.exec(node, "tee", PROGRAM, stdin=(PROGRAMS / "name_service.py").read_text())
        for path in (SSSD, OTHER):
            cluster.shell(node, f"setsid -f python3 {PROGRAM} $1 >{PROGRAM}.log 2>&1 </dev/null", path)
            wait_until(
                f"{path} exists",
                lambda at=(node, path): cluster.run(at[0], "test", "-S", at[1]).returncode == 0,  # type: ignore[misc]
            )
    cluster.exec(
        "login", "tee", "/home/alice/slurm-client.out", user="alice", stdin=(PROGRAMS / "name_client.py").read_text()
    )
    wait_for_agents(cluster)
    yield
    for node in GPU_NODES:
        cluster.shell(
            node,
            f"pkill -f '^python3 {PROGRAM}'; rm -rf /var/lib/sss {Path(OTHER).parent} {PROGRAM}*",
        )


def ask(cluster: Cluster, job: str, number: int, question: str = "who", *, wait: bool = True) -> str:
    """Let the job ask the service; return the output of the job, with the answer if it is waited for."""
    cluster.shell("login", f"(echo {question}) >.ask && mv .ask slurm-ask-{number}.out", user="alice")
    return cluster.wait_for_output(job, f"answer {number}") if wait else ""


def started(cluster: Cluster, socket: str) -> str:
    """Submit the job on c1, and return its ID once it has asked the service."""
    job = cluster.submit("--nodelist=c1", script=JOB.replace("SOCKET", socket))
    cluster.wait_for_output(job, "step number=2")
    ask(cluster, job, 1)
    return job


def test_connection_to_sssd_is_closed_by_a_move(cluster: Cluster) -> None:
    """The client sees the end of the stream on the other node, and connects to the service there.

    The job is suspended a second time before the client has used its closed connection.
    """
    job = started(cluster, SSSD)
    for node in ("c2", "c1"):
        suspend(cluster, job)
        wait_asleep(cluster, job)
        cluster.exec("login", "scontrol", "update", f"jobid={job}", f"nodelist={node}")
        wake(cluster, job)
        cluster.wait_for_state(job, "RUNNING")
        assert cluster.job(job)["NodeList"] == node
    output = ask(cluster, job, 2)
    assert "the connection was closed" in output
    assert "answer 2 2 1" in output
    finish(cluster, job)


def test_request_to_service_in_progress_is_refused(cluster: Cluster) -> None:
    """``status`` names it; the job continues, and is suspended when the answer has arrived."""
    job = started(cluster, SSSD)
    # The service answers the first line when it may, and reads the second one only then.
    ask(cluster, job, 2, "slow; echo who", wait=False)
    refusals = wait_until(
        "status names the request",
        lambda: [problem["text"] for problem in status(cluster, job)["jobs"][0]["next"].get("against", ())],
    )
    assert refusals == [next(text for text in refusals if f"has a request to {SSSD} in progress" in text)]
    done = cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
    assert f"has a request to {SSSD} in progress" in done.stderr
    cluster.exec("c1", "touch", str(Path(SSSD).with_suffix(".go")))
    cluster.wait_for_output(job, "answer 2")
    ask(cluster, job, 3)
    suspend(cluster, job)
    wait_asleep(cluster, job)
    wake(cluster, job)
    assert "the connection was closed" in ask(cluster, job, 4)
    finish(cluster, job)


def test_connection_to_other_service_is_kept_unless_listed(cluster: Cluster) -> None:
    """The suspension fails by name, and the job continues; with the socket in the site's list it moves."""
    job = started(cluster, OTHER)
    done = cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
    assert "connected to a UNIX socket outside of the job" in done.stdout + done.stderr
    assert "answer 2 1 2" in ask(cluster, job, 2)
    with configured(cluster, services=["/run/other-service/*"]):
        suspend(cluster, job)
        wait_asleep(cluster, job)
        wake(cluster, job)
        assert "answer 3 2 1" in ask(cluster, job, 3)
    finish(cluster, job)
