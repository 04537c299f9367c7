"""Attacks by a user who swaps files of a suspended job, or steals descriptors of its processes during a restore.

Real process trees and real CRIU in a compute container, which has no Yama: a process can copy descriptors of any
other process of its user. The attacks are in `checkpoint/attacks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster.driver import Cluster

from .test_checkpoint import Drive, DriveError, programs

pytestmark = pytest.mark.cluster
__all__ = ["programs"]
DIRECTORY_OF_ROOT = "/srv/checkpoint-attack"
WORK = "/home/alice/checkpoint-test"


@pytest.fixture
def attack(programs: Cluster) -> Iterator[Callable[..., Any]]:
    """Run attacks on c1."""
    made = Drive(programs.container("c1"), program="attacks.py")
    yield made
    made.close()


def test_root_file_in_place_of_an_appended_file_is_not_written(attack: Callable[..., Any], programs: Cluster) -> None:
    """CRIU does not open the file, so its descriptor cannot be stolen."""
    attack("victim", "append")
    attack("dump")
    attack("swap", "file", "file")
    attack("steal")
    with pytest.raises(
        DriveError, match=f"RestoreFailed: {DIRECTORY_OF_ROOT}/file would be open with access that its user"
    ):
        attack("restore_victim")
    assert f"{DIRECTORY_OF_ROOT}/file" not in attack("stolen")["taken"]
    assert attack("root_events") == []
    assert attack("members") == []
    assert programs.exec("c1", "cat", f"{DIRECTORY_OF_ROOT}/file") == "root's\n"


@pytest.mark.parametrize("victim", ["cwd", "directory"])
def test_directory_below_a_closed_home_is_not_opened(attack: Callable[..., Any], victim: str) -> None:
    """All users may read the directory, but the job's user cannot enter the home above it."""
    attack("victim", victim)
    attack("dump")
    attack("swap", "project", "hidden")
    with pytest.raises(DriveError, match=f"RestoreFailed: {WORK}/project: cannot be opened by its user: Permission"):
        attack("restore_victim")
    assert attack("members") == []


@pytest.mark.parametrize("what", ["fifo", "device", "own fifo"])
def test_special_file_in_place_of_a_file_is_refused_unopened(attack: Callable[..., Any], what: str) -> None:
    """Opening a FIFO may block until the timeout, and opening a device may have side effects."""
    attack("victim", "file")
    attack("dump")
    attack("swap", "file", what)
    with pytest.raises(DriveError, match="has another type than before"):
        attack("restore_victim")
    assert attack("root_events") == []
    assert attack("members") == []


@pytest.mark.parametrize("victim", ["socket", "datagrams"])
def test_socket_in_root_directory_is_neither_removed_nor_created(attack: Callable[..., Any], victim: str) -> None:
    """The user of the job has no write access to the directory."""
    attack("victim", victim)
    attack("dump")
    attack("swap", "place", "directory")
    with pytest.raises(DriveError, match=f"RestoreFailed: {WORK}/place/socket: its socket cannot be made: Permission"):
        attack("restore_victim")
    assert attack("root_events") == []
    assert attack("root_names") == ["place", "socket"]


def test_removed_file_is_not_created_in_root_directory(attack: Callable[..., Any]) -> None:
    """A removed file is created with its contents where its user may create files."""
    attack("victim", "ghost")
    attack("dump")
    attack("swap", "place", "directory")
    attack("restore_victim")
    assert attack("report") == "mine"
    assert attack("root_events") == []
    assert attack("root_names") == ["place", "socket"]


def test_dump_creates_no_name_in_root_directory(attack: Callable[..., Any]) -> None:
    """The user swaps the directory of a removed file with a link again and again."""
    attack("victim", "named")
    assert attack("dump_swapped", 8) == []


def test_directory_below_a_closed_home_is_not_watched(attack: Callable[..., Any]) -> None:
    """An inotify watch would report the names of the files in it."""
    attack("victim", "watch")
    attack("dump")
    attack("swap", "place", "hidden")
    with pytest.raises(DriveError, match=r"RestoreFailed"):
        attack("restore_victim")
    assert attack("members") == []


def test_image_swapped_after_verification_is_not_used(attack: Callable[..., Any]) -> None:
    """Each small file is read once, and the data read is verified."""
    attack("victim", "plain")
    attack("dump")
    with pytest.raises(DriveError, match=r"ImageDamaged: .*criu/files\.img: its contents have changed"):
        attack("restore_victim", True, "files.img")
    assert attack("members") == []


def test_image_is_restored_from_store_writable_by_others(attack: Callable[..., Any]) -> None:
    """CRIU reads a private copy of the small files."""
    attack("victim", "plain")
    attack("dump")
    attack("restore_victim", True)
    assert attack("report") == ["mine", "00000000"]


def test_held_tree_has_only_files_that_its_user_may_open(attack: Callable[..., Any]) -> None:
    """A user can steal descriptors of a held process tree, but only of files that the user may open."""
    attack("victim", "plain")
    attack("dump")
    attack("steal")
    attack("restore_victim")
    result = attack("stolen")
    assert result["taken"]
    assert result["beyond"] == []


def test_hundreds_of_mapped_files_are_restored(attack: Callable[..., Any]) -> None:
    """A program with many libraries has hundreds of mapped files."""
    attack("victim", "libraries")
    attack("dump")
    attack("restore_victim")
    assert attack("report") == 600


def test_fifo_is_restored_with_its_contents(attack: Callable[..., Any]) -> None:
    """The FIFO is opened with the user's rights, without waiting for a writer."""
    attack("victim", "fifo")
    attack("dump")
    assert attack("restore_victim") < 20
    assert attack("report") == "mine"


def test_removed_files_are_restored(attack: Callable[..., Any]) -> None:
    """A working directory, a running program, a FIFO, and a file with another hard link are restored."""
    attack("victim", "gone")
    attack("dump")
    attack("restore_victim")
    assert attack("report") == [
        f"{WORK}/gone (deleted)", f"{WORK}/program (deleted)", None, "x", "linked", f"{WORK}/linked (deleted)",
        ["go", "other", "ready"],
    ]  # fmt: skip


def test_named_sockets_are_restored_as_created(attack: Callable[..., Any]) -> None:
    """Sockets that listen, are bound to a relative or a removed name, or are connected to the node's log."""
    attack("victim", "listeners")
    attack("dump")
    attack("restore_victim")
    where, gone = f"{WORK}/socket", f"{WORK}/gone"
    assert attack("report") == ["hello", "data", where, gone, False, 2001, "0o140640"]
    assert attack("received") == "logged"


def test_unaccepted_connection_prevents_dump(attack: Callable[..., Any]) -> None:
    """It could be established again only through a path name."""
    attack("victim", "waiting")
    with pytest.raises(DriveError, match="DumpFailed: it could not be restored: a connection to its socket"):
        attack("dump")


def test_open_process_file_prevents_suspension(attack: Callable[..., Any]) -> None:
    attack("victim", "process")
    assert "undumpable" in [refusal["code"] for refusal in attack("refusals")]
