"""An image store owned by the user that runs the tests, and checkpoint images in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.image import digest
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.interface import Image, Pages
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.retention import Copy, Tier
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import (
    GpuFact,
    JobKey,
    LiveRun,
    Manifest,
    SavedOutput,
    SuspendOption,
    Versions,
)

MIB = 1 << 20
SMALL = 64 << 10
Reports = list[tuple[int, str]]

KEY = bytes(range(32))
JOB = JobKey("cluster", 123, 1_700_000_000)

MANIFEST = Manifest(
    key=JOB,
    seq=0,
    uid=1001,
    gid=1001,
    node="c1",
    restarts=0,
    started_epoch=1_700_000_100.5,
    dumped_epoch=1_700_000_101.25,
    option=SuspendOption.parse("window=900,util=5,signal=USR1@10"),
    versions=Versions("0.1", "6.12", "4.1.1", "24.11.5", "580.95.05"),
    root_pid=2,
    cuda_pids=(2, 7),
    gpus=(GpuFact("GPU-1", "NVIDIA H100", 80 << 30),),
    gpu_bytes=5 << 30,
    outputs=(SavedOutput(1, "file", "/home/a/slurm-\udcff.out", "out.1", None, 5, 5, False, "home/a/out"),),
    files=(),
)
"""All fields but those that the store fills in."""

LATER = LiveRun(replace(JOB, submit_epoch=JOB.submit_epoch + 200), 1001, 1)
"""The attempt that Slurm starts when the job was requeued."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    """Return an empty store."""
    made = DirectoryStore(tmp_path / "images", KEY)
    yield made
    made.close()


@pytest.fixture
def make_image(store: DirectoryStore) -> Callable[..., Image]:
    """Return a function that writes an image of a few files."""

    def make(
        into: DirectoryStore = store, manifest: Manifest = MANIFEST, size: int = 5000, local: bytes = b""
    ) -> Image:
        with into.begin(manifest.key, uid=manifest.uid, estimate=size) as writer:
            criu = Path(f"/proc/self/fd/{writer.criu_fd}")
            (criu / "pages-1.img").write_bytes(b"page" * (size // 4))
            (criu / "pstree.img").write_bytes(b"tree")
            (criu / "empty.img").touch()
            if local:
                (criu / "local-1").write_bytes(local)
            source = criu / "pstree.img"
            with source.open("rb") as opened:
                assert writer.save("out.1", opened.fileno(), 3) == 3
            return writer.commit(manifest)

    return make


class Node:
    """Three tiers of small blocks; the memory tier holds ``memory`` bytes."""

    def __init__(self, root: Path, memory: int = 1 << 30, disk: int | None = None) -> None:
        self.reports: Reports = []
        self.left: int | None = None
        self.now = 1000.0
        self.memory = DirectoryStore(root / "memory", KEY, quota=memory)
        self.disk = DirectoryStore(root / "disk", KEY, quota=disk)
        self.shared = DirectoryStore(root / "shared", KEY)
        self.tiers = Tiers(
            [
                Tier("memory", self.memory, durable=False, available_bytes=lambda: self.left),
                Tier("disk", self.disk, direct=True),
                Tier("shared", self.shared, shared=True, direct=True),
            ],
            now=lambda: self.now,
            report=lambda key, text: self.reports.append((key.job_id, text)),
        )

    def dump(self, job: int = 123, size: int = 4 * MIB, *, publish: bool = True, settle: bool = True) -> Image:
        key = JobKey("cluster", job, JOB.submit_epoch)

        def fill(writer: ImageWriter) -> Image:
            criu = Path(f"/proc/self/fd/{writer.criu_fd}")
            (criu / "pages-1.img").write_bytes(os.urandom(size))
            (criu / "pstree.img").write_bytes(b"tree")
            return writer.commit(replace(MANIFEST, key=key, dumped_epoch=self.now))

        image = self.tiers.write(key, fill, uid=1001, estimate=size)
        if settle:
            self.tiers.settle(image)
        if publish:
            self.tiers.publish(key.name, image.manifest.seq)
        return image

    def where(self, image: Image) -> list[str]:
        """Return the tiers with a complete copy."""
        facts = image.manifest
        return [copy.tier.name for copy in self.tiers._all_copies(facts.key.name, facts.seq)]

    def file(self, tier: DirectoryStore, image: Image) -> Path:
        return tier.path / image.manifest.key.name / f"{image.manifest.seq:04d}" / "criu" / "pages-1.img"

    def flip(self, tier: DirectoryStore, image: Image) -> None:
        """Flip one bit in the middle."""
        with self.file(tier, image).open("r+b") as file:
            file.seek(12345)
            byte = file.read(1)[0]
            file.seek(12345)
            file.write(bytes([byte ^ 4]))

    def close(self) -> None:
        for store in self.tiers.stores:
            store.close()


def whole(copy: Copy, pages: Pages) -> Copy:
    """Use a copy: verify it completely."""
    pages.sound()
    return copy


def run_of(image: Image) -> LiveRun:
    """Return the attempt that restores the image."""
    return replace(LATER, key=replace(image.manifest.key, submit_epoch=LATER.key.submit_epoch))


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Return a function that makes nodes with blocks of 64 KiB."""
    monkeypatch.setattr(digest, "BLOCK", SMALL)
    monkeypatch.setattr(digest, "workers", lambda: 2)
    made: list[Node] = []

    def make(name: str = "c1", **limits: int) -> Node:
        made.append(Node(tmp_path / name, **limits))
        return made[-1]

    yield make
    for node in made:
        node.close()
