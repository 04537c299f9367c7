"""Files of a process tree, opened as its user and passed to CRIU: with real files, users and descriptors."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from stalling import Stalling

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import open_files
from slurm_affinode.checkpoint.files.open_files import Inheritance
from slurm_affinode.checkpoint.image.criu_images import bodies, message
from slurm_affinode.checkpoint.image.private_image import PrivateImage, private_image
from slurm_affinode.checkpoint.interface import InheritFd, RestoreFailed, Take
from slurm_affinode.checkpoint.user_files import User

from .. import criu_files as made

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root opens files as others")
ALICE = User(2001, 2001, (2001, 2077))
PROGRAM, TOP = 1, 2
FIRST = 10
FILE = stat.S_IFREG | 0o644
Files = Sequence[bytes]


class Sound:
    """Pages of a sound image."""

    def begin(self, take: Take | None = None) -> None:
        """Read nothing."""

    def sound(self, timeout_s: float | None = None) -> None:
        """Raise nothing."""

    def check(self, path: str, blocks: Iterable[memoryview]) -> None:
        """Read the blocks."""
        deque(blocks, maxlen=0)


class Job:
    """A directory of a user, and images of jobs that have files open in it."""

    def __init__(self, work: Path, stack: ExitStack) -> None:
        self.work, self._stack = work, stack
        self.images = Path(tempfile.mkdtemp(prefix="image-"))
        stack.callback(shutil.rmtree, self.images)

    def pass_on(
        self, entries: Files, *, used: Sequence[tuple[int, int]] | None = None, areas: Files = (),
        cwd: int = TOP, streams: Sequence[InheritFd] = (), timeout_s: float = 20,
        index: tuple[str, bytes] = ("local.json", b'{"files": []}'), **others: bytes,
    ) -> tuple[Inheritance, PrivateImage]:  # fmt: skip
        """Prepare a restore.

        ``used`` are the entries that are descriptors, with their kinds; by default all entries are regular files.
        """
        numbers = [(number, 1) for number in range(FIRST, FIRST + len(entries))] if used is None else used
        program = made.regular(PROGRAM, "/bin/true", mode=os.stat("/bin/true").st_mode)  # noqa: PTH116
        files = {
            "files.img": made.image(program, made.root(TOP), *entries),
            "fdinfo-2.img": made.descriptors(*numbers),
            "mm-7.img": made.memory(PROGRAM, *areas),
            "fs-7.img": made.places(cwd, TOP),
            index[0]: index[1],
            **{name.replace("_", "-") + ".img": data for name, data in others.items()},
        }
        for path in self.images.iterdir():
            path.unlink()
        for name, data in files.items():
            (self.images / name).write_bytes(data)
        fd = os.open(self.images, os.O_RDONLY)
        self._stack.callback(os.close, fd)
        image = self._stack.enter_context(private_image(fd, Sound(), shared=False))
        root, namespace = os.open("/", os.O_PATH | os.O_DIRECTORY), os.open("/proc/self/ns/mnt", os.O_RDONLY)
        self._stack.callback(os.close, root)
        self._stack.callback(os.close, namespace)
        inherited = Inheritance(image, root, namespace, ALICE, streams, timeout_s=timeout_s)
        return self._stack.enter_context(inherited), image

    def file(self, name: str, *, owner: int = ALICE.uid, mode: int = 0o644, data: bytes = b"") -> Path:
        """Make a file; its group has the number of its owner."""
        path = self.work / name
        path.write_bytes(data)
        os.chown(path, owner, owner)
        path.chmod(mode)
        return path


@pytest.fixture
def job() -> Iterator[Job]:
    """Return an empty directory that every user can reach, unlike those of pytest."""
    with ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="job-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, work)
        work.chmod(0o755)
        os.chown(work, ALICE.uid, ALICE.gid)
        yield Job(work, stack)


def passed(inherited: Inheritance, number: int) -> int:
    """Return the descriptor of an entry."""
    (result,) = [figure.fd for figure in inherited.fds if figure.key.endswith(f".{number:x}")]
    return result


def where(fd: int) -> str:
    """Return the target of a descriptor."""
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115


def pread(fd: int, length: int, at: int) -> bytes:
    """Read from the file of an O_PATH descriptor, opened as CRIU opens it."""
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(reading, length, at)
    finally:
        os.close(reading)


@pytest.fixture(params=["faccessat2", "open"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use both system calls for checking access; ``open`` is for older kernels."""
    if request.param == "open":
        monkeypatch.setattr(open_files, "_SYS_FACCESSAT2", 9999)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "case",
    [
        (0, 0, 0o644, os.O_RDONLY, True),
        (0, 0, 0o644, os.O_RDWR, False),
        (0, 0, 0o644, os.O_WRONLY | os.O_APPEND, False),
        (0, 0, 0o600, os.O_RDONLY, False),
        (0, 0, 0o600, os.O_PATH, True),
        (0, 2077, 0o660, os.O_RDWR, True),
        (0, 2077, 0o640, os.O_RDWR, False),
        (2001, 2001, 0o400, os.O_RDWR, True),
        (2002, 2002, 0o622, os.O_WRONLY, True),
        (0, 0, 0o644, 3, False),
    ],
)
def test_file_is_passed_if_its_user_may_open_it_in_that_mode(job: Job, case: tuple[int, int, int, int, bool]) -> None:
    """Owner, groups and mode decide, for the mode it is open in. The owner can open all own files."""
    owner, group, mode, flags, good = case
    path = job.file("file")
    os.chown(path, owner, group)
    path.chmod(mode)
    entry = made.regular(FIRST, str(path), flags, stat.S_IFREG | mode)
    if not good:
        with pytest.raises(RestoreFailed, match=f"{path} would be open with access that its user does not have"):
            job.pass_on([entry])
        return
    inherited, _ = job.pass_on([entry])
    fd = passed(inherited, FIRST)
    assert os.path.samestat(os.fstat(fd), path.stat())
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH


def test_image_has_no_path_of_the_user(job: Job) -> None:
    path = job.file("secret")
    inherited, image = job.pass_on([made.regular(FIRST, str(path), mode=FILE)])
    data = image.read("files.img")
    assert b"secret" not in data
    assert b"/bin/true" not in data
    named = {message(message(body)[3][0])[6][0] for body in bodies(data)}  # type: ignore[arg-type]
    assert named == {figure.key.encode() for figure in inherited.fds}
    assert len({item.fd for item in inherited.fds}) == 3


def test_link_is_followed_with_the_rights_of_the_user(job: Job) -> None:
    """A link may lead to a file of root that every user can read, but not to one below a closed directory."""
    directory_of_root = job.work / "closed"
    directory_of_root.mkdir(mode=0o700)
    (directory_of_root / "file").write_text("root's")
    (directory_of_root / "file").chmod(0o644)
    path = job.work / "file"
    path.symlink_to(directory_of_root / "file")
    with pytest.raises(RestoreFailed, match=f"{path}: cannot be opened by its user: Permission denied"):
        job.pass_on([made.regular(FIRST, str(path), mode=FILE)])
    directory_of_root.chmod(0o755)
    inherited, _ = job.pass_on([made.regular(FIRST, str(path), mode=FILE)])
    assert where(passed(inherited, FIRST)) == str(directory_of_root / "file")


@pytest.mark.parametrize("use", ["descriptor", "cwd"])
def test_directory_below_a_closed_directory_is_not_entered(job: Job, use: str) -> None:
    """Its own mode would allow it."""
    home = job.work / "home"
    (home / "project").mkdir(parents=True)
    home.chmod(0o700)
    (home / "project").chmod(0o755)
    path = job.work / "project"
    path.symlink_to(home / "project")
    entry = made.regular(FIRST, str(path), os.O_RDONLY | os.O_DIRECTORY, stat.S_IFDIR | 0o755)
    with pytest.raises(RestoreFailed, match="cannot be opened by its user: Permission denied"):
        job.pass_on([entry], used=[(FIRST, 1)] if use == "descriptor" else [], cwd=FIRST if use == "cwd" else TOP)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("mode", "good"), [(0o711, True), (0o744, False)])
def test_working_directory_needs_search_permission_only(job: Job, mode: int, good: bool) -> None:
    path = job.work / "theirs"
    path.mkdir()
    path.chmod(mode)
    entry = made.regular(FIRST, str(path), mode=stat.S_IFDIR | mode)
    if good:
        job.pass_on([entry], used=[], cwd=FIRST)
        return
    with pytest.raises(RestoreFailed, match="access that its user does not have"):
        job.pass_on([entry], used=[], cwd=FIRST)


def test_strongest_mapping_decides(job: Job) -> None:
    """One mapping reads the file, another one writes to it."""
    path = job.file("library", owner=0)
    entry = made.regular(FIRST, str(path), mode=FILE)
    reading = made.mapping(FIRST)
    inherited, _ = job.pass_on([entry], used=[], areas=[reading])
    assert inherited.rights[path.stat().st_dev, path.stat().st_ino] == os.R_OK
    with pytest.raises(RestoreFailed, match="access that its user does not have"):
        job.pass_on([entry], used=[], areas=[reading, made.mapping(FIRST, status=1 << 7, flags=os.O_RDWR)])


@pytest.mark.parametrize("what", ["fifo", "device", "directory", "socket"])
def test_file_of_another_type_is_refused_unopened(job: Job, what: str) -> None:
    """Opening a FIFO would wait for a writer, and opening a device may have effects."""
    path = job.work / "file"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 3))
    elif what == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    os.chown(path, ALICE.uid, ALICE.gid)
    began = time.monotonic()
    with pytest.raises(RestoreFailed, match=f"{path}: has another type than before"):
        job.pass_on([made.regular(FIRST, str(path), mode=FILE)])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("minor", "good"), [(3, True), (5, True), (9, True), (11, False), (1, False)])
def test_device_is_passed_if_opening_it_has_no_effect(job: Job, minor: int, good: bool) -> None:
    """/dev/null is passed, but neither the kernel's log nor its memory."""
    path = job.work / "device"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    path.chmod(0o666)
    entry = made.regular(FIRST, str(path), os.O_RDWR, stat.S_IFCHR | 0o666)
    if good:
        job.pass_on([entry])
        return
    with pytest.raises(RestoreFailed, match="is a device, which is not opened again"):
        job.pass_on([entry])


def test_block_device_is_refused(job: Job) -> None:
    """The owner does not matter."""
    path = job.work / "disk"
    os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(7, 200))
    path.chmod(0o666)
    with pytest.raises(RestoreFailed, match="is a device"):
        job.pass_on([made.regular(FIRST, str(path), os.O_RDONLY, stat.S_IFBLK | 0o666)])


def test_device_files_of_a_forked_worker_are_replaced(job: Job) -> None:
    """A descriptor with /dev/null, and a mapping with an empty file that cannot grow; the device is not opened."""
    entries = (made.external(FIRST), made.regular(FIRST + 1, "/dev/nvidia0", os.O_RDWR, stat.S_IFCHR | 0o666))
    area = made.mapping(FIRST + 1, status=1 << 7 | 1 << 27, protection=3, flags=os.O_RDWR)
    inherited, image = job.pass_on(entries, used=[(FIRST, 16)], areas=[area])
    null, empty = os.fstat(passed(inherited, FIRST)), passed(inherited, FIRST + 1)
    assert (stat.S_ISCHR(null.st_mode), null.st_rdev) == (True, os.makedev(1, 3))
    assert inherited.rights[null.st_dev, null.st_ino] == os.R_OK | os.W_OK
    assert where(empty).startswith("/memfd:")
    with pytest.raises(PermissionError):
        os.ftruncate(empty, 1)
    kinds = [message(body)[3] for body in bodies(image.read("fdinfo-2.img"))]
    assert kinds == [[1]]
    assert b"nvidia" not in image.read("files.img")


def test_file_mapped_as_device_and_otherwise_is_refused(job: Job) -> None:
    """The replacement would be passed for a file that the user has to be able to open."""
    path = job.file("data")
    areas = [made.mapping(FIRST, status=status) for status in (1 << 7 | 1 << 27, 1 << 7)]
    with pytest.raises(RestoreFailed, match="mapped as a device, and as something else"):
        job.pass_on([made.regular(FIRST, str(path), mode=FILE)], used=[], areas=areas)


def test_fifo_is_passed_unopened(job: Job) -> None:
    """Opening it would wait for the other end."""
    path = job.work / "fifo"
    os.mkfifo(path)
    path.chmod(0o600)
    os.chown(path, ALICE.uid, ALICE.gid)
    entries = [made.regular(FIRST, str(path), os.O_WRONLY, stat.S_IFIFO | 0o600), made.fifo(FIRST + 1, FIRST)]
    inherited, _ = job.pass_on(entries, used=[(FIRST + 1, 3)])
    assert fcntl.fcntl(passed(inherited, FIRST), fcntl.F_GETFL) & os.O_PATH


@pytest.mark.parametrize(
    ("name", "flags", "good"),
    [
        ("/proc/meminfo", os.O_RDONLY, True),
        ("/proc/kallsyms", os.O_RDONLY, False),
        ("/proc/sys/kernel/ostype", os.O_RDONLY, False),
        ("/sys/devices/system/cpu/online", os.O_RDONLY, True),
        ("/sys/kernel/mm/transparent_hugepage/enabled", os.O_RDONLY, False),
    ],
)
def test_kernel_files_are_passed_if_they_require_no_privilege(job: Job, name: str, flags: int, good: bool) -> None:
    """They would be opened with root's rights. Both the name and the target of a link are checked."""
    if not Path(name).exists():
        pytest.skip("this kernel has none")
    mode = Path(name).stat().st_mode
    link = job.work / "file"
    link.symlink_to(name)
    if good:
        job.pass_on([made.regular(FIRST, name, flags, mode)])
        job.pass_on([made.regular(FIRST, str(link), flags, mode)])
        return
    with pytest.raises(RestoreFailed, match="cannot be opened again for it"):
        job.pass_on([made.regular(FIRST, name, flags, mode)])
    with pytest.raises(RestoreFailed, match="is a file of the kernel's, which is not opened again"):
        job.pass_on([made.regular(FIRST, str(link), flags, mode)])


def test_magic_links_are_not_followed(job: Job) -> None:
    """Such a link leads to the files of another process."""
    link = job.work / "file"
    link.symlink_to("/proc/self/exe")
    with pytest.raises(RestoreFailed, match="cannot be opened by its user: Too many levels"):
        job.pass_on([made.regular(FIRST, str(link), mode=os.stat("/bin/true").st_mode)])  # noqa: PTH116


@pytest.mark.parametrize(
    ("entry", "why"),
    [({"size": 3}, "has bad size 5 .expect 3."), ({"mode": stat.S_IFREG | 0o600}, "has bad mode 100644")],
)
def test_changed_file_is_refused_with_its_name(job: Job, entry: dict[str, int], why: str) -> None:
    """CRIU would report only the number of a descriptor."""
    path = job.file("file", data=b"12345")
    with pytest.raises(RestoreFailed, match=f"{path}: {why}"):
        job.pass_on([made.regular(FIRST, str(path), **{"mode": FILE, **entry})])


@pytest.mark.parametrize(
    ("owner", "mode", "directory", "reachable"),
    [
        (ALICE.uid, 0, 0o755, True),  # its owner may change the mode
        (ALICE.uid, 0o644, 0o000, False),
        (0, 0o444, 0o755, True),
        (0, 0o400, 0o755, False),
    ],
)
def test_file_that_its_user_can_no_longer_open_is_known(
    job: Job, owner: int, mode: int, directory: int, reachable: bool
) -> None:
    place = job.work / "place"
    place.mkdir()
    os.chown(place, ALICE.uid, ALICE.gid)
    path = place / "file"
    path.write_bytes(b"")
    os.chown(path, owner, owner)
    with path.open() as file:
        running = subprocess.Popen(("sleep", "100"), pass_fds=(file.fileno(),), cwd="/", stdin=subprocess.DEVNULL)
    try:
        path.chmod(mode)
        place.chmod(directory)
        tree = [Process(running.pid).id]
        assert open_files.unreachable(Process(os.getpid()).id, tree, ALICE) == (None if reachable else str(path))
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("entry", [{"size": 3}, {"size": 9}, {"mode": stat.S_IFREG | 0o600}])
def test_file_that_is_the_same_may_have_changed(job: Job, entry: dict[str, int]) -> None:
    """Other programs write to it, as to a database or a log. Another file in its place, and a program, are refused."""
    path = job.file("file", data=b"12345")
    file = made.regular(FIRST, str(path), **{"mode": FILE, **entry})
    (job.images / "files.img").write_bytes(made.image(file))
    directory = os.open(job.images, os.O_RDONLY)
    try:
        with path.open():
            open_files.record(directory, [Process(os.getpid()).id])
    finally:
        os.close(directory)
    index = (open_files.INDEX, (job.images / open_files.INDEX).read_bytes())
    assert str(path) in json.loads(index[1])
    inherited, image = job.pass_on([file], index=index)
    assert os.path.samestat(os.fstat(passed(inherited, FIRST)), path.stat())
    entries = [message(body)[3][0] for body in bodies(image.read("files.img"))]
    (kept,) = [fields for body in entries if (fields := message(bytes(body)))[1] == [FIRST]]  # type: ignore[arg-type]
    assert not {8, 10} & kept.keys()  # size and mode, which CRIU would compare
    with pytest.raises(RestoreFailed, match="has bad"):
        job.pass_on([file], areas=[made.mapping(FIRST, protection=5)], index=index)
    other = job.file("other", data=b"12345")
    other.replace(path)
    with pytest.raises(RestoreFailed, match="has bad"):
        job.pass_on([file], index=index)


def test_root_directory_other_than_the_jobs_is_refused(job: Job) -> None:
    with pytest.raises(RestoreFailed, match="is the root directory of a process, and not that of the job"):
        job.pass_on(
            [made.regular(FIRST, str(job.work), mode=job.work.stat().st_mode)], used=[],
            fs_8=made.places(TOP, FIRST),
        )  # fmt: skip


def test_given_stream_keeps_its_name(job: Job) -> None:
    """The output of the new attempt is passed as it is, whatever its user may open."""
    path = job.file("out", owner=0, mode=0o600)
    with path.open("ab") as out:
        key = str(path).lstrip("/")
        inherited, image = job.pass_on(
            [made.regular(FIRST, str(path), os.O_WRONLY)], streams=[InheritFd(out.fileno(), key)]
        )
        assert inherited.fds[0] == InheritFd(out.fileno(), key)
    assert str(path).encode() in image.read("files.img")


@pytest.mark.parametrize(("name", "good"), [("/dev/ptmx", True), ("/dev/pts/7", True), ("/home/a/tty", False)])
def test_terminals_below_dev_are_left_to_criu(job: Job, name: str, good: bool) -> None:
    """CRIU opens them by number, in directories of root."""
    entries = [made.regular(FIRST, name, os.O_RDWR, stat.S_IFCHR | 0o620), made.terminal(FIRST + 1, FIRST)]
    if good:
        _, image = job.pass_on(entries, used=[(FIRST + 1, 11)])
        assert name.encode() in image.read("files.img")
        return
    with pytest.raises(RestoreFailed, match="is a terminal that is not one of /dev/pts"):
        job.pass_on(entries, used=[(FIRST + 1, 11)])


@pytest.mark.parametrize("mode", [stat.S_IFREG | 0o640, stat.S_IFIFO | 0o600, stat.S_IFDIR | 0o750])
def test_removed_file_is_made_again_with_the_rights_of_its_user(job: Job, mode: int) -> None:
    """It has no name, as if it had been removed there; two entries of one file get one file."""
    path = job.work / "removed"
    entries = [made.regular(FIRST, str(path), os.O_RDONLY, mode), made.regular(FIRST + 1, str(path), os.O_RDONLY, mode)]
    inherited, image = job.pass_on(
        entries,
        remap_fpath=made.image(made.remap(FIRST, 5, 1), made.remap(FIRST + 1, 5, 1)),
        ghost_file_5=made.ghost(mode, b"contents"),
    )
    fd = passed(inherited, FIRST)
    facts = os.fstat(fd)
    assert (facts.st_mode, facts.st_uid) == (mode, ALICE.uid)
    assert where(fd) == f"{path} (deleted)"
    assert os.path.sameopenfile(fd, passed(inherited, FIRST + 1))
    if stat.S_ISREG(mode):
        assert pread(fd, 99, 0) == b"contents"
    assert list(job.work.iterdir()) == []
    assert "remap-fpath.img" not in image.names()


@pytest.mark.parametrize("flags", [os.O_RDWR | os.O_TMPFILE, os.O_RDWR], ids=["first restore", "later restore"])
def test_file_without_a_name_can_still_be_given_one(job: Job, flags: int) -> None:
    """A program that has opened it with ``O_TMPFILE`` may link it once it is complete; it may be open twice."""
    path = str(job.work / "#1")
    opened_again = made.regular(FIRST, path, os.O_RDONLY, FILE)
    entries = [opened_again, made.regular(FIRST + 1, path, flags, FILE)]
    inherited, _ = job.pass_on(
        entries,
        remap_fpath=made.image(made.remap(FIRST, 5, 1), made.remap(FIRST + 1, 5, 1)),
        ghost_file_5=made.ghost(FILE, b"contents"),
    )
    assert list(job.work.iterdir()) == []
    name = job.work / "complete"
    os.link(f"/proc/self/fd/{passed(inherited, FIRST + 1)}", name, src_dir_fd=0, follow_symlinks=True)
    assert (name.read_bytes(), stat.S_IMODE(name.stat().st_mode)) == (b"contents", stat.S_IMODE(FILE))


def test_removed_file_is_made_elsewhere_if_the_user_may_not_write_its_directory(job: Job) -> None:
    """Nothing is made in a directory of root behind a link, and a file of the same name is not changed."""
    directory_of_root = job.work / "theirs"
    directory_of_root.mkdir(mode=0o755)
    link = job.work / "link"
    link.symlink_to(directory_of_root)
    before = directory_of_root.stat().st_mtime_ns
    entry = made.regular(FIRST, f"{link}/removed", os.O_RDWR, FILE)
    rest = {"remap_fpath": made.image(made.remap(FIRST, 5, 1)), "ghost_file_5": made.ghost(FILE, b"x")}
    inherited, _ = job.pass_on([entry], **rest)
    assert directory_of_root.stat().st_mtime_ns == before
    assert where(passed(inherited, FIRST)).startswith(f"{job.work}/.removed.")
    other = job.file("removed", data=b"another one")
    inherited, _ = job.pass_on([made.regular(FIRST, str(other), os.O_RDWR, FILE)], **rest)
    assert pread(passed(inherited, FIRST), 9, 0) == b"x"
    assert other.read_bytes() == b"another one"


def test_sparse_removed_file_is_restored_with_its_holes(job: Job) -> None:
    """Its image has the pieces with data."""
    head = made.message((1, ALICE.uid), (2, ALICE.gid), (3, FILE), (9, 1), (10, 1 << 30))
    piece = made.message((1, 3), (2, 1 << 20))
    data = made.image(head) + len(piece).to_bytes(4, "little") + piece + b"abc"
    entry = made.regular(FIRST, str(job.work / "removed"), os.O_RDONLY, FILE, size=1 << 30)
    inherited, _ = job.pass_on([entry], remap_fpath=made.image(made.remap(FIRST, 5, 1)), ghost_file_5=data)
    fd = passed(inherited, FIRST)
    assert pread(fd, 5, (1 << 20) - 1) == b"\0abc\0"
    assert os.fstat(fd).st_size == 1 << 30
    assert os.fstat(fd).st_blocks < 100


@pytest.mark.parametrize(
    ("ghost", "why"),
    [
        (made.HEADER, "is not described"),
        (made.ghost(stat.S_IFCHR | 0o666), "of the type 20000 is not restored"),
        (made.image(made.message((1, 0), (2, 0), (3, FILE), (9, 1), (10, 9))) + b"\xff\xff\xff\x7f", "cut short"),
        (made.image(made.message((1, 0), (2, 0), (3, FILE), (9, 1))) + b"", "has no size"),
    ],
)
def test_invalid_image_of_a_removed_file_is_refused(job: Job, ghost: bytes, why: str) -> None:
    """Nothing is left of the file."""
    entry = made.regular(FIRST, str(job.work / "removed"), os.O_RDONLY, FILE)
    with pytest.raises(RestoreFailed, match=f"cannot be created again: .*{why}"):
        job.pass_on([entry], remap_fpath=made.image(made.remap(FIRST, 5, 1)), ghost_file_5=ghost)
    assert list(job.work.iterdir()) == []


def test_file_with_another_name_is_found_by_the_name_of_criu(job: Job) -> None:
    """That name is removed after the restore, not before: another attempt may need it."""
    other = job.file("link_remap.5", data=b"x")
    entries = [
        made.regular(FIRST, str(job.work / "own"), os.O_RDWR, FILE, size=1),
        made.regular(FIRST + 1, str(other), os.O_RDWR, FILE),
    ]
    inherited, image = job.pass_on(entries, used=[(FIRST, 1)], remap_fpath=made.image(made.remap(FIRST, FIRST + 1, 0)))
    fd = passed(inherited, FIRST)
    assert os.path.samestat(os.fstat(fd), other.stat())
    assert where(fd) == f"{job.work}/own (deleted)"
    assert b"link_remap" not in image.read("files.img")
    assert [path.name for path in job.work.iterdir()] == ["link_remap.5"]
    inherited.finish()
    assert list(job.work.iterdir()) == []


def test_file_named_for_the_dump_regains_its_own_name(job: Job) -> None:
    """It has that name for a moment, so that ``/proc`` shows it."""
    named = job.file("own (deleted)", data=b"x")
    item = {"directory": str(job.work), "name": named.name, "aside": ".link_remap.1", "inode": named.stat().st_ino}
    index = json.dumps({"uid": ALICE.uid, "gid": ALICE.gid, "files": [item]}).encode()
    inherited, _ = job.pass_on([made.regular(FIRST, str(named), os.O_RDWR, FILE, size=1)], index=("remaps.json", index))
    assert where(passed(inherited, FIRST)) == f"{job.work}/own (deleted)"
    assert [path.name for path in job.work.iterdir()] == ["own (deleted)"]
    inherited.finish()
    assert list(job.work.iterdir()) == []


def test_removed_procfs_file_is_refused(job: Job) -> None:
    """CRIU would start a process for it."""
    with pytest.raises(RestoreFailed, match="was removed, and cannot be created again"):
        job.pass_on([made.regular(FIRST, "/proc/7/maps", mode=FILE)], remap_fpath=made.image(made.remap(FIRST, 7, 2)))


def test_watches_are_those_that_the_user_may_have(job: Job) -> None:
    """They are identified by the kernel's numbers."""
    readable, closed = job.work / "mine", job.work / "theirs"
    readable.mkdir(mode=0o755)
    closed.mkdir(mode=0o700)
    watches = [(1, 1, str(readable)), (1, 2, str(closed)), (5, 6, None)]
    inherited, _ = job.pass_on([made.inotify(FIRST, *watches)], used=[(FIRST, 8)])
    assert {inode for _, inode in inherited.watched} == {readable.stat().st_ino, 6}


def test_file_system_that_does_not_respond_does_not_block(
    job: Job, tmp_path: Path, stalling: Callable[[Path], Stalling]
) -> None:
    """The restore fails."""
    for above in (tmp_path, *tmp_path.parents[:3]):  # a worker of pytest has one directory level more
        if not above.stat().st_mode & 0o001:
            above.chmod(0o755)
    file_system = stalling(tmp_path / "work")
    file_system.stall()
    try:
        with pytest.raises(RestoreFailed, match="its file system does not respond"):
            job.pass_on([made.regular(FIRST, str(file_system.path / "file"), mode=FILE)], timeout_s=1)
    finally:
        file_system.resume()


def test_no_descriptor_stays_open(job: Job) -> None:
    """Neither when files are passed nor when they are refused."""
    own_file, file_of_root = job.file("mine"), job.file("theirs", owner=0, mode=0o600)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ExitStack() as stack:
        inner = Job(job.work, stack)
        inner.pass_on([made.regular(FIRST, str(own_file), mode=FILE)])
        with pytest.raises(RestoreFailed):
            inner.pass_on(
                [made.regular(FIRST, str(own_file), mode=FILE),
                 made.regular(FIRST + 1, str(file_of_root), mode=stat.S_IFREG | 0o600)]
            )  # fmt: skip
    assert len(list(Path("/proc/self/fd").iterdir())) == before
