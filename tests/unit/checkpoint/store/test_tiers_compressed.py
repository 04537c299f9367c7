"""Tiers: compressed images in the shared tier."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import compression
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import Image, ImageDamaged
from slurm_affinode.checkpoint.store.image_store import DirectoryStore

from ..conftest import JOB, KEY, LATER, MANIFEST, MIB, SMALL, Node, whole


@pytest.fixture
def packing_node(make_node: Callable[..., Node]) -> Node:
    """Return a node whose shared tier is compressed."""
    pytest.importorskip("zstandard")
    node = make_node()
    node.tiers.retention.tiers = (*node.tiers.tiers[:2], replace(node.tiers.tiers[2], level=3))
    return node


def compressible(node: Node) -> Image:
    """Return an image of text, noise and zeros."""

    def fill(writer: ImageWriter) -> Image:
        path = Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img")
        path.write_bytes(b"the same again " * 200_000 + os.urandom(MIB) + bytes(3 * MIB) + b"end")
        path.with_name("small.img").write_bytes(b"as it is")
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=1)
    node.tiers.settle(image)
    node.tiers.publish(JOB.name, 1)
    return image


def test_shared_tier_is_compressed(packing_node: Node) -> None:
    """The manifest is the same; the image is verified as it is, and unpacked in the tier that it is brought to."""
    node = packing_node
    image = compressible(node)
    assert node.shared.get(JOB.name, 1).manifest == image.manifest
    assert node.shared.packed(image)
    assert not node.disk.packed(image)
    names = sorted(path.name for path in node.file(node.shared, image).parent.iterdir())
    assert names == ["pages-1.img.zst", "small.img"]
    node.shared.verify(image)
    assert node.shared.usage().used < image.manifest.size / 2
    for store in (node.memory, node.disk):
        store.remove(image)
    copies, _ = node.tiers.copies(LATER)
    result = node.tiers.sound(copies, whole)
    assert result.tier.name == "memory"
    node.memory.verify(result.image)
    node.memory.remove(image)
    node.left = -1
    assert node.tiers.sound(node.tiers.copies(LATER)[0], whole).tier.name == "disk"


def test_compressed_image_without_room_to_unpack_is_reported(packing_node: Node) -> None:
    """It cannot be restored directly."""
    node = packing_node
    image = compressible(node)
    for store in (node.memory, node.disk):
        store.remove(image)
        store.budget.reserve = 1 << 60
    with pytest.raises(ImageDamaged, match="no tier of this node has room"):
        node.tiers.sound(node.tiers.copies(LATER)[0], whole)
    assert node.where(image) == ["shared"]


def test_compressed_copy_is_unpacked_after_damaged_ones_were_set_aside(packing_node: Node) -> None:
    """Both copies of the node are damaged: the shared one is the last, and has to be brought to one of their tiers."""
    node = packing_node
    image = compressible(node)
    for store in (node.memory, node.disk):
        node.flip(store, image)
    copies, _ = node.tiers.copies(LATER)
    result = node.tiers.sound(copies, whole)
    assert result.tier.name == "memory"
    assert [text.rpartition("; ")[2] for _, text in node.reports] == ["set aside, another copy is used"] * 2
    assert len(node.memory.aside()) == len(node.disk.aside()) == 1


@pytest.mark.parametrize("place", [0, 9, 17, 40])
def test_flipped_bit_in_a_compressed_image_is_detected(packing_node: Node, place: int) -> None:
    """It is in the format, the length, or the data of a slot."""
    node = packing_node
    image = compressible(node)
    path = node.file(node.shared, image).with_name("pages-1.img.zst")
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ImageDamaged):
        node.shared.verify(image)
    with pytest.raises(ImageDamaged):
        node.shared.copy(image, DirectoryStore(node.shared.path.with_name("other"), KEY))


def test_flipped_bits_of_a_slot_are_reported_as_damage(packing_node: Node) -> None:
    """A bit in the header of the slot or of zstd's frame, or behind it, is reported as damage, or has no effect."""
    node = packing_node
    image = compressible(node)
    path = node.file(node.shared, image).with_name("pages-1.img.zst")
    slot, view = path.read_bytes()[:64], memoryview(bytearray(SMALL))
    whole = node.file(node.disk, image).read_bytes()[:SMALL]
    result = 0
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(slot)):
            changed = bytearray(slot)
            changed[bit // 8] ^= 1 << bit % 8
            os.pwrite(file.fileno(), changed, 0)
            try:
                compression.read(file.fileno(), 0, 0, view)
            except ImageDamaged:
                result += 1
            else:
                result += view != whole  # its digest will differ
    assert result > 400
