"""Ownership of the SQLite file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.db.repository import Repository

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")

USER, GROUP = 64123, 64124


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a state directory that belongs to a user."""
    state = tmp_path / "state"
    state.mkdir(mode=0o750)
    os.chown(state, USER, GROUP)
    return state


def test_file_made_by_root_belongs_to_the_owner_of_the_directory(directory: Path) -> None:
    """Root's timer may run before the first nightly run, which has to write to the file, too."""
    with Repository.open(str(directory / "affinode.sqlite")) as opened:
        opened.counts()
        owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in directory.iterdir()}
    assert owners["affinode.sqlite"] == (USER, GROUP)
    assert set(owners.values()) == {(USER, GROUP)}


def test_existing_file_keeps_its_owner(directory: Path, tmp_path: Path) -> None:
    """So does the target of a link: a user must not make root give away files of others."""
    other = tmp_path / "other.sqlite"
    other.touch()
    (directory / "affinode.sqlite").symlink_to(other)
    with Repository.open(str(directory / "affinode.sqlite")):
        pass
    (directory / "dangling.sqlite").symlink_to(tmp_path / "made.sqlite")
    with Repository.open(str(directory / "dangling.sqlite")):
        pass
    assert [path.stat().st_uid for path in (other, tmp_path / "made.sqlite")] == [0, 0]
