"""Closed files of a job in node-local directories: found, copied, restored and removed, with the rights of its user."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from job_owner import OWNER, hand_over, using

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import scratch_search
from slurm_affinode.checkpoint.files.scratch_files import (
    ScratchFiles,
    ScratchOutcome,
    ScratchRestored,
    ScratchRules,
    tied,
)
from slurm_affinode.checkpoint.files.scratch_index import DATA, INDEX
from slurm_affinode.checkpoint.files.scratch_record import RecordError, ScratchRecord, ScratchRecords
from slurm_affinode.checkpoint.files.scratch_search import ScratchSearchResult
from slurm_affinode.checkpoint.interface import DumpNoRoom, RestoreFailed
from slurm_affinode.model.suspension import JobKey

BEFORE, FOREVER = 0.0, float("inf")
"""All files were changed in between."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are needed")


@dataclass
class Site:
    """A node-local directory, an image, and the record of a job on this node."""

    tmp: Path
    image: Path
    fd: int
    record: ScratchRecord
    rules: ScratchRules
    others: str | None = None

    @property
    def files(self) -> ScratchFiles:
        return ScratchFiles(self.rules)

    def find(self, since: float = BEFORE) -> ScratchSearchResult:
        """Search for the files of this process, which are the owner's."""
        hand_over(self.tmp)
        me = Process(os.getpid()).id
        return self.files.find(me, [me], OWNER, [(since, FOREVER)], self.others)

    def save(self, search: ScratchSearchResult | None = None, kept: Collection[str] = ()) -> ScratchOutcome:
        """Copy files into the image."""
        for path in self.image.iterdir():
            path.unlink()
        me = Process(os.getpid()).id
        return self.files.save(me, search or self.find(), self.fd, OWNER, "c1", kept_paths=kept, timeout_s=60)

    def index(self) -> bytes:
        return (self.image / INDEX).read_bytes()

    def restore_files(self) -> ScratchRestored:
        """Restore the files of the image, as seen by this process."""
        me, data = Process(os.getpid()).id, None
        with ExitStack() as stack:
            if (self.image / DATA).exists():
                data = os.open(DATA, os.O_RDONLY, dir_fd=self.fd)
                stack.callback(os.close, data)
            return self.files.restore_files(me, self.index(), data, OWNER, self.record, timeout_s=60)

    def leave(self) -> int:
        """Remove the files from the node that the job has left."""
        return self.files.leave(self.index(), OWNER)

    def change_index(self, **changes: object) -> None:
        """Change the index of the image, or its only file."""
        index = json.loads(self.index())
        index |= {key: value for key, value in changes.items() if key in index}
        for file in index["files"]:
            file |= {key: value for key, value in changes.items() if key in file}
        (self.image / INDEX).write_text(json.dumps(index))


@pytest.fixture
def site(open_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Return an empty directory and an empty image; the owner has no other processes on the node."""
    tmp, image = open_path / "tmp", open_path / "image"
    tmp.mkdir()
    tmp.chmod(0o1777)
    image.mkdir(mode=0o700)
    fd = os.open(image, os.O_RDONLY)
    monkeypatch.setattr(scratch_search, "processes", lambda proc: iter(()))
    record = ScratchRecords(open_path / "scratch").of(JobKey("alpha", 7, 1), OWNER.uid)
    yield Site(tmp, image, fd, record, ScratchRules(directories=(str(tmp),)))
    os.close(fd)


def contents(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return type, mode, time and contents of everything below a directory."""
    result: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        facts = path.lstat()
        data: object = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        result[str(path.relative_to(directory))] = (facts.st_mode, facts.st_uid, facts.st_mtime_ns, data)
    return result


def clear(directory: Path) -> None:
    """Remove everything below a directory, as on another node."""
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def filled(tmp: Path) -> None:
    """Create a temporary directory with files of every kind."""
    work = tmp / "tmp.Xy12" / "deep"
    work.mkdir(parents=True, mode=0o750)
    (work / "data").write_bytes(b"x" * 70_000)
    with (work / "sparse").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(2 << 20)
        file.write(b"end")
    (work / "empty").touch()
    (work / "read-only").write_bytes(b"r")
    (work / "link").symlink_to("data")
    (work / "hard").hardlink_to(work / "data")
    os.mkfifo(work / "fifo", 0o620)
    (work / os.fsdecode(b"n\xff")).write_bytes(b"name")
    (work / "read-only").chmod(0o400)
    os.utime(work / "data", ns=(5, 1_000_000_007))
    os.utime(work / "empty", ns=(5, -7_000_000_000))
    work.chmod(0o550)
    os.utime(work, ns=(5, 2_000_000_009))


def test_closed_files_are_restored_on_another_node(site: Site) -> None:
    """Contents, holes, modes, times, symbolic and hard links, named pipes, and read-only directories."""
    filled(site.tmp)
    outcome = site.save()
    assert outcome.kind == "copied", outcome
    before = contents(site.tmp)
    clear(site.tmp)
    restored = site.restore_files()
    assert restored.kept_paths == []
    assert restored.missing == ()
    assert contents(site.tmp) == before
    work = site.tmp / "tmp.Xy12" / "deep"
    assert (work / "hard").stat().st_ino == (work / "data").stat().st_ino
    assert (work / "sparse").stat().st_blocks * 512 < 1 << 20
    assert site.restore_files().inodes == {}  # identical ones are accepted


@pytest.mark.parametrize("age", ["older", "newer"])
def test_files_from_before_the_job_are_not_its_own(site: Site, age: str) -> None:
    """A directory that existed before is included with a new file in it, and only with that."""
    (site.tmp / "cache").mkdir()
    (site.tmp / "cache" / "old").write_text("x")
    hand_over(site.tmp)
    since = time.time() + (3600 if age == "older" else 0)
    findings = site.find(since)
    if age == "newer":
        time.sleep(0.02)  # the kernel's time of a change is that of its last tick
        since = time.time() - 0.01
        (site.tmp / "cache" / "new").write_text("x")
        findings = site.find(since)
    assert [file.path for file in findings.files] == ([] if age == "older" else ["cache", "cache/new"])
    assert site.save(findings).kind == ("none" if age == "older" else "copied")


@needs_root
def test_working_directory_of_another_user_ties_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be copied with the rights of the job's user."""
    (site.tmp / "data").mkdir()
    os.chown(site.tmp / "data", OWNER.uid + 1, OWNER.gid)
    monkeypatch.chdir(site.tmp / "data")
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "belongs to another user" in outcome.text


@needs_root
def test_files_of_other_users_are_neither_entered_nor_copied(site: Site) -> None:
    """They could be of any number, and are none of the job's."""
    (site.tmp / "foreign").mkdir()
    os.chown(site.tmp / "foreign", OWNER.uid + 1, OWNER.gid)
    (site.tmp / "foreign" / "file").write_text("x")
    (site.tmp / "secret").write_text("x")
    os.chown(site.tmp / "secret", OWNER.uid + 1, OWNER.gid)
    (site.tmp / "mine").write_text("x")
    assert [file.path for file in site.find().files] == ["mine"]


@needs_root
def test_links_lead_to_no_file_of_root(site: Site, open_path: Path) -> None:
    """A symbolic link is copied as such; a file that is replaced by one after the search is left out."""
    secret = open_path / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    (site.tmp / "link").symlink_to(secret)
    (site.tmp / "dir").mkdir()
    (site.tmp / "dir" / "file").write_text("mine")
    (site.tmp / "file").write_text("mine")
    findings = site.find()
    (site.tmp / "file").unlink()
    (site.tmp / "file").symlink_to(secret)
    (site.tmp / "dir").rename(site.tmp / "moved")
    (site.tmp / "dir").symlink_to(open_path)
    outcome = site.save(findings)
    assert outcome.kind == "tied", outcome  # ELOOP: what it was is not known
    assert b"root's" not in b"".join(path.read_bytes() for path in site.image.iterdir())


@needs_root
@pytest.mark.parametrize("where", ["parent", "file"])
def test_restore_follows_no_link(site: Site, open_path: Path, where: str) -> None:
    """A link in place of a directory or file is in the way, and what it leads to is not written."""
    (site.tmp / "dir").mkdir()
    (site.tmp / "dir" / "file").write_text("mine")
    site.save()
    clear(site.tmp)
    aim = open_path / "aim"
    aim.mkdir()
    os.chown(aim, OWNER.uid, OWNER.gid)
    if where == "parent":
        (site.tmp / "dir").symlink_to(aim)
        with pytest.raises(RestoreFailed, match="dir/file"):
            site.restore_files()
    else:
        (site.tmp / "dir").mkdir()
        (site.tmp / "dir" / "file").symlink_to(aim / "file")
        hand_over(site.tmp)
        assert site.restore_files().kept_paths == [str(site.tmp / "dir" / "file")]
    assert list(aim.iterdir()) == []


@pytest.mark.parametrize("limit", ["bytes", "files", "policy"])
def test_job_with_more_than_the_limit_is_tied(site: Site, limit: str) -> None:
    """Nothing is copied then, and the text names limit and files."""
    filled(site.tmp)
    changes: dict[str, dict[str, object]] = {
        "bytes": {"limit_bytes": 1000}, "files": {"limit_files": 3}, "policy": {"policy": "pin"},
    }  # fmt: skip
    site.rules = replace(site.rules, **changes[limit])  # type: ignore[arg-type]
    outcome = site.save()
    assert outcome.kind == "tied"
    assert outcome.text.startswith("tied to c1: ")
    assert {"bytes": "more than 1000 B", "files": "more than 3 files", "policy": "does not copy"}[limit] in outcome.text
    assert [path.name for path in site.image.iterdir()] == [INDEX]
    assert tied(site.index(), OWNER.uid) == outcome.text


def test_ignored_files_are_not_searched(site: Site) -> None:
    """``local_files = "ignore"`` is the behavior of earlier releases."""
    filled(site.tmp)
    site.rules = replace(site.rules, policy="ignore")
    assert site.save().kind == "none"


@needs_root
def test_unreadable_file_ties_the_job(site: Site) -> None:
    """Root could read it, and the user cannot."""
    (site.tmp / "closed").write_text("x")
    (site.tmp / "closed").chmod(0)
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "closed: Permission denied" in outcome.text


@needs_root
def test_unreadable_directory_ties_the_job(site: Site) -> None:
    """Its contents are unknown, not empty."""
    (site.tmp / "closed").mkdir()
    (site.tmp / "closed").chmod(0)
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "closed: Permission denied" in outcome.text


def test_search_that_takes_too_long_ties_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown is not nothing."""
    monkeypatch.setattr(scratch_search, "_FIND_S", 0.0)
    monkeypatch.setattr(scratch_search, "_GRACE_S", 60.0)
    (site.tmp / "file").touch()
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "takes longer" in outcome.text


def test_number_of_visited_files_is_limited(site: Site) -> None:
    """Also of those that are older than the job, which are not copied."""
    site.rules = replace(site.rules, limit_files=1)
    for number in range(12):
        (site.tmp / str(number)).touch()
    findings = site.find(time.time() + 3600)
    assert findings.files == ()
    assert "more than 10 files" in (findings.why_not or "")


def test_files_in_the_image_are_not_copied_again(site: Site) -> None:
    """Open files are stored elsewhere, with their directories."""
    (site.tmp / "dir").mkdir()
    for name in ("open", "closed", "linked"):
        (site.tmp / "dir" / name).write_text(name)
    (site.tmp / "dir" / "other").hardlink_to(site.tmp / "dir" / "linked")
    findings = site.find()
    kept = {str(site.tmp / "dir"), *(str(site.tmp / "dir" / name) for name in ("open", "linked", "other", "closed"))}
    site.save(findings, kept={*kept} - {str(site.tmp / "dir" / "closed"), str(site.tmp / "dir" / "other")})
    names = [file["path"] for file in json.loads(site.index())["files"]]
    assert sorted(names) == ["dir", "dir/closed", "dir/linked", "dir/other"]  # both names, to be linked again
    (site.tmp / "dir" / "linked").unlink()
    (site.tmp / "dir" / "other").unlink()
    assert site.save(site.find(), kept=kept).kind == "none"


def test_existing_file_with_other_contents_is_kept(site: Site) -> None:
    """The job is restored, and reports it; everything else is created."""
    (site.tmp / "dir").mkdir()
    (site.tmp / "dir" / "a").write_text("ours")
    (site.tmp / "dir" / "b").write_text("ours")
    site.save()
    clear(site.tmp)
    (site.tmp / "dir").mkdir()
    (site.tmp / "dir" / "a").write_text("theirs")
    hand_over(site.tmp)
    assert site.restore_files().kept_paths == [str(site.tmp / "dir" / "a")]
    assert (site.tmp / "dir" / "a").read_text() == "theirs"
    assert (site.tmp / "dir" / "b").read_text() == "ours"


def test_files_of_a_killed_attempt_are_replaced(site: Site) -> None:
    """The restore has recorded them; one that is in use stays."""
    (site.tmp / "a").write_text("image")
    site.save()
    clear(site.tmp)
    site.restore_files()
    (site.tmp / "a").write_text("changed by the lost attempt")
    with using(site.tmp / "a"):
        assert site.restore_files().kept_paths == [str(site.tmp / "a")]
    assert site.restore_files().kept_paths == []
    assert (site.tmp / "a").read_text() == "image"


def test_failed_restore_leaves_nothing(site: Site) -> None:
    """Files that it has created are removed again."""
    (site.tmp / "dir").mkdir()
    (site.tmp / "dir" / "a").write_text("x" * 100)
    (site.tmp / "b").write_text("x")
    site.save()
    clear(site.tmp)
    made = site.restore_files().inodes
    assert len(made) == 3
    site.files.remove(Process(os.getpid()).id, made, OWNER)
    assert list(site.tmp.iterdir()) == []
    site.tmp.rename(site.tmp.parent / "away")
    with pytest.raises(RestoreFailed, match="No such file"):
        site.restore_files()


def test_unchanged_files_are_removed_from_the_node_that_the_job_has_left(site: Site) -> None:
    """A job that returns has newer ones. Changed, new and used files stay, with their directories."""
    for name in ("gone", "stays"):
        (site.tmp / name).mkdir()
        (site.tmp / name / "file").write_text("x")
    (site.tmp / "used").write_text("x")
    site.save()
    (site.tmp / "stays" / "file").write_text("changed")
    with using(site.tmp / "used"):
        assert site.leave() == 2
    assert sorted(path.name for path in site.tmp.iterdir()) == ["stays", "used"]


def test_full_image_store_is_reported_as_such(site: Site) -> None:
    """The dump may then be repeated in another store."""
    with (site.tmp / "huge").open("wb") as file:
        file.truncate(8 << 40)
    site.rules = replace(site.rules, limit_bytes=1 << 60)
    with pytest.raises(DumpNoRoom, match="no room"):
        site.save()


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../file"}, {"path": "/file"}, {"path": "a//b"}, {"path": ""}, {"path": "a\0b"}, {"kind": "device"},
        {"place": "tmp"}, {"place": "/srv/.."}, {"place": "/"}, {"place": "/./"},
        {"mode": 0o20000}, {"size": -1}, {"at": 1 << 70}, {"gid": 1 << 32},
        {"kind": "link", "target": "other"}, {"size": 1 << 40}, {"uid": OWNER.uid + 1}, {"version": 2},
        {"path": "\ud800"},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_index_is_refused(site: Site, change: dict[str, object]) -> None:
    """An image is signed by a node, but contains what a user has chosen. Nothing is created."""
    (site.tmp / "file").write_text("x")
    site.save()
    clear(site.tmp)
    site.change_index(**change)
    with pytest.raises(RestoreFailed):
        site.restore_files()
    assert list(site.tmp.iterdir()) == []


def test_user_in_the_image_gets_no_rights(site: Site) -> None:
    """Files are created with the rights of the user that Slurm names, without special bits for others."""
    (site.tmp / "file").write_text("x")
    (site.tmp / "file").chmod(0o640)
    site.save()
    clear(site.tmp)
    site.restore_files()
    facts = (site.tmp / "file").stat()
    assert facts.st_uid == OWNER.uid
    assert stat.S_IMODE(facts.st_mode) == 0o640


def test_record_of_another_job_counts_for_nothing(site: Site) -> None:
    """Slurm reuses job IDs."""
    assert site.record.write(lambda facts: replace(facts, periods=((5.0, 6.0),), required="c1"))
    assert site.record.read().periods == ((5.0, 6.0),)
    assert replace(site.record, uid=OWNER.uid + 1).read().required is None
    assert replace(site.record, submit=0).read().periods == ()


def test_record_of_a_later_release_counts(site: Site) -> None:
    """An agent ignores keys that its release does not know, and names a version that it does not know."""
    site.record.write(lambda facts: replace(facts, required="c1"))
    value = json.loads(site.record.path.read_text())
    site.record.path.write_text(json.dumps({**value, "later": 1}))
    assert site.record.read().required == "c1"
    site.record.path.write_text(json.dumps({**value, "required": ["c1"], "version": 2}))
    with pytest.raises(RecordError, match="cannot be read: its version is unknown"):
        site.record.read()


def test_index_of_a_later_release_is_refused_by_its_version(site: Site) -> None:
    """A restore must not leave out what it does not know: the job is held with its image."""
    (site.tmp / "file").write_text("x")
    site.save()
    index = json.loads(site.index())
    for change, reason in (({"version": 2, "files": {}}, "its version is unknown"), ({"later": 1}, "unknown later")):
        (site.image / INDEX).write_text(json.dumps({**index, **change}))
        with pytest.raises(RestoreFailed, match=reason):
            site.restore_files()


def test_record_that_cannot_be_read_is_kept(site: Site) -> None:
    """When the job was on this node is not known; files of killed attempts are not replaced."""
    site.record.write(lambda facts: facts)
    site.record.path.write_text("{")
    with pytest.raises(RecordError, match=f"{site.record.path}: cannot be read: "):
        site.record.read()
    assert not site.record.write(lambda facts: replace(facts, required="c1"))
    assert site.record.path.read_text() == "{"
    assert site.record.read_or_default().created == {}


# --- whose files they are


def test_files_from_between_two_attempts_are_not_the_jobs(site: Site) -> None:
    """While a tied job was suspended, another job of its user may have run."""
    (site.tmp / "file").write_text("x")
    hand_over(site.tmp)
    now, me = time.time(), Process(os.getpid()).id
    apart = [(BEFORE, now - 3600), (now + 3600, FOREVER)]
    assert site.files.find(me, [me], OWNER, apart, lambda: None).files == ()
    assert len(site.files.find(me, [me], OWNER, [*apart, (now - 60, now + 60)], lambda: None).files) == 1


def test_older_files_below_working_directory_tie_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs them, and they are not its own."""
    (site.tmp / "staged" / "below").mkdir(parents=True)
    (site.tmp / "other").write_text("x")
    hand_over(site.tmp)
    monkeypatch.chdir(site.tmp / "staged")
    outcome = site.save(site.find(time.time() + 3600))
    assert outcome.kind == "tied"
    assert "staged/below, below its working directory, is from before the job" in outcome.text


def test_other_processes_of_the_user_tie_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied or removed then; a job without files is not affected."""
    held = site.tmp.parent / "held"
    held.touch()
    hand_over(held)
    monkeypatch.undo()
    with using(held):
        assert site.save().kind == "none"
        (site.tmp / "a").write_text("x")
        outcome = site.save()
    assert outcome.kind == "tied"
    assert "other processes of its user" in outcome.text
    assert site.leave() == 0
    assert (site.tmp / "a").exists()


@needs_root
def test_process_that_has_ended_does_not_tie_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has such processes until their parent has reaped them, which it cannot while it is stopped."""
    (site.tmp / "a").write_text("x")
    with subprocess.Popen(("cat",), stdin=subprocess.PIPE, user=OWNER.uid, group=OWNER.gid, extra_groups=()) as child:
        monkeypatch.setattr(scratch_search, "processes", lambda proc: iter([Process(child.pid)]))
        assert site.save().kind == "tied"
        child.kill()
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert site.save().kind == "copied"


def test_other_jobs_of_the_user_tie_the_job(site: Site) -> None:
    """They may have ended meanwhile, and left results. A file that the job has open is its own."""
    (site.tmp / "a").write_text("x")
    site.others = "other jobs of its user ran on this node"
    assert site.save(kept=[str(site.tmp / "a")]).kind == "none"
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "other jobs of its user" in outcome.text


def test_private_directories_are_copied_under_every_policy(site: Site) -> None:
    """Those of job_container/tmpfs end with the attempt, and belong to no other job."""
    (site.tmp / "file").write_text("x" * 100)
    site.rules = replace(site.rules, policy="pin")
    site.others = "other jobs"
    result = replace(site.find(), private=frozenset((str(site.tmp),)))
    assert site.save(result).kind == "copied"
    site.rules = replace(site.rules, limit_bytes=10)
    outcome = site.save(result)
    assert outcome.kind == "lost"
    assert "they end with the attempt" in outcome.text


def test_shared_file_systems_are_not_searched(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are on the other node as well, and would be lost if they were removed here."""
    (site.tmp / "file").write_text("x")
    monkeypatch.setattr(scratch_search, "_LOCAL_TYPES", frozenset())
    assert site.save().kind == "none"


def test_file_with_names_elsewhere_ties_the_job(site: Site) -> None:
    """A copy would be another file than the one with the other name."""
    (site.tmp / "a").write_text("x")
    hand_over(site.tmp)
    (site.tmp.parent / "b").hardlink_to(site.tmp / "a")
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "a has other names elsewhere" in outcome.text


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_attributes_tie_the_job(site: Site, kind: str) -> None:
    """Without its ACL, a file may be open to more users than before."""
    path = site.tmp / "a"
    path.touch() if kind == "file" else path.mkdir()
    try:
        os.setxattr(path, "user.x", b"x")
    except OSError as error:
        pytest.skip(f"the file system has no attributes: {error.strerror}")
    outcome = site.save()
    assert outcome.kind == "tied"
    assert "a: has an ACL or extended attributes" in outcome.text or "a has an ACL" in outcome.text


# --- attacks on the node of the restore


@needs_root
@pytest.mark.parametrize("what", ["parent", "above", "file", "fifo"])
def test_files_of_another_user_are_not_used(site: Site, what: str) -> None:
    """That user has seen the name on the other node, and could exchange files below it, or their contents."""
    (site.tmp / "dir" / "below").mkdir(parents=True)
    os.mkfifo(site.tmp / "dir" / "below" / "fifo")
    (site.tmp / "dir" / "below" / "file").write_text("mine")
    site.save()
    clear(site.tmp)
    below = site.tmp / "dir" / "below"
    below.mkdir(parents=True)
    path = {"parent": below, "above": below.parent, "file": below / "file", "fifo": below / "fifo"}[what]
    if what == "file":
        path.write_text("mine")
    if what == "fifo":
        os.mkfifo(path)
    hand_over(site.tmp)
    os.chown(path, OWNER.uid + 1, OWNER.gid)
    path.chmod(0o777)
    kept = site.restore_files().kept_paths
    assert str(path) in kept
    left = {item.name for item in below.iterdir()}
    assert left == (set() if what in ("parent", "above") else {"file", "fifo"})


@needs_root
def test_group_without_its_user_gives_no_rights(site: Site) -> None:
    """The rights of a group would be those of another one."""
    path = site.tmp / "file"
    path.write_text("x")
    hand_over(site.tmp)
    os.chown(path, OWNER.uid, 7777)
    path.chmod(0o2664)
    site.save()
    clear(site.tmp)
    site.restore_files()
    facts = path.stat()
    assert (facts.st_gid, stat.S_IMODE(facts.st_mode)) == (OWNER.gid, 0o604)


def test_missing_files_of_a_tied_job_are_reported(site: Site) -> None:
    """The node may have cleaned ``/tmp`` while the job was suspended."""
    site.rules = replace(site.rules, policy="pin")
    for name in ("gone", "stays", "changed"):
        (site.tmp / name).write_text(name)
    assert site.save().kind == "tied"
    assert site.restore_files() == ScratchRestored(tied=True, missing=[])
    (site.tmp / "gone").unlink()
    (site.tmp / "changed").write_text("later")
    assert sorted(site.restore_files().missing) == [str(site.tmp / "changed"), str(site.tmp / "gone")]


@needs_root
def test_mount_points_are_not_crossed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file system could be of any size, or on another machine."""
    (site.tmp / "mounted").mkdir()
    (site.tmp / "mounted" / "file").write_text("x")
    hand_over(site.tmp)
    mounted = site.tmp / "mounted"
    if subprocess.run(("mount", "-t", "tmpfs", "tmpfs", mounted), capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        (mounted / "inside").write_text("x")
        hand_over(mounted)
        os.chown(mounted, OWNER.uid, OWNER.gid)
        assert site.find().files == ()
    finally:
        subprocess.run(("umount", mounted), check=True)


@needs_root
def test_special_files_are_not_opened(site: Site) -> None:
    """A FIFO would block, and a device act. A FIFO is created again, devices and sockets are left out."""
    os.mkfifo(site.tmp / "fifo")
    os.mknod(site.tmp / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(site.tmp / "socket"))
    server.close()
    findings = site.find()
    assert [(file.path, file.kind) for file in findings.files] == [("fifo", "fifo")]
    assert site.save(findings).kind == "copied"


def test_directory_in_the_environment_is_not_searched(site: Site, open_path: Path) -> None:
    """A user sets ``TMPDIR`` to any path."""
    directory = open_path / "own"
    directory.mkdir()
    (directory / "file").touch()
    hand_over(directory)
    code = "import sys; print(flush=True); sys.stdin.read()"
    environment = {**os.environ, "TMPDIR": str(directory)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        me, job = Process(os.getpid()).id, Process(program.pid).id
        findings = site.files.find(me, [me, job], OWNER, [(BEFORE, FOREVER)], lambda: None)
        program.communicate()
    assert findings == ScratchSearchResult()
