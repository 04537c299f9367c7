"""The conformance suite of image stores, on each kind that a tier can be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from conformance.image_store import StoreKind, StoreSuite, needs_compression

from slurm_affinode.base.timeouts import FileSystemCalls
from slurm_affinode.checkpoint.image import compression, digest
from slurm_affinode.checkpoint.image.block_io import Limiter
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.tiers import filesystem
from slurm_affinode.checkpoint.store.transfer import CopyMode

from ..conftest import KEY, LATER, MANIFEST

HOST_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system, whatever its names
HOWS = {
    "memory": CopyMode(Limiter(0), read_direct=True),
    "disk": CopyMode(Limiter(0), write_direct=True),
    "shared": CopyMode(Limiter(0), read_direct=True, write_direct=True),
    "compressed": CopyMode(Limiter(0), read_direct=True, write_direct=True, level=3),
}
"""The settings with which ``Tiers.move`` copies to each tier."""


class TestStore(StoreSuite):
    """All of them."""

    @pytest.fixture(params=["memory", "disk", "shared", pytest.param("compressed", marks=needs_compression)])
    def kind(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StoreKind]:
        monkeypatch.setattr(digest, "BLOCK", 1 << 12)
        monkeypatch.setattr(digest, "workers", lambda: 1)
        monkeypatch.setattr(compression, "LEAST", 1 << 12)
        with ExitStack() as stack:
            root = tmp_path
            if request.param == "memory":
                if not os.access(HOST_MEMORY, os.W_OK) or filesystem(HOST_MEMORY) != "tmpfs":
                    pytest.skip(f"{HOST_MEMORY} is no tmpfs")
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=HOST_MEMORY)))
            calls = FileSystemCalls(root) if request.param in ("shared", "compressed") else None
            store = stack.enter_context(closing(DirectoryStore(root / "store", KEY, calls=calls)))
            other = stack.enter_context(closing(DirectoryStore(tmp_path / "other", KEY)))
            yield StoreKind(store, other, HOWS[request.param], MANIFEST, LATER)
