"""Tiers: copies that are dropped to make room, and the images that they make room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_affinode.checkpoint.interface import CheckpointError, NoRoom
from slurm_affinode.checkpoint.store.retention import Copy
from slurm_affinode.checkpoint.store.tiers import Tiers

from ..conftest import JOB, MIB, Node, run_of


def test_copies_that_are_also_on_disk_make_room_in_memory(make_node: Callable[..., Node]) -> None:
    """The copy that has waited longest is dropped, and only as much of it as is needed."""
    node = make_node(memory=9 * MIB)
    older = node.dump(1)
    node.now += 60
    younger = node.dump(2)
    third = node.dump(3, size=2 * MIB)
    assert node.where(older) == ["disk", "shared"]
    assert node.where(younger) == ["memory", "disk", "shared"]
    assert node.where(third) == ["memory", "disk", "shared"]
    (begun,) = node.memory.begun()
    assert begun[0] == older.manifest
    assert 0 < begun[1] < 4 * MIB
    # The rest of it is reused when the image is brought again.
    node.memory.remove(third)
    (copy, *_), _ = node.tiers.copies(run_of(older))
    before = node.file(node.memory, older).parent.parent.with_name("0001.tmp").stat().st_ino
    brought = node.tiers.pull(copy, expected_s=1.0)
    assert brought is not None
    assert brought.tier.name == "memory"
    node.memory.verify(brought.image)
    assert node.file(node.memory, older).parent.parent.stat().st_ino == before


def test_pull_ahead_of_a_start_does_not_evict_more_valuable_copies(make_node: Callable[..., Node]) -> None:
    """An image needed in days does not replace one whose job has just been suspended."""
    node = make_node(memory=5 * MIB)
    first = node.dump(1)
    node.now += 3600
    second = node.dump(2)
    assert node.where(second) == ["memory", "disk", "shared"]
    node.now += 60
    (copy, *_), _ = node.tiers.copies(run_of(first))
    assert copy.tier.name == "disk"
    assert node.tiers.pull(copy, expected_s=1e6) is None
    assert node.tiers.pull(copy, expected_s=5.0) == Copy(
        replace(first, store=str(node.memory.path)), node.tiers.tiers[0]
    )


def test_host_memory_needed_by_jobs_is_released(make_node: Callable[..., Node]) -> None:
    """Copies leave the tier when the node runs short of memory; an only copy stays."""
    node = make_node()
    safe, only = node.dump(1), node.dump(2, publish=False, settle=False)
    node.left = -1
    node.tiers.relieve()
    assert node.where(only) == ["memory"]
    assert node.where(safe) == ["disk", "shared"]
    assert node.where(node.dump(3)) == ["disk", "shared"]  # and no image is added
    node.left = None
    assert node.where(node.dump(4)) == ["memory", "disk", "shared"]


def test_room_includes_copies_that_can_be_dropped(make_node: Callable[..., Node]) -> None:
    """A disk full of images that are also in the shared tier has room; one full of only copies has none."""
    node = make_node(memory=1, disk=6 * MIB)
    image = node.dump(1)
    assert node.where(image) == ["disk", "shared"]
    node.tiers.check_room(1001, 4 * MIB)
    node.shared.remove(image)
    node.shared.budget.reserve = 1 << 60
    with pytest.raises(NoRoom):
        node.tiers.check_room(1001, 4 * MIB)


@pytest.mark.parametrize("by", ["the agent's start", "the next dump"])
def test_tier_with_a_reduced_quota_drops_copies(make_node: Callable[..., Node], by: str) -> None:
    """The quota was changed in the configuration; new images are still added."""
    node = make_node()
    for job in (1, 2, 3, 4):
        node.dump(job)
        node.now += 100
    node.memory.budget.quota = 9 * MIB
    if by == "the agent's start":
        node.tiers.relieve()
        assert 4 * MIB < node.memory.usage().used <= 9 * MIB
    new = node.dump(5)
    assert node.where(new) == ["memory", "disk", "shared"]
    assert 4 * MIB < node.memory.usage().used <= 9 * MIB


def test_user_quota_is_checked_first(make_node: Callable[..., Node]) -> None:
    """It is checked even if there is room enough, or if the tier is unusable."""
    node = make_node()
    node.disk.budget.user_quota = 6 * MIB
    tiers = Tiers.of(node.disk, None)
    tiers.check_room(1001, 4 * MIB)
    with pytest.raises(NoRoom, match="user 1001 has 0 B of 6 MiB"):
        tiers.check_room(1001, 8 * MIB)
    node.disk.path.rename(node.disk.path.with_name("away"))
    with pytest.raises(NoRoom, match="no longer exists"):
        tiers.check_room(1001, 4 * MIB)


def test_dump_in_memory_is_copied_to_a_disk_that_can_make_room(make_node: Callable[..., Node]) -> None:
    """Its value on the disk is the time to load it from the tier behind the disk."""
    node = make_node(disk=10 * MIB)
    older = [node.dump(1), node.dump(2)]
    node.now += 360
    new = node.dump(3, publish=False)
    assert node.where(new) == ["memory", "disk"]
    assert sum("disk" in node.where(image) for image in older) == 1


def test_host_memory_is_reserved_once(make_node: Callable[..., Node]) -> None:
    """Two simultaneous dumps do not both count on the same free memory."""
    node = make_node()
    node.left = 6 * MIB
    tier = node.tiers.tiers[0]
    writer = node.memory.begin(JOB, uid=1001, estimate=4 * MIB)
    assert tier.room() == 2 * MIB
    assert node.where(node.dump(7)) == ["disk", "shared"]
    writer.abandon()
    assert tier.room() == 6 * MIB


def test_copy_is_written_by_one_process_at_a_time(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That also holds on file systems without locks on directories."""
    node = make_node()
    image = node.dump(publish=False)
    monkeypatch.setattr("slurm_affinode.checkpoint.image.writer.lock", lambda fd: True)
    writer = node.shared.take_up(image)
    with pytest.raises(CheckpointError, match="another process is writing"):
        node.tiers.publish(JOB.name, 1)
    writer.leave()
    assert node.tiers.publish(JOB.name, 1)


def test_superseded_image_of_a_job_is_dropped_first(make_node: Callable[..., Node]) -> None:
    """No attempt will restore it, since the job has a newer image, which stays."""
    node = make_node(memory=9 * MIB)
    other = node.dump(2)
    node.now += 60
    first = node.dump(1)
    again = node.dump(1)
    assert (first.manifest.seq, again.manifest.seq) == (1, 2)
    assert node.where(again) == node.where(other) == ["memory", "disk", "shared"]
    assert node.where(first) == ["disk", "shared"]


def test_value_of_a_new_image_is_the_time_to_load_it(make_node: Callable[..., Node]) -> None:
    """It is loaded from the next tier, like the present ones, not from the tier that it is written to."""
    node = make_node(memory=5 * MIB)
    node.tiers.retention._speeds["memory"] = 1e12
    first = node.dump(1)
    node.now += 60
    second = node.dump(2)
    assert node.where(second) == ["memory", "disk", "shared"]
    assert node.where(first) == ["disk", "shared"]


def test_nodes_that_fill_the_shared_tier_do_not_wait_for_each_other(make_node: Callable[..., Node]) -> None:
    """Half of each image is there, without room for the rest: the younger is removed, and copied when there is room."""
    node, other = make_node(), make_node("c2")
    other.shared = node.shared
    other.tiers.retention.tiers = (*other.tiers.tiers[:2], node.tiers.tiers[2])
    older, younger = other.dump(7, publish=False), node.dump(8, publish=False)
    assert older.manifest.dumped_epoch == younger.manifest.dumped_epoch  # then the names decide
    for image, who in ((older, other), (younger, node)):
        stops = iter([False] * 80)
        who.tiers.stopping.is_set = lambda stops=stops: next(stops, True)  # type: ignore[method-assign]
        with pytest.raises(CheckpointError):
            who.tiers.publish(image.manifest.key.name, 1)
        who.tiers.stopping.is_set = lambda: False  # type: ignore[method-assign]
    sizes = [held for _, held in node.shared.begun()]
    node.shared.budget.quota = sum(sizes) + MIB
    with pytest.raises(NoRoom):
        other.tiers.publish("cluster.7", 1)  # the older one keeps its part
    assert len(node.shared.begun()) == 2
    with pytest.raises(NoRoom):
        node.tiers.publish("cluster.8", 1)
    assert [facts for facts, _ in node.shared.begun()] == [older.manifest]
    assert node.reports == [(8, "the tier shared is full; the partial copy of its image is removed for another one")]
    assert other.tiers.publish("cluster.7", 1)
    with pytest.raises(NoRoom):
        node.tiers.publish("cluster.8", 1)
    node.shared.remove(older)
    assert node.tiers.publish("cluster.8", 1)
