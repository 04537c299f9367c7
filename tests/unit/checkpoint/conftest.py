"""An image store of the user that runs the tests, and images in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.model.suspension import (
    GpuFact,
    JobKey,
    LiveRun,
    Manifest,
    SavedOutput,
    SuspendOption,
    Versions,
)

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
"""All but what the store fills in."""

LATER = LiveRun(replace(JOB, submit_epoch=JOB.submit_epoch + 200), 1001, 1)
"""The run that Slurm makes of the job when it was requeued."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    """An empty store."""
    made = DirectoryStore(tmp_path / "images", KEY)
    yield made
    made.close()


@pytest.fixture
def make_image(store: DirectoryStore) -> Callable[..., Image]:
    """Writes an image of a few files."""

    def make(into: DirectoryStore = store, manifest: Manifest = MANIFEST, size: int = 5000) -> Image:
        with into.begin(manifest.key, uid=manifest.uid, estimate=size) as writer:
            criu = Path(f"/proc/self/fd/{writer.criu_fd}")
            (criu / "pages-1.img").write_bytes(b"page" * (size // 4))
            (criu / "pstree.img").write_bytes(b"tree")
            (criu / "empty.img").touch()
            source = criu / "pstree.img"
            with source.open("rb") as opened:
                assert writer.save("out.1", opened.fileno(), 3) == 3
            return writer.commit(manifest)

    return make
