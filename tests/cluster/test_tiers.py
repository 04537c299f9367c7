"""Images in three tiers on live nodes: damaged copies in the fast tier, a full fast tier, compressed images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from cluster.driver import GPU_NODES, Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    SHARED,
    asleep,
    configured,
    continue_criu,
    each_once,
    finish,
    hold_criu,
    idle_job,
    pausing_criu,
    status,
    wait_asleep,
    wait_for_agents,
    wait_for_held_criu,
    wake,
)

pytestmark = pytest.mark.cluster

MEMORY = "/mnt/affinode-images"


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


@contextmanager
def memory_tier(
    cluster: Cluster,
    size: str,
    agents: Callable[..., AbstractContextManager[None]] = configured,
    **more: object,
) -> Iterator[None]:
    """Mount a tmpfs on each GPU node as memory tier of the agents; ``more``: other keys of ``[suspend]``."""
    for node in GPU_NODES:
        cluster.shell(node, f"mkdir -p {MEMORY} && mount -t tmpfs -o size={size},mode=0700 tmpfs {MEMORY}")
    keys = {"tiers.memory": MEMORY, "tiers.memory_size": "4G", "tiers.memory_reserve": "64M", **more}
    try:
        with agents(cluster, **keys):
            yield
    finally:
        for node in GPU_NODES:
            cluster.shell(node, f"umount -l {MEMORY}; rmdir {MEMORY}")


def tiers_of(cluster: Cluster, node: str, job: str) -> list[str]:
    """Return the tiers with a complete image of the job, as seen from the node."""
    text = cluster.run(node, "slurm-affinode", "images", "list", job, "--json").stdout
    return [image["tier"] for image in json.loads(text)["images"]]


def compressed(cluster: Cluster, job: str) -> list[str]:
    """Return the paths of the compressed files of the job's image in the shared store."""
    return cluster.shell("login", f"ls {SHARED}/images/*.{job}/0001/criu/*.zst").split()


def test_damaged_copy_is_replaced_by_another_tier(cluster: Cluster) -> None:
    """The copies in memory and on disk are damaged: they are set aside and reported, and the shared one is used."""
    with memory_tier(cluster, "1g"):
        job = asleep(cluster, idle_job(), BY_HAND)
        node = cluster.job(job).get("BatchHost") or next(
            item for item in GPU_NODES if "memory" in tiers_of(cluster, item, job)
        )
        assert tiers_of(cluster, node, job) == ["memory", "disk", "shared"]
        for place in (MEMORY, "/var/lib/slurm-affinode/images"):
            cluster.shell(
                node,
                'file=$(ls -S "$1"/*."$2"/0001/criu/pages-*.img | head -n 1); '
                "printf '\\x5a' | dd of=\"$file\" bs=1 seek=4242 conv=notrunc status=none",
                place, job,
            )  # fmt: skip
        cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={node}")
        wake(cluster, job)
        cluster.wait_for_state(job, "RUNNING", timeout_s=90)
        # Printed when the pages are verified, while the tree is still held.
        cluster.wait_for_output(job, "restored on")
        wait_until(
            "status reports the damage", lambda: str(status(cluster, job)), lambda printed: "is damaged" in printed
        )
        listed = cluster.run(node, "slurm-affinode", "images", "list", job)
        assert listed.returncode == 1
        assert listed.stderr.count("set aside") == 2
        output = finish(cluster, job)
        assert each_once(output)


def test_full_memory_tier_falls_back_to_disk(cluster: Cluster) -> None:
    """An image that does not fit into the memory tier is written to disk and restored from there."""
    with memory_tier(cluster, "1m"):
        job = asleep(cluster, idle_job(), BY_HAND)
        seen = wait_until(
            "the image is on a disk",
            lambda: [tiers_of(cluster, node, job) for node in GPU_NODES],
            lambda result: ["disk", "shared"] in result,
        )
        assert not any("memory" in tiers for tiers in seen)
        wake(cluster, job)
        assert each_once(finish(cluster, job))


def test_memory_tier_filled_during_dump_falls_back_to_disk(cluster: Cluster) -> None:
    """Another writer fills the tmpfs before CRIU writes there: the tree is dumped again, to disk."""
    with memory_tier(cluster, "768m", pausing_criu):
        job = cluster.submit(BY_HAND, script=idle_job())
        cluster.wait_for_output(job, "step number=2")
        node = cluster.job(job)["BatchHost"]
        hold_criu(cluster, node, "before", "dump")
        cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")
        wait_for_held_criu(cluster, node, "before", "dump")
        assert cluster.run(node, "sh", "-c", f"ls -d {MEMORY}/*.{job}/0001.tmp").returncode == 0
        cluster.shell(node, f"fallocate -l $(($(stat -f -c '%a * %S' {MEMORY}) - 5 * 1024 * 1024)) {MEMORY}/others")
        continue_criu(cluster, node)
        wait_asleep(cluster, job)
        cluster.shell(node, f"rm {MEMORY}/others")
        assert tiers_of(cluster, node, job) == ["disk", "shared"]
        assert "did not fit" in str(status(cluster, job))
        assert cluster.run(node, "sh", "-c", f"ls {MEMORY}/*.{job}").stdout == ""
        wake(cluster, job)
        assert each_once(finish(cluster, job))


def test_compressed_image_is_prefetched_to_planned_node(cluster: Cluster) -> None:
    """The job was suspended on c1 and is planned on c2: its image is unpacked into the memory of c2 in advance."""
    with memory_tier(cluster, "1g", **{"tiers.compress": 3, "tiers.prefetch": "1h"}):
        job = asleep(cluster, idle_job("--nodelist=c1"), BY_HAND)
        packed = compressed(cluster, job)
        others = cluster.submit(
            "--partition=gpu", "--gres=gpu:2", "--nodelist=c2", "--time=10", wrap="sleep 600", user="bob"
        )
        cluster.wait_for_state(others, "RUNNING")
        cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2")
        wake(cluster, job)
        wait_until(
            "the image is in the memory of c2",
            lambda: tiers_of(cluster, "c2", job),
            lambda result: result == ["memory", "shared"],
        )
        assert cluster.job(job)["JobState"] == "PENDING"
        # From here on, the shared copy cannot be read.
        cluster.shell("login", 'for file; do truncate -s 0 "$file"; done', *packed)
        cluster.exec("login", "scancel", others, user="bob")
        output = finish(cluster, job)
        assert each_once(output)
        assert "restored on c2" in output


def test_compressed_image_is_unpacked_to_disk(cluster: Cluster) -> None:
    """Without prefetch, the restore on another node copies the image to that node's disk."""
    with configured(cluster, **{"tiers.compress": 3, "tiers.prefetch": "0s"}):
        job = asleep(cluster, idle_job("--nodelist=c1"), BY_HAND)
        assert compressed(cluster, job)
        assert tiers_of(cluster, "c2", job) == ["shared"]
        cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2")
        wake(cluster, job)
        output = cluster.wait_for_output(job, "restored on c2")
        assert tiers_of(cluster, "c2", job) == ["disk", "shared"]
        output = finish(cluster, job)
        assert each_once(output)
