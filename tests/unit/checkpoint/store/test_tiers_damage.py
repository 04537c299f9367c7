"""Tiers: damaged copies."""

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
from slurm_affinode.checkpoint.store.retention import Copy

from ..conftest import JOB, LATER, SMALL, Node, whole


@pytest.mark.parametrize("bad", ["memory", "disk", "shared"])
def test_copy_with_a_flipped_bit_is_set_aside(make_node: Callable[..., Node], bad: str) -> None:
    """The copy of another tier is used; the damaged one is kept apart and reported."""
    node = make_node()
    image = node.dump()
    store = {"memory": node.memory, "disk": node.disk, "shared": node.shared}[bad]
    node.flip(store, image)
    if bad == "shared":
        node.memory.remove(image)  # otherwise it is not brought
    # Begin with the damaged copy, as on a node without a faster one.
    copies, _ = node.tiers.copies(LATER)
    start = [copy.tier.name for copy in copies].index(bad)
    sound = node.tiers.sound([*copies[start:], *copies[:start]], whole)
    assert sound.tier.name != bad
    sound.tier.store.verify(sound.image)
    assert bad not in node.where(image)
    assert [job for job, _ in node.reports] == [123]
    assert "contents have changed; set aside" in node.reports[0][1]
    (aside,) = store.aside()
    assert aside.startswith(f"{JOB.name}/0001.")
    assert store.sweep([LATER], cluster="cluster", young_s=-1) == []
    assert store.sweep([], cluster="cluster", young_s=-1) == [aside]


def test_flipped_bit_in_every_tier_is_an_error(make_node: Callable[..., Node]) -> None:
    """The last copy stays where it is, and each tier is named."""
    node = make_node()
    image = node.dump()
    for store in node.tiers.stores:
        node.flip(store, image)
    with pytest.raises(ImageDamaged, match=r"memory: .*; disk: .*; shared: "):
        node.tiers.sound(node.tiers.copies(LATER)[0], whole)
    assert node.where(image) == ["shared"]


def test_unreadable_copy_is_not_published(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector is not lack of room in the target tier: the copy is made from a sound one."""
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
    ((_, report),) = node.reports
    assert report.startswith("its copy in the tier memory is damaged: criu/pages-1.img: cannot be read: Input/output")


def test_damaged_copy_is_not_published(make_node: Callable[..., Node]) -> None:
    """The copy to the shared tier is made from a sound one."""
    node = make_node()
    image = node.dump(publish=False)
    node.flip(node.memory, image)
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["disk", "shared"]
    node.shared.verify(image)


def read_only(*_: object) -> None:
    """Raise the error of a file system that was remounted read-only."""
    raise OSError(errno.EROFS, "Read-only file system")


def test_damaged_copy_that_cannot_be_set_aside_is_not_used(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tier is read-only: no image is brought there, where the damaged copy still has the name."""
    node = make_node()
    image = node.dump()
    node.disk.remove(image)
    node.flip(node.memory, image)
    monkeypatch.setattr(node.memory, "set_aside", read_only)
    sound = node.tiers.sound(node.tiers.copies(LATER)[0], whole)
    sound.tier.store.verify(sound.image)
    assert sound.tier.name == "shared"


@pytest.mark.parametrize("bad", ["0001.tmp", "0001.tmp/criu", ""])
def test_error_in_the_target_tier_is_not_reported_as_damage_of_the_source(
    make_node: Callable[..., Node], bad: str
) -> None:
    """The target directory is open to others: nothing is copied, and the copies on this node stay."""
    node = make_node()
    image = node.dump(publish=False)
    target = node.shared.path / JOB.name / bad
    target.mkdir(parents=True)
    target.chmod(0o755)
    with pytest.raises(CheckpointError, match="mode 0755"):
        node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["memory", "disk"]
    assert node.memory.aside() == []
    target.chmod(0o700)
    for path in node.shared.path.rglob("*"):
        path.chmod(0o700)
    assert node.tiers.publish(JOB.name, 1)


@pytest.mark.parametrize("bad", ["memory", "disk", "shared"])
@pytest.mark.parametrize("what", ["manifest", "signature", "other", "link"])
def test_copy_with_a_tampered_manifest_is_skipped(make_node: Callable[..., Node], bad: str, what: str) -> None:
    """It is reported, and replaced when the image is brought there."""
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
    assert [copy.tier.name for copy in copies] == [name for name in ("memory", "disk", "shared") if name != bad]
    assert damage is not None
    assert len(node.reports) == 1
    sound = node.tiers.sound(copies, whole)
    assert node.tiers.move(sound, next(tier for tier in node.tiers.tiers if tier.name == bad)).tier.name == bad
    assert node.where(image) == ["memory", "disk", "shared"]
    store.verify(image)


def test_damaged_shared_copy_is_kept_if_no_copy_is_sound(make_node: Callable[..., Node]) -> None:
    node = make_node()
    image = node.dump()
    for store in (node.memory, node.disk, node.shared):
        node.flip(store, image)
    with pytest.raises(ImageDamaged, match="its contents have changed"):
        node.tiers.repair(JOB.name, 1)
    assert node.where(image) == ["memory", "disk", "shared"]


def test_replaced_copy_is_set_aside(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporarily unreadable copy is kept in case its replacement turns out to be damaged."""
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
    """Damage a file as a power cut does if it was not synced: pieces not written, another size."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(3):
            file.seek(generator.randrange(max(1, size)))
            file.write(bytes(min(SMALL, size)))
        file.truncate(generator.choice([size, size, generator.randrange(size + 1), 2 * size, 0]))


@pytest.mark.parametrize("seed", range(20))
def test_copy_interrupted_by_a_power_cut_is_continued_correctly(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is left of the files, the continued copy is the image, or there is none."""
    node, generator = make_node(), random.Random(seed)  # noqa: S311
    image = node.dump(publish=False)
    stops = iter([False] * generator.randrange(70))
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: next(stops, True))
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
    assert not node.reports
    node.shared.verify(node.shared.get(JOB.name, 1))


def test_copy_removed_from_its_tier_meanwhile_is_not_reported_as_damaged(make_node: Callable[..., Node]) -> None:
    """It was dropped after it had been found: the next one is used."""
    node = make_node()
    image = node.dump()
    copies, _ = node.tiers.copies(LATER)
    node.memory.remove(image)
    assert node.tiers.sound(copies, whole).tier.name == "disk"
    assert node.reports == []


def test_damage_found_during_use_switches_to_the_next_copy(make_node: Callable[..., Node]) -> None:
    """The damaged copy is set aside, and the next one is used from the beginning; the last one stays."""
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
def test_failure_with_a_sound_copy_is_not_reported_as_damage(make_node: Callable[..., Node], error: Exception) -> None:
    """No other copy is tried."""
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
    assert node.reports == []


def test_damage_of_a_brought_copy_is_not_attributed_to_its_source(make_node: Callable[..., Node]) -> None:
    node = make_node()
    image = node.dump()
    for store in (node.memory, node.disk):
        store.remove(image)

    def use(copy: Copy, pages: Pages) -> None:
        pages.sound(0)
        raise ImageDamaged(f"{copy.tier.name}: no longer exists")

    with pytest.raises(ImageDamaged, match=r"^memory: no longer exists"):
        node.tiers.sound(node.tiers.copies(LATER)[0], use)
    assert node.where(image) == ["memory", "shared"]


def test_copy_that_cannot_be_verified_is_not_treated_as_fetched(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is where the copy of the shared tier would be brought to."""
    node = make_node()
    image = node.dump()
    node.disk.remove(image)

    def cannot(*_: object, known: bool = False) -> None:
        raise CheckpointError("its digests are BLAKE3")

    monkeypatch.setattr(node.memory, "verifying", cannot)
    assert node.tiers.sound(node.tiers.copies(LATER)[0], whole).tier.name == "shared"
