"""Tiers: what makes room, and for what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_affinode.checkpoint.interface import CheckpointError, NoRoom
from slurm_affinode.checkpoint.tier import Copy
from slurm_affinode.checkpoint.tiers import Tiers

from .conftest import JOB, MIB, Node, run_of


def test_what_is_on_the_disk_too_makes_room_in_memory(make_node: Callable[..., Node]) -> None:
    """Of several, what is wanted least goes, and no more of it than is needed."""
    node = make_node(memory=9 * MIB)
    often, seldom = node.dump(1), node.dump(2)
    for second in range(5):
        node.now += 10 + second
        node.tiers.demand.requested(often.manifest.key.name, node.now)
    third = node.dump(3, size=2 * MIB)
    assert node.where(often) == ["memory", "disk", "shared"]
    assert node.where(seldom) == ["disk", "shared"]
    assert node.where(third) == ["memory", "disk", "shared"]
    (begun,) = node.memory.begun()
    assert begun[0] == seldom.manifest
    assert 0 < begun[1] < 4 * MIB
    # What is left of it is taken up when it is wanted again.
    node.memory.remove(third)
    (copy, *_), _ = node.tiers.copies(run_of(seldom))
    before = node.file(node.memory, seldom).parent.parent.with_name("0001.tmp").stat().st_ino
    brought = node.tiers.pull(copy, expected_s=1.0)
    assert brought is not None
    assert brought.tier.name == "memory"
    node.memory.verify(brought.image)
    assert node.file(node.memory, seldom).parent.parent.stat().st_ino == before


def test_a_pull_ahead_of_time_does_not_drive_out_what_is_worth_more(make_node: Callable[..., Node]) -> None:
    """What is wanted in an hour is not put in place of what is wanted each minute."""
    node = make_node(memory=5 * MIB)
    first = node.dump(1)
    node.now += 3600
    second = node.dump(2)
    assert node.where(second) == ["memory", "disk", "shared"]
    for _ in range(200):
        node.now += 20
        node.tiers.demand.requested(second.manifest.key.name, node.now)
    (copy, *_), _ = node.tiers.copies(run_of(first))
    assert copy.tier.name == "disk"
    assert node.tiers.pull(copy, expected_s=1e6) is None
    assert node.tiers.pull(copy, expected_s=5.0) == Copy(
        replace(first, store=str(node.memory.path)), node.tiers.tiers[0]
    )


def test_host_memory_that_jobs_need_is_given_back(make_node: Callable[..., Node]) -> None:
    """Copies leave the tier when the node runs short; what is only there stays."""
    node = make_node()
    safe, only = node.dump(1), node.dump(2, publish=False, settle=False)
    node.left = -1
    node.tiers.relieve()
    assert node.where(only) == ["memory"]
    assert node.where(safe) == ["disk", "shared"]
    assert node.where(node.dump(3)) == ["disk", "shared"]  # and nothing comes in
    node.left = None
    assert node.where(node.dump(4)) == ["memory", "disk", "shared"]


def test_room_is_what_can_be_made(make_node: Callable[..., Node]) -> None:
    """A disk full of what is in the shared tier has room; one full of what is nowhere else has none."""
    node = make_node(memory=1, disk=6 * MIB)
    image = node.dump(1)
    assert node.where(image) == ["disk", "shared"]
    node.tiers.check_room(1001, 4 * MIB)
    node.shared.remove(image)
    node.shared.budget.reserve = 1 << 60
    with pytest.raises(NoRoom):
        node.tiers.check_room(1001, 4 * MIB)


@pytest.mark.parametrize("by", ["the agent's start", "the next dump"])
def test_a_tier_that_is_given_less_room_keeps_within_it(make_node: Callable[..., Node], by: str) -> None:
    """Configured anew: what is too much goes, and new images come in."""
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


def test_what_a_user_may_have_is_asked_before_anything_is_touched(make_node: Callable[..., Node]) -> None:
    """Where there is room enough, too; and where a tier takes nothing any more."""
    node = make_node()
    node.disk.budget.user_quota = 6 * MIB
    tiers = Tiers.of(node.disk, None)
    tiers.check_room(1001, 4 * MIB)
    with pytest.raises(NoRoom, match="user 1001 has 0 B of 6 MiB"):
        tiers.check_room(1001, 8 * MIB)
    node.disk.path.rename(node.disk.path.with_name("away"))
    with pytest.raises(NoRoom, match="not there any more"):
        tiers.check_room(1001, 4 * MIB)


def test_a_dump_in_memory_is_not_sent_past_a_disk_that_can_make_room(make_node: Callable[..., Node]) -> None:
    """It is on its way out, and worth there what it would take to load it from behind the disk."""
    node = make_node(disk=10 * MIB)
    older = [node.dump(1), node.dump(2)]
    node.now += 300
    for image in older:
        node.tiers.demand.requested(image.manifest.key.name, node.now)
    node.now += 60
    new = node.dump(3, publish=False)
    assert node.where(new) == ["memory", "disk"]
    assert sum("disk" in node.where(image) for image in older) == 1


def test_host_memory_is_promised_once(make_node: Callable[..., Node]) -> None:
    """Two dumps at once do not both count on what is left beside the jobs' memory."""
    node = make_node()
    node.left = 6 * MIB
    tier = node.tiers.tiers[0]
    writer = node.memory.begin(JOB, uid=1001, estimate=4 * MIB)
    assert tier.room() == 2 * MIB
    assert node.where(node.dump(7)) == ["disk", "shared"]
    writer.abandon()
    assert tier.room() == 6 * MIB


def test_one_copy_is_written_once_at_a_time(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file system that has no locks on directories."""
    node = make_node()
    image = node.dump(publish=False)
    monkeypatch.setattr("slurm_affinode.checkpoint.writer.lock", lambda fd: True)
    writer = node.shared.take_up(image)
    with pytest.raises(CheckpointError, match="somebody else is writing"):
        node.tiers.publish(JOB.name, 1)
    writer.leave()
    assert node.tiers.publish(JOB.name, 1)


def test_an_older_image_of_a_job_goes_before_all_others(make_node: Callable[..., Node]) -> None:
    """No run takes it any more, and its job's next dump is in its place; the job's newest image stays."""
    node = make_node(memory=9 * MIB)
    often, other = node.dump(1), node.dump(2)
    for _ in range(5):
        node.now += 10
        node.tiers.demand.requested(often.manifest.key.name, node.now)
    again = node.dump(1)
    assert (often.manifest.seq, again.manifest.seq) == (1, 2)
    assert node.where(again) == node.where(other) == ["memory", "disk", "shared"]
    assert node.where(often) == ["disk", "shared"]


def test_a_new_image_is_worth_what_it_would_take_to_load_it(make_node: Callable[..., Node]) -> None:
    """From the next tier, as those that are there already, and not from the one that it is written to."""
    node = make_node(memory=5 * MIB)
    node.tiers.retention._speeds["memory"] = 1e12
    first = node.dump(1)
    node.now += 60
    second = node.dump(2)
    assert node.where(second) == ["memory", "disk", "shared"]
    assert node.where(first) == ["disk", "shared"]


def test_two_nodes_that_fill_the_shared_tier_do_not_wait_for_each_other(make_node: Callable[..., Node]) -> None:
    """Half of each is there, and no room for the rest: the younger one makes way, and comes when there is some."""
    node, other = make_node(), make_node("c2")
    other.shared = node.shared
    other.tiers.retention.tiers = (*other.tiers.tiers[:2], node.tiers.tiers[2])
    older, younger = other.dump(7, publish=False), node.dump(8, publish=False)
    assert older.manifest.dumped_epoch == younger.manifest.dumped_epoch  # then it goes by the name
    for image, who in ((older, other), (younger, node)):
        looks = iter([False] * 80)
        who.tiers.stopping.is_set = lambda looks=looks: next(looks, True)  # type: ignore[method-assign]
        with pytest.raises(CheckpointError):
            who.tiers.publish(image.manifest.key.name, 1)
        who.tiers.stopping.is_set = lambda: False  # type: ignore[method-assign]
    sizes = [held for _, held in node.shared.begun()]
    node.shared.budget.quota = sum(sizes) + MIB
    with pytest.raises(NoRoom):
        other.tiers.publish("cluster.7", 1)  # the older one keeps what it has
    assert len(node.shared.begun()) == 2
    with pytest.raises(NoRoom):
        node.tiers.publish("cluster.8", 1)
    assert [facts for facts, _ in node.shared.begun()] == [older.manifest]
    assert node.told == [(8, "the tier shared is full; what was there of its image makes room for another")]
    assert other.tiers.publish("cluster.7", 1)
    with pytest.raises(NoRoom):
        node.tiers.publish("cluster.8", 1)
    node.shared.remove(older)
    assert node.tiers.publish("cluster.8", 1)
