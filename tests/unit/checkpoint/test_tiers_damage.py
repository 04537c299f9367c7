"""Tiers: copies that are not what was written."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.checkpoint.interface import (
    CheckpointError,
    Image,
    ImageDamaged,
    ImageUnreadable,
    Pages,
    RestoreFailed,
)
from slurm_affinode.checkpoint.tier import Copy

from .conftest import JOB, LATER, SMALL, Node, whole


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
    sound = node.tiers.sound([*copies[start:], *copies[:start]], whole)
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
        node.tiers.sound(node.tiers.copies(LATER)[0], whole)
    assert node.where(image) == ["shared"]


def test_a_copy_that_cannot_be_read_is_not_published(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector is no lack of room in the tier that is written to: the copy is made from the one that is sound."""
    node = make_node()
    image = node.dump(publish=False)
    bad = node.file(node.memory, image).stat()
    read = os.preadv

    def preadv(fd: int, *arguments: Any) -> int:
        facts = os.fstat(fd)
        if (facts.st_dev, facts.st_ino) == (bad.st_dev, bad.st_ino):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["disk", "shared"]
    ((_, told),) = node.told
    assert told.startswith("its copy in the tier memory is damaged: criu/pages-1.img: cannot be read: Input/output")


def test_a_damaged_copy_is_not_published(make_node: Callable[..., Node]) -> None:
    """The copy to the shared tier is made from the one that is sound."""
    node = make_node()
    image = node.dump(publish=False)
    node.flip(node.memory, image)
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["disk", "shared"]
    node.shared.verify(image)


def read_only(*_: object) -> None:
    """What a file system says that was mounted anew."""
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_bad_copy_that_cannot_be_put_aside_is_not_used(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tier is read-only: the image is not brought there, where the bad copy still has its name."""
    node = make_node()
    image = node.dump()
    node.disk.remove(image)
    node.flip(node.memory, image)
    monkeypatch.setattr(node.memory, "set_aside", read_only)
    sound = node.tiers.sound(node.tiers.copies(LATER)[0], whole)
    sound.tier.store.verify(sound.image)
    assert sound.tier.name == "shared"


@pytest.mark.parametrize("bad", ["0001.tmp", "0001.tmp/criu", ""])
def test_trouble_where_a_copy_goes_to_is_no_damage_of_its_source(make_node: Callable[..., Node], bad: str) -> None:
    """The directory there is open to others: nothing is copied, and the copies of this node stay."""
    node = make_node()
    image = node.dump(publish=False)
    there = node.shared.path / JOB.name / bad
    there.mkdir(parents=True)
    there.chmod(0o755)
    with pytest.raises(CheckpointError, match="mode 0755"):
        node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["memory", "disk"]
    assert node.memory.aside() == []
    there.chmod(0o700)
    for path in node.shared.path.rglob("*"):
        path.chmod(0o700)
    assert node.tiers.publish(JOB.name, 1)


@pytest.mark.parametrize("bad", ["memory", "disk", "shared"])
@pytest.mark.parametrize("what", ["manifest", "signature", "other", "link"])
def test_a_manifest_that_was_tampered_with(make_node: Callable[..., Node], bad: str, what: str) -> None:
    """The copy is passed over and told of, and replaced where the image is brought there."""
    node = make_node()
    image, other = node.dump(), node.dump(7)
    store = {"memory": node.memory, "disk": node.disk, "shared": node.shared}[bad]
    place = node.file(store, image).parent.parent
    if what == "manifest":
        text = (place / "manifest.json").read_text()
        (place / "manifest.json").write_text(text.replace('"uid": 1001', '"uid": 1000'))
    elif what == "signature":
        (place / "manifest.hmac").write_text("é" * 32)
    elif what == "other":
        for name in ("manifest.json", "manifest.hmac"):
            (place / name).write_bytes((node.file(store, other).parent.parent / name).read_bytes())
    else:
        (place / "manifest.json").rename(place.parent / "elsewhere")
        (place / "manifest.json").symlink_to(place.parent / "elsewhere")
    copies, damage = node.tiers.copies(LATER)
    assert [one.tier.name for one in copies] == [name for name in ("memory", "disk", "shared") if name != bad]
    assert damage is not None
    assert len(node.told) == 1
    sound = node.tiers.sound(copies, whole)
    assert node.tiers.move(sound, next(one for one in node.tiers.tiers if one.name == bad)).tier.name == bad
    assert node.where(image) == ["memory", "disk", "shared"]
    store.verify(image)


def test_a_shared_copy_is_not_given_up_for_none(make_node: Callable[..., Node]) -> None:
    """It seems to be damaged, and what the node has is: it stays where it is, and is told of."""
    node = make_node()
    image = node.dump()
    for store in (node.memory, node.disk, node.shared):
        node.flip(store, image)
    with pytest.raises(ImageDamaged, match="its contents have changed"):
        node.tiers.mend(JOB.name, 1)
    assert node.where(image) == ["memory", "disk", "shared"]


def test_a_copy_that_is_replaced_is_set_aside(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be read for a moment. Nothing has gone when that which it is replaced by is found to be damaged."""
    node = make_node()
    image = node.dump()
    node.memory.remove(image)
    node.flip(node.disk, image)

    def fails(*_: object) -> Image:
        raise ImageUnreadable("cannot be opened: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(node.shared, "get", fails)
        with pytest.raises(ImageDamaged):
            node.tiers.publish(JOB.name, 1)
    (aside,) = node.shared.aside()
    assert (node.shared.path / aside / "manifest.json").exists()


def lose(path: Path, generator: random.Random) -> None:
    """What a power cut may leave of a file that was not synced: pieces not written, another end."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(3):
            file.seek(generator.randrange(max(1, size)))
            file.write(bytes(min(SMALL, size)))
        file.truncate(generator.choice([size, size, generator.randrange(size + 1), 2 * size, 0]))


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_during_a_copy(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever is left of the files, the copy that is taken up is the image, or there is none."""
    node, generator = make_node(), random.Random(seed)  # noqa: S311
    image = node.dump(publish=False)
    looks = iter([False] * generator.randrange(70))
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: next(looks, True))
    with suppress(CheckpointError):
        node.tiers.publish(JOB.name, 1)
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: False)
    if node.where(image) == ["memory", "disk"]:
        for path in sorted(node.shared.path.rglob("*")):
            if path.is_file() and generator.random() < 0.7:
                lose(path, generator)
            elif path.is_file() and generator.random() < 0.2:
                path.unlink()
        assert node.where(image) == ["memory", "disk"]
        node.shared.begun()
    assert node.tiers.publish(JOB.name, 1)
    assert not node.told
    node.shared.verify(node.shared.get(JOB.name, 1))


def test_a_copy_that_left_its_tier_meanwhile_is_no_damaged_one(make_node: Callable[..., Node]) -> None:
    """It was dropped after it had been found: the next is taken, and nothing is told."""
    node = make_node()
    image = node.dump()
    copies, _ = node.tiers.copies(LATER)
    node.memory.remove(image)
    assert node.tiers.sound(copies, whole).tier.name == "disk"
    assert node.told == []


def test_damage_that_is_found_during_the_use_of_a_copy_is_as_any_other(make_node: Callable[..., Node]) -> None:
    """It is put aside, and the next one is used from the beginning on; the last one stays."""
    node = make_node()
    image = node.dump()
    used: list[str] = []

    def use(copy: Copy, pages: Pages) -> str:
        used.append(f"{copy.tier.name} begun")
        pages.sound()
        used.append(f"{copy.tier.name} sound")
        return copy.tier.name

    node.flip(node.memory, image)
    copies, _ = node.tiers.copies(LATER)
    assert node.tiers.sound(copies, use) == "disk"
    assert used == ["memory begun", "disk begun", "disk sound"]
    assert node.where(image) == ["disk", "shared"]
    node.flip(node.disk, image)
    node.file(node.shared, image).with_name("pstree.img").write_bytes(b"tref")
    used.clear()
    with pytest.raises(ImageDamaged, match=r"disk: .*pages-1.img: its contents .*; shared: .*pstree.img: its contents"):
        node.tiers.sound(node.tiers.copies(LATER)[0], use)
    assert used == ["disk begun"]
    assert node.where(image) == ["shared"]


@pytest.mark.parametrize("error", [RestoreFailed("no"), CheckpointError("no"), OSError(errno.EIO, "no")])
def test_what_fails_with_a_sound_copy_is_not_laid_to_it(make_node: Callable[..., Node], error: Exception) -> None:
    """No other copy is tried, and nothing is said of this one."""
    node = make_node()
    image = node.dump()
    used: list[str] = []

    def use(copy: Copy, pages: Pages) -> None:
        used.append(copy.tier.name)
        raise error

    with pytest.raises(type(error), match="no"):
        node.tiers.sound(node.tiers.copies(LATER)[0], use)
    assert used == ["memory"]
    assert node.where(image) == ["memory", "disk", "shared"]
    assert node.told == []


def test_a_copy_that_was_brought_is_sound(make_node: Callable[..., Node]) -> None:
    """What is found wrong with it later is not laid to the one that it was made from."""
    node = make_node()
    image = node.dump()
    for store in (node.memory, node.disk):
        store.remove(image)

    def use(copy: Copy, pages: Pages) -> None:
        pages.sound(0)
        raise ImageDamaged(f"{copy.tier.name}: is not there any more")

    with pytest.raises(ImageDamaged, match=r"^memory: is not there"):
        node.tiers.sound(node.tiers.copies(LATER)[0], use)
    assert node.where(image) == ["memory", "shared"]


def test_a_copy_that_cannot_be_verified_is_not_taken_for_one_that_was_brought(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where the one of the shared tier would be brought."""
    node = make_node()
    image = node.dump()
    node.disk.remove(image)

    def cannot(*_: object, known: bool = False) -> None:
        raise CheckpointError("its digests are BLAKE3")

    monkeypatch.setattr(node.memory, "verifying", cannot)
    assert node.tiers.sound(node.tiers.copies(LATER)[0], whole).tier.name == "shared"
