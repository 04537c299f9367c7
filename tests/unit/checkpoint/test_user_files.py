"""Files opened with the rights of the job's user."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.user_files import User, as_user, user_of

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root opens files as another user")
ALICE = User(2001, 2001, (2001, 2077))


def rights() -> tuple[str, ...]:
    """Return user ID and group ID for files, and the groups, of the calling thread, as the kernel reports them."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    return facts["Uid"].split()[3], facts["Gid"].split()[3], facts["Groups"].strip()


@only_root
def test_only_the_call_has_the_users_rights() -> None:
    """The calling thread and all other threads keep their own rights."""
    before = rights()
    assert as_user(ALICE, rights) == ("2001", "2001", "2001 2077")
    assert rights() == before


@only_root
@pytest.mark.parametrize("number", [1 << 32, (1 << 32) - 1, -1, 1 << 64])
def test_user_numbers_that_wrap_around_are_refused(number: int) -> None:
    """4294967296 would be root for a C library that takes 32 bits."""
    for user in (User(number, 2001), User(2001, number), User(2001, 2001, (number,))):
        with pytest.raises(OSError, match="not the number of a user"):
            as_user(user, rights)


@only_root
def test_exception_of_the_call_is_raised(tmp_path: Path) -> None:
    (tmp_path / "mine").touch(mode=0o600)
    with pytest.raises(PermissionError):
        as_user(ALICE, (tmp_path / "mine").read_text)
    assert as_user(User(0, 0), (tmp_path / "mine").read_text) == ""


def test_groups_are_read_from_a_process_of_the_user() -> None:
    """The groups of another user's process are not used."""
    me = user_of(os.getpid(), os.getuid(), os.getgid())
    assert me == User(os.getuid(), os.getgid(), tuple(sorted(os.getgroups())))
    assert user_of(os.getpid(), os.getuid() + 1, 5) == User(os.getuid() + 1, 5)
    assert user_of(1 << 22, 7, 8) == User(7, 8)
