"""The lock: exclusive, released by the kernel, and with the process ID of its holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.pipeline.nightly import exclusive

HOLD = """
import sys
from pathlib import Path
from slurm_affinode.pipeline.nightly import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_second_run_is_rejected_with_process_id_of_holder(tmp_path, holder):
    message = f"another nightly run is in progress \\(process {holder.pid}\\)"
    with pytest.raises(UnreachableError, match=message) as caught, exclusive(tmp_path / "lock"):
        pytest.fail("held twice")
    assert caught.value.exit_code == 3


def test_lock_of_killed_process_is_released(tmp_path, holder):
    holder.kill()
    holder.wait()
    with exclusive(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_waiting_run_gets_the_lock_after_release(tmp_path, holder):
    got = threading.Event()

    def wait():
        with exclusive(tmp_path / "lock", wait=True):
            got.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not got.is_set()
    holder.stdin.close()
    waiter.join(timeout=240)
    assert got.is_set()
    holder.wait()


def test_unusable_lock_path_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnreachableError, match="file/lock: cannot be made"), exclusive(tmp_path / "file" / "lock"):
        pytest.fail("no directory")


def test_full_disk_does_not_prevent_locking(tmp_path, monkeypatch):
    """The process ID in the file is only informational."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with exclusive(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == ""


def test_symbolic_link_as_lock_is_not_followed(tmp_path):
    """Root may run it in a directory of another user; the target of the link would be overwritten."""
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(UnreachableError, match="lock: cannot be made"), exclusive(tmp_path / "lock"):
        pytest.fail("held")
    assert (tmp_path / "other").read_text() == "theirs"
