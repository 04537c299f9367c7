"""The job mapping directory, written by prolog and epilog and read by dcgm-exporter."""

from __future__ import annotations

import fcntl
import os
import stat
import threading

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.gpu import jobs


def test_jobs_are_added_and_removed(tmp_path):
    """A file has one job ID per line; a GPU without jobs has no file."""
    directory = tmp_path / "map"
    jobs.add(directory, ["0", "1"], "7")
    jobs.add(directory, ["1"], "8")
    jobs.add(directory, ["1"], "8")
    assert (directory / "1").read_text() == "7\n8\n"
    assert jobs.read(directory) == {"0": ("7",), "1": ("7", "8")}
    jobs.remove(directory, "7")
    jobs.remove(directory, "7")
    assert sorted(path.name for path in directory.iterdir()) == ["1"]
    assert jobs.read(directory) == {"1": ("8",)}


def test_mapping_is_readable_with_any_umask(tmp_path):
    """dcgm-exporter runs as another user."""
    before = os.umask(0o077)
    try:
        jobs.add(tmp_path / "map", ["0"], "7")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "map", tmp_path / "map" / "0")] == [0o755, 0o644]
    (tmp_path / "map").chmod(0o700)
    jobs.add(tmp_path / "map", ["1"], "7")
    assert stat.S_IMODE((tmp_path / "map").stat().st_mode) == 0o700, "as the site has it"


def test_other_files_are_unchanged(tmp_path):
    """They are files whose name is not an index, and temporary files."""
    (tmp_path / ".0.tmp").write_text("1\n")
    (tmp_path / "README").write_text("hello\n")
    (tmp_path / "3").write_text("12\n\n 12 \n13")
    assert jobs.read(tmp_path) == {"3": ("12", "13")}
    jobs.remove(tmp_path, "12")
    jobs.remove(tmp_path, "13")
    jobs.remove(tmp_path, "1")
    assert {path.name for path in tmp_path.iterdir()} == {".0.tmp", "README"}


def test_missing_directory_is_not_an_empty_mapping(tmp_path):
    assert jobs.read(tmp_path / "none") is None
    assert jobs.read(tmp_path) == {}


@pytest.mark.parametrize(
    ("gpu", "job"), [("../x", "1"), ("", "1"), ("0/1", "1"), ("0", "1;2"), ("0", ""), ("0", "x\n1")]
)
def test_hostile_names_are_refused(tmp_path, gpu, job):
    """Nothing is written."""
    with pytest.raises(ValueError, match=r"is not (a job ID|the index)"):
        jobs.add(tmp_path / "map", [gpu], job)
    assert not (tmp_path / "map").exists()


def test_concurrent_writers_lose_nothing(tmp_path):
    threads = [threading.Thread(target=jobs.add, args=(tmp_path, ["0"], str(job))) for job in range(1, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = jobs.read(tmp_path)
    assert result is not None
    assert sorted(map(int, result["0"])) == list(range(1, 21))


def test_lock_timeout_is_reported(tmp_path):
    """A prolog must not hang."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(UnreachableError, match="locked"):
            jobs.add(tmp_path, ["0"], "1", lock_s=0.05)
    finally:
        os.close(fd)


def test_directory_writable_by_others_is_not_written(tmp_path):
    """Through links, others could have root read any file, or overwrite it."""
    directory, secret = tmp_path / "map", tmp_path / "secret"
    directory.mkdir()
    secret.write_text("root:hash\n")
    (directory / "0").symlink_to(secret)
    for mode in (0o777, 0o1777, 0o775):
        directory.chmod(mode)
        with pytest.raises(UnreachableError, match="users other than its owner may write"):
            jobs.add(directory, ["0"], "1")
        with pytest.raises(UnreachableError, match="users other than its owner may write"):
            jobs.remove(directory, "1")
    assert (directory / "0").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_directory_of_another_user_is_not_written(tmp_path):
    (tmp_path / "map").mkdir(mode=0o755)
    os.chown(tmp_path / "map", 12345, 12345)
    with pytest.raises(UnreachableError, match="users other than its owner may write"):
        jobs.add(tmp_path / "map", ["0"], "1")


def test_link_in_place_of_a_written_file_is_not_followed(tmp_path):
    """It was left there while the directory was open to all users."""
    target = tmp_path / "target"
    target.write_text("precious")
    directory = tmp_path / "map"
    directory.mkdir()
    (directory / ".0.tmp").symlink_to(target)
    jobs.add(directory, ["0"], "1")
    assert target.read_text() == "precious"
    assert (directory / "0").read_text() == "1\n"
    assert not (directory / "0").is_symlink()


def test_directory_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnreachableError, match="cannot be"):
        jobs.add(tmp_path / "file", ["0"], "1")
    with pytest.raises(UnreachableError, match="cannot be read"):
        jobs.read(tmp_path / "file")
