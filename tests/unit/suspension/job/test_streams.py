"""Output files of a job: saved with the checkpoint image and restored byte for byte, whatever their open mode."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest
from job_owner import OWNER, hand_over

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.image import writer as image_writer
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import JobKey, SavedOutput
from slurm_affinode.suspension.job import streams

ALICE = User(2001, 2001, (2001, 2077))
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root opens files as another user")

REQUEUE_2605 = (
    b"[2026-11-21T05:36:03.430+00:00] error: *** JOB 9 ON c1 CANCELLED AT 2026-11-21T05:36:03 DUE TO JOB REQUEUE ***\n"
)
REQUEUE = b"slurmstepd-c1: error: *** JOB 12 ON c1 CANCELLED AT 2026-11-20T10:00:00 DUE TO JOB REQUEUE ***\n"
OTHER = REQUEUE.replace(b"JOB REQUEUE", b"TIME LIMIT")


def saved_in(directory):
    """Return a function that opens the saved outputs in this directory."""
    return lambda name: os.open(directory / name, os.O_RDONLY)


@pytest.fixture
def shepherd(tmp_path):
    """A process with one file for both of its outputs, as Slurm gives a batch script."""
    with (tmp_path / "out").open("ab") as file:
        process = subprocess.Popen(("sleep", "100"), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    hand_over(tmp_path / "out")
    yield process.pid
    process.kill()
    process.wait()


def store(directory):
    def write(name, fd, size):
        data = os.pread(fd, size, 0)
        (directory / name).write_bytes(data)
        return len(data)

    return write


def test_output_shared_by_both_streams_is_saved_once(shepherd, tmp_path):
    (tmp_path / "out").write_bytes(b"one\ntwo\n")
    (tmp_path / "image").mkdir()
    null, out, err = streams.save(Process(shepherd).id, store(tmp_path / "image"), OWNER)
    assert (null.kind, null.inherit) == ("null", None)
    assert (out.kind, out.file, out.size, out.append) == ("file", "out.1", 8, True)
    assert (err.file, err.same_as) == (None, 1)
    assert out.inherit == str(tmp_path / "out").lstrip("/")
    assert (tmp_path / "image" / "out.1").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("since", ["before", "meanwhile"])
def test_output_that_does_not_respond_is_reported(tmp_path, stalling, monkeypatch, since):
    """If the file server fails, the suspension is aborted; others are not blocked."""
    monkeypatch.setattr(streams, "_ANSWER_S", 0.2)
    monkeypatch.setattr(image_writer, "_READ_S", 0.2)
    file_system = stalling(tmp_path / "theirs")
    (file_system.path / "out").write_bytes(b"one\n" * 100_000)
    hand_over(file_system.path)
    with (file_system.path / "out").open("ab") as file:
        process = subprocess.Popen(("sleep", "100"), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL)
    store = DirectoryStore(tmp_path / "images", b"k" * 32)
    try:
        with store.begin(JobKey("c", 1, 1), uid=0, estimate=1) as image:

            def save(name, fd, size):
                file_system.stall()
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return image.save(name, fd, size)

            if since == "before":
                file_system.stall()
            with pytest.raises(streams.StreamsError, match="cannot be read: its file system does not respond"):
                streams.save(Process(process.pid).id, save, OWNER)
    finally:
        file_system.resume()
        store.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (b"", b"one\ntwo\n"),
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"one\ntwo\n" + REQUEUE, b"one\ntwo\n"),
        (b"one\ntwo\nslurm-affinode: suspended after 15m idle on c1\n" + REQUEUE, b"one\ntwo\n"),
        (b"one\ntwo\n" + REQUEUE_2605, b"one\ntwo\n"),
        (b"one\ntwo\nsomebody else\n", b"one\ntwo\nsomebody else\n"),
        (b"task prolog\n", b"one\ntwo\ntask prolog\n"),
        (b"slurm-affinode: waiting\n", b"one\ntwo\n"),
        (b"slurm-affinode: waiting", b"one\ntwo\nslurm-affinode: waiting"),
        (b"one\ntwo\n" + REQUEUE[:-1], b"one\ntwo\n" + REQUEUE[:-1]),
        (b"one\ntwo\n" + OTHER, b"one\ntwo\n" + OTHER),
    ],
)
def test_output_is_restored(tmp_path, now, then):
    """The output is truncated or kept, with Slurm's own message or output of others after it."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(now)
    hand_over(tmp_path / "now")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), OWNER)
        os.write(fd, b"three\n")
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == then + b"three\n"


@pytest.mark.timeout(30)
def test_long_line_similar_to_slurms_message_is_parsed_fast(tmp_path):
    """A job may write any text. A single regular expression for the whole line backtracked on this one for minutes."""
    almost = b"slurmstepd" + b": error: *** JOB 1 DUE TO JOB REQUEUE" * 1700 + b"\n"
    (tmp_path / "out.1").write_bytes(b"one\n")
    (tmp_path / "now").write_bytes(b"one\n" + almost)
    hand_over(tmp_path / "now")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=4, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), OWNER)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == b"one\n" + almost


def test_output_of_interrupted_restore_is_removed(tmp_path):
    """Its process tree ran for a moment before it was killed; the new one writes those lines itself."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(b"one\ntwo\nthree\n")
    hand_over(tmp_path / "now")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), OWNER, again=True)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(("again", "then"), [(True, b"one\ntwo\n"), (False, b"one\ntwo\none\n")])
def test_output_of_interrupted_restore_is_completed(tmp_path, again, then):
    """The agent was killed while it wrote. In a first restore these lines are the output of Slurm's prolog."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(b"one\n")
    hand_over(tmp_path / "now")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), OWNER, again=again)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == then


@pytest.mark.timeout(60)
@pytest.mark.parametrize("since", ["before", "meanwhile"])
def test_output_that_does_not_respond_does_not_block_restore(tmp_path, stalling, monkeypatch, since):
    """The file server fails, or a user's own FUSE stalls: only a few restores run at a time. The error is reported."""
    monkeypatch.setattr(streams, "_ANSWER_S", 0.2)
    monkeypatch.setattr(streams, "_RESTORE_S", 0.2)
    file_system = stalling(tmp_path / "theirs")
    (file_system.path / "now").write_bytes(b"")
    hand_over(file_system.path)
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    saved = SavedOutput(1, "file", str(file_system.path / "now"), file="out.1", size=8, inherit="theirs/now")
    fd = os.open(file_system.path / "now", os.O_WRONLY)
    again = streams._open_again

    def opened(*args):
        result = again(*args)
        file_system.stall()
        return result

    try:
        if since == "before":
            file_system.stall()
        else:
            monkeypatch.setattr(streams, "_open_again", opened)
        with pytest.raises(RestoreFailed, match="theirs/now cannot be restored: its file system does not respond"):
            streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), OWNER)
        streams.say({1: fd}, "not restored")
    finally:
        file_system.resume()
        os.close(fd)


@only_root
def test_read_only_file_of_user_is_not_written(tmp_path):
    """The shepherd runs as the user: it may pass any file that the user can open as the job's output."""
    (tmp_path / "out.1").write_bytes(b"root::0:0::/:/bin/sh\n")
    (tmp_path / "passwd").write_bytes(b"root:x:0:0::/:/bin/sh\n")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=21, inherit="home/a/out")
    fd = os.open(tmp_path / "passwd", os.O_RDONLY)
    try:
        with pytest.raises(RestoreFailed, match="Permission denied"):
            streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), ALICE)
    finally:
        os.close(fd)
    assert (tmp_path / "passwd").read_bytes() == b"root:x:0:0::/:/bin/sh\n"


@only_root
def test_write_only_file_of_user_is_not_read(tmp_path):
    """Its contents would be copied to the user's own output."""
    (tmp_path / "log").write_bytes(b"of others\n")
    (tmp_path / "log").chmod(0o622)
    with (tmp_path / "log").open("ab") as file:
        process = subprocess.Popen(("sleep", "100"), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        with pytest.raises(streams.StreamsError, match="cannot be read: Permission denied"):
            streams.save(Process(process.pid).id, store(tmp_path), ALICE)
    finally:
        process.kill()
        process.wait()


@only_root
@pytest.mark.parametrize(("owner", "group", "mode"), [(2001, 0, 0o600), (0, 2077, 0o660), (0, 2001, 0o660)])
def test_rights_of_user_are_sufficient(tmp_path, owner, group, mode):
    """The user may write as owner or through a group of the job, also below a directory that is closed to root."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(b"")
    os.chown(tmp_path / "now", owner, group)
    (tmp_path / "now").chmod(mode)
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), ALICE)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == b"one\ntwo\n"


@only_root
@pytest.mark.parametrize("before", [b"", b"longer than the saved output"])
def test_write_clears_setuid_bit(tmp_path, before):
    """As a write of the user does: the contents are the user's, the rights would be those of the owner."""
    (tmp_path / "out.1").write_bytes(b"#!/bin/sh -p\nid\n")
    (tmp_path / "tool").write_bytes(before)
    (tmp_path / "tool").chmod(0o6777)
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=16, inherit="home/a/out")
    fd = os.open(tmp_path / "tool", os.O_WRONLY)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), ALICE)
    finally:
        os.close(fd)
    assert (tmp_path / "tool").read_bytes().startswith(b"#!/bin/sh -p\nid\n")
    assert (tmp_path / "tool").stat().st_mode & 0o7777 == 0o777


@only_root
def test_truncation_clears_setuid_bit(tmp_path):
    """A restore that is repeated removes the output of the interrupted one."""
    (tmp_path / "out.1").write_bytes(b"one\n")
    (tmp_path / "tool").write_bytes(b"one\ntwo\n")
    (tmp_path / "tool").chmod(0o4777)
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=4, inherit="home/a/out")
    fd = os.open(tmp_path / "tool", os.O_WRONLY)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), ALICE, again=True)
    finally:
        os.close(fd)
    assert (tmp_path / "tool").read_bytes() == b"one\n"
    assert (tmp_path / "tool").stat().st_mode & 0o7777 == 0o777


def test_full_pipe_does_not_block():
    """The job's error output may be a full pipe."""
    reading, writing = os.pipe()
    try:
        streams.say({2: writing}, "one")
        assert os.read(reading, 100) == b"slurm-affinode: one\n"
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writing, b"x" * 4096):
                pass
        os.set_blocking(writing, True)
        streams.say({2: writing}, "two")
    finally:
        os.close(reading)
        os.close(writing)


def test_output_redirected_to_dev_null_is_not_restored(tmp_path):
    """If the file was replaced by ``/dev/null``, nothing is restored."""
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open("/dev/null", os.O_WRONLY)
    try:
        streams.restore_files((saved,), {1: fd}, saved_in(tmp_path), OWNER)
        assert [(stream.fd, stream.key) for stream in streams.inherited((saved,), {1: fd})] == [(fd, "home/a/out")]
    finally:
        os.close(fd)


def test_ended_process_has_no_streams():
    process = subprocess.Popen(("sleep", "100"))
    held = Process(process.pid)
    gone = held.id
    process.kill()
    process.wait()
    with pytest.raises(streams.StreamsError):
        streams.borrow(held, 1)
    with streams.borrowed(held, os.getuid()) as fds:
        assert set(fds.values()) == {None}
    with pytest.raises(streams.StreamsError, match=r"process \d+: there is no such process"):
        streams.save(gone, lambda *_: 0, OWNER)
