"""Jobs in place whose shepherds have not connected to a restarted agent yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from inplace_site import GIB, Node, asleep, awake

from slurm_affinode.suspension.inplace.gpu_sharing import Rules, unheard
from slurm_affinode.suspension.job.peers import Identity, NotAShepherd, Peer


def put(proc: Path, pid: int, pid_ns: int, parent: int, space: str, *argv: str) -> None:
    """Create a process in a fake ``/proc``."""
    (proc / str(pid) / "ns").mkdir(parents=True)
    (proc / str(pid) / "ns" / "pid").symlink_to(space)
    (proc / str(pid) / "stat").write_text(f"{pid} (x) S {parent} {' '.join(['0'] * 20)}")
    (proc / str(pid) / "status").write_text(f"NSpid:\t{pid}\t{pid_ns}\nUid:\t0\t0\t0\t0\n")
    (proc / str(pid) / "cmdline").write_bytes(b"".join(f"{word}\0".encode() for word in argv))


def shepherd(job: str, option: str, end: str = "--") -> tuple[str, ...]:
    return ("/x/shepherd", "9", job, "0", "0", "30", "/run/shepherd.sock", option, end, "/bin/sh", "script")


def test_job_of_process_is_found_by_its_shepherd(tmp_path: Path) -> None:
    """It may be several levels up, beyond a container's PID 1. Other modes and false shepherds do not count."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[1]")
    put(tmp_path, 10, 10, 1, "pid:[1]", "slurmstepd")
    put(tmp_path, 11, 1, 10, "pid:[2]", *shepherd("7", "window=900,mode=inplace"))
    put(tmp_path, 12, 2, 11, "pid:[2]", "sh", "script")
    put(tmp_path, 13, 1, 12, "pid:[3]", *shepherd("9", "mode=inplace"))  # a false shepherd
    put(tmp_path, 14, 2, 13, "pid:[3]", "worker")
    for number, argv in (
        (20, shepherd("8", "window=900,mode=requeue")), (30, shepherd("8", "mode=inplace", "-")),
        (40, shepherd("8", "mode=what")), (50, ("sh",)), (60, ()),
    ):  # fmt: skip
        put(tmp_path, number, 1, 10, "pid:[4]", *argv)
        put(tmp_path, number + 1, 2, number, "pid:[4]", "sh")
    put(tmp_path, 80, 2, 81, "pid:[5]", "sh")
    put(tmp_path, 81, 3, 80, "pid:[5]", "sh")

    def identify(peer: Peer) -> Identity:
        if peer.pid == 13:
            raise NotAShepherd("it is in a user namespace of its own")
        return Identity(7, peer.uid, peer.gid, peer.pid, 1)

    assert unheard([10, 12, 14, 21, 31, 41, 51, 61, 80, 99], tmp_path, identify) == {7: (12, 14)}


@pytest.mark.parametrize("known", [False, True])
def test_jobs_without_connection_count_as_awake(world, known):
    """They count as awake until their shepherds connect, which then report more."""
    others: dict[int, tuple[int, ...]] = {8: (900,)}
    queries: list[list[int]] = []

    def unheard_pids(pids: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
        queries.append(list(pids))
        return others

    node = Node(world, Rules(awake_limit_pct=70), unheard=unheard_pids)
    node.sleep()
    node.connection()
    node.cards.processes = lambda: {node.cards.uuid: {900: 20 * GIB}}
    node.cards.free_bytes = lambda device: 60 * GIB
    if known:
        node.agent.registry.put(replace(node.job(), job_id=8, init_pid=800))
    node.round()
    assert (awake(world), asleep(world)) == ((True, False) if known else (False, True))
    if not known:
        assert queries[-1] == [900]
        assert node.view()["waits"] == "it needs 48 GiB on GPU 0, and 36 GiB is left there: job 8 is busy"
        others.clear()
        node.round()
        assert awake(world)
