"""Comparison of a restored tree's open files: only files that were passed to it are accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files.open_files import OpenFiles, watched
from slurm_affinode.checkpoint.user_files import User

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may inspect open files of others")
ALICE = User(2001, 2001, (2001, 2077))
HOW = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR, "path": os.O_PATH}
Inode = tuple[int, int]


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def running(held: ExitStack, code: str, *fds: int, cwd: Path | None = None) -> Process:
    """Return a process that has run the code and waits; it has these descriptors."""
    argv = (sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()")
    started = held.enter_context(
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, cwd=cwd)
    )
    held.callback(started.kill)
    assert started.stdout is not None
    started.stdout.readline()
    return held.enter_context(Process(started.pid))


def inode(path: Path | str) -> Inode:
    facts = os.stat(path)  # noqa: PTH116 - of links in /proc, too
    return facts.st_dev, facts.st_ino


def usual(process: Process, *but: Path) -> dict[Inode, int]:
    """Return all files of the process as if they had been passed, except these."""
    base = Path(f"/proc/{process.pid}")
    links = [base / "exe", base / "cwd", base / "root", *(base / "map_files").iterdir(), *(base / "fd").iterdir()]
    result = {inode(link): os.R_OK | os.W_OK for link in links}
    return {item: how for item, how in result.items() if item not in {inode(path) for path in but}}


@pytest.mark.parametrize(
    ("how", "right", "good"),
    [
        ("r", os.R_OK, True), ("w", os.W_OK, True), ("rw", os.R_OK | os.W_OK, True), ("path", 0, True),
        ("rw", os.R_OK, False), ("w", os.R_OK, False), ("r", 0, False), ("r", None, False), ("path", None, False),
    ],
)  # fmt: skip
def test_descriptor_of_a_file_that_was_not_passed_is_found(
    tmp_path: Path, held: ExitStack, how: str, right: int | None, good: bool
) -> None:
    """So is one that is open for more than was passed."""
    path = tmp_path / "file"
    path.write_text("x")
    fd = os.open(path, HOW[how])
    held.callback(os.close, fd)
    process = running(held, "", fd)
    passed = usual(process, path) | ({} if right is None else {inode(path): right})
    assert OpenFiles(ALICE, passed).strange(process) == (None if good else str(path))


def test_given_stream_is_accepted_in_its_open_mode(tmp_path: Path, held: ExitStack) -> None:
    """It is the output of the new attempt, and may be open for writing only."""
    path = tmp_path / "out"
    path.touch(mode=0o600)
    out, both = os.open(path, os.O_WRONLY), os.open(path, os.O_RDWR)
    held.callback(os.close, out)
    held.callback(os.close, both)
    process = running(held, "", out)
    passed = usual(process, path)
    assert OpenFiles(ALICE, passed).strange(process) == str(path)
    assert OpenFiles(ALICE, passed, [out]).strange(process) is None
    assert OpenFiles(ALICE, passed, [out]).strange(running(held, "", both)) == str(path)


def test_stream_given_as_a_path_permits_no_access(tmp_path: Path, held: ExitStack) -> None:
    """A user can open any file with ``O_PATH``, without any right to it, and pass that as the output."""
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    name, reading = os.open(path, os.O_PATH), os.open(path, os.O_RDONLY)
    held.callback(os.close, name)
    held.callback(os.close, reading)
    process = running(held, "", name)
    passed = usual(process, path)
    assert OpenFiles(ALICE, passed, [name]).strange(process) is None
    assert OpenFiles(ALICE, passed, [name]).strange(running(held, "", reading)) == str(path)


def test_mapping_of_a_file_that_was_not_passed_is_found(tmp_path: Path, held: ExitStack) -> None:
    """The descriptor is closed. A file without a name was made by CRIU."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    shared = running(held, f"import mmap\nwith open({str(path)!r}, 'r+b') as f: m = mmap.mmap(f.fileno(), 4096)")
    private = running(held, f"import mmap\nwith open({str(path)!r}) as f: m = mmap.mmap(f.fileno(), 4096, 2, 3)")
    passed = usual(shared, path)
    for process in (shared, private):
        assert OpenFiles(ALICE, passed).strange(process) == str(path)
    files = OpenFiles(ALICE, passed | {inode(path): os.R_OK})
    assert files.strange(private) is None
    assert files.strange(shared) == str(path)
    path.unlink()
    assert OpenFiles(ALICE, passed).strange(shared) is None


@pytest.mark.parametrize("what", ["cwd", "exe", "root"])
def test_directory_or_program_that_was_not_passed_is_found(tmp_path: Path, held: ExitStack, what: str) -> None:
    """A working or root directory gives access to the files below it."""
    process = running(held, "import os; os.chroot('.')" if what == "root" else "", cwd=tmp_path)
    link = Path(f"/proc/{process.pid}/{what}")
    place = inode(link)
    passed = {item: how for item, how in usual(process).items() if item != place}
    assert OpenFiles(ALICE, passed).strange(process) is not None
    assert OpenFiles(ALICE, passed | {place: os.R_OK}).strange(process) is None


def test_watch_that_was_not_passed_is_found(tmp_path: Path, held: ExitStack) -> None:
    """The kernel's numbers identify the file."""
    process = running(
        held,
        f"import ctypes; l = ctypes.CDLL(None); i = l.inotify_init(); l.inotify_add_watch(i, {bytes(tmp_path)!r}, 2)",
    )
    (number,) = [name for name in process.names("fd") if process.link(f"fd/{name}") == "anon_inode:inotify"]
    (watch,) = watched(process.read(f"fdinfo/{number}"))
    assert watch[1] == tmp_path.stat().st_ino
    assert "which it watches" in str(OpenFiles(ALICE, usual(process)).strange(process))
    assert OpenFiles(ALICE, usual(process), watched={watch}).strange(process) is None


def test_terminal_must_belong_to_the_user(held: ExitStack) -> None:
    """CRIU makes it, or finds it by its number."""
    master, slave = os.openpty()
    held.callback(os.close, master)
    held.callback(os.close, slave)
    process = running(held, "", slave)
    name = os.ttyname(slave)
    passed = usual(process, Path(name))
    os.chown(slave, 0, 0)
    os.fchmod(slave, 0o600)
    assert OpenFiles(ALICE, passed).strange(process) == name
    os.chown(slave, ALICE.uid, 5)
    assert OpenFiles(ALICE, passed).strange(process) is None


def test_ordinary_process_is_accepted(held: ExitStack) -> None:
    """Pipes, sockets and anonymous memory are not files."""
    modules = "import mmap, os, socket; "
    code = modules + "m = mmap.mmap(-1, 4096); f = os.memfd_create('x'); s = socket.socketpair()"
    passed = usual(running(held, modules))
    assert OpenFiles(ALICE, passed).strange(running(held, code)) is None


_MAP = """
import mmap, os, sys
fds = [os.open(path, os.O_RDWR) for path in sys.argv[1:3]]
high = mmap.mmap(fds[1], 4096)
low = mmap.mmap(fds[0], 4096)
os.closerange(3, 64)  # also the copies that mmap keeps
"""


def test_newline_in_a_path_hides_no_mapping(tmp_path: Path, held: ExitStack) -> None:
    """A directory name that looks like a line of ``maps`` for the same inode does not hide the true mapping.

    The forged line shows the user's own file in place of a file that the user may not open, and precedes the true one.
    """
    secret, own_file = tmp_path / "secret", tmp_path / "dir" / "x"
    secret.write_bytes(b"x" * 4096)
    secret.chmod(0o600)
    own_file.parent.mkdir()
    own_file.write_bytes(b"x" * 4096)
    os.chown(own_file, ALICE.uid, ALICE.gid)
    process = running(held, f"import sys; sys.argv[1:] = {[str(own_file), str(secret)]!r}\n{_MAP}")
    rows = process.text("maps").split("\n")
    own_row = next(row.split() for row in rows if row.endswith(str(own_file)))
    secret_row = next(row.split() for row in rows if row.endswith(str(secret)))
    forged = f"\r{own_row[0]} {secret_row[1]} {secret_row[2]} {secret_row[3]} {secret_row[4]} "
    own_file.parent.rename(tmp_path / forged)
    assert OpenFiles(ALICE, usual(process, secret)).strange(process) == str(secret)
