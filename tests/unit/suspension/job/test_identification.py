"""Identification of shepherds: real processes in real namespaces, each with a single defect."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from background import started_of
from namespace_job import needs_root
from waiting import wait_until

from slurm_affinode.base.pidfd import ExhaustedError, Process, processes
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.suspension.job import announcements as announcements_module
from slurm_affinode.suspension.job.announcements import Announcement, AnnouncementError, Announcements
from slurm_affinode.suspension.job.peers import Identity, Inspector, NotAShepherd, Peer

USER = 65534
TITLE = "slurmstepd: [123.batch]"
EXECUTE = "import os, sys; os.execv(sys.argv[2], (sys.argv[1], *sys.argv[3:]))"
"""Renames a process as Slurm does; jobs are found by these names. No shell: shells drop the tested privileges."""
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--")


def write(directory: Path, announced: Announcement, *, name: str | None = None, more: str = "") -> Path:
    """Write an announcement as ``spank/announcement.c`` does."""
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / (name or str(announced.job_id))
    pair = "{0[0]}:{0[1]}".format
    path.write_text(
        f"version=2\njob={announced.job_id}\nuid={announced.owner.uid}\ngid={announced.owner.gid}\npid={announced.pid}\nstarted={announced.started}\n"
        f"keeper={announced.keeper}\nkeeper_started={announced.keeper_started}\n"
        f"pid_namespace={pair(announced.pid_namespace)}\nmount_namespace={pair(announced.mount_namespace)}\n"
        f"program={pair(announced.program)}\ngroups={','.join(map(str, announced.owner.groups))}\n{more}"
    )
    path.chmod(0o600)
    return path


ANNOUNCED = Announcement(123, User(USER, USER, (4, 24)), 50, 4711, 49, 4700, (4, 5), (4, 6), (8, 9))


@dataclass
class Scene:
    """A slurmstepd, by name and owner, and the shepherd below it."""

    directory: Path
    stepd: Path
    shepherd: Path
    started: list[subprocess.Popen[bytes]]

    @property
    def announcements(self) -> Path:
        return self.directory / "shepherds"

    def start(
        self, *more: str, stepd: Path | None = None, before: tuple[str, ...] = (), shepherd: Path | None = None,
        user: tuple[str, ...] = AS_USER, makes: tuple[str, ...] = ("--pid", "--mount"),
    ) -> Process:  # fmt: skip
        """Start PID 1 of a namespace created by ``unshare`` with further options."""
        program = shepherd or self.shepherd
        argv = (str(stepd or self.stepd), *makes, "--fork", *more, *user, str(program), "1000")
        outer = subprocess.Popen((*before, sys.executable, "-c", EXECUTE, TITLE, *argv))
        self.started.append(outer)

        def child() -> int:
            for process in processes(Inspector().tree(outer.pid)):
                with contextlib.suppress(OSError):
                    if process.pid != outer.pid and Path(process.link("exe")).name == program.name:
                        return process.pid
            return 0

        return Process(wait_until("the shepherd runs", child))

    def announced(self, process: Process) -> Announcement:
        """Return the announcement that root would write for it."""
        parent = process.stat().parent
        pid_namespace, mount_namespace = process.namespace("pid"), process.namespace("mnt")
        assert pid_namespace is not None
        assert mount_namespace is not None
        program = process.facts("exe")
        return Announcement(
            123, User(USER, USER), process.pid, process.started, parent, started_of(parent), pid_namespace,
            mount_namespace, (program.st_dev, program.st_ino),
        )  # fmt: skip

    def identify(self, process: Process, announced: Announcement | None = None, **options: Path) -> Identity:
        """Identify the process as the agent does at its hello."""
        write(self.announcements, announced or self.announced(process))
        inspector = Inspector(
            finder=JobFinder(cgroups=self.directory), announcements=Announcements(self.announcements),
            shepherd=options.get("installed", self.directory / "none"),
        )  # fmt: skip
        uid = int(process.status()["Uid"].split()[0])
        return inspector.identify(Peer(process.pid, uid, uid))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield from _scene(Path(name))


def _scene(directory: Path) -> Iterator[Scene]:
    directory.chmod(0o755)
    for name, program in (("slurmstepd", "unshare"), ("shepherd", "sleep")):
        result = shutil.which(program)
        assert result is not None
        shutil.copy(result, directory / name)
        (directory / name).chmod(0o755)
    made = Scene(directory, directory / "slurmstepd", directory / "shepherd", [])
    yield made
    for item in made.started:
        for process in processes([pid for pid in Inspector().tree(item.pid) if pid != item.pid]):
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGKILL)
        item.kill()
        item.wait()


@needs_root
def test_announced_shepherd_is_accepted(scene: Scene) -> None:
    """The identity has its job, its user, and a handle to the process itself."""
    process = scene.start()
    who = scene.identify(process)
    assert (who.job_id, who.uid, who.pid, who.started, who.foreign) == (123, USER, process.pid, process.started, ())
    assert who.process is not None
    assert not who.process.ended()


@needs_root
def test_shepherd_is_accepted_across_upgrade(scene: Scene) -> None:
    """Its program and that of Slurm have been replaced since it started."""
    process = scene.start()
    announced = scene.announced(process)
    for program in (scene.shepherd, scene.stepd):
        new = Path(shutil.copy(program, program.with_suffix(".new")))
        new.replace(program)
    assert scene.identify(process, announced, installed=scene.shepherd).pid == process.pid


@needs_root
def test_installed_program_other_than_announced_is_accepted(scene: Scene) -> None:
    """It was replaced while the job was being started."""
    process = scene.start()
    announced = replace(scene.announced(process), program=(1, 2))
    assert scene.identify(process, announced, installed=scene.shepherd).pid == process.pid
    with pytest.raises(NotAShepherd, match="does not execute the shepherd's program"):
        scene.identify(process, announced)


CHANGES: dict[str, tuple[dict[str, object], str]] = {
    "process": ({"pid": 1}, "another process was announced"),
    "start": ({"started": 1}, "another process was announced"),
    "user": ({"owner": User(0, USER)}, "was announced for user 0"),
    "group": ({"owner": User(USER, 0)}, "was announced for group 0"),
    "pid namespace": ({"pid_namespace": (4, 1)}, "not in the namespaces that were announced"),
    "mount namespace": ({"mount_namespace": (4, 1)}, "not in the namespaces that were announced"),
    "program": ({"program": (1, 2)}, "does not execute the shepherd's program"),
    "keeper": ({"keeper": 1}, "is not the announced task"),
    "keeper's start": ({"keeper_started": 1}, "is not the announced task"),
}


@needs_root
@pytest.mark.parametrize("what", sorted(CHANGES))
def test_shepherd_with_different_announcement_is_rejected(scene: Scene, what: str) -> None:
    """Each field of the announcement is checked."""
    changes, message = CHANGES[what]
    process = scene.start()
    announced = scene.announced(process)
    assert scene.identify(process, announced).pid == process.pid
    with pytest.raises(NotAShepherd, match=message):
        scene.identify(process, replace(announced, **changes))  # type: ignore[arg-type]


@needs_root
def test_unannounced_shepherd_is_rejected(scene: Scene) -> None:
    """Everything else is correct; an announcement for another job's shepherd does not help."""
    process = scene.start()
    announced = scene.announced(process)
    with pytest.raises(NotAShepherd, match="no shepherd was announced for job 123"):
        scene.identify(process, replace(announced, job_id=124))


def _renamed(scene: Scene) -> Process:
    other = scene.directory / "starter"
    shutil.copy(scene.stepd, other)
    return scene.start(stepd=other)


def _setuid(scene: Scene) -> Process:
    scene.stepd.chmod(0o4755)
    return scene.start()


def _of_a_user(scene: Scene) -> Process:
    os.chown(scene.stepd, USER, USER)
    return scene.start()


def _changeable(scene: Scene) -> Process:
    scene.stepd.chmod(0o775)
    return scene.start()


def _started_by_a_user(scene: Scene) -> Process:
    return scene.start(before=("setpriv", f"--ruid={USER}", "--"))


def _other_root(scene: Scene) -> Process:
    root = scene.directory / "root"
    for name in ("proc", "usr", "bin", "lib", "lib64", *scene.directory.parts[1:2]):
        (root / name).mkdir(parents=True)
    mounts = " && ".join(f"mount --rbind /{path.name} {path}" for path in root.iterdir())
    script = f'{mounts} && exec chroot {root} "$@"'
    return scene.start("sh", "-c", script, "sh")


def _own_user_namespace(scene: Scene) -> Process:
    return scene.start("--user", "--map-root-user", user=())


WRONG: dict[str, tuple[Callable[[Scene], Process], str]] = {
    "no slurmstepd": (_renamed, "parent of process .* is not slurmstepd"),
    "setuid": (_setuid, "belongs to no job"),
    "owner": (_of_a_user, "is not slurmstepd"),
    "changeable": (_changeable, "that users can start or change"),
    "started by a user": (_started_by_a_user, "parent of process .* is not of root"),
    "root directory": (_other_root, "root directory of process .* is not the node's"),
    "user namespace": (_own_user_namespace, "in a user namespace of its own"),
}


@needs_root
@pytest.mark.parametrize("what", sorted(WRONG))
def test_shepherd_with_single_defect_is_rejected(scene: Scene, what: str) -> None:
    """The announcement by root does not matter."""
    make, message = WRONG[what]
    process = make(scene)
    with pytest.raises(NotAShepherd, match=message):
        scene.identify(process)


@needs_root
def test_other_user_or_process_than_connected_is_rejected(scene: Scene) -> None:
    """The connected process has ended, and its PID now belongs to a shepherd."""
    process = scene.start()
    write(scene.announcements, scene.announced(process))
    inspector = Inspector(finder=JobFinder(cgroups=scene.directory), announcements=Announcements(scene.announcements))
    with pytest.raises(NotAShepherd, match=f"does not belong to user {USER + 1}"):
        inspector.identify(Peer(process.pid, USER + 1, USER))
    with pytest.raises(NotAShepherd, match="is not PID 1"):
        inspector.identify(Peer(os.getpid(), 0, 0))
    with pytest.raises(NotAShepherd, match="is gone"):
        inspector.identify(Peer((1 << 22) - 1, USER, USER))


@needs_root
def test_shepherd_in_nested_namespace_is_rejected(scene: Scene) -> None:
    """It is announced, and below a slurmstepd, but that one runs in a nested PID namespace itself."""
    process = scene.start(before=("unshare", "--pid", "--mount-proc", "--fork", "--kill-child"))
    with pytest.raises(NotAShepherd, match="is not in this PID namespace"):
        scene.identify(process)


@needs_root
def test_shepherd_in_mount_namespace_of_user_is_rejected(scene: Scene) -> None:
    """It is in the agent's user namespace, but in a mount namespace where a user may mount programs."""
    owner = subprocess.Popen(("unshare", "--user", "--map-root-user", "--mount", "sleep", "1000"))
    scene.started.append(owner)
    own_namespace = Path("/proc/self/ns/mnt").readlink()
    wait_until("the mounts are there", lambda: Path(f"/proc/{owner.pid}/ns/mnt").readlink() != own_namespace)
    into = ("nsenter", f"--mount=/proc/{owner.pid}/ns/mnt", "--")
    process = scene.start(before=into, makes=("--pid",))
    with pytest.raises(NotAShepherd, match=r"the mount namespace of process \d+ is of a user namespace"):
        scene.identify(process)


@needs_root
def test_private_namespaces_are_reported(scene: Scene) -> None:
    """Slurm may start jobs in private networks: this one is a shepherd, but its process tree cannot be restored."""
    assert scene.identify(scene.start("--net", "--ipc")).foreign == ("net", "ipc")


@needs_root
def test_shepherd_with_ended_parent_is_rejected(scene: Scene) -> None:
    """Its keeper was killed, and could not remove the announcement."""
    process = scene.start()
    announced = scene.announced(process)
    os.kill(announced.keeper, signal.SIGKILL)
    scene.started[0].wait()
    with pytest.raises(NotAShepherd, match="belongs to no job"):
        scene.identify(process, announced)
    process.signal(signal.SIGKILL)


# --- announcements


@pytest.fixture
def announcements(tmp_path: Path) -> Announcements:
    return Announcements(tmp_path / "shepherds", owner=os.geteuid())


def test_announcement_is_read(tmp_path: Path, announcements: Announcements) -> None:
    """Without a file or a directory there is no announcement."""
    assert announcements.of(123) is None
    write(tmp_path / "shepherds", ANNOUNCED)
    assert announcements.of(123) == ANNOUNCED
    assert announcements.of(12) is None


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another job": (lambda path: path.write_text(path.read_text().replace("job=123", "job=124")), "is for job 124"),
    "version": (lambda path: path.write_text(path.read_text().replace("version=2", "version=1")), "plugin is of"),
    "cut": (lambda path: path.write_text(path.read_text()[:60]), "incomplete|not understood"),
    "empty": (lambda path: path.write_text(""), "incomplete"),
    "twice": (lambda path: path.write_text(path.read_text() + "job=123\n"), "not understood"),
    "words": (lambda path: path.write_text(path.read_text().replace("uid=65534", "uid=-1")), "not understood"),
    "one number": (lambda path: path.write_text(path.read_text().replace("program=8:9", "program=8")), "incomplete"),
    "two numbers": (lambda path: path.write_text(path.read_text().replace("pid=50", "pid=50:1")), "incomplete"),
    "writable": (lambda path: path.chmod(0o622), "may write"),
    "directory writable": (lambda path: path.parent.chmod(0o770), "may write"),
    "link": (lambda path: path.replace(path.parent / "x") and path.symlink_to("x"), "symbolic links"),
    "directory link": (
        lambda path: path.parent.rename(path.parent.with_name("y")) and path.parent.symlink_to("y"), "irectory",
    ),
    "fifo": (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(BROKEN))
def test_invalid_announcement_is_rejected(tmp_path: Path, announcements: Announcements, what: str) -> None:
    """No part of it is used."""
    change, message = BROKEN[what]
    change(write(tmp_path / "shepherds", ANNOUNCED))
    with pytest.raises(AnnouncementError, match=message):
        announcements.of(123)


def test_stale_announcements_are_removed(tmp_path: Path, announcements: Announcements) -> None:
    """A killed keeper leaves its announcement; the current attempt has one of the same name."""
    directory = tmp_path / "shepherds"
    announcements.clear(123)
    announcements.sweep()
    here = replace(ANNOUNCED, pid=os.getpid(), started=started_of(os.getpid()))
    for job_id in (123, 124, 125):
        write(directory, replace(here if job_id == 125 else ANNOUNCED, job_id=job_id))
    (directory / ".126.new").touch()
    announcements.clear(125)
    announcements.clear(123)
    assert sorted(path.name for path in directory.iterdir()) == [".126.new", "124", "125"]
    announcements.sweep()
    assert sorted(path.name for path in directory.iterdir()) == [".126.new", "125"]


@pytest.mark.parametrize("since_removed", [False, True])
def test_new_announcement_is_kept_while_an_old_one_is_removed(
    tmp_path: Path, announcements: Announcements, monkeypatch: pytest.MonkeyPatch, since_removed: bool
) -> None:
    """A new attempt is announced between the examination of the old one and its removal."""
    directory = tmp_path / "shepherds"
    current = replace(ANNOUNCED, pid=os.getpid(), started=started_of(os.getpid()))
    write(directory, ANNOUNCED)
    ended = announcements_module.Process

    def examined(pid: int, *, started: int) -> Process:
        if since_removed:
            (directory / "123").unlink()
        write(tmp_path / "new", current).replace(directory / "123")
        return ended(pid, started=started)

    monkeypatch.setattr(announcements_module, "Process", examined)
    announcements.clear(123)
    assert announcements.of(123) == current
    assert [path.name for path in directory.iterdir()] == ["123"]


def test_announcement_of_unknown_state_is_kept(
    tmp_path: Path, announcements: Announcements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without free descriptors, the agent does not know whether its shepherd is alive."""

    def exhausted(pid: int, *, started: int) -> Process:
        raise ExhaustedError(f"process {pid} cannot be examined: Too many open files")

    write(tmp_path / "shepherds", ANNOUNCED)
    monkeypatch.setattr(announcements_module, "Process", exhausted)
    announcements.clear(123)
    announcements.sweep()
    assert announcements.of(123) == ANNOUNCED
