"""The job's output files: saved with the image, put back byte for byte, whatever the mode they are opened in."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from slurm_affinode.agent import streams
from slurm_affinode.checkpoint import writer
from slurm_affinode.checkpoint.asuser import User
from slurm_affinode.checkpoint.images import DirectoryStore
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.model.suspension import JobKey, SavedOutput
from slurm_affinode.pinned import Process

ME = User(os.getuid(), os.getgid())
ALICE = User(2001, 2001, (2001, 2077))
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root opens files as somebody else")

REQUEUE_2605 = (
    b"[2026-11-21T05:36:03.430+00:00] error: *** JOB 9 ON c1 CANCELLED AT 2026-11-21T05:36:03 DUE TO JOB REQUEUE ***\n"
)
REQUEUE = b"slurmstepd-c1: error: *** JOB 12 ON c1 CANCELLED AT 2026-11-20T10:00:00 DUE TO JOB REQUEUE ***\n"
OTHER = REQUEUE.replace(b"JOB REQUEUE", b"TIME LIMIT")


def saved_in(directory):
    """Opens saved outputs."""
    return lambda name: os.open(directory / name, os.O_RDONLY)


@pytest.fixture
def shepherd(tmp_path):
    """A process with a file for both of its outputs, as Slurm gives to a batch script."""
    with (tmp_path / "out").open("ab") as file:
        process = subprocess.Popen(("sleep", "100"), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    yield process.pid
    process.kill()
    process.wait()


def store(directory):
    def write(name, fd, size):
        data = os.pread(fd, size, 0)
        (directory / name).write_bytes(data)
        return len(data)

    return write


def test_output_is_saved_once_where_both_streams_are_one_file(shepherd, tmp_path):
    (tmp_path / "out").write_bytes(b"one\ntwo\n")
    (tmp_path / "image").mkdir()
    null, out, err = streams.save(Process(shepherd).id, store(tmp_path / "image"), ME)
    assert (null.kind, null.inherit) == ("null", None)
    assert (out.kind, out.file, out.size, out.append) == ("file", "out.1", 8, True)
    assert (err.file, err.same_as) == (None, 1)
    assert out.inherit == str(tmp_path / "out").lstrip("/")
    assert (tmp_path / "image" / "out.1").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("since", ["before", "meanwhile"])
def test_output_that_does_not_answer_is_told(tmp_path, stalling, monkeypatch, since):
    """Of a file server that has gone: the suspension is taken back, and others have their turn."""
    monkeypatch.setattr(streams, "_ANSWER_S", 0.2)
    monkeypatch.setattr(writer, "_READ_S", 0.2)
    theirs = stalling(tmp_path / "theirs")
    (theirs.path / "out").write_bytes(b"one\n" * 100_000)
    with (theirs.path / "out").open("ab") as file:
        process = subprocess.Popen(("sleep", "100"), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL)
    store = DirectoryStore(tmp_path / "images", b"k" * 32)
    try:
        with store.begin(JobKey("c", 1, 1), uid=0, estimate=1) as image:

            def save(name, fd, size):
                theirs.stall()
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return image.save(name, fd, size)

            if since == "before":
                theirs.stall()
            with pytest.raises(streams.StreamsError, match="cannot be read: its file system does not answer"):
                streams.save(Process(process.pid).id, save, ME)
    finally:
        theirs.go_on()
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
def test_output_comes_back_as_it_was(tmp_path, now, then):
    """Truncated, kept, with Slurm's own line or with somebody else's behind it."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(now)
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ME)
        os.write(fd, b"three\n")
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == then + b"three\n"


@pytest.mark.timeout(30)
def test_a_long_line_that_is_almost_slurms_own_does_not_keep_the_agent(tmp_path):
    """A job writes what it likes. One expression for the whole line went back and forth on this one for minutes."""
    almost = b"slurmstepd" + b": error: *** JOB 1 DUE TO JOB REQUEUE" * 1700 + b"\n"
    (tmp_path / "out.1").write_bytes(b"one\n")
    (tmp_path / "now").write_bytes(b"one\n" + almost)
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=4, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ME)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == b"one\n" + almost


def test_what_a_restore_that_was_cut_short_wrote_goes(tmp_path):
    """Its tree ran for a moment before it was ended; the new one writes those lines itself."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(b"one\ntwo\nthree\n")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ME, again=True)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(("again", "then"), [(True, b"one\ntwo\n"), (False, b"one\ntwo\none\n")])
def test_output_of_a_cut_short_restore_is_completed(tmp_path, again, then):
    """The agent was killed while it wrote. In a first restore it is what Slurm's prolog has written."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(b"one\n")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY | os.O_APPEND)
    try:
        streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ME, again=again)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == then


@pytest.mark.timeout(60)
@pytest.mark.parametrize("since", ["before", "meanwhile"])
def test_output_that_does_not_answer_keeps_no_restore(tmp_path, stalling, monkeypatch, since):
    """Of a file server that has gone, or of a user's own FUSE: few restores are made at a time. It is told, too."""
    monkeypatch.setattr(streams, "_ANSWER_S", 0.2)
    monkeypatch.setattr(streams, "_PUT_BACK_S", 0.2)
    theirs = stalling(tmp_path / "theirs")
    (theirs.path / "now").write_bytes(b"")
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    saved = SavedOutput(1, "file", str(theirs.path / "now"), file="out.1", size=8, inherit="theirs/now")
    fd = os.open(theirs.path / "now", os.O_WRONLY)
    again = streams._open_again

    def opened(*args):
        found = again(*args)
        theirs.stall()
        return found

    try:
        if since == "before":
            theirs.stall()
        else:
            monkeypatch.setattr(streams, "_open_again", opened)
        with pytest.raises(RestoreFailed, match="theirs/now cannot be put back: its file system does not answer"):
            streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ME)
        streams.say({1: fd}, "not restored")
    finally:
        theirs.go_on()
        os.close(fd)


@only_root
def test_a_file_that_the_user_may_only_read_is_not_written(tmp_path):
    """The shepherd is the user's: what it hands over as its output may be any file that the user can open."""
    (tmp_path / "out.1").write_bytes(b"root::0:0::/:/bin/sh\n")
    (tmp_path / "passwd").write_bytes(b"root:x:0:0::/:/bin/sh\n")
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=21, inherit="home/a/out")
    fd = os.open(tmp_path / "passwd", os.O_RDONLY)
    try:
        with pytest.raises(RestoreFailed, match="Permission denied"):
            streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ALICE)
    finally:
        os.close(fd)
    assert (tmp_path / "passwd").read_bytes() == b"root:x:0:0::/:/bin/sh\n"


@only_root
def test_a_file_that_the_user_may_only_write_is_not_read(tmp_path):
    """It would come back in the user's own output."""
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
def test_the_users_own_rights_are_enough(tmp_path, owner, group, mode):
    """As owner, by a group of the job; also below a directory that root itself is kept out of by a file server."""
    (tmp_path / "out.1").write_bytes(b"one\ntwo\n")
    (tmp_path / "now").write_bytes(b"")
    os.chown(tmp_path / "now", owner, group)
    (tmp_path / "now").chmod(mode)
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open(tmp_path / "now", os.O_WRONLY)
    try:
        streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ALICE)
    finally:
        os.close(fd)
    assert (tmp_path / "now").read_bytes() == b"one\ntwo\n"


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting():
    """The job's error output may be one, and full."""
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


def test_output_that_went_to_a_file_may_go_nowhere_now(tmp_path):
    """``/dev/null`` in place of the file: nothing to put back."""
    saved = SavedOutput(1, "file", "/home/a/out", file="out.1", size=8, inherit="home/a/out")
    fd = os.open("/dev/null", os.O_WRONLY)
    try:
        streams.put_back((saved,), {1: fd}, saved_in(tmp_path), ME)
        assert [(one.fd, one.key) for one in streams.inherited((saved,), {1: fd})] == [(fd, "home/a/out")]
    finally:
        os.close(fd)


def test_a_process_that_is_gone_has_no_streams():
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
        streams.save(gone, lambda *_: 0, ME)
