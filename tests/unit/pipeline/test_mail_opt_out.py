"""Users who want no mails: a file counts for its owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.pipeline import mail_opt_out

ALICE, BOB = 60_001, 60_002


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "no-mail"
    path.mkdir()
    path.chmod(0o1733)
    return path


def file_of(directory: Path, name: str, uid: int) -> Path:
    path = directory / name
    path.touch()
    os.chown(path, uid, uid)
    return path


def test_user_opts_out_and_in_again(directory: Path) -> None:
    """Each of them is idempotent."""
    uid = os.getuid()
    assert not mail_opt_out.is_opted_out(directory, uid)
    assert [mail_opt_out.opt_out(directory, uid) for _ in range(2)] == [True, False]
    assert mail_opt_out.is_opted_out(directory, uid)
    assert mail_opt_out.opted_out(directory) == {uid}
    assert [mail_opt_out.opt_in(directory, uid) for _ in range(2)] == [True, False]
    assert mail_opt_out.opted_out(directory) == frozenset()


def test_owner_counts_and_not_the_name(directory: Path) -> None:
    """A user cannot opt out for another one."""
    file_of(directory, str(ALICE), BOB)
    assert mail_opt_out.opted_out(directory) == {BOB}
    assert not mail_opt_out.is_opted_out(directory, ALICE)
    with pytest.raises(AffinodeError, match=f"belongs to the user with UID {BOB}"):
        mail_opt_out.opt_out(directory, ALICE)


def test_links_and_directories_do_not_count(directory: Path, tmp_path: Path) -> None:
    """A second name of a file, or a symbolic link to it, may have been made by someone else."""
    elsewhere = file_of(tmp_path, "file", ALICE)
    os.link(elsewhere, directory / "hard")
    (directory / "soft").symlink_to(elsewhere)
    (directory / "folder").mkdir()
    os.chown(directory / "folder", ALICE, ALICE)
    assert mail_opt_out.opted_out(directory) == frozenset()


def test_unsafe_directory_is_not_used(directory: Path, tmp_path: Path) -> None:
    directory.chmod(0o777)
    with pytest.raises(AffinodeError, match="users could remove files of others"):
        mail_opt_out.opted_out(directory)
    directory.chmod(0o1733)
    os.chown(directory, ALICE, ALICE)
    with pytest.raises(AffinodeError, match="belongs to another user"):
        mail_opt_out.opted_out(directory)
    (tmp_path / "link").symlink_to(directory)
    for path in (tmp_path / "none", tmp_path / "link"):
        with pytest.raises(AffinodeError, match=str(path)):
            mail_opt_out.opted_out(path)
