"""Attacks by users who reuse PIDs or try to gain privileges through a restore."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phase_jobs import job_at_phase
from cluster.phases import continue_agent, stopping_at, wait_settled
from cluster.sleepers import LOCAL, agent_pid, each_once, finish, wait_asleep, wait_for_agents, wake

from .test_checkpoint import Drive, DriveError, drive, programs

__all__ = ["drive", "programs"]

pytestmark = pytest.mark.cluster

PROGRAM = Path(__file__).with_name("number_taker.py")
PLACE = "/home/alice/number-taker"
ALICE = 2001


@pytest.fixture
def taker(cluster: Cluster) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that starts a process of alice with a given PID on a node."""
    nodes: list[str] = []

    def take(node: str, number: int) -> None:
        nodes.append(node)
        cluster.shell(node, f"rm -rf {PLACE}; install -d -o alice -m 0777 {PLACE}")
        cluster.exec(node, "tee", f"{PLACE}/taker.py", stdin=PROGRAM.read_text())
        cluster.shell(
            node,
            'setsid -f /opt/slurm-affinode/bin/python "$1/taker.py" "$2" "$3" "$1" >"$1/log" 2>&1 </dev/null',
            PLACE, str(number), str(ALICE),
        )  # fmt: skip
        wait_until(
            f"a process of alice has PID {number}",
            lambda: cluster.run(node, "sh", "-c", f"ls {PLACE}; cat {PLACE}/log").stdout,
            lambda seen: "taken" in seen.split(),
        )

    yield take
    for node in nodes:
        cluster.shell(node, f"[ ! -e {PLACE}/pid ] || kill -KILL -- -$(cat {PLACE}/pid); rm -rf {PLACE}")


@pytest.mark.usefixtures("clean_queue")
def test_reused_pid_of_shepherd_runs_no_user_program(cluster: Cluster, taker: Callable[[str, int], None]) -> None:
    """The job is requeued during its restore, and PID 1 of namespaces of alice's gets the PID of its shepherd.

    Root runs no program that is mounted there, and the job resumes from its image afterwards.
    """
    wait_for_agents(cluster)
    with stopping_at(cluster, "restoring"):
        stopped = job_at_phase(cluster, "restoring")
        records = cluster.shell(stopped.node, f"tail -qn 1 {LOCAL}/journal/*.{stopped.job}*.jsonl").splitlines()
        facts = next(json.loads(line)["facts"] for line in records if '"restoring"' in line)
        cluster.exec("login", "scontrol", "requeuehold", stopped.job, user="alice")
        wait_until(
            "the shepherd is gone",
            lambda: cluster.run(stopped.node, "test", "-e", f"/proc/{facts['init_pid']}").returncode != 0,
        )
        taker(stopped.node, facts["init_pid"])
        continue_agent(cluster, stopped.node)
        wait_settled(cluster)
    assert cluster.run(stopped.node, "cat", f"{PLACE}/ran").stdout == ""
    assert agent_pid(cluster, stopped.node)
    wait_asleep(cluster, stopped.job)
    wake(cluster, stopped.job)
    assert each_once(finish(cluster, stopped.job, timeout_s=150))


@pytest.fixture
def rights(drive: Callable[..., Drive]) -> Drive:
    """Yield a drive for sessions with supplementary groups and kernel keys."""
    return drive("c1", program="rights.py")


def test_revoked_group_is_not_restored(rights: Drive) -> None:
    """The restore is refused before any process exists; it succeeds once the user has the group again."""
    rights("with_groups", [4, 6])
    rights("start", ["memory"])
    assert rights("rights") == [[4, 6]]
    rights("dump")
    rights("with_groups", [6])
    with pytest.raises(DriveError, match="would have group 4, which its owner does not have"):
        rights("restore")
    assert rights("members") == []
    rights("with_groups", [4, 6, 24])
    rights("restore")
    assert rights("rights") == [[4, 6]]
    assert rights("finish")["status"] == "0"


def test_tree_without_groups_is_restored_without_groups(rights: Drive) -> None:
    """CRIU would leave its own groups, which are those of root, to a process tree that has none."""
    rights("start", ["memory"])
    rights("dump")
    rights("restore")
    assert rights("rights") == [[]]
    assert rights("finish")["status"] == "0"


def test_restored_tree_does_not_have_the_keys_of_root(rights: Drive) -> None:
    """The tree gets a session keyring of its own instead of that of the restoring process."""
    rights("start", ["keys"])
    rights("dump")
    rights("plant_key")
    rights("restore")
    done = rights("finish")
    assert done["found"] == {"keys": "ok"}
    assert done["status"] == "0"


def test_tree_cannot_be_traced_by_its_user_while_it_is_verified(rights: Drive) -> None:
    """Another process of alice tries to get descriptors and memory of every new process meanwhile."""
    rights("start", ["memory", "files"])
    rights("dump")
    report = rights("restore_watched")
    assert report["seen"] > 0
    assert report["attempts"] > 100
    assert report["got"] == []
    assert rights("finish")["status"] == "0"
