"""Conformance suite of the stores of image tiers: host memory, disk, shared store, compressed shared store.

A test file subclasses ``StoreSuite`` and defines the fixture ``kind``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import compression
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageDamaged, NoRoom
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.transfer import CopyMode
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest

LARGE = 1 << 18


@dataclass(frozen=True)
class StoreKind:
    """An empty store of one kind, and another one to copy from."""

    store: DirectoryStore
    other: DirectoryStore
    """Holds no image. Its copies are neither compressed nor written past the page cache."""
    how: CopyMode
    """Settings of copies to ``store``."""
    manifest: Manifest
    run: LiveRun
    """The attempt that may be restored from an image with this manifest."""

    @property
    def key(self) -> JobKey:
        return self.manifest.key

    def fill(self, writer: ImageWriter, size: int = LARGE) -> Image:
        """Write an image: text, noise and zeros in a file of pages, and small files."""
        criu = Path(f"/proc/self/fd/{writer.criu_fd}")
        (criu / "pages-1.img").write_bytes(b"the same again " * (size // 60) + os.urandom(size // 4) + bytes(size // 2))
        (criu / "pstree.img").write_bytes(b"tree")
        (criu / "empty.img").touch()
        return writer.commit(self.manifest)

    def write(self, store: DirectoryStore, size: int = LARGE) -> Image:
        """Write an image to a store."""
        with store.begin(self.key, uid=self.manifest.uid, estimate=size) as writer:
            return self.fill(writer, size)

    def copied(self) -> Image:
        """Return an image that was copied to the store, as images reach the slower tiers."""
        return self.other.copy(self.write(self.other), self.store, self.how)

    def arrive(self, way: str) -> Image:
        """Return an image that was written to the store (``dump``), or copied to it (``copy``)."""
        return self.write(self.store) if way == "dump" else self.copied()

    def pages(self, image: Image) -> Path:
        """Return the path of the file of pages in the store."""
        criu = self.store.path / image.job / image.entry / "criu"
        return next(path for path in criu.iterdir() if path.name.startswith("pages-1.img"))


def _valid(images: Iterable[Image | ImageDamaged]) -> list[Image]:
    return [image for image in images if isinstance(image, Image)]


@pytest.mark.parametrize("way", ["dump", "copy"])
class StoreSuite:
    """Tests for each kind of store; images are written to it, or copied to it."""

    def test_image_is_found_verified_and_removed(self, kind: StoreKind, way: str) -> None:
        """Removing it twice is not an error, and leaves nothing."""
        store, image = kind.store, kind.arrive(way)
        assert store.find(kind.run) == store.get(image.job, 1) == image
        assert store.has(image)
        assert _valid(store.images()) == [image]
        assert store.jobs() == [image.job]
        assert {file.path for file in image.manifest.files} == {
            "criu/pages-1.img", "criu/pstree.img", "criu/empty.img",
        }  # fmt: skip
        for _ in range(2):
            store.verify(image)
        assert store.small_file(image, "pstree.img", 100) == b"tree"
        assert store.packed(image) is (way == "copy" and kind.how.level > 0)
        assert store.usage().images == 1
        assert store.usage().by_user == {kind.manifest.uid: image.manifest.size}
        for _ in range(2):
            store.remove(image)
        assert store.find(kind.run) is None
        assert not store.has(image)
        assert list(store.path.iterdir()) == []

    def test_copy_back_is_the_same_image(self, kind: StoreKind, way: str) -> None:
        """A repeated copy changes nothing."""
        image = kind.arrive(way)
        for source in _valid(kind.other.images()):
            kind.other.remove(source)
        back = kind.store.copy(image, kind.other)
        kind.other.verify(back)
        assert (back.manifest, kind.other.packed(back)) == (image.manifest, False)
        assert kind.store.copy(image, kind.other) == back
        assert kind.other.copy(back, kind.store, kind.how) == image

    def test_damaged_image_is_detected_and_not_copied(self, kind: StoreKind, way: str) -> None:
        """By a flipped bit in its pages."""
        image = kind.arrive(way)
        for source in _valid(kind.other.images()):
            kind.other.remove(source)
        with kind.pages(image).open("r+b") as file:
            file.seek(17)
            byte = file.read(1)[0]
            file.seek(17)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(ImageDamaged):
            kind.store.verify(image)
        with pytest.raises(ImageDamaged):
            kind.store.copy(image, kind.other)
        assert kind.other.images() == []

    def test_image_that_was_set_aside_is_listed_and_not_found(self, kind: StoreKind, way: str) -> None:
        """Its number is not used again, and a repetition is not an error."""
        store, image = kind.store, kind.arrive(way)
        for _ in range(2):
            store.set_aside(image)
        assert store.find(kind.run) is None
        (aside,) = store.aside()
        assert aside.startswith(f"{image.job}/{image.entry}.")
        with pytest.raises(ImageDamaged):
            store.get(image.job, 1)
        assert kind.write(store).manifest.seq == 2

    def test_cut_copy_is_incomplete_and_completed_by_a_copy(self, kind: StoreKind, way: str) -> None:
        """Cutting it twice changes nothing; 0 removes it."""
        store, image = kind.store, kind.arrive(way)
        if way == "dump":
            store.copy(image, kind.other)
        for _ in range(2):
            store.cut(image, image.manifest.size // 2)
            ((manifest, held),) = store.begun()
            assert manifest == image.manifest
            assert held < image.manifest.size
            assert (store.find(kind.run), store.has(image)) == (None, False)
        source = kind.other.get(image.job, 1)
        store.verify(kind.other.copy(source, store, kind.how))
        assert store.begun() == []
        for _ in range(2):
            store.cut(image, 0)
        assert list(store.path.iterdir()) == []

    def test_discarded_image_leaves_nothing(self, kind: StoreKind, way: str) -> None:
        kind.arrive(way)
        for _ in range(2):
            kind.store.discard(kind.key, 1)
        assert list(kind.store.path.iterdir()) == []

    def test_incomplete_image_is_not_found(self, kind: StoreKind, way: str) -> None:
        """It cannot be discarded while it is written. A writer or copy that ends early can be repeated."""
        store = kind.store
        if way == "dump":
            with store.begin(kind.key, uid=1, estimate=0) as writer:
                assert writer.seq == 1
                assert (store.find(kind.run), store.images(), store.busy(kind.key)) == (None, [], True)
                with pytest.raises(CheckpointError, match="is being written"):
                    store.discard(kind.key, 1)
            assert not store.busy(kind.key)
            assert [path.name for path in (store.path / kind.key.name).iterdir()] == []
        else:
            source, stops = kind.write(kind.other), iter([False] * 40)
            with pytest.raises(CheckpointError, match="resumed later"):
                kind.other.copy(source, store, replace(kind.how, stop=lambda: next(stops, True)))
            assert (store.find(kind.run), store.images(), store.busy(kind.key)) == (None, [], False)
            assert [manifest for manifest, _ in store.begun()] == [source.manifest]
        store.verify(kind.arrive(way) if way == "dump" else kind.other.copy(source, store, kind.how))

    def test_full_store_takes_no_image(self, kind: StoreKind, way: str) -> None:
        """Nothing is left of it, and images that are there remain."""
        store = kind.store
        store.budget.quota = 1 << 12
        source = kind.write(kind.other)
        with pytest.raises(NoRoom):
            store.check_room(1001, LARGE)
        with pytest.raises(NoRoom):
            _ = kind.write(store) if way == "dump" else kind.other.copy(source, store, kind.how)
        assert store.find(kind.run) is None
        store.budget.quota = None
        store.check_room(1001, LARGE)
        image = kind.write(store) if way == "dump" else kind.other.copy(source, store, kind.how)
        store.verify(image)

    def test_store_that_is_not_there_takes_no_image(self, kind: StoreKind, way: str) -> None:
        """It was unmounted, and an empty directory is in its place. Its images can still be read."""
        store, image = kind.store, kind.arrive(way)
        store.path.rename(store.path.with_name("away"))
        store.path.mkdir(mode=0o700)
        with pytest.raises(NoRoom, match="is not the file system"):
            store.begin(kind.key, uid=1, estimate=0)
        with pytest.raises(NoRoom, match="is not the file system"):
            store.take_up(image)
        store.verify(image)
        assert list(store.path.iterdir()) == []


needs_compression = pytest.mark.skipif(compression.zstd() is None, reason="the package zstandard is not installed")
"""For the compressed kind."""
