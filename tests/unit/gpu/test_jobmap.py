"""The job mapping directory: what prolog and epilog write and dcgm-exporter reads."""

from __future__ import annotations

import fcntl
import os
import stat
import threading

import pytest

from slurm_affinode.errors import UnreachableError
from slurm_affinode.gpu import jobmap


def test_jobs_come_and_go(tmp_path):
    """One id per line; a GPU without jobs has no file."""
    directory = tmp_path / "map"
    jobmap.add(directory, ["0", "1"], "7")
    jobmap.add(directory, ["1"], "8")
    jobmap.add(directory, ["1"], "8")
    assert (directory / "1").read_text() == "7\n8\n"
    assert jobmap.read(directory) == {"0": ("7",), "1": ("7", "8")}
    jobmap.remove(directory, "7")
    jobmap.remove(directory, "7")
    assert sorted(path.name for path in directory.iterdir()) == ["1"]
    assert jobmap.read(directory) == {"1": ("8",)}


def test_a_prolog_of_any_umask_makes_what_others_can_read(tmp_path):
    """dcgm-exporter is another user's."""
    before = os.umask(0o077)
    try:
        jobmap.add(tmp_path / "map", ["0"], "7")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "map", tmp_path / "map" / "0")] == [0o755, 0o644]
    (tmp_path / "map").chmod(0o700)
    jobmap.add(tmp_path / "map", ["1"], "7")
    assert stat.S_IMODE((tmp_path / "map").stat().st_mode) == 0o700, "as the site has it"


def test_other_files_are_left_alone(tmp_path):
    """Names that are no index, also half-written ones."""
    (tmp_path / ".0.tmp").write_text("1\n")
    (tmp_path / "README").write_text("hello\n")
    (tmp_path / "3").write_text("12\n\n 12 \n13")
    assert jobmap.read(tmp_path) == {"3": ("12", "13")}
    jobmap.remove(tmp_path, "12")
    jobmap.remove(tmp_path, "13")
    jobmap.remove(tmp_path, "1")
    assert {path.name for path in tmp_path.iterdir()} == {".0.tmp", "README"}


def test_no_directory_is_not_an_empty_one(tmp_path):
    assert jobmap.read(tmp_path / "none") is None
    assert jobmap.read(tmp_path) == {}


@pytest.mark.parametrize(
    ("gpu", "job"), [("../x", "1"), ("", "1"), ("0/1", "1"), ("0", "1;2"), ("0", ""), ("0", "x\n1")]
)
def test_hostile_names_are_refused(tmp_path, gpu, job):
    """Nothing is written."""
    with pytest.raises(ValueError, match=r"is no (job id|index)"):
        jobmap.add(tmp_path / "map", [gpu], job)
    assert not (tmp_path / "map").exists()


def test_writers_wait_for_each_other(tmp_path):
    """Many prologs and epilogs at once lose nothing."""
    threads = [threading.Thread(target=jobmap.add, args=(tmp_path, ["0"], str(job))) for job in range(1, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = jobmap.read(tmp_path)
    assert found is not None
    assert sorted(map(int, found["0"])) == list(range(1, 21))


def test_a_lock_that_is_never_given_back_ends_in_an_error(tmp_path):
    """A prolog must not hang for good."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(UnreachableError, match="locked"):
            jobmap.add(tmp_path, ["0"], "1", lock_s=0.05)
    finally:
        os.close(fd)


def test_a_directory_of_others_is_not_written_by_root(tmp_path):
    """They could lead it anywhere by links: what it reads would be theirs to read, what it writes would be lost."""
    directory, secret = tmp_path / "map", tmp_path / "secret"
    directory.mkdir()
    secret.write_text("root:hash\n")
    (directory / "0").symlink_to(secret)
    for mode in (0o777, 0o1777, 0o775):
        directory.chmod(mode)
        with pytest.raises(UnreachableError, match="others than its user may write"):
            jobmap.add(directory, ["0"], "1")
        with pytest.raises(UnreachableError, match="others than its user may write"):
            jobmap.remove(directory, "1")
    assert (directory / "0").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_of_another_user_is_not_written(tmp_path):
    (tmp_path / "map").mkdir(mode=0o755)
    os.chown(tmp_path / "map", 12345, 12345)
    with pytest.raises(UnreachableError, match="others than its user may write"):
        jobmap.add(tmp_path / "map", ["0"], "1")


def test_a_link_in_place_of_what_is_written_is_not_followed(tmp_path):
    """Left there while the directory was open to all."""
    target = tmp_path / "target"
    target.write_text("precious")
    directory = tmp_path / "map"
    directory.mkdir()
    (directory / ".0.tmp").symlink_to(target)
    jobmap.add(directory, ["0"], "1")
    assert target.read_text() == "precious"
    assert (directory / "0").read_text() == "1\n"
    assert not (directory / "0").is_symlink()


def test_a_place_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnreachableError, match="cannot be"):
        jobmap.add(tmp_path / "file", ["0"], "1")
    with pytest.raises(UnreachableError, match="cannot be read"):
        jobmap.read(tmp_path / "file")
