"""Directories that nobody else can have had a hand in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import rootdir
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.rootdir import check_above


@pytest.mark.parametrize(("mode", "good"), [(0o700, True), (0o755, True), (0o775, False), (0o1777, False)])
def test_what_lies_beside_the_shared_store_is_its_owners(tmp_path: Path, mode: int, good: bool) -> None:
    """Notes and claims: in a directory where others may write they could be others', or links."""
    place = tmp_path / "scratch"
    place.mkdir()
    place.chmod(mode)
    if good:
        check_above(place / "images", owner=os.geteuid())
        return
    with pytest.raises(CheckpointError, match=f"scratch: others than user .* mode {mode:04o}") as caught:
        check_above(place / "images", owner=os.geteuid())
    assert "slurm-affinode/images" in str(caught.value.hint)


def test_a_directory_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    """Nor one that is not there."""
    with pytest.raises(CheckpointError, match="others than user"):
        check_above(tmp_path / "images", owner=os.geteuid() + 1)
    with pytest.raises(CheckpointError, match="cannot be looked at"):
        check_above(tmp_path / "gone" / "images", owner=os.geteuid())


def test_what_cannot_be_looked_at_stays_open_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that goes away between two calls, with every sweep: else the agent has no descriptors left."""
    top = rootdir.open_top(tmp_path, owner=os.geteuid(), create=False)
    (tmp_path / "job").mkdir(mode=0o700)
    before = len(list(Path("/proc/self/fd").iterdir()))

    def stale(fd: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        for opened in (
            lambda: rootdir.open_directory(top, "job", owner=os.geteuid()),
            lambda: rootdir.open_top(tmp_path, owner=os.geteuid(), create=False),
        ):
            with pytest.raises(OSError, match="Stale"):
                opened()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(top)
