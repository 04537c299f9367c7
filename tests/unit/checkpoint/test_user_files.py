"""Files opened with the rights of the job's user."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.user_files import User, as_user

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
def test_quotas_of_the_user_apply() -> None:
    """setfsuid(2) keeps CAP_SYS_RESOURCE, with which a write exceeds quotas and takes reserved blocks."""

    def resources() -> bool:
        status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
        return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)

    before = resources()
    assert not as_user(ALICE, resources)
    assert resources() == before


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


@only_root
@pytest.mark.parametrize("user", [User(0, 0), User(0, 2001), User(2001, 0), User(0, 0, (2001,))], ids=str)
@pytest.mark.parametrize("where", ["here", "in a namespace"])
@pytest.mark.parametrize("effective", [False, True])
def test_root_does_not_act_for_itself(user: User, where: str, effective: bool) -> None:
    """Whatever a job's processes or an image say, nothing is done for a job with the rights of root."""
    called: list[int] = []
    assert user.is_root
    with contextlib.ExitStack() as stack:
        space = None
        if where != "here":
            space = os.open("/proc/self/ns/mnt", os.O_RDONLY)
            stack.callback(os.close, space)
        with pytest.raises(PermissionError, match="root does not act with its own rights"):
            as_user(user, lambda: called.append(1), namespace_fd=space, effective=effective)
    assert called == []


@only_root
def test_call_in_a_namespace_has_the_users_rights() -> None:
    """The thread that enters the namespace is not the calling one."""
    before, space = rights(), os.open("/proc/self/ns/mnt", os.O_RDONLY)
    try:
        assert as_user(ALICE, rights, namespace_fd=space) == ("2001", "2001", "2001 2077")
    finally:
        os.close(space)
    assert rights() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root acts as the user")
def test_other_users_act_as_themselves() -> None:
    """Only root can change its rights."""
    assert as_user(User(0, 0), threading.get_ident) == threading.get_ident()


def test_only_user_and_group_make_a_root_user() -> None:
    """Root's group as one of several is no more than a right on its files."""
    assert not User(2001, 2001, (0, 4)).is_root
    assert not ALICE.is_root
