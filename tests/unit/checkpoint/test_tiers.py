"""Tiers: where images go, what leaves, and what happens when one of the tiers is bad."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import digest, rootdir
from slurm_affinode.checkpoint.blockio import Limiter
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import DumpFailed, DumpNoRoom, Image, ImageDamaged, NoRoom
from slurm_affinode.checkpoint.opening import filesystem, open_tiers
from slurm_affinode.checkpoint.tier import Copy, Tier
from slurm_affinode.checkpoint.tiers import Tiers
from slurm_affinode.checkpoint.writer import ImageWriter
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest
from slurm_affinode.nodeconfig import SuspendConfig
from slurm_affinode.tierconfig import TiersConfig

from .conftest import JOB, KEY, LATER, MANIFEST

MIB = 1 << 20
SMALL = 64 << 10
Told = list[tuple[int, str]]


class Node:
    """Three tiers of small blocks; the memory tier holds ``memory`` bytes."""

    def __init__(self, root: Path, memory: int = 1 << 30, disk: int | None = None) -> None:
        self.told: Told = []
        self.left: int | None = None
        self.now = 1000.0
        self.memory = DirectoryStore(root / "memory", KEY, quota=memory)
        self.disk = DirectoryStore(root / "disk", KEY, quota=disk)
        self.shared = DirectoryStore(root / "shared", KEY)
        self.tiers = Tiers(
            [
                Tier("memory", self.memory, durable=False, left=lambda: self.left),
                Tier("disk", self.disk, direct=True),
                Tier("shared", self.shared, shared=True, direct=True),
            ],
            now=lambda: self.now,
            report=lambda key, text: self.told.append((key.job_id, text)),
        )

    def dump(self, job: int = 123, size: int = 4 * MIB, *, publish: bool = True, settle: bool = True) -> Image:
        key = JobKey("cluster", job, JOB.submit_epoch)

        def fill(writer: ImageWriter) -> Image:
            criu = Path(f"/proc/self/fd/{writer.criu_fd}")
            (criu / "pages-1.img").write_bytes(os.urandom(size))
            (criu / "pstree.img").write_bytes(b"tree")
            return writer.commit(replace(MANIFEST, key=key))

        image = self.tiers.write(key, fill, uid=1001, estimate=size)
        if settle:
            self.tiers.settle(image)
        if publish:
            self.tiers.publish(key.name, image.manifest.seq)
        return image

    def where(self, image: Image) -> list[str]:
        """Tiers with a complete copy."""
        facts = image.manifest
        return [copy.tier.name for copy in self.tiers._all(facts.key.name, facts.seq)]

    def file(self, tier: DirectoryStore, image: Image) -> Path:
        return tier.path / image.manifest.key.name / f"{image.manifest.seq:04d}" / "criu" / "pages-1.img"

    def flip(self, tier: DirectoryStore, image: Image) -> None:
        """One bit, in the middle."""
        with self.file(tier, image).open("r+b") as file:
            file.seek(12345)
            byte = file.read(1)[0]
            file.seek(12345)
            file.write(bytes([byte ^ 4]))

    def close(self) -> None:
        for store in self.tiers.stores:
            store.close()


def run_of(image: Image) -> LiveRun:
    """The run that takes it back."""
    return replace(LATER, key=replace(image.manifest.key, submit_epoch=LATER.key.submit_epoch))


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Makes nodes with blocks of 64 KiB."""
    monkeypatch.setattr(digest, "BLOCK", SMALL)
    monkeypatch.setattr(digest, "workers", lambda: 2)
    made: list[Node] = []

    def make(name: str = "c1", **limits: int) -> Node:
        made.append(Node(tmp_path / name, **limits))
        return made[-1]

    yield make
    for node in made:
        node.close()


def test_a_dump_goes_to_memory_and_is_durable_before_it_counts(make_node: Callable[..., Node]) -> None:
    """First the fastest tier, then the disk, then where every node sees it."""
    node = make_node()
    image = node.dump(publish=False, settle=False)
    assert node.where(image) == ["memory"]
    assert node.tiers.settle(image).tier.name == "disk"
    assert node.tiers.settle(image).tier.name == "disk"
    assert node.where(image) == ["memory", "disk"]
    assert node.tiers.publish(JOB.name, 1)
    assert node.where(image) == ["memory", "disk", "shared"]
    copies, damage = node.tiers.copies(LATER)
    assert [one.tier.name for one in copies] == ["memory", "disk", "shared"]
    assert damage is None
    assert node.tiers.sound(copies).tier.name == "memory"
    assert not node.told


def test_where_memory_is_full_the_dump_goes_to_the_disk(make_node: Callable[..., Node]) -> None:
    """A copy that is the only one stays where it is."""
    node = make_node(memory=6 * MIB)
    first = node.dump(1, publish=False, settle=False)
    second = node.dump(2)
    assert node.where(first) == ["memory"]
    assert node.where(second) == ["disk", "shared"]


def test_a_tier_that_runs_full_meanwhile_leaves_the_image_to_the_next(make_node: Callable[..., Node]) -> None:
    """Nothing is left of it there, and it is told of; what is no lack of room is not tried again."""
    node = make_node()
    tried: list[str] = []

    def fill(writer: ImageWriter) -> Image:
        tried.append(str(Path(f"/proc/self/fd/{writer.fd}").readlink()))
        Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").write_bytes(b"half")
        if len(tried) == 1:
            raise DumpNoRoom("the image store ran full during the dump")
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=4)
    assert [path.rsplit("/", 3)[1] for path in tried] == ["memory", "disk"]
    assert node.where(image) == ["disk"]
    assert list((node.memory.path / JOB.name).iterdir()) == []
    assert node.told == [
        (123, "the tier memory ran full while its image was written: the image store ran full during the dump")
    ]

    def fail(writer: ImageWriter) -> Image:
        tried.append("once")
        raise DumpFailed("it holds something that cannot be dumped")

    with pytest.raises(DumpFailed, match="cannot be dumped"):
        node.tiers.write(JOB, fail, uid=1001, estimate=4)
    assert tried[2:] == ["once"]


def test_where_every_tier_runs_full_each_is_named(make_node: Callable[..., Node]) -> None:
    """And nothing is left."""
    node = make_node()

    def fill(writer: ImageWriter) -> Image:
        raise NoRoom(f"{len(node.told)}: full")

    with pytest.raises(NoRoom, match="0: full"):
        node.tiers.write(JOB, fill, uid=1001, estimate=4)
    assert node.told[-1] == (123, "no tier takes its image: 0: full; 1: full; 2: full")
    assert [list(store.path.glob("*/*")) for store in node.tiers.stores] == [[], [], []]


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


def test_another_node_brings_the_image_to_its_fast_tier(make_node: Callable[..., Node]) -> None:
    """Read once from the shared tier, verified on the way."""
    node = make_node()
    image = node.dump()
    other = make_node("c2")
    other.tiers.retention.tiers = (*other.tiers.tiers[:2], node.tiers.tiers[2])
    copies, _ = other.tiers.copies(LATER)
    assert [one.tier.name for one in copies] == ["shared"]
    found = other.tiers.sound(copies)
    assert found.tier.name == "memory"
    assert found.image.manifest == image.manifest
    assert other.tiers.on_node(JOB.name, 1) == found


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


def test_a_tier_that_went_away_is_passed_over(make_node: Callable[..., Node]) -> None:
    """Its directory was replaced, as by an umount: the next tier takes the image, and nothing is lost."""
    node = make_node()
    first = node.dump(1)
    node.memory.path.rename(node.memory.path.with_name("elsewhere"))
    second = node.dump(2)
    assert node.where(second) == ["disk", "shared"]
    (copy, *_), _ = node.tiers.copies(run_of(first))
    assert node.tiers.sound([copy])


def test_what_is_written_when_the_agent_ends_is_taken_up(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was told to stop is there in part, and is completed by the next agent."""
    node = make_node()
    image = node.dump(publish=False)
    looks = iter([False] * 40)
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: next(looks, True))
    with pytest.raises(Exception, match="taken up later"):
        node.tiers.publish(JOB.name, 1)
    ((facts, held),) = node.shared.begun()
    assert facts == image.manifest
    assert 0 < held < 4 * MIB
    assert node.shared.sweep([LATER], cluster="cluster", young_s=-1) == []
    monkeypatch.undo()
    monkeypatch.setattr(digest, "BLOCK", SMALL)
    assert node.tiers.publish(JOB.name, 1)
    node.shared.verify(image)


def test_zeros_take_no_room(make_node: Callable[..., Node], tmp_path: Path) -> None:
    """Blocks of zeros are holes in a copy, holes are not read; contents and digests are the same."""
    node = make_node()

    def fill(writer: ImageWriter) -> Image:
        with Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").open("wb") as file:
            file.write(os.urandom(300_000))
            file.write(bytes(8 * MIB))
            file.seek(40 * MIB)
            file.write(b"end")
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=1)
    node.tiers.settle(image)
    copied = node.file(node.disk, image)
    assert copied.stat().st_size == 40 * MIB + 3
    assert copied.stat().st_blocks * 512 < MIB
    node.disk.verify(image)


# --- real file systems


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small tmpfs file systems."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made: list[Path] = []

    def mount(name: str, size: str = "16m") -> Path:
        path = tmp_path / name
        path.mkdir(mode=0o700)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", path], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted: {done.stderr.decode().strip()}")
        made.append(path)
        return path

    yield mount
    for path in made:
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def config(tmp_path: Path, memory: Path, **more: object) -> SuspendConfig:
    """A node with a memory tier."""
    tiers = TiersConfig(memory=memory, memory_size="1G", memory_reserve="0", **more)  # type: ignore[arg-type]
    return SuspendConfig(local_store=tmp_path / "disk", shared_store=tmp_path / "shared", tiers=tiers)


def write(tiers: Tiers, facts: Manifest, size: int) -> Image:
    """A dump."""

    def fill(writer: ImageWriter) -> Image:
        Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img").write_bytes(os.urandom(size))
        return writer.commit(facts)

    image = tiers.write(facts.key, fill, uid=facts.uid, estimate=size)
    tiers.settle(image)
    tiers.publish(facts.key.name, image.manifest.seq)
    return image


def test_a_full_tmpfs(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """What does not fit goes to the disk; what fits goes to memory."""
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


@pytest.mark.parametrize("options", ["size=16m", "size=1g,nr_inodes=4"])
def test_a_tmpfs_that_runs_full_while_it_is_written(tmp_path: Path, mounted: Callable[..., Path], options: str) -> None:
    """Bytes or files run out after the image was begun: it is on the disk, whole, and the tmpfs is as it was."""
    memory = mounted("memory", options.removeprefix("size="))
    tiers = open_tiers(config(tmp_path, memory), KEY)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 * MIB))

    def fill(writer: ImageWriter) -> Image:
        with source.open("rb") as file:
            assert writer.save("out.1", file.fileno(), 20 * MIB) == 20 * MIB
        return writer.commit(MANIFEST)

    image = tiers.write(JOB, fill, uid=1001, estimate=MIB)
    assert [copy.tier.name for copy in tiers._all(JOB.name, 1)] == ["disk"]
    assert tiers.settle(image).tier.name == "disk"
    assert list(memory.glob("*/*")) == []
    for store in tiers.stores:
        store.close()


def test_a_file_system_that_takes_nothing_is_told(mounted: Callable[..., Path]) -> None:
    """Without bytes, without files, and read-only."""
    for name, options in (("bytes", "16m"), ("files", "1g,nr_inodes=2"), ("read-only", "16m")):
        path = mounted(name, options)
        fd = os.open(path, os.O_RDONLY)
        assert not rootdir.is_full(fd)
        if name == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        else:
            (path / "others").write_bytes(bytes(14 * MIB if name == "bytes" else 1))
        assert rootdir.is_full(fd)
        os.close(fd)


def test_a_tier_that_becomes_read_only(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """Its images can still be read, new ones go elsewhere."""
    memory = mounted("memory")
    tiers = open_tiers(config(tmp_path, memory), KEY)
    first = write(tiers, MANIFEST, MIB)
    subprocess.run(["mount", "-o", "remount,ro", memory], check=True)
    second = write(tiers, replace(MANIFEST, key=JobKey("cluster", 2, 1)), MIB)
    assert tiers.on_node(JOB.name, 1).tier.name == "memory"  # type: ignore[union-attr]
    assert tiers.on_node(second.manifest.key.name, 1).tier.name == "disk"  # type: ignore[union-attr]
    told: list[str] = []
    tiers.report = lambda key, text: told.append(text)
    page = next(memory.glob("*/0001/criu/pages-1.img"))
    subprocess.run(["mount", "-o", "remount,rw", memory], check=True)
    with page.open("r+b") as file:
        file.write(b"damage")
    subprocess.run(["mount", "-o", "remount,ro", memory], check=True)
    assert tiers.sound(tiers.copies(LATER)[0]).tier.name == "disk"
    assert "cannot be set aside" in told[0]
    assert first.manifest.seq == 1
    for store in tiers.stores:
        store.close()


def test_an_unmounted_tier(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """Also where it goes away under an agent that runs."""
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
    assert again.sound(again.copies(LATER)[0]).tier.name == "disk"
    for store in again.stores:
        store.close()


def test_a_directory_that_is_no_tmpfs_is_no_memory(tmp_path: Path) -> None:
    """The tier is left out, with the reason."""
    if filesystem(tmp_path) == "tmpfs":
        pytest.skip("temporary files are on a tmpfs here")
    tiers = open_tiers(config(tmp_path, tmp_path / "memory"), KEY)
    assert [tier.name for tier in tiers.tiers] == ["disk", "shared"]
    assert "not on a tmpfs" in tiers.missing[0]
    for store in tiers.stores:
        store.close()


# --- compressed


@pytest.fixture
def packing_node(make_node: Callable[..., Node]) -> Node:
    """The shared tier is compressed."""
    pytest.importorskip("zstandard")
    node = make_node()
    node.tiers.retention.tiers = (*node.tiers.tiers[:2], replace(node.tiers.tiers[2], level=3))
    return node


def compressible(node: Node) -> Image:
    """An image of text, noise and zeros."""

    def fill(writer: ImageWriter) -> Image:
        path = Path(f"/proc/self/fd/{writer.criu_fd}/pages-1.img")
        path.write_bytes(b"the same again " * 200_000 + os.urandom(MIB) + bytes(3 * MIB) + b"end")
        path.with_name("small.img").write_bytes(b"as it is")
        return writer.commit(MANIFEST)

    image = node.tiers.write(JOB, fill, uid=1001, estimate=1)
    node.tiers.settle(image)
    node.tiers.publish(JOB.name, 1)
    return image


def test_the_shared_tier_may_be_compressed(packing_node: Node) -> None:
    """The manifest is the same, the room less; it is verified as it is, and unpacked where it is brought."""
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
    found = node.tiers.sound(copies)
    assert found.tier.name == "memory"
    node.memory.verify(found.image)
    node.memory.remove(image)
    node.left = -1
    assert node.tiers.sound(node.tiers.copies(LATER)[0]).tier.name == "disk"


def test_compressed_and_no_room_to_unpack(packing_node: Node) -> None:
    """It cannot be restored from where it is, and says so."""
    node = packing_node
    image = compressible(node)
    for store in (node.memory, node.disk):
        store.remove(image)
        store.budget.reserve = 1 << 60
    with pytest.raises(ImageDamaged, match="no tier of this node has room"):
        node.tiers.sound(node.tiers.copies(LATER)[0])
    assert node.where(image) == ["shared"]


@pytest.mark.parametrize("place", [0, 9, 17, 40])
def test_a_flipped_bit_in_a_compressed_image(packing_node: Node, place: int) -> None:
    """In the form, the length, or the data of a slot."""
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


def test_a_compressed_copy_is_taken_up(packing_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it ended."""
    node = packing_node
    looks = iter([False] * 60)
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: next(looks, True))
    with pytest.raises(Exception, match="taken up later"):
        compressible(node)
    assert node.shared.begun()
    monkeypatch.setattr(node.tiers.stopping, "is_set", lambda: False)
    assert node.tiers.publish(JOB.name, 1)
    node.shared.verify(node.shared.get(JOB.name, 1))


def test_copies_keep_to_their_rates(make_node: Callable[..., Node]) -> None:
    """To the shared tier, and ahead of a start; neither the way out to the disk nor a restore that waits."""
    node, passed = make_node(), dict.fromkeys(("shared", "ahead"), 0)

    class Counting(Limiter):
        """A limit that lets all pass."""

        def __init__(self, name: str) -> None:
            super().__init__(0)
            self.name = name

        def pass_(self, count: int) -> None:
            passed[self.name] += count

    node.tiers._to_shared, node.tiers._ahead = Counting("shared"), Counting("ahead")
    image = node.dump(publish=False)
    assert passed == {"shared": 0, "ahead": 0}
    node.tiers.publish(JOB.name, 1)
    assert passed == {"shared": image.manifest.size, "ahead": 0}
    for store in (node.memory, node.disk):
        store.remove(image)
    (copy,), _ = node.tiers.copies(LATER)
    assert node.tiers.pull(copy, expected_s=0.0)
    assert passed["ahead"] == 0
    node.memory.remove(image)
    assert node.tiers.pull(copy, expected_s=60.0)
    assert passed["ahead"] == image.manifest.size
