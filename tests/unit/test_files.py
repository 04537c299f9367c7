"""Durable writes: the old file or the new one, never half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.files import delivering, replacing, write_text


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """A write that fails half way changes nothing."""
    path = tmp_path / "sub" / "report.html"
    write_text(path, "old")

    def fail_half_way() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has /dev/full")
@pytest.mark.parametrize("write", [replacing, delivering])
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, write: Callable[..., Any]) -> None:
    """What the system says names no file: it is the write that fails, not the opening."""

    def fill() -> None:
        with write(tmp_path / "page.html"), Path("/dev/full").open("w", encoding="utf-8") as full:
            full.write("x")

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.filename == str(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_the_new_file_has_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    """The temporary file is private; the finished one has the given mode."""
    path = tmp_path / "x"
    write_text(path, "é", mode=0o640)
    assert path.read_bytes() == "é".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_link_in_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    """Root writes a report into a user's directory; the user puts a link to a file of root's there meanwhile."""
    victim = tmp_path / "shadow"
    victim.write_text("secret")
    victim.chmod(0o600)
    path = tmp_path / "theirs" / "report.html"
    with replacing(path) as temporary:
        [unfinished] = path.parent.iterdir()
        unfinished.unlink()
        unfinished.symlink_to(victim)
        temporary.write_text("page")
    assert victim.read_text() == "secret"
    assert victim.stat().st_mode & 0o777 == 0o600


def test_directory_that_is_swapped_is_not_written(tmp_path: Path) -> None:
    """The directory is another one when the file is done."""
    theirs, victim = tmp_path / "theirs", tmp_path / "etc"
    victim.mkdir()
    (victim / "passwd").write_text("root")
    with replacing(theirs / "passwd") as temporary:
        temporary.write_text("mallory")
        theirs.rename(tmp_path / "moved")
        theirs.symlink_to(victim)
    assert (victim / "passwd").read_text() == "root"
    assert [one.name for one in victim.iterdir()] == ["passwd"]


def test_an_output_that_is_no_file_is_written_into(tmp_path: Path) -> None:
    """A pipe, or a device such as /dev/null, stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with delivering(pipe) as target:
        target.write_text("page")
    assert os.read(reader, 10) == b"page"
    os.close(reader)
    assert pipe.is_fifo()


def test_an_output_behind_a_link_stays_behind_it(tmp_path: Path) -> None:
    """As /dev/stdout is one, to wherever the shell sends it."""
    (tmp_path / "link").symlink_to(tmp_path / "page")
    for text in ("new", "newer"):
        with delivering(tmp_path / "link") as target:
            target.write_text(text)
        assert (tmp_path / "page").read_text() == text
    assert (tmp_path / "link").is_symlink()
