"""Tiers: copies that are not what was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_affinode.checkpoint.interface import ImageDamaged

from .conftest import JOB, LATER, Node


@pytest.mark.parametrize("bad", ["memory", "disk", "shared"])
def test_a_flipped_bit_in_one_tier_is_put_aside(make_node: Callable[..., Node], bad: str) -> None:
    """The copy of another tier is used; the bad one is kept apart and told of."""
    node = make_node()
    image = node.dump()
    store = {"memory": node.memory, "disk": node.disk, "shared": node.shared}[bad]
    node.flip(store, image)
    if bad == "shared":
        node.memory.remove(image)  # else it need not be brought
    # From the bad one on: as on a node that has no faster one.
    copies, _ = node.tiers.copies(LATER)
    start = [one.tier.name for one in copies].index(bad)
    sound = node.tiers.sound([*copies[start:], *copies[:start]])
    assert sound.tier.name != bad
    sound.tier.store.verify(sound.image)
    assert bad not in node.where(image)
    assert [job for job, _ in node.told] == [123]
    assert "contents have changed; set aside" in node.told[0][1]
    (aside,) = store.aside()
    assert aside.startswith(f"{JOB.name}/0001.")
    assert store.sweep([LATER], cluster="cluster", young_s=-1) == []
    assert store.sweep([], cluster="cluster", young_s=-1) == [aside]


def test_a_flipped_bit_in_every_tier_is_an_error(make_node: Callable[..., Node]) -> None:
    """The last copy stays where it is, and each is named."""
    node = make_node()
    image = node.dump()
    for store in node.tiers.stores:
        node.flip(store, image)
    with pytest.raises(ImageDamaged, match=r"memory: .*; disk: .*; shared: "):
        node.tiers.sound(node.tiers.copies(LATER)[0])
    assert node.where(image) == ["shared"]


def test_a_damaged_copy_is_not_published(make_node: Callable[..., Node]) -> None:
    """The copy to the shared tier is made from the one that is sound."""
    node = make_node()
    image = node.dump(publish=False)
    node.flip(node.memory, image)
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["disk", "shared"]
    node.shared.verify(image)
