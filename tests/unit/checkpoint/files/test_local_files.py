"""Named node-local files: saved in the image, restored where they are missing, and never overwritten."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from job_owner import BECOME_OWNER, OWNER, hand_over, using
from stalling import Stalling

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import local_files
from slurm_affinode.checkpoint.files.local_files import INDEX, leave, remove, restore_files, save
from slurm_affinode.checkpoint.interface import DumpFailed, DumpNoRoom, RestoreFailed
from slurm_affinode.checkpoint.user_files import User


@dataclass
class Place:
    """A directory in the place of /tmp, and an image."""

    tmp: Path
    image: Path
    fd: int
    made: dict[str, tuple[int, int]] = field(default_factory=dict)
    user: User = OWNER

    def save(self) -> int:
        """Save the files of this process, which are the owner's."""
        hand_over(self.tmp)
        me = Process(os.getpid()).id
        return save(me, [me], self.fd, OWNER, places=[str(self.tmp)])

    def leave(self) -> list[str]:
        """Remove the files after the job has left the node."""
        return leave((self.image / INDEX).read_bytes, OWNER, places=[str(self.tmp)])

    def restore_files(self) -> list[str]:
        """Restore the files, as seen by this process."""
        opened: list[int] = []

        def contents(name: str) -> int:
            opened.append(os.open(name, os.O_RDONLY, dir_fd=self.fd))
            return opened[-1]

        try:
            self.made = restore_files(Process(os.getpid()).id, self.fd, contents, self.user, places=[str(self.tmp)])
            return list(self.made)
        finally:
            for fd in opened:
                os.close(fd)


@pytest.fixture
def place(open_path: Path) -> Iterator[Place]:
    """Return an empty directory and an empty image."""
    tmp, image = open_path / "tmp", open_path / "image"
    tmp.mkdir()
    image.mkdir(mode=0o700)
    fd = os.open(image, os.O_RDONLY)
    yield Place(tmp, image, fd)
    os.close(fd)


def test_open_files_are_restored(place: Place) -> None:
    """Files with mode and holes, directories above them, and named pipes; deleted and closed files are not restored."""
    deep = place.tmp / "mine" / "deep"
    deep.mkdir(parents=True)
    (place.tmp / "mine").chmod(0o750)
    (place.tmp / "closed").write_text("x")
    os.mkfifo(deep / "fifo")
    with (deep / "file").open("w+b") as file, (place.tmp / "gone").open("w") as gone:
        (place.tmp / "gone").unlink()
        file.truncate(5 << 20)
        file.seek(4 << 20)
        file.write(b"end")
        file.flush()
        (deep / "file").chmod(0o640)
        fifo = os.open(deep / "fifo", os.O_RDWR)
        assert place.save() == 5 << 20
        assert not gone.closed
    os.close(fifo)
    assert place.restore_files() == []
    before = (deep / "file").read_bytes()
    for path in (deep / "file", deep / "fifo"):
        path.unlink()
    deep.rmdir()
    (place.tmp / "mine").rmdir()
    assert [Path(path).name for path in place.restore_files()] == ["mine", "deep", "file", "fifo"]
    assert (deep / "file").read_bytes() == before
    assert (deep / "file").stat().st_mode & 0o777 == 0o640
    assert (place.tmp / "mine").stat().st_mode & 0o777 == 0o750
    assert (deep / "fifo").is_fifo()
    assert sum(path.stat().st_blocks * 512 for path in place.image.glob("local-*")) < 4 << 20


def test_files_are_removed_when_their_job_leaves(place: Place) -> None:
    """A job that returns has newer contents; shared memory would hold host memory meanwhile."""
    psm = place.tmp / "psm_1"
    with psm.open("w+b") as file:
        for contents in (b"first", b"second, and longer"):
            file.seek(0)
            file.write(contents)
            file.flush()
            place.save()
            for copy in place.image.iterdir():
                copy.rename(place.tmp.parent / f"{copy.name}-{len(contents)}")
    for size in (18, 5):  # the older image must not be able to remove the newer file
        for name in (INDEX, "local-0"):
            (place.tmp.parent / f"{name}-{size}").replace(place.image / name)
        assert place.leave() == ([str(psm)] if size == 18 else [])
        assert psm.exists() is False
        if size == 18:
            assert place.restore_files() == [str(psm)]
            assert psm.read_bytes() == b"second, and longer"
            psm.unlink()
    assert place.restore_files() == [str(psm)]
    assert psm.read_bytes() == b"first"


@pytest.mark.parametrize("change", ["content", "replaced", "open", "mapped", "none"])
def test_file_of_another_user_is_kept(place: Place, change: str) -> None:
    """Another job of the user may share a file: only an unchanged one that is not in use is removed."""
    path = place.tmp / "shared"
    with path.open("w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        place.save()
    with ExitStack() as stack:
        if change == "content":
            path.write_bytes(b"y" * 4096)
            os.utime(path, ns=(1, 1))
        elif change == "replaced":
            (place.tmp / "new").write_bytes(b"x" * 4096)
            hand_over(place.tmp / "new")
            (place.tmp / "new").rename(path)
        elif change in ("open", "mapped"):
            stack.enter_context(using(path, change))
        assert place.leave() == ([str(path)] if change == "none" else [])
    assert path.exists() == (change != "none")


def test_both_names_of_a_file_are_removed(place: Place) -> None:
    """A named semaphore has two names until it is restored."""
    first, second, remap = place.tmp / "sem.Xy", place.tmp / "sem.name", place.tmp / "link_remap.5"
    with first.open("w+b") as file:
        file.write(b"count")
        file.flush()
        second.hardlink_to(first)
        remap.hardlink_to(first)
        first.unlink()
        place.save()
    assert place.leave() == [str(second)]
    assert list(place.tmp.iterdir()) == []


def test_failed_restore_removes_the_files_that_it_created(place: Place) -> None:
    """Otherwise the job could not return to this node later. What was there before stays, as does a replacement."""
    with ExitStack() as stack:
        for name in ("new", "there", "replaced"):
            (place.tmp / name).mkdir()
            (place.tmp / name / "file").write_text(name)
            stack.enter_context((place.tmp / name / "file").open())
        place.save()
    for name in ("new", "replaced"):
        shutil.rmtree(place.tmp / name)
    assert len(place.restore_files()) == 4
    (place.tmp / "other").touch()
    (place.tmp / "other").replace(place.tmp / "replaced" / "file")
    remove(Process(os.getpid()).id, place.made, OWNER)
    assert sorted(str(path.relative_to(place.tmp)) for path in place.tmp.rglob("*")) == [
        "replaced", "replaced/file", "there", "there/file",
    ]  # fmt: skip


def test_leaving_follows_no_path_to_another_place(place: Place, tmp_path: Path) -> None:
    """A path out of the places removes nothing, and neither does a damaged index."""
    (place.tmp / "d").mkdir()
    with (place.tmp / "d" / "file").open("w") as file:
        file.write("x")
        file.flush()
        place.save()
    (place.tmp / "d").rename(tmp_path / "away")
    (place.tmp / "d").symlink_to(tmp_path / "away")
    index = json.loads((place.image / INDEX).read_text())
    (identity,) = index["originals"].values()
    for paths in ({str(tmp_path / "away" / "file"): identity}, {"../x": [1]}, {f"{place.tmp}/x": "no"}, 5):
        (place.image / INDEX).write_text(json.dumps(index | {"originals": paths}))
        assert place.leave() == []
    (place.image / INDEX).write_text("{")
    assert place.leave() == []
    assert (tmp_path / "away" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_user_in_the_index_gets_no_rights(place: Place) -> None:
    """A writer of the store, or root on another node, may name root; only the rights of the job's user are used."""
    place.tmp.chmod(0o755)
    index, own_file = place.image / INDEX, place.tmp / "mine"
    own_file.write_text("x")
    facts = own_file.stat()
    identity = [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns]
    index.touch(mode=0o600)
    entry = {"path": f"{place.tmp}/made", "kind": "directory", "mode": 0o700}
    index.write_text(json.dumps({"uid": 0, "gid": 0, "files": [entry], "originals": {str(own_file): identity}}))
    assert leave((place.image / INDEX).read_bytes, User(2001, 2001), places=[str(place.tmp)]) == []
    assert own_file.exists()
    place.user = User(2001, 2001)
    with pytest.raises(RestoreFailed, match="belong to user 0, not to user 2001"):
        place.restore_files()
    assert [path.name for path in place.tmp.iterdir()] == ["mine"]
    index.write_text(json.dumps({"uid": 2001, "gid": 0, "files": [entry]}))
    with pytest.raises(RestoreFailed, match="Permission denied"):
        place.restore_files()


def test_socket_with_a_path_upwards_is_skipped(place: Place) -> None:
    """Its directories would be created outside of the local ones."""
    elsewhere = place.tmp.parent / "e"
    elsewhere.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{place.tmp}/../e/l")
        assert place.save() == 0
    assert INDEX not in [path.name for path in place.image.iterdir()]


def test_directory_of_a_socket_is_restored(place: Place) -> None:
    """multiprocessing makes such sockets. CRIU makes the socket itself, but not the directories above it."""
    directory = place.tmp / "py mp" / "in"  # short: an address has at most 107 bytes
    directory.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as odd:
        listening.bind(str(directory / "l"))
        listening.listen()
        odd.bind(f"\0{place.tmp}\nodd\n1 2 3")
        assert place.save() == 0
    shutil.rmtree(directory.parent)
    assert place.restore_files() == [str(directory.parent), str(directory)]
    assert list(directory.iterdir()) == []
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("node", ["the same", "another"])
def test_file_with_another_name_is_restored_with_both(place: Place, node: str) -> None:
    """sem_open(3) makes named semaphores so. The name that CRIU gave the file exists only during the restore."""
    first, second, remap = place.tmp / "sem.Xy", place.tmp / "sem.name", place.tmp / "link_remap.5"
    with first.open("w+b") as file, (place.tmp / "a").open("w") as elsewhere:
        file.write(b"count")
        file.flush()
        for name in (second, remap):
            name.hardlink_to(first)
        first.unlink()
        (place.tmp / "below").mkdir()
        for name in (place.tmp / "below" / "b", place.tmp / "link_remap.6"):
            name.hardlink_to(place.tmp / "a")
        (place.tmp / "a").unlink()
        assert place.save() == 5
        assert not remap.exists()
        assert (place.tmp / "link_remap.6").exists()  # the only known name of the file
        assert not elsewhere.closed
    if node == "another":
        second.unlink()
        (place.tmp / "link_remap.6").unlink()
    for made in ({"another": 3, "the same": 1}[node], 0):
        assert len(place.restore_files()) == made
        assert second.read_bytes() == b"count"
        assert remap.samefile(second)
        assert (place.tmp / "link_remap.6").read_bytes() == b""
    remap.unlink()
    remap.write_bytes(b"count")
    with pytest.raises(RestoreFailed, match="exists already, and is another file"):
        place.restore_files()


@pytest.mark.parametrize("target", ["other", "../other", "sub/other", ""])
def test_link_to_a_file_outside_the_list_is_refused(place: Place, target: str) -> None:
    """Otherwise the job would write to the file of another job of its user."""
    (place.tmp / "other").write_text("other")
    before = (place.tmp / "other").stat()
    copy = f"{place.tmp}/{target}" if target else None
    entry = {"path": f"{place.tmp}/name", "kind": "link", "mode": 0o600, "copy": copy}
    (place.image / INDEX).touch(mode=0o600)
    (place.image / INDEX).write_text(json.dumps({"uid": OWNER.uid, "gid": OWNER.gid, "files": [entry]}))
    with pytest.raises(RestoreFailed, match="is not another name of a file listed before it"):
        place.restore_files()
    assert (place.tmp / "other").stat() == before
    assert [path.name for path in place.tmp.iterdir()] == ["other"]


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc/PID/map_files is for root")
def test_mapped_files_count_as_open(place: Place) -> None:
    """Shared memory is mapped and its descriptor closed."""
    with (place.tmp / "shared").open("w+b") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
    mapped[:2] = b"ok"
    assert place.save() == 4096
    (place.tmp / "shared").unlink()
    place.restore_files()
    assert (place.tmp / "shared").read_bytes()[:2] == b"ok"
    mapped.close()


def test_image_without_open_files_has_no_list(place: Place) -> None:
    assert place.save() == 0
    assert place.restore_files() == []
    assert list(place.image.iterdir()) == []


_MANAGES = """
import ctypes, sys
names = ctypes.create_string_buffer(b"".join(b"/%s\\0" % name.encode() for name in sys.argv[1:]), 2 << 20)
print(flush=True)
sys.stdin.read()
"""


SHM = "/dev/shm"  # noqa: S108 - where shm_open(3) creates files


@dataclass
class Manager:
    """A program that has the names of files in its memory, as PyTorch's manager of shared memory does."""

    names: list[str] = field(default_factory=list)

    def make(self, name: str, contents: bytes) -> Path:
        """Create a file in ``/dev/shm`` that no process has open."""
        path = Path(SHM, name)
        path.write_bytes(contents)
        hand_over(path)
        self.names.append(name)
        return path

    @contextmanager
    def running(self) -> Iterator[Process]:
        """Run it with the names of all files, except for secret ones."""
        argv = [sys.executable, "-c", _MANAGES, *(name for name in self.names if "secret" not in name)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == b"\n"
            with Process(running.pid) as process:
                yield process
            running.communicate()


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """Return a manager, which is a Python program here; the files that it has named are removed."""
    if not os.access(SHM, os.W_OK):
        pytest.skip(f"{SHM} is not writable")
    monkeypatch.setattr("slurm_affinode.checkpoint.files.local_files._MANAGER", Path("/proc/self/exe").readlink().name)
    made = Manager()
    yield made
    for name in made.names:
        Path(SHM, name).unlink(missing_ok=True)


def test_tensors_in_flight_are_saved(place: Place, manager: Manager) -> None:
    """With PyTorch's strategy ``file_system``, a queued batch of a data loader is a file that no process has open."""
    random = os.getpid()
    paths = [manager.make(f"torch_6_{random}_{number}", b"batch %d" % number) for number in range(3)]
    paths[1].unlink()  # the other process has received it
    manager.make(f"torch_6_{random}_x", b"no tensor")
    manager.make(f"torch_6_secret_{random}", b"not in its memory")
    with manager.running() as process:
        assert save(process.id, [process.id], place.fd, OWNER, places=[SHM]) == 14
    assert leave((place.image / INDEX).read_bytes, OWNER, places=[SHM]) == [str(paths[0]), str(paths[2])]
    opened = os.open(place.image, os.O_RDONLY)
    try:
        result = restore_files(
            Process(os.getpid()).id, place.fd, lambda name: os.open(name, os.O_RDONLY, dir_fd=opened), place.user,
            places=[SHM],
        )  # fmt: skip
    finally:
        os.close(opened)
    assert list(result) == [str(paths[0]), str(paths[2])]
    assert [path.read_bytes() for path in (paths[0], paths[2])] == [b"batch 0", b"batch 2"]


def test_other_program_is_not_searched_for_tensors(
    place: Place, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the manager knows which of the names in its memory are files of the job."""
    monkeypatch.undo()
    manager.make(f"torch_6_{os.getpid()}_1", b"batch")
    with manager.running() as process:
        assert save(process.id, [process.id], place.fd, OWNER, places=[SHM]) == 0


def test_false_manager_gets_no_files_of_other_users(
    place: Place, manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user may start any program under this name. Links are not followed; too much memory fails the dump."""
    (tmp_path / "secret").write_bytes(b"secret")
    link = manager.make(f"torch_6_{os.getpid()}_1", b"")
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    if os.geteuid() == 0:
        os.chown(manager.make(f"torch_6_{os.getpid()}_2", b"of another user"), 2001, 2001)
    os.mkfifo(Path(SHM, f"torch_6_{os.getpid()}_3"))
    manager.names.append(f"torch_6_{os.getpid()}_3")
    with manager.running() as process:
        assert save(process.id, [process.id], place.fd, OWNER, places=[SHM]) == 0
        monkeypatch.setattr("slurm_affinode.checkpoint.files.local_files._MOST_MEMORY", 1 << 20)
        with pytest.raises(DumpFailed, match="has more than 1048576 bytes of memory"):
            save(process.id, [process.id], place.fd, OWNER, places=[SHM])
    assert list(place.image.iterdir()) == []


def test_number_of_names_in_memory_is_limited(place: Place, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte holds fifty million names: the agent would need more memory for them than the node has."""
    for number in range(3):
        manager.make(f"torch_6_{os.getpid()}_{number}", b"batch")
    monkeypatch.setattr("slurm_affinode.checkpoint.files.local_files._MOST_NAMES", 2, raising=False)
    with manager.running() as process, pytest.raises(DumpFailed, match="has more than 2 names"):
        save(process.id, [process.id], place.fd, OWNER, places=[SHM])


_LEASES = f"""
import fcntl, os, signal, sys
{BECOME_OWNER}signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print(flush=True)
sys.stdin.read()
"""


def test_leased_file_does_not_delay_dump(place: Place) -> None:
    """The kernel lets a process that opens such a file wait for 45 seconds, for each of a thousand files."""
    path = place.tmp / "leased"
    path.write_bytes(b"x")
    hand_over(place.tmp)
    argv = [sys.executable, "-c", _LEASES, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"\n":
            pytest.skip("the file system has no leases")
        with pytest.raises(DumpFailed, match=r"a process has a lease on it: .*/leased"):
            save(Process(holder.pid).id, [Process(holder.pid).id], place.fd, OWNER, places=[str(place.tmp)])
        holder.communicate()


def test_dump_times_out(place: Place) -> None:
    """A job may have more files, and directories with more names, than can be examined in hours."""
    me = Process(os.getpid()).id
    with (place.tmp / "file").open("w"), pytest.raises(DumpFailed, match="takes longer than 0 seconds"):
        save(me, [me], place.fd, OWNER, places=[str(place.tmp)], timeout_s=0)
    assert list(place.image.iterdir()) == []


def test_file_that_grows_is_copied_up_to_its_size(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of the user may make it larger than the room that was checked."""
    with (place.tmp / "file").open("w+b") as file:
        file.write(b"mine")
        file.flush()

        def grow(directory_fd: int, size: int, path: str) -> None:
            file.truncate(1 << 40)
            os.pwrite(file.fileno(), b"x", 1 << 39)

        monkeypatch.setattr("slurm_affinode.checkpoint.files.local_files._check_room", grow)
        assert place.save() == 4
    assert (place.image / "local-0").read_bytes() == b"mine"


def test_holes_of_all_files_need_room(place: Place) -> None:
    room = os.statvfs(place.image)
    with ExitStack() as stack:
        for number in range(3):
            file = stack.enter_context((place.tmp / f"hole-{number}").open("w+b"))
            file.truncate(room.f_bavail * room.f_frsize // 2)
        with pytest.raises(DumpNoRoom, match="more than there is room for"):
            place.save()


def test_list_that_could_not_be_read_is_not_written(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No restore of such an image would succeed."""
    monkeypatch.setattr("slurm_affinode.checkpoint.files.local_files.LIMIT", 100)
    with (place.tmp / ("x" * 100)).open("w"), pytest.raises(DumpFailed, match="list is longer than 100 bytes"):
        place.save()


@pytest.mark.parametrize("user", ["same", "other"])
def test_file_on_unresponsive_file_system_delays_no_removal(
    place: Place, stalling: Callable[[Path], Stalling], user: str
) -> None:
    """Any user may mount one below ``/tmp``, such as sshfs or an AppImage."""
    with (place.tmp / "psm").open("w+b") as file:
        file.write(b"x")
        file.flush()
        place.save()
    fuse = stalling(place.tmp / "mounted")
    (fuse.path / "file").touch()
    code = "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); os.setuid(int(sys.argv[2]))\n"
    code += "print(flush=True); sys.stdin.read()"
    uid = str(OWNER.uid) if user == "same" else "2001"
    with subprocess.Popen([sys.executable, "-c", code, fuse.path / "file", uid], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        fuse.stall()
        result: list[str] = []
        thread = threading.Thread(target=lambda: result.extend(place.leave()), daemon=True)
        thread.start()
        thread.join(20)
        fuse.resume()
        assert result == [str(place.tmp / "psm")]
        other.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_file_system_closed_to_root_prevents_no_removal(place: Place) -> None:
    """A FUSE file system is open to the user who has mounted it, and by default not to root."""
    with (place.tmp / "psm").open("w+b") as file:
        file.write(b"x")
        file.flush()
        place.save()
    mounted = place.tmp / "mounted"
    mounted.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("there is no /dev/fuse")
    options = f"fd={server},rootmode=40000,user_id=2001,group_id=2001".encode()
    try:
        if ctypes.CDLL(None).mount(b"x", bytes(mounted), b"fuse.x", 0, options) != 0:
            pytest.skip("no FUSE can be mounted")
        opened = os.open(mounted, os.O_PATH)
        try:
            with pytest.raises(PermissionError):
                os.fstat(opened)
            assert place.leave() == [str(place.tmp / "psm")]
        finally:
            os.close(opened)
            subprocess.run(["umount", "-l", mounted], check=True)
    finally:
        os.close(server)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_open_files_of_other_users_do_not_count(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have millions of files open, which would delay the jobs of this user for hours."""
    (place.tmp / "in use").touch()
    with (place.tmp / "psm").open("w+b") as file:
        file.write(b"x")
        file.flush()
        place.save()
    seen: list[int] = []
    files_of = local_files._files_of
    monkeypatch.setattr(
        local_files, "_files_of", lambda process, *rest: (seen.append(process.pid), files_of(process, *rest))[1]
    )
    code = "import os; os.setgid(2001); os.setuid(2001); print(flush=True); input()"
    with (
        using(place.tmp / "in use") as user,
        subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as other,
    ):
        assert other.stdout is not None
        other.stdout.readline()
        assert place.leave() == [str(place.tmp / "psm")]
        assert user in seen
        assert other.pid not in seen
        other.communicate(b"\n")


@pytest.mark.parametrize("other", ["contents", "longer", "directory", "symlink"])
def test_other_file_in_its_place_is_not_changed(place: Place, other: str) -> None:
    """The restore is refused."""
    path = place.tmp / "file"
    with path.open("w") as file:
        file.write("mine")
        file.flush()
        place.save()
    path.unlink()
    match other:
        case "contents":
            path.write_text("his_")
        case "longer":
            path.write_text("mine, too")
        case "directory":
            path.mkdir()
        case "symlink":
            (place.tmp / "target").write_text("mine")
            path.symlink_to(place.tmp / "target")
    with pytest.raises(RestoreFailed, match="is another file"):
        place.restore_files()
    if path.is_file():
        assert path.read_text() in ("his_", "mine, too", "mine")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_same_file_of_another_user_is_not_used(place: Place, what: str) -> None:
    """That user has seen the name on the other node, and could change the contents after the restore."""
    path = place.tmp / "dir" / "file"
    path.parent.mkdir()
    with path.open("w") as file:
        file.write("mine")
        file.flush()
        place.save()
    os.chown(path if what == "file" else path.parent, OWNER.uid + 1, OWNER.gid)
    path.chmod(0o666)
    with pytest.raises(RestoreFailed, match="another file"):
        place.restore_files()


def test_holes_are_restored_as_holes(place: Place) -> None:
    """A hole larger than the store has room for is refused: its digest would take days."""
    with (place.tmp / "hole").open("w+b") as file:
        file.truncate(8 << 40)
        with pytest.raises(DumpNoRoom, match=r"more than there is room for: .*hole"):
            place.save()
        file.truncate(1 << 30)
        file.seek((1 << 29) + 5)
        file.write(b"x")
        file.flush()
        assert place.save() == 1 << 30
    (place.tmp / "hole").unlink()
    assert [Path(path).name for path in place.restore_files()] == ["hole"]
    with (place.tmp / "hole").open("rb") as file:
        assert (os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_blocks < 100) == (1 << 30, True)
        assert os.pread(file.fileno(), 3, (1 << 29) + 4) == b"\0x\0"


def test_paths_outside_the_local_directories_are_not_restored(place: Place) -> None:
    """A list that cannot be parsed is refused."""
    elsewhere = place.tmp.parent / "elsewhere"
    entry = {"path": str(elsewhere), "kind": "directory", "mode": 0o755}
    index = place.image / INDEX
    index.touch(mode=0o600)
    index.write_text(json.dumps({"uid": OWNER.uid, "gid": OWNER.gid, "files": [entry]}))
    assert place.restore_files() == []
    assert not elsewhere.exists()
    for path in (f"{place.tmp}/../elsewhere", f"{place.tmp}//../elsewhere", f"{place.tmp}/x/../../elsewhere"):
        index.write_text(json.dumps({"uid": OWNER.uid, "gid": OWNER.gid, "files": [entry | {"path": path}]}))
        assert place.restore_files() == []
        assert not elsewhere.exists()
    index.write_text("{}")
    with pytest.raises(RestoreFailed, match="cannot be read"):
        place.restore_files()


_SWAPS = """
import os, sys
mine = os.open(sys.argv[1], os.O_RDWR)
theirs = os.open(sys.argv[2], os.O_PATH)  # a user may, without any right on the file
os.setgid(2001); os.setuid(2001)
print(flush=True)
input()
os.dup2(theirs, mine)
print(flush=True)
input()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may inspect open files of others")
def test_file_swapped_after_the_check_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may resume a stopped process and replace an open file by one that only root may read."""
    place, image = tmp_path / "place", tmp_path / "image"
    place.mkdir()
    image.mkdir(mode=0o700)
    (place / "mine").write_bytes(b"mine")
    os.chown(place / "mine", 2001, 2001)
    (tmp_path / "secret").write_bytes(b"root")
    (tmp_path / "secret").chmod(0o600)
    argv = (sys.executable, "-c", _SWAPS, str(place / "mine"), str(tmp_path / "secret"))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdin is not None
        assert user.stdout is not None
        user.stdout.readline()

        def swap(directory_fd: int, size: int, path: str) -> None:
            user.stdin.write(b"\n")  # type: ignore[union-attr]
            user.stdin.flush()  # type: ignore[union-attr]
            user.stdout.readline()  # type: ignore[union-attr]

        monkeypatch.setattr("slurm_affinode.checkpoint.files.local_files._check_room", swap)
        fd = os.open(image, os.O_RDONLY | os.O_DIRECTORY)
        try:
            save(Process(user.pid).id, [Process(user.pid).id], fd, User(2001, 2001), places=[str(place)])
        finally:
            os.close(fd)
            user.kill()
    copies = [path.read_bytes() for path in image.iterdir() if path.name != INDEX]
    assert copies == [b"mine"]
