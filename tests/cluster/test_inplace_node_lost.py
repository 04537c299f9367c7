"""Lose the node at the beginning of a phase of in-place sleep: the server starts from its beginning, or ends."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster.driver import Cluster, ClusterError, wait_until
from cluster.phase_jobs import IN_PLACE, assert_nothing_left, every_other, row_of, server_at_phase
from cluster.servers import BY_HAND, NODE, ask, ledger, put_to_sleep, serve
from cluster.sleepers import wait_for_agents

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def wait_until_missed(cluster: Cluster, missed: Callable[[], bool]) -> None:
    """Wait until Slurm notices that the job is missing on the recovered node."""
    for _ in range(30):
        cluster.register(NODE)
        with contextlib.suppress(ClusterError):
            wait_until("it is missed", missed, timeout_s=5)
            return
    raise AssertionError("Slurm does not miss the job")


@pytest.mark.parametrize("phase", every_other(IN_PLACE))
def test_server_starts_afresh_after_node_loss_at_phase(cluster: Cluster, phase: str) -> None:
    """Without an image, Slurm restarts the job from its beginning; comment and status give the reason."""
    with server_at_phase(cluster, phase) as server:
        cluster.kill(NODE)
        cluster.start(NODE)
    wait_for_agents(cluster)
    wait_until_missed(cluster, lambda: cluster.job(server.job)["Restarts"] == "1")
    wait_until(
        "it serves again",
        lambda: cluster.run("login", "curl", "--silent", "--fail", f"{server.url}/health").returncode == 0,
        timeout_s=150,
    )
    answer, _ = ask(cluster, server.url)
    assert answer["number"] == 1
    assert_nothing_left(cluster, server.job)
    comment = cluster.comment(server.job)
    assert comment.startswith(f"lost: its processes on {NODE} ended while it was suspended")
    assert row_of(cluster, server.job)["said"] == comment
    shown = cluster.exec("login", "slurm-affinode", "status", server.job, user="alice")
    assert "lost: its processes" in shown
    assert ledger(cluster, server.job)[-1]["ended_ms"] is not None
    put_to_sleep(cluster, server.job)
    assert ask(cluster, server.url)[0] == {"prediction": answer["prediction"], "number": 2}


def test_job_without_requeue_ends_after_node_loss(cluster: Cluster) -> None:
    """Slurm ends the job; no process, journal or note is left."""
    server = serve(cluster, 8001, BY_HAND, "--no-requeue")
    put_to_sleep(cluster, server.job)
    cluster.kill(NODE)
    cluster.start(NODE)
    wait_for_agents(cluster)
    wait_until_missed(cluster, lambda: cluster.job(server.job)["JobState"] == "NODE_FAIL")
    assert_nothing_left(cluster, server.job)


# Response times of slurmd in milliseconds, one a line. Argument: seconds.
RESPONSES = r"""
end=$((SECONDS + $1))
while [ "$SECONDS" -lt "$end" ]; do
  began=$(date +%s%N)
  scontrol show slurmd >/dev/null || echo 60000
  echo $((($(date +%s%N) - began) / 1000000))
  sleep 0.1
done
"""


def median_ms(cluster: Cluster, seconds: int) -> float:
    """Return the median response time of slurmd during some seconds."""
    lines = cluster.shell(NODE, RESPONSES, str(seconds), timeout_s=seconds + 60).split()
    return statistics.median(map(int, lines))


def test_sleep_and_wake_do_not_delay_slurmd(cluster: Cluster) -> None:
    """slurmd responds as fast during repeated sleeps and wakes of a server as while the server is awake."""
    server = serve(cluster, 8000)
    awake = median_ms(cluster, 10)
    stop = threading.Event()

    def cycle() -> None:
        while not stop.is_set():
            put_to_sleep(cluster, server.job)
            ask(cluster, server.url)

    with ThreadPoolExecutor(1) as pool:
        cycles = pool.submit(cycle)
        try:
            busy = median_ms(cluster, 20)
        finally:
            stop.set()
        cycles.result()
    assert len(ledger(cluster, server.job)) > 1
    # A node is declared failed after SlurmdTimeout, 15 s here; the machine has other work in between.
    assert busy < 3 * awake + 1000


def test_sleeper_ends_and_starts_again_after_timeout_of_slurmd(cluster: Cluster) -> None:
    """slurmctld declares the node failed and requeues the job while the old attempt sleeps there.

    When slurmd responds again, the old processes end, the job starts again, and the node is not drained.
    """
    server = serve(cluster, 8000)
    put_to_sleep(cluster, server.job)
    pid = cluster.exec(NODE, "cat", "/run/slurmd.pid").strip()
    old = cluster.shell(NODE, "pgrep -u alice -f model_server").split()
    cluster.shell(NODE, f"kill -STOP {pid}")
    try:
        wait_until("the node has failed", lambda: cluster.nodes()[NODE].startswith("down"), timeout_s=120)
    finally:
        cluster.shell(NODE, f"kill -CONT {pid}")
    wait_until("the job runs again", lambda: cluster.job(server.job)["Restarts"] == "1", timeout_s=120)
    cluster.wait_for_state(server.job, "RUNNING", timeout_s=120)
    wait_until(
        "it serves again",
        lambda: cluster.run("login", "curl", "--silent", "--fail", f"{server.url}/health").returncode == 0,
    )
    assert not set(old) & set(cluster.shell(NODE, "pgrep -u alice -f model_server").split())
    assert cluster.nodes()[NODE] in ("allocated", "mixed")
    cluster.exec("login", "scancel", server.job)
    assert_nothing_left(cluster, server.job)
