"""Directories that no user other than their owner can have changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.root_directory import check_above


@pytest.mark.parametrize(("mode", "good"), [(0o700, True), (0o755, True), (0o775, False), (0o1777, False)])
def test_directory_above_the_shared_store_is_writable_by_its_owner_only(tmp_path: Path, mode: int, good: bool) -> None:
    """Notes and claims in a directory that others may write to could be forged, or be links."""
    place = tmp_path / "scratch"
    place.mkdir()
    place.chmod(mode)
    if good:
        check_above(place / "images", owner=os.geteuid())
        return
    with pytest.raises(CheckpointError, match=f"scratch: users other than .* mode {mode:04o}") as caught:
        check_above(place / "images", owner=os.geteuid())
    assert "slurm-affinode/images" in str(caught.value.hint)


def test_directory_of_another_user_or_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="users other than"):
        check_above(tmp_path / "images", owner=os.geteuid() + 1)
    with pytest.raises(CheckpointError, match="cannot be examined"):
        check_above(tmp_path / "gone" / "images", owner=os.geteuid())


def test_failed_stat_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a file server that disappears between two calls costs a descriptor with every sweep."""
    top = root_directory.open_top(tmp_path, owner=os.geteuid(), create=False)
    (tmp_path / "job").mkdir(mode=0o700)
    before = len(list(Path("/proc/self/fd").iterdir()))

    def stale(fd: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        for opened in (
            lambda: root_directory.open_directory(top, "job", owner=os.geteuid()),
            lambda: root_directory.open_top(tmp_path, owner=os.geteuid(), create=False),
        ):
            with pytest.raises(OSError, match="Stale"):
                opened()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(top)
