"""The names that CRIU gives to deleted files: set aside while a job is suspended, and in place for its restore."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from job_owner import OWNER, hand_over
from stalling import Stalling

from slurm_affinode.base import timeouts
from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.files.deleted_files import RemovedFile
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.suspension.records.record import SuspensionFacts, decode, encode

ALICE = User(2001, 2001)
ME = Process(os.getpid()).id
CRIU = "link_remap.5"


@dataclass
class Place:
    """A directory in which jobs work, and their images."""

    work: Path
    images: list[int]

    def open_removed(self, name: str) -> IO[str]:
        """Return an open file that has another name and has lost its own."""
        file = (self.work / name).open("w+")
        file.write(name)
        file.flush()
        (self.work / f"{name}-too").hardlink_to(self.work / name)
        (self.work / name).unlink()
        hand_over(self.work)
        return file

    def dumped(self, name: str, image: int, *, but: tuple[str, ...] = ()) -> None:
        """Give the file CRIU's name, as a dump does, and set that aside."""
        (self.work / CRIU).hardlink_to(self.work / f"{name}-too")
        deleted_files.set_aside(ME, [ME], self.images[image], OWNER, but=but)

    def names(self) -> set[str]:
        """Return the names in the directory, except for the files' other names."""
        return {path.name for path in self.work.iterdir() if not path.name.endswith("-too")}


@pytest.fixture
def place(tmp_path: Path, open_path: Path) -> Iterator[Place]:
    """Return an empty directory and two images."""
    (open_path / "work").mkdir()
    fds = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o700)
        fds.append(os.open(tmp_path / name, os.O_RDONLY))
    yield Place(open_path / "work", fds)
    for fd in fds:
        os.close(fd)


def test_jobs_with_the_same_remap_name_restore_their_own_files(place: Place) -> None:
    """CRIU chooses the same name for jobs that began alike."""
    with place.open_removed("a"), place.open_removed("b"):
        place.dumped("a", 0)
        place.dumped("b", 1)
        assert len(place.names()) == 2
        assert CRIU not in place.names()
        for name, image in (("a", 0), ("b", 1)):
            for _ in range(2):  # as if the agent died during a restore
                deleted_files.put_in_place(ME, place.images[image], OWNER)
                assert (place.work / CRIU).read_text() == name
            deleted_files.settle(ME, place.images[image], OWNER)
            assert len(place.names()) == 2  # both can be restored again


def test_restore_waits_for_another_restore_in_the_directory(place: Place) -> None:
    """CRIU soon removes the name; if it stays, the restore is refused."""
    with place.open_removed("a"), place.open_removed("b"):
        place.dumped("a", 0)
        place.dumped("b", 1)
        deleted_files.put_in_place(ME, place.images[0], OWNER)
        with pytest.raises(RestoreFailed, match=r"link_remap\.5: exists already"):
            deleted_files.put_in_place(ME, place.images[1], OWNER, wait_s=0)
        other = threading.Timer(0.2, (place.work / CRIU).unlink)
        other.start()
        deleted_files.put_in_place(ME, place.images[1], OWNER)
        assert (place.work / CRIU).read_text() == "b"
        other.join()


def test_names_of_another_user_are_refused(place: Place) -> None:
    """Root on another node may name root in the list of an image."""
    with place.open_removed("a"):
        place.dumped("a", 0)
        with pytest.raises(RestoreFailed, match=r"belong to user \d+, not to user 2001"):
            deleted_files.put_in_place(ME, place.images[0], ALICE)
        assert CRIU not in place.names()


def test_aborted_dump_leaves_no_name(place: Place) -> None:
    """Neither CRIU's name, which would obstruct the next dump, nor the one set aside; names of other jobs stay."""
    with place.open_removed("a"), place.open_removed("b"):
        place.dumped("a", 0)
        (place.work / CRIU).hardlink_to(place.work / "a-too")
        (place.work / "link_remap.6").write_text("not its")
        (place.work / ".link_remap.of-another").hardlink_to(place.work / "b-too")
        deleted_files.forget(ME, [ME], OWNER)
        assert place.names() == {"link_remap.6", ".link_remap.of-another"}


def journaled(removed: tuple[RemovedFile, ...]) -> tuple[RemovedFile, ...]:
    """Return the files as the journal of the suspension has them."""
    facts = decode(json.loads(json.dumps(encode(SuspensionFacts(removed=removed)))))
    return facts.removed or ()


@pytest.mark.parametrize("moment", ["CRIU has named it", "it is set aside"])
def test_dump_of_a_lost_node_leaves_no_name(place: Place, moment: str) -> None:
    """Nothing is left of the process tree; its journal has the directories. Names of other jobs stay."""
    with place.open_removed("a"):
        named = journaled(deleted_files.ahead([ME]))
        if moment == "it is set aside":
            place.dumped("a", 0)
        else:
            (place.work / CRIU).hardlink_to(place.work / "a-too")
    (place.work / "link_remap.6").write_text("not its")
    (place.work / ".link_remap.of-another").hardlink_to(place.work / "a-too")
    deleted_files.forget_lost(named, OWNER)
    assert place.names() == {"link_remap.6", ".link_remap.of-another"}
    assert (place.work / "a-too").exists()


def test_node_local_files_are_not_set_aside(place: Place) -> None:
    """They are saved in the image."""
    with place.open_removed("a"):
        place.dumped("a", 0, but=(str(place.work.parent),))
        assert place.names() == {CRIU}
        assert root_directory.names(place.images[0]) == []


def test_name_removed_by_the_user_is_not_restored(place: Place) -> None:
    """Another file of that name is not removed."""
    with place.open_removed("a"):
        place.dumped("a", 0)
        (name,) = place.names()
        (place.work / name).unlink()
        deleted_files.put_in_place(ME, place.images[0], OWNER)
        (place.work / CRIU).write_text("another")
        deleted_files.settle(ME, place.images[0], OWNER)
        assert place.names() == {CRIU}


def test_aside_names_differ_between_attempts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts may have the same file open.

    The namespace of a suspended job is gone, and its number is reused, on any node. The restore of one attempt must not
    remove the name of the other.
    """

    def later(path: Path, *args: Any, **kwargs: Any) -> str:
        return "another boot" if path.name == "boot_id" else read(path, *args, **kwargs)

    read = Path.read_text
    with place.open_removed("a"):
        place.dumped("a", 0)
        first = place.names()
        monkeypatch.setattr(Path, "read_text", later)
        place.dumped("a", 1)
        assert place.names() > first
        _, remaps = deleted_files._read(place.images[0])
        deleted_files._take_away(ME, remaps, lambda item: item.aside, OWNER)
        assert len(place.names()) == 1
        assert not place.names() & first


def test_directory_that_does_not_respond_does_not_block(
    tmp_path: Path, open_path: Path, stalling: Callable[[Path], Stalling], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a file server is gone, the restore fails and the next one can begin."""
    monkeypatch.setattr(deleted_files, "_ANSWER_S", 0.2)
    monkeypatch.setattr(deleted_files._patiently, "__defaults__", (0.2,))
    monkeypatch.setattr(deleted_files._below, "__kwdefaults__", {"limit_s": 0.2})
    (tmp_path / "image").mkdir(mode=0o700)
    image = os.open(tmp_path / "image", os.O_RDONLY)
    file_system = stalling(open_path / "work")
    hand_over(file_system.path)
    item = {"directory": str(file_system.path), "name": CRIU, "aside": ".link_remap.1", "inode": 1}
    root_directory.write(
        image, deleted_files.INDEX, json.dumps({"uid": OWNER.uid, "gid": OWNER.gid, "files": [item]}).encode()
    )
    file_system.stall()
    try:
        deleted_files.settle(ME, image, OWNER)
        with pytest.raises(
            RestoreFailed, match=r"a deleted file cannot be recreated: link_remap\.5: its file system does not respond"
        ):
            deleted_files.put_in_place(ME, image, OWNER, wait_s=0)
    finally:
        file_system.resume()
        os.close(image)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works as others")
def test_removed_file_gets_a_name_with_the_rights_of_its_user(open_path: Path) -> None:
    """The kernel's name for it is used, in its own directory, not in a directory of root's behind a link."""
    work, directory_of_root = open_path / "work", open_path / "theirs"
    work.mkdir()
    directory_of_root.mkdir()
    os.chown(work, 2001, 2001)
    with (work / "file").open("w") as file:
        os.fchown(file.fileno(), 2001, 2001)
        (work / "other").hardlink_to(work / "file")
        (work / "file").unlink()
        work.rename(open_path / "moved")
        (open_path / "work").symlink_to(directory_of_root)
        deleted_files.give_names(ME, [ME], ALICE)
        assert {path.name for path in (open_path / "moved").iterdir()} == {"other", "file (deleted)"}
        assert list(directory_of_root.iterdir()) == []
        assert (open_path / "moved" / "file (deleted)").samefile(open_path / "moved" / "other")
        deleted_files.give_names(ME, [ME], ALICE)
        deleted_files.forget(ME, [ME], ALICE)
        assert {path.name for path in (open_path / "moved").iterdir()} == {"other"}
        (open_path / "moved").chmod(0o500)
        os.chown(open_path / "moved", 0, 0)
        deleted_files.give_names(ME, [ME], ALICE)
        assert {path.name for path in (open_path / "moved").iterdir()} == {"other"}


def test_name_for_a_dump_is_set_aside_and_restored(place: Place) -> None:
    """It is handled like CRIU's names."""
    with place.open_removed("a"):
        deleted_files.give_names(ME, [ME], OWNER)
        assert place.names() == {"a (deleted)"}
        deleted_files.set_aside(ME, [ME], place.images[0], OWNER)
        (aside,) = place.names()
        assert aside.startswith(deleted_files.ASIDE)
        deleted_files.put_in_place(ME, place.images[0], OWNER)
        assert place.names() == {"a (deleted)", aside}
        index = root_directory.read(place.images[0], deleted_files.INDEX, owner=os.geteuid(), limit=1 << 20)
        assert deleted_files.names_of(index) == {f"{place.work}/a (deleted)"}
        deleted_files.settle(ME, place.images[0], OWNER)
        assert place.names() == {aside}


def test_each_removed_name_of_a_file_is_restored(place: Place) -> None:
    """Two processes may have opened it by different names."""
    with place.open_removed("a"):
        (place.work / "b").hardlink_to(place.work / "a-too")
        with (place.work / "b").open():
            (place.work / "b").unlink()
            deleted_files.give_names(ME, [ME], OWNER)
            assert place.names() == {"a (deleted)", "b (deleted)"}
            deleted_files.set_aside(ME, [ME], place.images[0], OWNER)
            assert len(place.names()) == 1
            deleted_files.put_in_place(ME, place.images[0], OWNER)
            assert place.names() > {"a (deleted)", "b (deleted)"}
            deleted_files.forget(ME, [ME], OWNER)
            assert place.names() == set()


@pytest.mark.parametrize("change", [{"aside": "precious"}, {"name": "precious"}, {"aside": "link_remap.5"}])
def test_other_names_than_those_of_a_dump_are_refused(place: Place, change: dict[str, str]) -> None:
    """Root on another node can sign such a list: any file of the user could be linked, renamed or removed."""
    item = {"directory": str(place.work), "name": CRIU, "aside": ".link_remap.1", "inode": 1}
    index = {"uid": OWNER.uid, "gid": OWNER.gid, "files": [item | change]}
    with pytest.raises(RestoreFailed, match="is not a name for a"):
        deleted_files.names_of(json.dumps(index).encode())


def test_list_that_could_not_be_read_is_not_written(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No restore of such an image would succeed. The names are left for ``forget``."""
    with place.open_removed("a"):
        deleted_files.give_names(ME, [ME], OWNER)
        monkeypatch.setattr(deleted_files, "_LIMIT", 50)
        with pytest.raises(OSError, match="list is longer than 50 bytes"):
            deleted_files.set_aside(ME, [ME], place.images[0], OWNER)
        assert place.names() == {"a (deleted)"}
        deleted_files.forget(ME, [ME], OWNER)
        assert place.names() == set()


def test_search_for_names_times_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has been abandoned must not search directories for hours."""
    with place.open_removed("a"):
        deleted_files.give_names(ME, [ME], OWNER)
        monkeypatch.setattr(deleted_files, "time_limit", lambda seconds, what: timeouts.time_limit(0, what))
        with pytest.raises(TimeoutError, match="takes longer than 0 seconds"):
            deleted_files.set_aside(ME, [ME], place.images[0], OWNER)
