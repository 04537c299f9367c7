"""Running programs: every failure is one line with the cause."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from slurm_affinode.base import process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import run

_HANGS = """import ctypes, os, sys, time
libc, parent = ctypes.CDLL(None), os.getpid()
libc.prctl(0x59616d61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: by anybody
reading, writing = os.pipe()
tracer = os.fork()
if tracer == 0:
    for fd in (0, 1, 2):
        os.close(fd)
    libc.ptrace(0x4206, parent, None, ctypes.c_void_p(0x40))  # PTRACE_SEIZE, PTRACE_O_TRACEEXIT
    os.write(writing, b"x")
    time.sleep(600)
os.read(reading, 1)
with open(sys.argv[1], "w") as file:
    file.write(str(tracer))
time.sleep(600)
"""
"""A program that does not end when it is killed, until its tracer does, as if it waited for a file server."""


def test_output_and_environment_are_passed() -> None:
    """Output is bytes; the environment is exactly the given one."""
    done = run([sys.executable, "-c", "import os; print(sorted(os.environ)[0])"], timeout_s=30, env={"A": "1"})
    assert done.stdout == b"A\n"
    assert done.returncode == 0


def test_stdin_is_closed_unless_given() -> None:
    """A program that reads standard input gets end of file, not the terminal."""
    script = "import sys; print(len(sys.stdin.read()))"
    assert run([sys.executable, "-c", script], timeout_s=30).stdout == b"0\n"
    assert run([sys.executable, "-c", script], timeout_s=30, stdin=b"abc").stdout == b"3\n"


def test_last_line_of_standard_error_is_the_reason() -> None:
    script = "import sys; print('first', file=sys.stderr); print('no such cluster', file=sys.stderr); sys.exit(4)"
    with pytest.raises(UnreachableError, match="ended with status 4: no such cluster"):
        run([sys.executable, "-c", script], timeout_s=30)
    assert run([sys.executable, "-c", script], timeout_s=30, check=False).returncode == 4


def test_missing_forbidden_and_slow_programs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no-such-program-here: no such program"):
        run(["no-such-program-here"], timeout_s=1)
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(UnreachableError, match="not allowed"):
        run([str(plain)], timeout_s=1)
    plain.chmod(0o755)
    with pytest.raises(UnreachableError, match="cannot be started: Exec format error"):
        run([str(plain)], timeout_s=1)
    with pytest.raises(UnreachableError, match=r"timed out after 0\.2 s"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_program_that_hangs_in_the_kernel_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be killed, and must not block other programs."""
    monkeypatch.setattr(process, "REAP_S", 0.2)
    tracer, communicate = tmp_path / "tracer", subprocess.Popen.communicate

    def once_it_hangs(*arguments: Any, **options: Any) -> Any:
        wait_until("it is traced", lambda: tracer.exists() and tracer.read_text())
        return communicate(*arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_hangs)
    try:
        with pytest.raises(UnreachableError, match=r"timed out after 0\.2 s"):
            run([sys.executable, "-c", _HANGS, str(tracer)], timeout_s=0.2)
    finally:
        os.kill(int(tracer.read_text()), signal.SIGKILL)


_BECOMES_ANOTHER = "import os, time; os.setresuid(65534, 65534, 65534); time.sleep(20)"
_RUN = f"""
import sys
from slurm_affinode.base import process
process.REAP_S = 0.1
process.run([sys.executable, "-c", {_BECOMES_ANOTHER!r}], timeout_s=1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")
def test_timeout_of_program_that_cannot_be_killed_is_reported() -> None:
    """It has become another user, and this process has no ``CAP_KILL``, as in a confined service."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUN], capture_output=True, text=True, timeout=240, check=False,
        preexec_fn=_drop_kill,
    )  # fmt: skip
    assert "UnreachableError" in done.stderr.splitlines()[-1]
    assert "timed out after 1 s" in done.stderr.splitlines()[-1]


def _drop_kill() -> None:
    ctypes.CDLL(None).prctl(24, 5)  # PR_CAPBSET_DROP, CAP_KILL


def _tool(directory: Path, text: str, mode: int = 0o755) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tool"
    path.write_text(f"#!/bin/sh\necho {text}\n")
    path.chmod(mode)
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")
@pytest.mark.parametrize("attack", ["directory", "parent", "file", "owner", "link", "middle"])
def test_root_runs_no_program_that_a_user_can_replace(tmp_path: Path, attack: str) -> None:
    """``PATH`` has a directory of a user before root's own: the program there is skipped."""
    hostile, sound = tmp_path / "a" / "b", tmp_path / "sound"
    hostile_tool = _tool(hostile, "hostile")
    _tool(sound, "sound")
    if attack == "directory":
        hostile.chmod(0o777)
    elif attack == "parent":
        os.chown(hostile.parent, 4242, 4242)
    elif attack == "file":
        hostile_tool.chmod(0o775)
    elif attack == "owner":
        os.chown(hostile_tool, 4242, 4242)
    else:  # a link of root's to, or through, a directory that a user can change
        place = tmp_path / "user"
        place.mkdir()
        (place / "on").symlink_to(hostile)
        os.chown(place, 4242, 4242)
        hostile_tool = tmp_path / "links" / "tool"
        hostile_tool.parent.mkdir()
        hostile_tool.symlink_to(
            place / "on" / "tool" if attack == "middle" else os.path.relpath(place / "on/tool", hostile_tool.parent)
        )
        hostile = hostile_tool.parent
    env = {"PATH": f"{hostile}:{sound}"}
    assert run(["tool"], timeout_s=30, env=env).stdout == b"sound\n"
    with pytest.raises(UnreachableError, match="users other than root may write to"):
        run(["tool"], timeout_s=30, env={"PATH": str(hostile)})
    with pytest.raises(UnreachableError, match="users other than root may write to"):
        process.find(str(hostile_tool))


@pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")
def test_root_runs_no_program_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tool(tmp_path, "hostile")
    monkeypatch.chdir(tmp_path)
    for path in (":", ".", "./", ""):
        with pytest.raises(UnreachableError, match="no such program"):
            run(["tool"], timeout_s=30, env={"PATH": path})


@pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")
def test_links_of_root_are_followed(tmp_path: Path) -> None:
    """``/bin`` is such a link; a circular link is an error."""
    _tool(tmp_path / "there", "found")
    (tmp_path / "bin").symlink_to("there")
    (tmp_path / "there" / "alias").symlink_to("../bin/tool")
    assert run(["alias"], timeout_s=30, env={"PATH": str(tmp_path / "bin")}).stdout == b"found\n"
    assert process.find(str(tmp_path / "bin/alias")) == str(tmp_path / "there/tool")
    (tmp_path / "there" / "tool").unlink()
    (tmp_path / "there" / "tool").symlink_to("tool")
    with pytest.raises(UnreachableError, match="no such program"):
        run(["tool"], timeout_s=30, env={"PATH": str(tmp_path / "bin")})


def test_search_first_puts_a_directory_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is added once, also for environments derived from the agent's."""
    monkeypatch.setenv("PATH", os.environ["PATH"])
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho ours\n")
    program.chmod(0o755)
    process.search_first(tmp_path)
    process.search_first(tmp_path)
    assert os.environ["PATH"].count(str(tmp_path)) == 1
    monkeypatch.setattr(process, "replaceable", lambda _path: None)
    assert process.run(["scontrol"], timeout_s=10).stdout == b"ours\n"


@pytest.mark.parametrize("name", ["sacct", "scontrol", "sacctmgr"])
def test_missing_slurm_command_names_the_configuration_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is often installed in a directory of its own."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnreachableError, match="no such program") as caught:
        process.run([name], timeout_s=10)
    assert "slurm.bin_dir" in (caught.value.hint or "")
