"""Order of a restore: the tree is released after its image is verified; the first cause of a failure is reported."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from job_owner import OWNER
from namespace_job import EmptyNamespace

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import Namespace, Number
from slurm_affinode.base.process import Completed
from slurm_affinode.checkpoint.criu import criu
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.files import inet_sockets
from slurm_affinode.checkpoint.files.inet_sockets import BoundPort
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged, Pages, RestoreFailed, Take

from .. import criu_files
from ..image.test_memory_map import CHILD, LAZY, PRESENT, fill
from .test_criu import ID, make_image

ROOT = 7
Log = list[str]


class Program:
    """A fake CRIU: it restores, calls its action script, and releases the tree unless that was killed meanwhile."""

    def __init__(self, log: Log, *, fails: bool = False, hangs: bool = False, can_leave: bool = True) -> None:
        self.log, self.fails, self.hangs, self.can_leave = log, fails, hangs, can_leave

    def __call__(self, argv: Sequence[str], **options: Any) -> Completed:
        """Stand in for ``process.run``."""
        argv = tuple(argv)
        if "--version" in argv:
            return Completed(argv, 0, b"Version: 4.1.1\n", "")
        if "check" in argv:
            return Completed(argv, int(not self.can_leave), b"", "")
        if "restore" not in argv:
            return Completed(argv, 0, b"", "")
        if "--lazy-pages" in argv:
            self.log.append("criu, lazy")
            return Completed(argv, 1, b"", "(0.1) Error (criu/uffd.c:1): connect to lazy-pages.socket failed")
        self.log.append("criu")
        if self.fails:
            return Completed(argv, 1, b"", "File a has bad size")
        if self.hangs:
            raise UnreachableError("nsenter: timed out after 5 s")
        work = Path(next(word for word in argv if word.startswith("--work-dir=")).partition("=")[2]).readlink()
        gate = next(word for word in argv if word.startswith("--action-script=")).partition("=")[2]
        for action in ("post-restore", "pre-resume"):
            script = subprocess.run([gate], cwd=work, env={"CRTOOLS_SCRIPT_ACTION": action}, timeout=240, check=False)
            killed = "killed" in self.log[self.log.index("criu") :]
            assert script.returncode == killed
            if killed:
                return Completed(argv, 1, b"", "the tree is gone")
        self.log.append("let go")
        (work / "pid").write_text(str(ROOT))
        return Completed(argv, 0, b"", "")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Return the events in their order; there is no namespace."""
    happened: Log = []
    monkeypatch.setattr(criu, "_check_tree", lambda *_: happened.append("looked"))
    return happened


@pytest.fixture
def restore(tmp_path: Path, log: Log) -> Iterator[Callable[..., int]]:
    """Return a function that restores an image."""
    make_image(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)

    def run(program: Program, pages: Pages) -> int:
        space = EmptyNamespace(lambda: log.append("killed"))
        return Criu(program="/bin/true", runner=program, cgroup_root=tmp_path, hold=lambda init: space).restore(  # type: ignore[arg-type,return-value]
            ID,
            fd,
            [],
            root_pid_ns=ROOT,
            timeout_s=5,
            pages=pages,
            user=OWNER,
            ready=lambda: program.log.append("ready"),
        )

    yield run
    os.close(fd)


class Answers:
    """Pages of an image, sound or not."""

    def __init__(self, log: Log, error: Exception | None = None) -> None:
        self.log, self.error = log, error

    def begin(self, take: Take | None = None) -> None:
        """Record whether the pages are placed as they are read."""
        self.log.append("read" if take is None else "read and put")

    def sound(self, timeout_s: float | None = None) -> None:
        """Require a time limit."""
        assert timeout_s is not None
        assert timeout_s <= 5
        self.log.append("sound?")
        if self.error is not None:
            raise self.error

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """Read everything."""
        deque(blocks, maxlen=0)


DAMAGED = ImageDamaged("alpha.7/0001: criu/pages-1.img: its contents have changed")
LATE = CheckpointError("alpha.7/0001: could not be verified in time")


def test_tree_is_released_after_its_image_is_verified(restore: Callable[..., int], log: Log) -> None:
    """The tree belongs to root until then; its open files are compared before it is released."""
    assert restore(Program(log), Answers(log)) == ROOT
    assert log == ["read", "criu", "sound?", "looked", "ready", "let go"]


def test_names_for_the_dump_are_removed_before_the_tree_runs(
    restore: Callable[..., int], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program would find them in its directories, and could not remove these."""
    monkeypatch.setattr(criu.deleted_files, "settle", lambda *_: log.append("names of removed files"))
    monkeypatch.setattr(criu.Inheritance, "finish", lambda _: log.append("names of temporary files"))
    restore(Program(log), Answers(log))
    assert log[:4] == ["names of removed files", "names of temporary files", "read", "criu"]
    assert log.count("names of removed files") == 1


@pytest.mark.parametrize("error", [DAMAGED, LATE, MemoryError("none left")])
def test_tree_of_a_damaged_image_is_not_released(restore: Callable[..., int], log: Log, error: Exception) -> None:
    """The cause is reported, not CRIU's error about the killed tree."""
    with pytest.raises(type(error), match=str(error)):
        restore(Program(log), Answers(log, error))
    assert log[:4] == ["read", "criu", "sound?", "killed"]
    assert not {"looked", "ready", "let go"} & set(log)


@pytest.mark.parametrize(
    ("raised", "expected", "why"),
    [
        (DAMAGED, ImageDamaged, "its contents have changed"),
        (None, RestoreFailed, "CRIU could not restore it: File a has bad size"),
        (LATE, RestoreFailed, "CRIU could not restore it: File a has bad size"),
    ],
)
def test_damaged_image_is_reported_as_the_cause_when_criu_fails(
    restore: Callable[..., int], log: Log, raised: Exception | None, expected: type[Exception], why: str
) -> None:
    """Another copy may be sound."""
    with pytest.raises(expected, match=why):
        restore(Program(log, fails=True), Answers(log, raised))
    assert log[:4] == ["read", "criu", "killed", "sound?"]
    assert "ready" not in log


def test_tree_is_killed_before_verification_when_criu_is_killed(restore: Callable[..., int], log: Log) -> None:
    """CRIU was killed while it held the tree, which would run now."""
    verifying = threading.Event()

    class Killed(Program):
        """It is killed by a signal before its script ends."""

        def __call__(self, argv: Sequence[str], **options: Any) -> Completed:
            if "restore" not in argv:
                return super().__call__(argv, **options)
            work = Path(next(word for word in argv if word.startswith("--work-dir=")).partition("=")[2]).readlink()
            with (work / "ask").open("w") as ask:
                ask.write("post-restore\n")
            assert verifying.wait(60)
            return Completed(tuple(argv), -9, b"", "")

    class Late(Answers):
        """The image is found to be damaged only after the tree was killed."""

        def sound(self, timeout_s: float | None = None) -> None:
            """Wait until the tree is killed."""
            verifying.set()
            deadline = time.monotonic() + 60
            while "killed" not in log:
                assert time.monotonic() < deadline
            raise DAMAGED

    with pytest.raises(ImageDamaged):
        restore(Killed(log), Late(log))
    assert log[:2] == ["read", "killed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("change", ["owner of the cgroup", "owner above", "owner of the file", "mode", None])
def test_cgroup_that_a_user_may_change_is_refused(
    restore: Callable[..., int], log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str | None
) -> None:
    """systemd moves processes to cgroups of their users at the request of these, who could kill CRIU there.

    The tree that CRIU holds would then run before it is compared.
    """
    group = tmp_path / "user.slice" / "app.slice"
    group.mkdir(parents=True)
    procs = group / "cgroup.procs"
    procs.touch(mode=0o644)
    match change:
        case "owner of the cgroup":
            os.chown(group, 2001, 2001)
        case "owner above":
            os.chown(group.parent, 2001, 2001)
        case "owner of the file":
            os.chown(procs, 2001, 2001)
        case "mode":
            procs.chmod(0o664)
    monkeypatch.setattr(criu, "_cgroup_files", lambda init, root: [procs])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    if change is None:
        assert restore(Program(log), Answers(log)) == ROOT
        return
    with pytest.raises(RestoreFailed, match="users other than root may change a cgroup of its shepherd"):
        restore(Program(log), Answers(log))
    assert "criu" not in log


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_port_of_another_process_is_not_shared(
    restore: Callable[..., int], log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """CRIU binds as root, and would share the ports of root and of other restored jobs."""
    (tmp_path / "files.img").write_bytes(criu_files.image(criu_files.root(1), criu_files.network(2, 1, 8000)))

    def refuse(ports: Collection[BoundPort], exempt: Collection[str] = ()) -> None:
        assert [port.number for port in ports] == [8000]
        if when == "before" or "looked" in log:
            raise RestoreFailed("its port 8000 is in use")

    monkeypatch.setattr(inet_sockets, "refuse_shared", refuse)
    with pytest.raises(RestoreFailed, match="its port 8000 is in use"):
        restore(Program(log), Answers(log))
    assert log[:5] == ([] if when == "before" else ["read", "criu", "sound?", "looked", "killed"])
    assert not {"ready", "let go"} & set(log)


def test_verification_is_stopped_when_criu_times_out(restore: Callable[..., int], log: Log) -> None:
    """The time limit is for both."""
    with pytest.raises(RestoreFailed, match="aborted: nsenter: timed out after 5 s"):
        restore(Program(log, hangs=True), Answers(log))
    assert set(log) == {"read", "criu", "killed"}


def test_tree_is_killed_before_the_criu_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would run. CRIU started earlier and its PID is above those of the tree."""
    criu, root, child = Number(900, 11, 1), Number(7, 12, 1), Number(8, 13, 1)
    listings = [[root, child, criu], [criu], []]
    sent: list[int] = []
    space = Namespace.__new__(Namespace)
    monkeypatch.setattr(Namespace, "numbers", lambda self: listings.pop(0))
    monkeypatch.setattr(Namespace, "send", lambda self, process, number: sent.append(process.pid))
    assert space.kill_all()
    assert sent == [12, 13, 11, 11]


@pytest.mark.parametrize("can_leave", [True, False])
def test_criu_fills_the_memory_if_it_cannot_be_left_to_the_agent(
    restore: Callable[..., int], log: Log, tmp_path: Path, can_leave: bool
) -> None:
    """CRIU reports that beforehand, or fails and is tried again without."""
    fill(tmp_path, ROOT, [(5, 2, LAZY | PRESENT)], [(0, 9)])
    fill(tmp_path, CHILD, [], [(0, 9)])
    assert restore(Program(log, can_leave=can_leave), Answers(log)) == ROOT
    tried = ["read and put", "criu, lazy", "killed", "read"] if can_leave else ["read"]
    assert log == [*tried, "criu", "sound?", "looked", "ready", "let go"]
