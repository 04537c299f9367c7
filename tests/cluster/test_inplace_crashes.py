"""Agent, helper and node that die where a phase of a sleep in place begins: the server lives on, or starts anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phases import go_on, kill_stopped, stopping_at, wait_for_stop
from cluster.servers import (
    BY_HAND,
    JOURNAL,
    NODE,
    Server,
    ask,
    in_place,
    ledger,
    put_to_sleep,
    serve,
    wait_awake,
)
from cluster.sleepers import SHARED, journals, status, wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PHASES = ("locking", "locked", "parked", "frozen", "waking")
ATTEMPTS = 5
HELPER = "[c]heckpoint.cuda_helper"


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """They answer."""
    wait_for_agents(cluster)


def through(cluster: Cluster, phase: str) -> bool:
    """Whether the journal of the node is beyond a phase."""
    seen = journals(cluster, NODE)
    if phase == "waking":
        return not seen
    return any(PHASES.index(one) > PHASES.index(phase) for one in seen)


@contextmanager
def caught(cluster: Cluster, phase: str) -> Iterator[Server]:
    """A server whose agent stands still where ``phase`` begins."""
    server = serve(cluster, 8001, BY_HAND)
    for _ in range(ATTEMPTS):
        if phase == "waking":
            put_to_sleep(cluster, server.job)
        with stopping_at(cluster, phase, NODE):
            # An agent that stands still does not answer who asked.
            verb = "wake" if phase == "waking" else "suspend --no-wait"
            ask_for = f"setsid -f slurm-affinode {verb} {server.job} </dev/null >/dev/null 2>&1"
            cluster.shell("login", ask_for, user="alice")
            if wait_for_stop(cluster, lambda: through(cluster, phase)) is not None:
                yield server
                return
        if phase != "waking":
            wake(cluster, server.job)
        wait_awake(cluster, server.job)
    raise AssertionError(f"none of {ATTEMPTS} agents was caught where {phase} begins")


def row_of(cluster: Cluster, job: str) -> dict[str, Any]:
    """What status says of a job, as soon as an agent knows it."""
    rows: list[dict[str, Any]] = wait_until("an agent knows it", lambda: status(cluster, job).get("jobs") or [])
    return rows[0]


def answers(cluster: Cluster, server: Server, number: int) -> None:
    """It is asked, and answers rightly, awake or asleep; then it is awake, and nothing is left of its sleep."""
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": number}
    wait_awake(cluster, server.job)
    nothing_left(cluster, server.job)


def nothing_left(cluster: Cluster, job: str) -> None:
    """No journal, no claim, no note."""
    wait_until("its journal is closed", lambda: cluster.run(NODE, "ls", JOURNAL).stdout == "")
    left = cluster.run("login", "sh", "-c", f"ls -d {SHARED}/claims/*.{job}.* {SHARED}/asleep/*.{job}.json").stdout
    assert left == ""


@pytest.mark.parametrize("phase", PHASES)
def test_agent_killed_where_a_phase_begins(cluster: Cluster, phase: str) -> None:
    """The next one has it running, or asleep and ready to wake; status says what happened; it can sleep once more."""
    with caught(cluster, phase) as server:
        kill_stopped(cluster, NODE)
    wait_for_agents(cluster)
    if phase == "frozen":
        assert in_place(cluster, server.job) is not None
    answers(cluster, server, 2)
    row = row_of(cluster, server.job)
    if phase == "locking":
        assert row["said"].startswith("runs on: the agent was stopped: taken back: it was locking")
    else:
        assert row["last"]["text"].startswith("awake after ")
    put_to_sleep(cluster, server.job)
    answers(cluster, server, 3)
    assert cluster.job(server.job)["Restarts"] == "0"


@pytest.mark.parametrize("phase", PHASES)
def test_helper_for_the_driver_killed_where_a_phase_begins(cluster: Cluster, phase: str) -> None:
    """What it was about to do is taken back with that reason, or done by another one."""
    with caught(cluster, phase) as server:
        cluster.shell(NODE, f"kill -KILL $(pgrep -f {HELPER})")
        go_on(cluster, NODE)
        wait_until("the attempt is over", lambda: journals(cluster, NODE), lambda seen: seen in ([], ["frozen"]))
    row = row_of(cluster, server.job)
    if phase in ("parked", "frozen"):
        assert row["state"] == "asleep"
    elif phase != "waking" and row["state"] != "asleep":  # else it had done that, and its answer was on the way
        assert "the helper for the CUDA driver was ended by signal 9" in row["last"]["text"]
    answers(cluster, server, 2)
    assert cluster.job(server.job)["Restarts"] == "0"


@pytest.mark.parametrize("phase", PHASES)
def test_node_lost_where_a_phase_begins(cluster: Cluster, phase: str) -> None:
    """There is no image: Slurm starts it from its beginning; comment and status say why, nothing of before is left."""
    with caught(cluster, phase) as server:
        cluster.kill(NODE)
        cluster.start(NODE)
    wait_for_agents(cluster)
    wait_until("it is requeued", lambda: cluster.job(server.job)["Restarts"], lambda n: n == "1", timeout_s=150)
    wait_until(
        "it serves again",
        lambda: cluster.run("login", "curl", "--silent", "--fail", f"{server.url}/health").returncode == 0,
        timeout_s=150,
    )
    answer, _ = ask(cluster, server.url)
    assert answer["number"] == 1
    nothing_left(cluster, server.job)
    comment = cluster.exec("login", "squeue", "--noheader", f"--jobs={server.job}", "--format=%k")
    assert comment.startswith(f"lost: its processes on {NODE} ended while it was suspended")
    assert row_of(cluster, server.job)["said"] == comment.strip()
    shown = cluster.exec("login", "slurm-affinode", "status", server.job, user="alice")
    assert "lost: its processes" in shown
    assert ledger(cluster, server.job)[-1]["ended_ms"] is not None
    put_to_sleep(cluster, server.job)
    assert ask(cluster, server.url)[0] == {"prediction": answer["prediction"], "number": 2}


def test_node_lost_and_the_job_may_not_be_requeued(cluster: Cluster) -> None:
    """It is over, as Slurm does it; nothing of it is left."""
    server = serve(cluster, 8001, BY_HAND, "--no-requeue")
    put_to_sleep(cluster, server.job)
    cluster.kill(NODE)
    cluster.start(NODE)
    cluster.wait_for_state(server.job, "NODE_FAIL", timeout_s=150)
    wait_for_agents(cluster)
    nothing_left(cluster, server.job)
