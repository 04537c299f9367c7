"""Sweep of the image store: images of ended jobs, superseded images and interrupted writes are removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.checkpoint.store.image_store import DirectoryStore, newest
from slurm_affinode.model.suspension import JobKey, LiveRun

from ..conftest import JOB, KEY, LATER, MANIFEST

Make = Callable[..., Image]


def test_sweep_keeps_images_of_live_jobs(store: DirectoryStore, make_image: Make) -> None:
    """Images of ended jobs, of reused job IDs, and interrupted writes are removed; all others stay."""
    kept = make_image()
    this_run = make_image(manifest=replace(MANIFEST, key=JobKey("cluster", 200, 5), restarts=3))
    make_image(manifest=replace(MANIFEST, key=JobKey("cluster", 300, 5)))
    make_image(manifest=replace(MANIFEST, key=JobKey("cluster", 400, 5)))
    foreign = make_image(manifest=replace(MANIFEST, key=JobKey("other", 300, 5)))
    store.begin(JobKey("cluster", 500, 5), uid=1, estimate=0).leave()
    live = [
        LATER,
        LiveRun(JobKey("cluster", 200, 5), 1001, 3),
        LiveRun(JobKey("cluster", 300, 9000), 1001, 0),
        LiveRun(JobKey("cluster", 600, 1), 1001, 0),
    ]
    assert store.sweep(live, cluster="cluster") == []
    removed = store.sweep(live, cluster="cluster", young_s=-1)
    assert removed == ["cluster.300/0001", "cluster.400/0001", "cluster.500/0001.tmp"]
    assert [i.manifest.key for i in store.images() if isinstance(i, Image)] == [
        kept.manifest.key, this_run.manifest.key, foreign.manifest.key,
    ]  # fmt: skip


def test_failed_removal_does_not_stop_the_sweep(
    store: DirectoryStore, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory with errors is reported; images of other ended jobs are removed."""
    for job in (7, 8, 9):
        make_image(manifest=replace(MANIFEST, key=replace(JOB, job_id=job)))
    rename = os.rename

    def busy(name: str, to: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if Path(f"/proc/self/fd/{src_dir_fd}").readlink().name == "cluster.8":
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(name, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", busy)
    failures: list[str] = []
    assert store.sweep([], cluster="cluster", young_s=-1, failed=failures.append) == [
        "cluster.7/0001",
        "cluster.9/0001",
    ]
    assert failures == [f"{store.path}/cluster.8: Device or resource busy"]


def test_sweep_removes_superseded_images(tmp_path: Path, store: DirectoryStore, make_image: Make) -> None:
    """The newer image must be of an attempt that was requeued since, and be sound where every node sees it.

    Complete and partial copies are removed on each node.
    """
    shared = DirectoryStore(tmp_path / "shared", KEY)
    live = [LATER]

    def sweep(where: DirectoryStore = store) -> list[str]:
        return where.sweep(live, cluster="cluster", newest=newest(shared.images(), live), young_s=-1)

    first = make_image()
    second = make_image(manifest=replace(MANIFEST, restarts=1, key=LATER.key))
    for image in (first, second):
        store.copy(image, shared)
    assert sweep() == sweep(shared) == []  # the second suspension may still be rolled back
    live[:] = [replace(LATER, restarts=2)]
    third = make_image(manifest=replace(MANIFEST, restarts=2, key=LATER.key))
    store.cut(first, 1)
    shared.set_aside(first)
    assert sweep() == ["cluster.123/0001.tmp"]
    assert sweep(shared) == []  # an image that was set aside stays for inspection
    assert store.find(live[0]) is None
    store.discard(third.manifest.key, 3)
    assert store.find(live[0]) == second
    (shared.path / "cluster.123" / "0002" / "manifest.json").write_text("{}")
    make_image()
    assert sweep() == []
    shared.close()
