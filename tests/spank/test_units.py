"""The C unit tests of the plugin and the shepherd, and tests of both that need no Slurm."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from elf import read
from namespace_job import needs_root

SOURCE = Path(__file__).resolve().parents[2] / "spank"


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command, whatever its exit status."""
    return subprocess.run(argv, input=stdin, check=False, text=True, capture_output=True, timeout=280)


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skip without a compiler."""
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            missing(f"{tool} is not installed")


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it in continuous integration."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def shepherd(compiler: None) -> Iterator[Path]:
    """The shepherd, built without Slurm's headers, in a directory where other users can execute it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield build_shepherd(directory)


def build_shepherd(directory: Path) -> Path:
    """Build the shepherd as ``make`` does; return its path."""
    path = directory / "slurm-affinode-shepherd"
    built = run("make", "-s", "-C", str(SOURCE), f"BUILD={directory}", str(path))
    assert built.returncode == 0, built.stderr
    path.chmod(0o711)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_unit_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    """`make check` in spank/."""
    probe = ("gcc", "-fsanitize=address,undefined", "-x", "c", "-o", str(tmp_path / "probe"), "-")
    if run(*probe, stdin="int main(void) { return 0; }").returncode != 0:
        missing("gcc has no sanitizer libraries")
    ran = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", "check")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for test in (tmp_path / "sanitized").glob("test_*"):
        if test.suffix == "":
            assert b"__asan_init" in test.read_bytes(), test
            assert b"__ubsan_handle" in test.read_bytes(), test
    assert ran.stdout.count("ok test_") == len(list((SOURCE / "tests").glob("test_*.c")))


def test_shepherd_rejects_manual_start(shepherd: Path) -> None:
    """It reports the version of its protocol, and refuses other command lines."""
    assert run(str(shepherd), "--speaks", "2").returncode == 0
    assert run(str(shepherd), "--speaks", "1").returncode == 1
    refused = run(str(shepherd), "echo", "hello")
    assert refused.returncode == 2
    assert "is started by Slurm" in refused.stderr


@pytest.mark.usefixtures("compiler")
def test_missing_headers_are_reported(tmp_path: Path) -> None:
    """Without slurm/spank.h, the build names the package to install."""
    built = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", "SLURM_CFLAGS=-nostdinc")
    assert built.returncode != 0
    assert "slurm/spank.h does not exist: install libslurm-dev" in built.stderr


# --- the shepherd's program

PACKET = struct.Struct("<Iiiiq")
STATUS, EXEC, RESIGN, RESIGNED = 6, 7, 10, 11
"""Values of ``enum packet_kind``."""
USER = 64999
"""A UID without a user."""
PRELOADED = """
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) { (void)!write(2, "preloaded", 9); }
"""


def start_shepherd(
    shepherd: Path, *script: str, before: Callable[[], None] | None = None, agent: str = "/no/such.sock",
    image: bool = False, **variables: str,
) -> tuple[subprocess.Popen[bytes], socket.socket]:  # fmt: skip
    """Start a shepherd with the test as its keeper. ``agent``: the socket of its agent. ``image``: it has one."""
    keeper_end, shepherd_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    option = "window=900,util=0,mode=requeue,wake=auto,when=pressure"
    argv = (str(shepherd), str(shepherd_end.fileno()), "7", "0", str(int(image)), "300", agent, option, "--", *script)
    with shepherd_end:
        process = subprocess.Popen(
            argv, pass_fds=(shepherd_end.fileno(),), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**variables},
            preexec_fn=before,  # noqa: PLW1509 - it only makes system calls
        )  # fmt: skip
    keeper_end.settimeout(60)
    return process, keeper_end


def test_shepherd_ignores_loader_variables(shepherd: Path, tmp_path: Path) -> None:
    """The script gets LD_PRELOAD and similar variables as the user set them; the shepherd ignores them."""
    library = tmp_path / "preloaded.so"
    assert run("gcc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-", stdin=PRELOADED).returncode == 0
    variables = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(tmp_path), "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    script = 'echo "$LD_PRELOAD $LD_LIBRARY_PATH $GLIBC_TUNABLES"'
    process, keeper = start_shepherd(shepherd, "/bin/sh", "-c", script, **variables)
    with keeper:
        out, err = process.communicate(timeout=240)
    assert out.decode().split() == list(variables.values())
    assert err == b"preloaded"  # once: in the shell
    assert (
        run("env", *(f"{key}={value}" for key, value in variables.items()), str(shepherd), "--speaks", "2").stderr == ""
    )


def test_shepherd_is_hardened(shepherd: Path) -> None:
    """Static, position independent, with read-only relocations and a non-executable stack."""
    result = read(shepherd.read_bytes())
    assert not result.interpreted
    assert not result.executable_stack
    assert (result.shared, result.pie, result.relro, result.now) == (True, True, True, True)
    assert b"buffer overflow detected" in shepherd.read_bytes()
    assert b"stack smashing detected" in shepherd.read_bytes()


@pytest.mark.usefixtures("compiler")
def test_criu_plugin_is_hardened(tmp_path: Path) -> None:
    """CRIU loads it as root: read-only relocations, a non-executable stack, and one exported symbol."""
    path = tmp_path / "device_files.so"
    built = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", "criu-plugin")
    assert built.returncode == 0, built.stderr
    result = read(path.read_bytes())
    assert (result.shared, result.relro, result.now, result.executable_stack) == (True, True, True, False)
    assert b"__stack_chk_fail" in path.read_bytes()
    symbols = [line.split() for line in run("nm", "--dynamic", "--defined-only", str(path)).stdout.splitlines()]
    assert [words[-1] for words in symbols] == ["CR_PLUGIN_DESC"]


def test_build_without_static_libc_fails(tmp_path: Path, compiler: None) -> None:
    """No shepherd is better than one into which a job can load libraries; the message says what is missing."""
    linker = tmp_path / "gcc"
    linker.write_text('#!/bin/sh\ncase " $* " in *" -static"*) exit 1 ;; esac\nexec gcc "$@"\n')
    linker.chmod(0o755)
    target = tmp_path / "slurm-affinode-shepherd"
    built = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", f"CC={linker}", str(target))
    assert built.returncode != 0
    assert "has to be linked statically" in built.stderr
    assert not target.exists()


def no_process_left() -> None:
    """In the child process, become a user at the process limit."""
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


@needs_root
def test_script_replaces_shepherd_after_withdrawal(shepherd: Path) -> None:
    """Without a fork, no program of the user runs as PID 1 before the announcement is withdrawn."""
    process, keeper = start_shepherd(shepherd, "/bin/sh", "-c", "echo $$", before=no_process_left)
    with keeper:
        assert PACKET.unpack(keeper.recv(64))[0] == RESIGN
        os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
        assert process.stdout.read() is None  # type: ignore[union-attr]
        assert Path(f"/proc/{process.pid}/exe").readlink() == shepherd
        os.set_blocking(process.stdout.fileno(), True)  # type: ignore[union-attr]
        keeper.send(PACKET.pack(RESIGNED, 0, 0, 0, 0))
        out, _ = process.communicate(timeout=240)
        assert out.decode() == f"{process.pid}\n"
        assert process.returncode == 0
        assert keeper.recv(64) == b""  # the script has no connection to the keeper


@needs_root
def test_script_is_not_started_without_withdrawal(shepherd: Path) -> None:
    """If the keeper cannot withdraw the announcement or is gone, the job fails as if fork had failed."""
    process, keeper = start_shepherd(shepherd, "/bin/sh", "-c", "echo $$", before=no_process_left)
    with keeper:
        assert PACKET.unpack(keeper.recv(64))[0] == RESIGN
        keeper.shutdown(socket.SHUT_WR)
        kind, status, *_ = PACKET.unpack(keeper.recv(64))
        out, err = process.communicate(timeout=240)
    assert (kind, os.waitstatus_to_exitcode(status), process.returncode) == (STATUS, 11, 11)
    assert out == b""
    assert err == b"slurm-affinode: the script cannot be started: fork: Resource temporarily unavailable\n"


def test_shepherd_reports_ended_processes_to_an_agent_that_waits_for_them(shepherd: Path, tmp_path: Path) -> None:
    """The root of a restored tree ends before the reply. An older agent gets no message that it does not know."""
    reading, writing = os.pipe()

    def with_child() -> None:
        if os.fork() == 0:
            os.dup2(reading, 3)
            os.closerange(4, 1024)  # also the pipe through which Popen waits for the execution
            os.read(3, 1)
            os._exit(3)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(60)
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        process, keeper = start_shepherd(
            shepherd, "/bin/true", before=with_child, agent=listener.getsockname(), image=True
        )
        with keeper, listener.accept()[0] as link:
            link.settimeout(60)
            assert link.recv(4096).startswith(b"hello\n")
            link.send(b"wait")
            os.close(writing)  # its child ends
            os.close(reading)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            while children.read_text():
                time.sleep(0.01)
            link.settimeout(0.5)
            with pytest.raises(TimeoutError):
                link.recv(4096)
            link.settimeout(60)
            link.send(b"wait\nreports=1")
            verb, pid, status = link.recv(4096).decode().split("\n")
            assert (verb, status) == ("reaped", f"status={3 << 8}")
            child = int(pid.removeprefix("pid="))
            link.send(f"restored\npid={child}".encode())
            kind, ended, *_ = PACKET.unpack(keeper.recv(64))
            assert (kind, os.waitstatus_to_exitcode(ended)) == (STATUS, 3)
        process.communicate(timeout=240)
