"""Node-local files that a killed attempt has left behind: a restore replaces those that restores of the job created."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_owner import OWNER, hand_over, using

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import local_files
from slurm_affinode.checkpoint.files.created_files import CreatedFiles, CreatedFilesOfJobs, FileIdentity
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import JobKey

KEY = JobKey("alpha", 7, 1000)
OTHER = "exists already, and is another file"


@dataclass
class Node:
    """A directory in the place of /dev/shm, an image with the file ``psm``, and the records of a node."""

    shm: Path
    image: Path
    fd: int
    records: CreatedFilesOfJobs
    user: User

    @property
    def psm(self) -> Path:
        """Return the path of the job's shared memory."""
        return self.shm / "psm"

    def restore(self, key: JobKey = KEY) -> list[str]:
        """Restore the files for an attempt of the job; return the paths of those that were created."""
        opened: list[int] = []

        def contents(name: str) -> int:
            opened.append(os.open(name, os.O_RDONLY, dir_fd=self.fd))
            return opened[-1]

        try:
            me, record = Process(os.getpid()).id, self.records.of(key, self.user.uid)
            return list(
                local_files.restore_files(me, self.fd, contents, self.user, created=record, places=[str(self.shm)])
            )
        finally:
            for fd in opened:
                os.close(fd)


@pytest.fixture
def node(tmp_path: Path, open_path: Path) -> Iterator[Node]:
    """Return a node that the job has just left."""
    image = tmp_path / "image"
    image.mkdir(mode=0o700)
    with ExitStack() as stack:
        shm = open_path / "shm"
        shm.mkdir()
        fd = os.open(image, os.O_RDONLY)
        stack.callback(os.close, fd)
        node = Node(shm, image, fd, CreatedFilesOfJobs(tmp_path / "created-files"), OWNER)
        with node.psm.open("w+b") as file:
            if FileIdentity.of(file.fileno()) is None:
                pytest.skip(f"the file system of {open_path} has no file handles, or the container denies them")
            file.write(b"as in the image")
            file.flush()
            hand_over(shm)
            me = Process(os.getpid()).id
            local_files.save(me, [me], fd, OWNER, places=[str(shm)])
        node.psm.unlink()
        yield node


def killed(node: Node) -> None:
    """Restore the job, let it change its file in place, and kill the attempt."""
    assert node.restore() == [str(node.psm)]
    node.psm.write_bytes(b"newer, and longer than in the image")


def test_file_of_a_killed_attempt_is_replaced(node: Node) -> None:
    """As often as attempts are killed, also after another image of the job, which has a later submit time."""
    for submit in (1000, 1000, 2000, 2000):
        assert node.restore(JobKey("alpha", 7, submit)) == [str(node.psm)]
        assert node.psm.read_bytes() == b"as in the image"
        node.psm.write_bytes(b"newer, and longer than in the image")


def test_unchanged_file_of_a_killed_attempt_is_used(node: Node) -> None:
    """It stays in the record: the next attempt may change it."""
    killed(node)
    node.psm.write_bytes(b"as in the image")
    assert node.restore() == []
    node.psm.write_bytes(b"newer")
    assert node.restore() == [str(node.psm)]


def test_both_names_of_a_killed_attempt_are_replaced(node: Node) -> None:
    """A named semaphore has two names until it is restored."""
    index = json.loads((node.image / local_files.INDEX).read_text())
    second = node.shm / "sem"
    index["files"].append({"path": str(second), "kind": "link", "mode": 0o600, "copy": str(node.psm)})
    (node.image / local_files.INDEX).write_text(json.dumps(index))
    assert node.restore() == [str(node.psm), str(second)]
    node.psm.write_bytes(b"newer")
    assert node.restore() == [str(node.psm), str(second)]
    assert second.samefile(node.psm)
    assert second.read_bytes() == b"as in the image"


def test_interrupted_restore_is_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent was killed while it copied the contents: the record is written before."""
    with monkeypatch.context() as patch:
        patch.setattr(local_files, "_fill", lambda *_: os.kill(os.getpid(), 0) or sys.exit(9))
        with pytest.raises(SystemExit):
            node.restore()
    assert node.psm.read_bytes() == b""
    assert node.restore() == [str(node.psm)]
    assert node.psm.read_bytes() == b"as in the image"


@pytest.mark.parametrize(
    "other", ["recreated", "renamed over", "hard link", "symbolic link", "directory", "FIFO", "through a link"]
)
def test_other_file_of_the_user_is_not_replaced(node: Node, other: str) -> None:
    """The program, or another job of the user, may have put it there. The message names it."""
    killed(node)
    away = node.shm.parent / "away"
    kept = away
    match other:
        case "recreated":  # most file systems reuse the inode number at once
            node.psm.unlink()
            node.psm.write_bytes(b"other")
            kept = node.psm
        case "renamed over":
            away.write_bytes(b"other")
            away.replace(node.psm)
            kept = node.psm
        case "hard link":
            away.write_bytes(b"other")
            node.psm.unlink()
            node.psm.hardlink_to(away)
        case "symbolic link":
            node.psm.rename(away)  # to the very file that was created
            node.psm.symlink_to(away)
        case "directory":
            node.psm.unlink()
            node.psm.mkdir()
            kept = node.psm
        case "FIFO":
            node.psm.unlink()
            os.mkfifo(node.psm)
            kept = node.psm
        case "through a link":
            away.mkdir()
            (away / "psm").write_bytes(b"other")
            node.psm.unlink()
            node.shm.rmdir()
            node.shm.symlink_to(away)
            kept = away / "psm"
    before = kept.lstat()
    with pytest.raises(
        RestoreFailed, match=f"{node.psm}: {OTHER}: if it is not needed, remove it from {os.uname().nodename}"
    ):
        node.restore()
    assert kept.lstat() == before
    assert node.psm.exists()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_file_in_use_is_not_replaced(node: Node, how: str) -> None:
    """A process of the killed attempt may have outlived it, or another job may use the file."""
    if how == "mapped" and os.geteuid() != 0:
        pytest.skip("/proc/PID/map_files is for root")
    killed(node)
    with using(node.psm, how), pytest.raises(RestoreFailed, match=f"{node.psm}: is left over .* and a process has it"):
        node.restore()
    assert node.psm.read_bytes() == b"newer, and longer than in the image"
    assert node.restore() == [str(node.psm)]


def test_record_of_a_later_release_counts(node: Node) -> None:
    """An agent ignores keys that its release does not know."""
    killed(node)
    path = node.records.of(KEY, node.user.uid).path
    value = json.loads(path.read_text())
    files = {name: {**identity, "later": 1} for name, identity in value["files"].items()}
    path.write_text(json.dumps({**value, "files": files, "later": 1}))
    assert node.restore() == [str(node.psm)]


@pytest.mark.parametrize("change", ["user", "version", "earlier job", "other path", "damaged", "large", "none"])
def test_record_that_does_not_belong_to_the_job_permits_nothing(
    node: Node, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may give the ID of a job to another one once it has lost its state."""
    killed(node)
    record = node.records.of(KEY, node.user.uid)
    value = json.loads(record.path.read_text())
    text = {
        "user": json.dumps(value | {"uid": node.user.uid + 1}),
        "version": json.dumps(value | {"version": 2}),
        "earlier job": json.dumps(value | {"submit": 1001}),
        "other path": json.dumps(value | {"files": {f"{node.psm}2": value["files"][str(node.psm)]}}),
        "damaged": '{"uid": 0, "files": {',
        "large": json.dumps(value),
        "none": "",
    }[change]
    record.path.write_text(text)
    if change == "large":
        monkeypatch.setattr("slurm_affinode.checkpoint.files.created_files._LIMIT", len(text) - 1)
    if change == "none":
        node.records.remove(7)
    with pytest.raises(RestoreFailed, match=OTHER):
        node.restore()
    assert node.psm.read_bytes() == b"newer, and longer than in the image"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("attack", ["file of another user", "directory of another user", "given away"])
def test_file_that_the_user_could_not_remove_is_not_replaced(node: Node, attack: str) -> None:
    """The record names the very file; the user's rights and its owner decide nevertheless."""
    node.shm.chmod(0o1777)
    index = json.loads((node.image / local_files.INDEX).read_text())
    (node.image / local_files.INDEX).write_text(json.dumps(index | {"uid": 2001}))
    node.user = User(2001, 2001)
    killed(node)
    assert node.psm.stat().st_uid == 2001
    match attack:
        case "file of another user":
            os.chown(node.psm, 2002, 2002)
            node.psm.chmod(0o666)
        case "given away":
            os.chown(node.psm, 0, 0)
            node.psm.chmod(0o666)
            node.shm.chmod(0o777)
        case "directory of another user":
            node.shm.chmod(0o755)
    before = node.psm.stat()
    with pytest.raises(RestoreFailed, match="Permission denied" if attack.startswith("directory") else OTHER):
        node.restore()
    assert node.psm.stat() == before


def test_failed_restore_leaves_no_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover that it has replaced was of no use."""
    killed(node)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(local_files, "_copy", fails)
        with pytest.raises(RestoreFailed, match="psm: No space left on device"):
            node.restore()
    assert list(node.shm.iterdir()) == []
    assert node.restore() == [str(node.psm)]


def test_file_replaced_while_it_is_created_is_not_written(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the user puts its own file in the place of the new, empty one."""

    def swap(record: CreatedFiles, files: object) -> None:
        (node.shm / "other").write_bytes(b"other")
        hand_over(node.shm / "other")
        (node.shm / "other").replace(node.psm)

    with monkeypatch.context() as patch:
        patch.setattr(CreatedFiles, "write", swap)
        with pytest.raises(RestoreFailed, match="psm: was replaced while it was created"):
            node.restore()
    assert node.psm.read_bytes() == b"other"


def test_record_has_only_files_of_the_newest_image(node: Node) -> None:
    """Other files are not in the way of a restore."""
    killed(node)
    record = node.records.of(KEY, node.user.uid)
    first = record.read()
    assert list(first) == [str(node.psm)]
    record.write({**first, str(node.shm / "old"): FileIdentity(1, "00")})
    node.restore()
    assert list(record.read()) == [str(node.psm)]
    assert record.path.stat().st_mode & 0o777 == 0o600
    assert node.records.jobs() == [7]
    node.records.remove(7)
    node.records.remove(7)
    assert node.records.jobs() == []


def test_record_that_cannot_be_written_does_not_prevent_a_restore(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    node.records = CreatedFilesOfJobs(tmp_path / "file" / "created-files")
    assert node.restore() == [str(node.psm)]
    assert "7.json: cannot be written: Not a directory" in caplog.text
    assert node.records.jobs() == []
