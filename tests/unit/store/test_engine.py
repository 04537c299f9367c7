"""Whose the SQLite file is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.store.repository import Repository

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")

USER, GROUP = 64123, 64124


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A state directory that belongs to a user."""
    state = tmp_path / "state"
    state.mkdir(mode=0o750)
    os.chown(state, USER, GROUP)
    return state


def test_what_root_makes_in_a_users_directory_is_the_users(directory: Path) -> None:
    """The timer of root may come before the first nightly run, which has to write there too."""
    with Repository.open(str(directory / "affinode.sqlite")) as opened:
        opened.counts()
        owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in directory.iterdir()}
    assert owners["affinode.sqlite"] == (USER, GROUP)
    assert set(owners.values()) == {(USER, GROUP)}


def test_a_file_that_is_there_keeps_its_owner(directory: Path, tmp_path: Path) -> None:
    """Also one that a link leads to: the user may not have root give away what is not the user's."""
    other = tmp_path / "other.sqlite"
    other.touch()
    (directory / "affinode.sqlite").symlink_to(other)
    with Repository.open(str(directory / "affinode.sqlite")):
        pass
    (directory / "dangling.sqlite").symlink_to(tmp_path / "made.sqlite")
    with Repository.open(str(directory / "dangling.sqlite")):
        pass
    assert [path.stat().st_uid for path in (other, tmp_path / "made.sqlite")] == [0, 0]
