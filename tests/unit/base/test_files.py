"""Atomic, durable writes of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.files import delivering, replacing, write_text


def test_failed_write_leaves_the_old_file_only(tmp_path: Path) -> None:
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
def test_full_disk_is_reported_with_the_file_name(tmp_path: Path, write: Callable[..., Any]) -> None:
    """The system's error has no file name, as the write fails, not the opening."""

    def fill() -> None:
        with write(tmp_path / "page.html"), Path("/dev/full").open("w", encoding="utf-8") as full:
            full.write("x")

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.filename == str(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_new_file_has_the_given_mode(tmp_path: Path) -> None:
    """The temporary file is private."""
    path = tmp_path / "x"
    write_text(path, "é", mode=0o640)
    assert path.read_bytes() == "é".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_link_in_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    """Root writes a report into a user's directory; meanwhile the user puts a link to a file of root there."""
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
    """The directory was replaced before the file is complete."""
    directory, victim = tmp_path / "theirs", tmp_path / "etc"
    victim.mkdir()
    (victim / "passwd").write_text("root")
    with replacing(directory / "passwd") as temporary:
        temporary.write_text("mallory")
        directory.rename(tmp_path / "moved")
        directory.symlink_to(victim)
    assert (victim / "passwd").read_text() == "root"
    assert [path.name for path in victim.iterdir()] == ["passwd"]


def test_output_that_is_not_a_regular_file_is_written_directly(tmp_path: Path) -> None:
    """A pipe, or a device such as /dev/null, is not replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with delivering(pipe) as target:
        target.write_text("page")
    assert os.read(reader, 10) == b"page"
    os.close(reader)
    assert pipe.is_fifo()


def test_output_behind_a_link_keeps_the_link(tmp_path: Path) -> None:
    """/dev/stdout is a link to the file that the shell opened."""
    (tmp_path / "link").symlink_to(tmp_path / "page")
    for text in ("new", "newer"):
        with delivering(tmp_path / "link") as target:
            target.write_text(text)
        assert (tmp_path / "page").read_text() == text
    assert (tmp_path / "link").is_symlink()
