"""CRIU's names of removed files: set aside while a job sleeps, in place for its restore."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from stalling import Stalling

from slurm_affinode.checkpoint import remaps, rootdir
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.pinned import Process

ME = Process(os.getpid()).id
OWNER = (os.geteuid(), os.getegid())
CRIU = "link_remap.5"


@dataclass
class Place:
    """A directory in which jobs work, and images."""

    work: Path
    images: list[int]

    def open_removed(self, name: str) -> IO[str]:
        """A file that is open, with another name, and without its own."""
        file = (self.work / name).open("w+")
        file.write(name)
        file.flush()
        (self.work / f"{name}-too").hardlink_to(self.work / name)
        (self.work / name).unlink()
        return file

    def dumped(self, name: str, image: int, *, but: tuple[str, ...] = ()) -> None:
        """CRIU has made its name for it."""
        (self.work / CRIU).hardlink_to(self.work / f"{name}-too")
        remaps.set_aside([ME], self.images[image], OWNER, but=but)

    def names(self) -> set[str]:
        """What is there, but for the files' own other names."""
        return {one.name for one in self.work.iterdir() if not one.name.endswith("-too")}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Nothing in it, and two images."""
    (tmp_path / "work").mkdir()
    fds = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o700)
        fds.append(os.open(tmp_path / name, os.O_RDONLY))
    yield Place(tmp_path / "work", fds)
    for fd in fds:
        os.close(fd)


def test_jobs_that_began_alike_sleep_in_one_directory(place: Place) -> None:
    """CRIU chooses the same name for each; in a restore each finds its own file by it."""
    with place.open_removed("a"), place.open_removed("b"):
        place.dumped("a", 0)
        place.dumped("b", 1)
        assert len(place.names()) == 2
        assert CRIU not in place.names()
        for name, image in (("a", 0), ("b", 1)):
            for _ in range(2):  # as where an agent dies in a restore
                remaps.put_in_place(ME, place.images[image])
                assert (place.work / CRIU).read_text() == name
            remaps.settle(ME, place.images[image])
            assert len(place.names()) == 2  # both can be restored again


def test_a_restore_waits_for_another_that_is_under_way(place: Place) -> None:
    """CRIU takes the name away soon; where it stays the restore is refused."""
    with place.open_removed("a"), place.open_removed("b"):
        place.dumped("a", 0)
        place.dumped("b", 1)
        remaps.put_in_place(ME, place.images[0])
        with pytest.raises(RestoreFailed, match=r"link_remap\.5: is there already"):
            remaps.put_in_place(ME, place.images[1], wait_s=0)
        other = threading.Timer(0.2, (place.work / CRIU).unlink)
        other.start()
        remaps.put_in_place(ME, place.images[1])
        assert (place.work / CRIU).read_text() == "b"
        other.join()


def test_a_dump_that_is_taken_back_leaves_no_name(place: Place) -> None:
    """Neither ours nor CRIU's, which the next dump would find in its way; others' names stay."""
    with place.open_removed("a"), place.open_removed("b"):
        place.dumped("a", 0)
        (place.work / CRIU).hardlink_to(place.work / "a-too")
        (place.work / "link_remap.6").write_text("not its")
        (place.work / ".link_remap.of-another").hardlink_to(place.work / "b-too")
        remaps.forget([ME], OWNER)
        assert place.names() == {"link_remap.6", ".link_remap.of-another"}


@pytest.mark.parametrize("moment", ["CRIU has named it", "it is set aside"])
def test_a_dump_whose_node_was_lost_leaves_no_name(place: Place, moment: str) -> None:
    """Nothing is there of the tree; its journal says where to look. Others' names stay."""
    with place.open_removed("a"):
        named = json.loads(json.dumps(remaps.ahead([ME])))
        if moment == "it is set aside":
            place.dumped("a", 0)
        else:
            (place.work / CRIU).hardlink_to(place.work / "a-too")
    (place.work / "link_remap.6").write_text("not its")
    (place.work / ".link_remap.of-another").hardlink_to(place.work / "a-too")
    remaps.forget_lost(named, OWNER)
    assert place.names() == {"link_remap.6", ".link_remap.of-another"}
    assert (place.work / "a-too").exists()


def test_files_of_the_node_are_left_to_others(place: Place) -> None:
    """They come along in the image."""
    with place.open_removed("a"):
        place.dumped("a", 0, but=(str(place.work.parent),))
        assert place.names() == {CRIU}
        assert [one.name for one in (place.work.parent / "one").iterdir()] == []


def test_what_its_user_has_taken_away_is_for_criu_to_miss(place: Place) -> None:
    """And another file of the name is not removed."""
    with place.open_removed("a"):
        place.dumped("a", 0)
        (name,) = place.names()
        (place.work / name).unlink()
        remaps.put_in_place(ME, place.images[0])
        (place.work / CRIU).write_text("another")
        remaps.settle(ME, place.images[0])
        assert place.names() == {CRIU}


def test_names_are_those_of_one_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace of a job that sleeps has gone, and the next one gets its number, on each node: both may have one
    file open, and what the first one's restore takes away is not the other's.
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
        remaps._take_away(ME, place.images[0], lambda one: one.aside)
        assert len(place.names()) == 1
        assert not place.names() & first


def test_a_directory_that_does_not_answer_keeps_nobody(
    tmp_path: Path, stalling: Callable[[Path], Stalling], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that has gone: a restore fails, and makes room for the next one."""
    monkeypatch.setattr(remaps, "_ANSWER_S", 0.2)
    monkeypatch.setattr(remaps._patiently, "__defaults__", (0.2,))
    monkeypatch.setattr(remaps._below, "__kwdefaults__", {"limit_s": 0.2})
    (tmp_path / "image").mkdir(mode=0o700)
    image = os.open(tmp_path / "image", os.O_RDONLY)
    theirs = stalling(tmp_path / "work")
    one = {"directory": str(theirs.path), "name": CRIU, "aside": ".link_remap.1", "inode": 1}
    rootdir.write(image, remaps.INDEX, json.dumps({"uid": OWNER[0], "gid": OWNER[1], "files": [one]}).encode())
    theirs.stall()
    try:
        remaps.settle(ME, image)
        with pytest.raises(RestoreFailed, match=r"cannot be put back: link_remap\.5: its file system does not answer"):
            remaps.put_in_place(ME, image, wait_s=0)
    finally:
        theirs.go_on()
        os.close(image)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works as others")
def test_removed_file_is_named_with_the_rights_of_its_user(tmp_path: Path) -> None:
    """By the name that the kernel has for it, in its own directory; not in one of root's that a link leads to."""
    for above in (tmp_path, *tmp_path.parents[:3]):  # a worker of pytest has a directory more
        if not above.stat().st_mode & 0o001:
            above.chmod(0o755)
    work, theirs = tmp_path / "work", tmp_path / "theirs"
    work.mkdir()
    theirs.mkdir()
    os.chown(work, 2001, 2001)
    with (work / "file").open("w") as file:
        os.fchown(file.fileno(), 2001, 2001)
        (work / "other").hardlink_to(work / "file")
        (work / "file").unlink()
        work.rename(tmp_path / "moved")
        (tmp_path / "work").symlink_to(theirs)
        remaps.give_names([ME], (2001, 2001))
        assert {path.name for path in (tmp_path / "moved").iterdir()} == {"other", "file (deleted)"}
        assert list(theirs.iterdir()) == []
        assert (tmp_path / "moved" / "file (deleted)").samefile(tmp_path / "moved" / "other")
        remaps.give_names([ME], (2001, 2001))
        remaps.forget([ME], (2001, 2001))
        assert {path.name for path in (tmp_path / "moved").iterdir()} == {"other"}
        (tmp_path / "moved").chmod(0o500)
        os.chown(tmp_path / "moved", 0, 0)
        remaps.give_names([ME], (2001, 2001))
        assert {path.name for path in (tmp_path / "moved").iterdir()} == {"other"}


def test_name_for_a_dump_is_set_aside_and_comes_back(place: Place) -> None:
    """As CRIU's names do."""
    with place.open_removed("a"):
        remaps.give_names([ME], OWNER)
        assert place.names() == {"a (deleted)"}
        remaps.set_aside([ME], place.images[0], OWNER)
        (aside,) = place.names()
        assert aside.startswith(remaps.ASIDE)
        remaps.put_in_place(ME, place.images[0])
        assert place.names() == {"a (deleted)", aside}
        index = rootdir.read(place.images[0], remaps.INDEX, owner=os.geteuid(), limit=1 << 20)
        assert remaps.names_of(index) == {f"{place.work}/a (deleted)"}
        remaps.settle(ME, place.images[0])
        assert place.names() == {aside}


def test_each_removed_name_of_a_file_is_given(place: Place) -> None:
    """Two processes may have opened it by two of them."""
    with place.open_removed("a"):
        (place.work / "b").hardlink_to(place.work / "a-too")
        with (place.work / "b").open():
            (place.work / "b").unlink()
            remaps.give_names([ME], OWNER)
            assert place.names() == {"a (deleted)", "b (deleted)"}
            remaps.set_aside([ME], place.images[0], OWNER)
            assert len(place.names()) == 1
            remaps.put_in_place(ME, place.images[0])
            assert place.names() > {"a (deleted)", "b (deleted)"}
            remaps.forget([ME], OWNER)
            assert place.names() == set()
