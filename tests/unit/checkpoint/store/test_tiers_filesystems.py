"""Tiers on real file systems: full, read-only, unmounted, of the wrong type."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.base.node_config import SuspendConfig, TiersConfig
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import CheckpointError, Image
from slurm_affinode.checkpoint.store.tiers import Tiers, filesystem, open_tiers
from slurm_affinode.model.suspension import JobKey, Manifest

from ..conftest import JOB, KEY, LATER, MANIFEST, MIB, Node, run_of, whole


def test_tier_that_was_unmounted_is_skipped(make_node: Callable[..., Node]) -> None:
    """Its directory was replaced, as by an unmount: the next tier gets the image, and nothing is lost."""
    node = make_node()
    first = node.dump(1)
    node.memory.path.rename(node.memory.path.with_name("elsewhere"))
    second = node.dump(2)
    assert node.where(second) == ["disk", "shared"]
    (copy, *_), _ = node.tiers.copies(run_of(first))
    assert node.tiers.sound([copy], whole)


@pytest.mark.parametrize("bad", ["memory", "disk"])
def test_tier_that_returns_errors_is_skipped(make_node: Callable[..., Node], bad: str) -> None:
    """A dead disk or a lost network file system does so: its contents are neither used nor queried."""
    node = make_node()
    first = node.dump(1)
    store = {"memory": node.memory, "disk": node.disk}[bad]
    os.close(store._entries.top)
    store._entries.top = -1
    node.tiers.check_room(1001, MIB)
    second = node.dump(2)
    others = [name for name in ("memory", "disk", "shared") if name != bad]
    assert node.where(second) == others
    copies, _ = node.tiers.copies(run_of(first))
    assert node.tiers.sound(copies, whole).tier.name == others[0]
    node.tiers.relieve()
    (error,) = store.images()
    assert "cannot be read: Bad file descriptor" in str(error)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts small tmpfs file systems."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made: list[Path] = []

    def mount(name: str, size: str = "16m", kind: str = "tmpfs") -> Path:
        path = tmp_path / name
        path.mkdir(mode=0o700)
        options = f"size={size},mode=0700" if kind == "tmpfs" else "mode=0700"
        done = subprocess.run(["mount", "-t", kind, "-o", options, kind, path], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no {kind} can be mounted: {done.stderr.decode().strip()}")
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def config(tmp_path: Path, memory: Path, **more: object) -> SuspendConfig:
    """Return the configuration of a node with a memory tier."""
    tiers = TiersConfig(memory=memory, memory_size="1G", memory_reserve="0", **more)  # type: ignore[arg-type]
    return SuspendConfig(local_store=tmp_path / "disk", shared_store=tmp_path / "shared", tiers=tiers)


def write(tiers: Tiers, facts: Manifest, size: int) -> Image:
    """Write a dump."""

    def fill(writer: ImageWriter) -> Image:
        Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").write_bytes(os.urandom(size))
        return writer.commit(facts)

    image = tiers.write(facts.key, fill, uid=facts.uid, estimate=size)
    tiers.settle(image)
    tiers.publish(facts.key.name, image.manifest.seq)
    return image


def test_image_that_does_not_fit_into_tmpfs_goes_to_disk(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """An image that fits goes to memory."""
    tiers = open_tiers(config(tmp_path, mounted("memory")), KEY)
    assert [tier.name for tier in tiers.tiers] == ["memory", "disk", "shared"]
    small, large = JobKey("cluster", 1, 1), JobKey("cluster", 2, 1)
    write(tiers, replace(MANIFEST, key=small), 4 * MIB)
    write(tiers, replace(MANIFEST, key=large), 20 * MIB)
    assert tiers.on_node(small.name, 1).tier.name == "memory"  # type: ignore[union-attr]
    assert tiers.on_node(large.name, 1).tier.name == "disk"  # type: ignore[union-attr]
    for store in tiers.stores:
        for image in store.images():
            assert isinstance(image, Image)
            store.verify(image)
        store.close()


@pytest.mark.parametrize("known", [True, False])
def test_image_does_not_use_promised_memory(tmp_path: Path, mounted: Callable[..., Path], known: bool) -> None:
    """Suspensions in progress need it, or it is unknown how much they need."""

    def promised() -> int:
        if not known:
            raise OSError
        return 1 << 60

    tiers = open_tiers(config(tmp_path, mounted("memory")), KEY, promised=promised)
    write(tiers, MANIFEST, MIB)
    assert tiers.on_node(MANIFEST.key.name, 1).tier.name == "disk"  # type: ignore[union-attr]
    for store in tiers.stores:
        store.close()


@pytest.mark.parametrize("options", ["size=16m", "size=1g,nr_inodes=4"])
def test_tmpfs_that_runs_full_during_a_write_is_cleaned_up(
    tmp_path: Path, mounted: Callable[..., Path], options: str
) -> None:
    """Bytes or inodes run out after the image was begun: the complete image is on the disk, the tmpfs as before."""
    memory = mounted("memory", options.removeprefix("size="))
    tiers = open_tiers(config(tmp_path, memory), KEY)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 * MIB))

    def fill(writer: ImageWriter) -> Image:
        with source.open("rb") as file:
            assert writer.save("out.1", file.fileno(), 20 * MIB) == 20 * MIB
        return writer.commit(MANIFEST)

    image = tiers.write(JOB, fill, uid=1001, estimate=MIB)
    assert [copy.tier.name for copy in tiers._all_copies(JOB.name, 1)] == ["disk"]
    assert tiers.settle(image).tier.name == "disk"
    assert list(memory.glob("*/*")) == []
    for store in tiers.stores:
        store.close()


def test_full_or_read_only_file_system_is_detected(mounted: Callable[..., Path]) -> None:
    """It is without bytes, without inodes, or read-only."""
    for name, options in (("bytes", "16m"), ("files", "1g,nr_inodes=2"), ("read-only", "16m")):
        path = mounted(name, options)
        fd = os.open(path, os.O_RDONLY)
        assert not root_directory.is_full(fd)
        if name == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        else:
            (path / "others").write_bytes(bytes(14 * MIB if name == "bytes" else 1))
        assert root_directory.is_full(fd)
        os.close(fd)


def test_tier_that_becomes_read_only_is_still_read(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """New images go elsewhere."""
    memory = mounted("memory")
    reported: list[str] = []
    tiers = open_tiers(config(tmp_path, memory), KEY, report=lambda key, text: reported.append(text))
    first = write(tiers, MANIFEST, MIB)
    subprocess.run(["mount", "-o", "remount,ro", memory], check=True)
    second = write(tiers, replace(MANIFEST, key=JobKey("cluster", 2, 1)), MIB)
    assert tiers.on_node(JOB.name, 1).tier.name == "memory"  # type: ignore[union-attr]
    assert tiers.on_node(second.manifest.key.name, 1).tier.name == "disk"  # type: ignore[union-attr]
    page = next(memory.glob("*/0001/criu/pages-1.img"))
    subprocess.run(["mount", "-o", "remount,rw", memory], check=True)
    with page.open("r+b") as file:
        file.write(b"damage")
    subprocess.run(["mount", "-o", "remount,ro", memory], check=True)
    assert tiers.sound(tiers.copies(LATER)[0], whole).tier.name == "disk"
    assert "cannot be set aside" in reported[0]
    assert first.manifest.seq == 1
    for store in tiers.stores:
        store.close()


def test_unmounted_tier_is_skipped(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """It may disappear while the agent runs."""
    memory = mounted("memory")
    tiers = open_tiers(config(tmp_path, memory), KEY)
    write(tiers, MANIFEST, MIB)
    subprocess.run(["umount", "-l", memory], check=True)
    second = write(tiers, replace(MANIFEST, key=JobKey("cluster", 2, 1)), MIB)
    assert tiers.on_node(second.manifest.key.name, 1).tier.name == "disk"  # type: ignore[union-attr]
    for store in tiers.stores:
        store.close()
    again = open_tiers(config(tmp_path, memory), KEY)
    assert [tier.name for tier in again.tiers] == ["disk", "shared"]
    assert "not on a tmpfs" in again.missing[0]
    assert again.sound(again.copies(LATER)[0], whole).tier.name == "disk"
    for store in again.stores:
        store.close()
    memory.rmdir()
    looked = open_tiers(config(tmp_path, memory), KEY, create=False)  # as a command does
    assert looked.missing == (f"{memory}: does not exist",)
    for store in looked.stores:
        store.close()


def test_shared_store_on_an_unmounted_file_system_is_refused(tmp_path: Path) -> None:
    """Its parent directory must exist: the agent reports it instead of beginning with an empty store."""
    shared = tmp_path / "mount" / "slurm-affinode" / "images"
    suspend = SuspendConfig(local_store=tmp_path / "new" / "disk", shared_store=shared)
    with pytest.raises(CheckpointError, match="slurm-affinode: does not exist") as caught:
        open_tiers(suspend, KEY)
    assert "mount its file system" in (caught.value.hint or "")
    shared.parent.mkdir(parents=True)
    tiers = open_tiers(suspend, KEY)
    assert [tier.name for tier in tiers.tiers] == ["disk", "shared"]
    for store in tiers.stores:
        store.close()


def test_tiers_in_one_directory_are_refused(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """So are two paths of one directory: an image dropped from one tier for the copy in the other would be lost."""
    with pytest.raises(CheckpointError, match="are one directory: the tiers disk and shared"):
        open_tiers(SuspendConfig(local_store=tmp_path / "images", shared_store=tmp_path / "images"), KEY)
    bound = mounted("bound")
    subprocess.run(["mount", "--bind", tmp_path / "images", bound], check=True)
    with pytest.raises(CheckpointError, match="are one directory"):
        open_tiers(SuspendConfig(local_store=tmp_path / "images", shared_store=bound), KEY)
    subprocess.run(["umount", bound], check=True)


def test_memory_tier_that_is_not_on_tmpfs_is_not_used(tmp_path: Path) -> None:
    """The reason is reported."""
    if filesystem(tmp_path) == "tmpfs":
        pytest.skip("temporary files are on a tmpfs here")
    tiers = open_tiers(config(tmp_path, tmp_path / "memory"), KEY)
    assert [tier.name for tier in tiers.tiers] == ["disk", "shared"]
    assert "not on a tmpfs" in tiers.missing[0]
    for store in tiers.stores:
        store.close()


@pytest.mark.parametrize(
    ("kind", "size", "why"),
    [("ramfs", "", "is on ramfs, not on a tmpfs"), ("tmpfs", "0", "is on a tmpfs without a limit")],
)
def test_memory_tier_without_a_size_limit_is_not_used(
    tmp_path: Path, mounted: Callable[..., Path], kind: str, size: str, why: str
) -> None:
    """Every image would skip it as if it were full."""
    tiers = open_tiers(config(tmp_path, mounted("memory", size, kind)), KEY)
    assert [tier.name for tier in tiers.tiers] == ["disk", "shared"]
    assert why in tiers.missing[0]
    for store in tiers.stores:
        store.close()
