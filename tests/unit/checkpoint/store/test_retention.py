"""Retention: which jobs are known to wait for their images, and the eviction of the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..conftest import MIB, Node


@pytest.mark.parametrize("where", ["this node", "another node"])
def test_image_of_restored_job_makes_room_first(make_node: Callable[..., Node], where: str) -> None:
    """Even if the other image is older: a job waits for that one."""
    node = make_node(memory=9 * MIB)
    older, younger = node.dump(1), node.dump(2)
    retention = node.tiers.retention
    ids = {(image.job, image.manifest.seq) for image in (older, younger)}
    retention.waiting(ids)
    if where == "this node":
        retention.restored(younger.job, younger.manifest.seq)
    retention.waiting(ids - {(younger.job, younger.manifest.seq)})
    node.now += 600
    node.dump(3)
    assert node.where(older) == ["memory", "disk", "shared"]
    assert node.where(younger) == ["disk", "shared"]


def test_image_that_has_waited_longest_makes_room_first(make_node: Callable[..., Node]) -> None:
    """Jobs without a note are not known to have been restored, and count as waiting."""
    node = make_node(memory=9 * MIB)
    older = node.dump(1)
    node.now += 600
    younger = node.dump(2)
    node.tiers.retention.waiting(set())
    node.now += 60
    node.dump(3)
    assert node.where(older) == ["disk", "shared"]
    assert node.where(younger) == ["memory", "disk", "shared"]


def test_next_suspension_of_a_restored_job_waits(make_node: Callable[..., Node]) -> None:
    """So does a job that waits again for the image of its lost attempt."""
    node = make_node()
    retention, first = node.tiers.retention, node.dump(1)
    retention.restored(first.job, 1)
    retention.restored(first.job, 1)
    again = node.dump(1)
    assert (first.manifest.seq, again.manifest.seq) == (1, 2)
    node.now += 60
    assert retention._waited_s(first.manifest) is None
    assert retention._waited_s(again.manifest) == pytest.approx(60)
    retention.waiting({(first.job, 1)})
    assert retention._waited_s(first.manifest) == pytest.approx(60)


def test_ended_jobs_are_forgotten(make_node: Callable[..., Node]) -> None:
    """Their number is bounded by that of the images."""
    retention = make_node().tiers.retention
    for number in (1, 2):
        retention.restored(f"cluster.{number}", 1)
    retention.keep({"cluster.2"})
    retention.keep({"cluster.2"})
    assert retention._restored == {"cluster.2": 1}
