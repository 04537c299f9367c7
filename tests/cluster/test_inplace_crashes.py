"""Kill the agent or the CUDA helper at the beginning of a phase of in-place sleep: the server survives."""

from __future__ import annotations

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phase_jobs import IN_PLACE, assert_nothing_left, every_other, row_of, server_at_phase
from cluster.phases import continue_agent, kill_stopped
from cluster.servers import NODE, Server, ask, in_place, put_to_sleep, wait_awake
from cluster.sleepers import journals, wait_for_agents

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HELPER = "[c]heckpoint.cuda.helper"


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def answers(cluster: Cluster, server: Server, number: int) -> None:
    """Assert that the server answers a request and is awake, and that no record of its sleep is left."""
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": number}
    wait_awake(cluster, server.job)
    assert_nothing_left(cluster, server.job)


@pytest.mark.parametrize("phase", IN_PLACE)
def test_server_survives_agent_killed_at_phase(cluster: Cluster, phase: str) -> None:
    """The next agent finds the job running or asleep; status shows the event, and the job can sleep again."""
    with server_at_phase(cluster, phase) as server:
        kill_stopped(cluster, NODE)
    wait_for_agents(cluster)
    if phase == "frozen":
        assert in_place(cluster, server.job) is not None
    answers(cluster, server, 2)
    row = row_of(cluster, server.job)
    if phase == "locking":
        assert row["said"].startswith("runs on: the agent was stopped: rolled back: it was locking")
    else:
        assert row["last"]["text"].startswith("awake after ")
    put_to_sleep(cluster, server.job)
    answers(cluster, server, 3)
    assert cluster.job(server.job)["Restarts"] == "0"


@pytest.mark.parametrize("phase", every_other(IN_PLACE))
def test_server_survives_cuda_helper_killed_at_phase(cluster: Cluster, phase: str) -> None:
    """The step is rolled back with this reason, or another helper completes it."""
    with server_at_phase(cluster, phase) as server:
        cluster.shell(NODE, f"kill -KILL $(pgrep -f {HELPER})")
        continue_agent(cluster, NODE)
        wait_until("the attempt is over", lambda: journals(cluster, NODE), lambda seen: seen in ([], ["frozen"]))
    row = row_of(cluster, server.job)
    if phase in ("parked", "frozen"):
        assert row["state"] == "asleep"
    elif phase != "waking" and row["state"] != "asleep":  # otherwise it had completed the step
        assert "the helper for the CUDA driver was ended by signal 9" in row["last"]["text"]
    answers(cluster, server, 2)
    assert cluster.job(server.job)["Restarts"] == "0"
