"""Files that a restored tree has open: only such as its user may open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import openfiles
from slurm_affinode.checkpoint.asuser import User
from slurm_affinode.checkpoint.openfiles import OpenFiles

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root looks at what others may open")
ALICE = User(2001, 2001, (2001, 2077))
Case = tuple[int, int, int, str, bool]
"""Owner, group, mode, how it is open, whether that is as it should be."""
HOW = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR, "path": os.O_PATH}


@pytest.fixture(params=["faccessat2", "open"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of asking the kernel: the second is for older ones."""
    if request.param == "open":
        monkeypatch.setattr(openfiles, "_SYS_FACCESSAT2", 9999)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def running(held: ExitStack, code: str, *fds: int) -> int:
    """A process of root's that has done this and waits; it has these descriptors."""
    argv = (sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()")
    process = held.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds))
    held.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "case",
    [
        (0, 0, 0o644, "r", True),
        (0, 0, 0o644, "rw", False),
        (0, 0, 0o644, "w", False),
        (0, 0, 0o600, "r", False),
        (0, 0, 0o600, "path", True),
        (0, 2077, 0o660, "rw", True),
        (0, 2077, 0o640, "rw", False),
        (2001, 2001, 0o400, "rw", True),
        (2002, 2002, 0o622, "w", True),
    ],
)
def test_a_file_that_the_user_may_not_open_is_seen(tmp_path: Path, held: ExitStack, case: Case) -> None:
    """By its owner, its groups and its mode, for what it is open for. What the user owns he can open."""
    owner, group, mode, how, good = case
    path = tmp_path / "file"
    path.write_text("x")
    os.chown(path, owner, group)
    path.chmod(mode)
    fd = os.open(path, HOW[how])
    held.callback(os.close, fd)
    assert OpenFiles(ALICE).strange(running(held, "", fd)) == (None if good else str(path))


def test_what_it_was_given_is_no_surprise(tmp_path: Path, held: ExitStack) -> None:
    """The new run's own output; for writing only, if that is what it is open for."""
    path = tmp_path / "out"
    path.touch(mode=0o600)
    out = os.open(path, os.O_WRONLY)
    held.callback(os.close, out)
    pid = running(held, "", out)
    assert OpenFiles(ALICE).strange(pid) == str(path)
    assert OpenFiles(ALICE, [out]).strange(pid) is None
    both = os.open(path, os.O_RDWR)
    held.callback(os.close, both)
    assert OpenFiles(ALICE, [out]).strange(running(held, "", both)) == str(path)


def test_a_mapping_is_seen_as_well(tmp_path: Path, held: ExitStack) -> None:
    """Its descriptor is closed. Once it has no name it is one that CRIU made."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    path.chmod(0o644)
    pid = running(held, f"import mmap\nwith open({str(path)!r}, 'r+b') as f: m = mmap.mmap(f.fileno(), 4096)")
    assert OpenFiles(ALICE).strange(pid) == str(path)
    private = running(held, f"import mmap\nwith open({str(path)!r}) as f: m = mmap.mmap(f.fileno(), 4096, 2, 3)")
    assert OpenFiles(ALICE).strange(private) is None
    path.unlink()
    assert OpenFiles(ALICE).strange(pid) is None


def test_each_process_is_looked_at(tmp_path: Path, held: ExitStack) -> None:
    """Also where another one has the same file mapped, and may: what it is open for counts."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    path.chmod(0o644)
    maps = f"import mmap\nwith open({str(path)!r}, 'r+b') as f: m = mmap.mmap(f.fileno(), 4096, 1, "
    look = OpenFiles(ALICE)
    assert look.strange(running(held, maps.replace("r+b", "rb") + "1)")) is None
    assert look.strange(running(held, maps + "3)")) == str(path)
    assert look.strange(running(held, maps + "1)")) == str(path)


def test_an_ordinary_process_has_nothing_strange(held: ExitStack) -> None:
    """Libraries, devices, pipes, memory without a file."""
    pid = running(
        held, "import mmap, os, numpy; m = mmap.mmap(-1, 4096); f = os.memfd_create('x'); n = open('/dev/null')"
    )
    assert OpenFiles(ALICE).strange(pid) is None
