"""Attacks by users who reuse PIDs, or who try to gain rights through a restore."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.caught import catch
from cluster.driver import Cluster, wait_until
from cluster.phases import go_on, stopping_at, wait_settled
from cluster.sleepers import LOCAL, agent_pid, each_once, finish, wait_asleep, wait_for_agents, wake

from .test_checkpoint import Drive, DriveError, drive, programs

__all__ = ["drive", "programs"]

pytestmark = [pytest.mark.cluster, pytest.mark.main]

PROGRAM = Path(__file__).with_name("number_taker.py")
PLACE = "/home/alice/number-taker"
ALICE = 2001


@pytest.fixture
def taker(cluster: Cluster) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that gives a PID on a node to a process of alice's."""
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
            f"a process of alice's has number {number}",
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
        caught = catch(cluster, "restoring")
        records = cluster.shell(caught.node, f"tail -qn 1 {LOCAL}/journal/*.{caught.job}*.jsonl").splitlines()
        facts = next(json.loads(line)["facts"] for line in records if '"restoring"' in line)
        cluster.exec("login", "scontrol", "requeuehold", caught.job, user="alice")
        wait_until(
            "the shepherd is gone",
            lambda: cluster.run(caught.node, "test", "-e", f"/proc/{facts['init_pid']}").returncode != 0,
        )
        taker(caught.node, facts["init_pid"])
        go_on(cluster, caught.node)
        wait_settled(cluster)
    assert cluster.run(caught.node, "cat", f"{PLACE}/ran").stdout == ""
    assert agent_pid(cluster, caught.node)
    wait_asleep(cluster, caught.job)
    wake(cluster, caught.job)
    assert each_once(finish(cluster, caught.job, timeout_s=150))


@pytest.fixture
def rights(drive: Callable[..., Drive]) -> Drive:
    """A drive that dumps and restores, with groups and keys."""
    return drive("c1", program="rights.py")


def test_revoked_group_is_not_restored(rights: Drive) -> None:
    """The restore is refused before any process exists; with the group it succeeds."""
    rights("with_groups", [4, 6])
    rights("start", ["memory"])
    assert rights("rights") == [[4, 6]]
    rights("dump")
    rights("with_groups", [6])
    with pytest.raises(DriveError, match="would have group 4, which its user does not have any more"):
        rights("restore")
    assert rights("members") == []
    rights("with_groups", [4, 6, 24])
    rights("restore")
    assert rights("rights") == [[4, 6]]
    assert rights("finish")["status"] == "0"


def test_tree_without_groups_is_restored_without_groups(rights: Drive) -> None:
    """CRIU leaves its own groups to a tree that has none: they were root's."""
    rights("start", ["memory"])
    rights("dump")
    rights("restore")
    assert rights("rights") == [[]]
    assert rights("finish")["status"] == "0"


def test_restored_tree_does_not_have_the_keys_of_root(rights: Drive) -> None:
    """It gets a session keyring of its own instead of the keyring of the restoring process."""
    rights("start", ["keys"])
    rights("dump")
    rights("plant_key")
    rights("restore")
    done = rights("finish")
    assert done["found"] == {"keys": "ok"}
    assert done["status"] == "0"


def test_tree_cannot_be_traced_by_its_user_while_it_is_verified(rights: Drive) -> None:
    """Meanwhile another process of alice's requests descriptors and memory of every new process."""
    rights("start", ["memory", "files"])
    rights("dump")
    told = rights("restore_watched")
    assert told["seen"] > 0
    assert told["asked"] > 100
    assert told["got"] == []
    assert rights("finish")["status"] == "0"
