"""A user swaps files of a sleeping job for others, and takes what its processes have open while they are restored.

Real trees and real CRIU in a compute container, which has no Yama: a process may take descriptors of any other of its
user. The attacks are in `checkpoint/attacks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster.driver import Cluster

from .test_checkpoint import Drive, DriveError, programs

pytestmark = [pytest.mark.cluster, pytest.mark.main]
__all__ = ["programs"]
THEIRS = "/srv/checkpoint-attack"
WORK = "/home/alice/checkpoint-test"


@pytest.fixture
def attack(programs: Cluster) -> Iterator[Callable[..., Any]]:
    """Does something on c1."""
    made = Drive(programs.container("c1"), program="attacks.py")
    yield made
    made.close()


def test_root_file_in_place_of_an_appended_file_is_not_written(attack: Callable[..., Any], programs: Cluster) -> None:
    """CRIU does not even open it, so nobody can take a descriptor of it."""
    attack("victim", "append")
    attack("dump")
    attack("swap", "file", "file")
    attack("steal")
    with pytest.raises(DriveError, match=f"RestoreFailed: {THEIRS}/file would be open as its user may not open it"):
        attack("put_back")
    assert f"{THEIRS}/file" not in attack("stolen")["taken"]
    assert attack("happened") == []
    assert attack("members") == []
    assert programs.exec("c1", "cat", f"{THEIRS}/file") == "root's\n"


@pytest.mark.parametrize("victim", ["cwd", "directory"])
def test_directory_below_a_closed_home_is_not_opened(attack: Callable[..., Any], victim: str) -> None:
    """Everybody may read it, and its user may not get there."""
    attack("victim", victim)
    attack("dump")
    attack("swap", "project", "hidden")
    with pytest.raises(DriveError, match=f"RestoreFailed: {WORK}/project: cannot be opened by its user: Permission"):
        attack("put_back")
    assert attack("members") == []


@pytest.mark.parametrize("what", ["fifo", "device", "own fifo"])
def test_special_file_in_place_of_a_file_is_refused_unopened(attack: Callable[..., Any], what: str) -> None:
    """At once: to open a FIFO may take until the time is over, and to open a device may do something to it."""
    attack("victim", "file")
    attack("dump")
    attack("swap", "file", what)
    with pytest.raises(DriveError, match="is of another type than it was"):
        attack("put_back")
    assert attack("happened") == []
    assert attack("members") == []


@pytest.mark.parametrize("victim", ["socket", "datagrams"])
def test_socket_in_a_directory_of_root_is_neither_removed_nor_made(attack: Callable[..., Any], victim: str) -> None:
    """Its user may not do that there."""
    attack("victim", victim)
    attack("dump")
    attack("swap", "place", "directory")
    with pytest.raises(DriveError, match=f"RestoreFailed: {WORK}/place/socket: its socket cannot be made: Permission"):
        attack("put_back")
    assert attack("happened") == []
    assert attack("root_names") == ["place", "socket"]


def test_removed_file_is_not_made_in_a_directory_of_root(attack: Callable[..., Any]) -> None:
    """It is made where its user may make files, and has its contents."""
    attack("victim", "ghost")
    attack("dump")
    attack("swap", "place", "directory")
    attack("put_back")
    assert attack("says") == "mine"
    assert attack("happened") == []
    assert attack("root_names") == ["place", "socket"]


def test_dump_makes_no_name_in_a_directory_of_root(attack: Callable[..., Any]) -> None:
    """For a file that was removed, while its directory and a link are exchanged over and over."""
    attack("victim", "named")
    assert attack("dump_swapped", 8) == []


def test_directory_below_a_closed_home_is_not_watched(attack: Callable[..., Any]) -> None:
    """Who watches it would get the names of its files."""
    attack("victim", "watch")
    attack("dump")
    attack("swap", "place", "hidden")
    with pytest.raises(DriveError, match=r"RestoreFailed"):
        attack("put_back")
    assert attack("members") == []


def test_image_that_is_swapped_behind_its_verification_is_not_used(attack: Callable[..., Any]) -> None:
    """Each small file is read once, and what was read is verified."""
    attack("victim", "plain")
    attack("dump")
    with pytest.raises(DriveError, match=r"ImageDamaged: .*criu/files\.img: its contents have changed"):
        attack("put_back", True, "files.img")
    assert attack("members") == []


def test_image_is_restored_from_a_store_that_others_write_to(attack: Callable[..., Any]) -> None:
    """With a copy of what CRIU reads itself."""
    attack("victim", "plain")
    attack("dump")
    attack("put_back", True)
    assert attack("says") == ["mine", "00000000"]


def test_held_tree_has_nothing_that_its_user_may_not_open(attack: Callable[..., Any]) -> None:
    """Where the kernel lets a user take descriptors of a tree that is held, he gets what is his."""
    attack("victim", "plain")
    attack("dump")
    attack("steal")
    attack("put_back")
    found = attack("stolen")
    assert found["taken"]
    assert found["beyond"] == []


def test_hundreds_of_mapped_files_come_back(attack: Callable[..., Any]) -> None:
    """As a program with many libraries has."""
    attack("victim", "libraries")
    attack("dump")
    attack("put_back")
    assert attack("says") == 600


def test_fifo_comes_back_with_its_contents(attack: Callable[..., Any]) -> None:
    """Opened for its user, and without waiting for a writer."""
    attack("victim", "fifo")
    attack("dump")
    assert attack("put_back") < 20
    assert attack("says") == "mine"


def test_removed_files_come_back(attack: Callable[..., Any]) -> None:
    """A working directory, a program that runs, a FIFO, a file that has another name still."""
    attack("victim", "gone")
    attack("dump")
    attack("put_back")
    assert attack("says") == [
        f"{WORK}/gone (deleted)", f"{WORK}/program (deleted)", None, "x", "linked", f"{WORK}/linked (deleted)",
        ["go", "other", "ready"],
    ]  # fmt: skip


def test_named_sockets_come_back_as_the_user_made_them(attack: Callable[..., Any]) -> None:
    """Listening, bound by a relative name, bound and removed, and connected to the node's log."""
    attack("victim", "listeners")
    attack("dump")
    attack("put_back")
    where, gone = f"{WORK}/socket", f"{WORK}/gone"
    assert attack("says") == ["hello", "data", where, gone, False, 2001, "0o140640"]
    assert attack("heard") == "logged"


def test_connection_that_is_not_accepted_keeps_a_tree_from_being_dumped(attack: Callable[..., Any]) -> None:
    """It would have to be made again by a path."""
    attack("victim", "waiting")
    with pytest.raises(DriveError, match="DumpFailed: it could not be restored: a connection to its socket"):
        attack("dump")


def test_file_of_a_process_keeps_a_tree_from_being_suspended(attack: Callable[..., Any]) -> None:
    """There is a code for it."""
    attack("victim", "process")
    assert "undumpable" in [one["code"] for one in attack("refusals")]
