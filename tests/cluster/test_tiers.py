"""Images in three tiers on live nodes: a bad copy in the fast one, and a fast one that is full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster.driver import GPU_NODES, Cluster, wait_until
from cluster.sleepers import BY_HAND, asleep, configured, finish, idle_job, status, steps, wait_for_agents, wake

pytestmark = pytest.mark.cluster

MEMORY = "/mnt/affinode-images"


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """They answer."""
    wait_for_agents(cluster)


@contextmanager
def memory_tier(cluster: Cluster, size: str) -> Iterator[None]:
    """A tmpfs of so many bytes on each node with GPUs, used by the agents."""
    for node in GPU_NODES:
        cluster.shell(node, f"mkdir -p {MEMORY} && mount -t tmpfs -o size={size},mode=0700 tmpfs {MEMORY}")
    keys: dict[str, object] = {"tiers.memory": MEMORY, "tiers.memory_size": "4G", "tiers.memory_reserve": "64M"}
    try:
        with configured(cluster, **keys):
            yield
    finally:
        for node in GPU_NODES:
            cluster.shell(node, f"umount -l {MEMORY}; rmdir {MEMORY}")


def tiers_of(cluster: Cluster, node: str, job: str) -> list[str]:
    """Where that node sees the job's image complete."""
    text = cluster.run(node, "slurm-affinode", "images", "list", job, "--json").stdout
    return [image["tier"] for image in json.loads(text)["images"]]


def test_bit_flipped_in_the_fast_tier_is_restored_from_another(cluster: Cluster) -> None:
    """The copies in host memory and on the disk are bad: the shared one is used, the bad ones are apart and told of."""
    with memory_tier(cluster, "1g"):
        job = asleep(cluster, idle_job(idle=8), BY_HAND)
        node = cluster.job(job).get("BatchHost") or next(
            one for one in GPU_NODES if "memory" in tiers_of(cluster, one, job)
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
        cluster.wait_for_output(job, "restored on")
        listed = cluster.run(node, "slurm-affinode", "images", "list", job)
        assert listed.returncode == 1
        assert listed.stderr.count("set aside") == 2
        assert "is damaged" in str(status(cluster, job))
        output = finish(cluster, job)
        assert steps(output) == list(range(1, 9))


def test_fast_tier_that_is_full_leaves_it_to_the_next(cluster: Cluster) -> None:
    """The image does not fit into host memory: it goes to the disk, and the job comes back all the same."""
    with memory_tier(cluster, "1m"):
        job = asleep(cluster, idle_job(idle=8), BY_HAND)
        seen = wait_until(
            "the image is on a disk",
            lambda: [tiers_of(cluster, node, job) for node in GPU_NODES],
            lambda found: ["disk", "shared"] in found,
        )
        assert not any("memory" in tiers for tiers in seen)
        wake(cluster, job)
        assert steps(finish(cluster, job)) == list(range(1, 9))
