"""The lock: one at a time, released by the kernel, and clear about who has it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from slurm_affinode.errors import UnreachableError
from slurm_affinode.workflow.nightly.lock import exclusive

HOLD = """
import sys
from pathlib import Path
from slurm_affinode.workflow.nightly.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock."""
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_one_is_refused_and_told_who_is_at_work(tmp_path, holder):
    said = f"another nightly run is at work \\(process {holder.pid}\\)"
    with pytest.raises(UnreachableError, match=said) as caught, exclusive(tmp_path / "lock"):
        pytest.fail("held twice")
    assert caught.value.exit_code == 3


def test_a_killed_holder_leaves_no_lock_behind(tmp_path, holder):
    holder.kill()
    holder.wait()
    with exclusive(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_waiting_ends_when_the_other_ends(tmp_path, holder):
    got = threading.Event()

    def wait():
        with exclusive(tmp_path / "lock", wait=True):
            got.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not got.is_set()
    holder.stdin.close()
    waiter.join(timeout=60)
    assert got.is_set()
    holder.wait()


def test_a_place_where_no_lock_can_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnreachableError, match="file/lock: cannot be made"), exclusive(tmp_path / "file" / "lock"):
        pytest.fail("no directory")


def test_a_full_disk_does_not_stop_the_lock(tmp_path, monkeypatch):
    """The process id in the file is only for people."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with exclusive(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == ""


def test_a_link_in_its_place_is_not_followed(tmp_path):
    """Where root runs it, the directory may be another user's: what the link names would be written over."""
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(UnreachableError, match="lock: cannot be made"), exclusive(tmp_path / "lock"):
        pytest.fail("held")
    assert (tmp_path / "other").read_text() == "theirs"
